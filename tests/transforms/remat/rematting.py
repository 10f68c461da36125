"""What the tests of rematerialization share: models of several kinds, and checks that they compute the same."""

import functools

import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from reference import make_config, mesh_of

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.transforms.remat.transform import remat_report, rematerialize

LAYERS, BATCH, TOKENS, WIDTH, VOCAB = 3, 4, 16, 32, 64
CONFIG = {"vocab_size": VOCAB, "seq_len": TOKENS, "num_layers": LAYERS, "d_model": WIDTH, "num_heads": 4}

# Float32 sums over devices in another order, of numbers of the size of the largest.
TOLERANCE = 1e-5


def model_of(kind):
    """Returns params, a loss function and specs over `model`, of e.g. `dict scan`, `linen loop own`."""
    framework, layers, *own = kind.split()
    config = gpt.GPTConfig(**CONFIG, scan=layers == "scan", remat=bool(own))
    if framework == "dict":
        return gpt.init(config, jax.random.key(0)), gpt.loss_fn(config), gpt.param_specs(config)
    init_fn, loss_fn = {"linen": gpt_linen, "nnx": gpt_nnx}[framework].make(config)
    return init_fn(jax.random.key(0)), loss_fn, None


def batch_of(seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, TOKENS + 1), dtype=np.int32)
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def scalar(loss_fn):
    """Returns the loss function without its aux."""

    def loss(params, *args):
        out = loss_fn(params, *args)
        return out[0] if isinstance(out, tuple) else out

    return loss


def plain(loss_fn, params, *args):
    return jax.jit(jax.value_and_grad(scalar(loss_fn), allow_int=True))(params, *args)


def placed(loss_fn, params, *args, policies, specs=None, mesh=None, gathered=False):
    """Returns value and gradients with each of some policies, from one compiled program, params sharded as `specs`."""
    mesh = mesh or mesh_of("model4")
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)
    if specs is not None:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    if gathered:
        config = make_config(stage=3, param_specs=specs)
        shardings = zero.state_shardings({"params": params}, mesh=mesh, config=config)["params"]
    fns = [rematerialize(loss_fn, policy, mesh=mesh, specs=specs) for policy in policies]
    fns = [zero.gather_on_use(fn, shardings, mesh=mesh) for fn in fns] if gathered else fns

    @jax.jit
    def run(params, *args):
        return [jax.value_and_grad(scalar(fn), allow_int=True)(params, *args) for fn in fns]

    args = jax.device_put(args, zero.batch_sharding(mesh))
    return run(jax.device_put(params, shardings), *args)


def assert_same(got, want, what=""):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(np.abs(b).max(initial=0), 1e-6)
        message = f"{what} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=TOLERANCE, err_msg=message)


@functools.cache
def report_of(kind, policy, mesh="model4"):
    params, loss_fn, specs = model_of(kind)
    return remat_report(loss_fn, params, batch_of(), remat=policy, mesh=mesh_of(mesh), specs=specs)


def names_of(jaxpr):
    """Returns the names of all primitives in a jaxpr and in those that lie in it."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append(eqn.primitive.name)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            found += names_of(value) if hasattr(value, "eqns") else []
    return found
