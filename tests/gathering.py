"""What the tests of gather-on-use share: shapes, and the check that the transformed function is the same one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from reference import MIN_SHARD_SIZE

import zero_jax as zero

LAYERS, FEATURES, HIDDEN, ROWS, LENGTH, BATCH_SIZE = 3, 16, 32, 24, 8, 16

# Float32 sums in another order, of numbers of the size of the largest.
TOLERANCE = 2e-6


def normal(*shape, seed=0, scale=0.3):
    """Returns a host array: the case that makes it costs nothing until it runs."""
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def examples(seed=1):
    """Returns `[batch, features]`."""
    return normal(BATCH_SIZE, FEATURES, seed=seed, scale=1.0)


def tokens(seed=2):
    """Returns `[batch, length]`, each under `ROWS`."""
    return np.random.default_rng(seed).integers(0, ROWS, (BATCH_SIZE, LENGTH), dtype=np.int32)


def mlp(seed=3):
    return {"up": normal(FEATURES, HIDDEN, seed=seed), "down": normal(HIDDEN, FEATURES, seed=seed)}


def stacked(*lead, seed=4):
    return {"up": normal(*lead, FEATURES, HIDDEN, seed=seed), "down": normal(*lead, HIDDEN, FEATURES, seed=seed)}


def block(x, params):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def specs_of(params, mesh):
    """Returns the shardings that stage 3 gives params: almost all are sharded, even the smallest."""
    config = zero.ZeroConfig(stage=3, min_shard_size=MIN_SHARD_SIZE)
    return zero.state_shardings({"params": params}, mesh=mesh, config=config)["params"]


def place_batch(tree, mesh):
    """Shards what divides over the batch axes by its leading dim."""
    sharding = zero.batch_sharding(mesh)
    size = sharding.num_devices // mesh.shape.get("model", 1)

    def place(x):
        divides = isinstance(x, np.ndarray) and x.ndim and x.shape[0] % size == 0
        return jax.device_put(x, sharding if divides else NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(lambda x: place(x) if isinstance(x, (np.ndarray, jax.Array)) else x, tree)


def assert_close(got, want):
    """Compares trees leaf by leaf, to the size of the largest number in each."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(np.abs(b).max(initial=0), 1e-6)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=TOLERANCE, err_msg=jax.tree_util.keystr(path))


def assert_sharded(grads, specs):
    """Gradients lie as the specs say; those that are zero whatever the params are need not."""
    for (path, grad), spec in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(specs), strict=True):
        is_right = grad.sharding.is_equivalent_to(spec, grad.ndim) or not np.any(grad)
        assert is_right, f"{jax.tree_util.keystr(path)} is sharded as {grad.sharding.spec}, not as {spec.spec}"


def check(fn, params, *args, mesh, specs=None, **options):
    """Checks that `gather_on_use(fn)` has the value and the gradients of `fn`, and returns its report."""
    specs = specs_of(params, mesh) if specs is None else specs
    gathered = zero.gather_on_use(fn, specs, mesh=mesh, **options)
    want, want_grads = jax.jit(jax.value_and_grad(fn))(params, *args)
    placed = jax.device_put(params, specs), *place_batch(args, mesh)
    got, grads = jax.jit(jax.value_and_grad(gathered))(*placed)
    assert_close(got, want)
    assert_close(grads, want_grads)
    assert_sharded(grads, specs)
    report = zero.gather_report(fn, specs, params, *args, mesh=mesh, **options)
    assert all(event.where for event in (*report.events, *report.wide)), report
    return report


def early(report):
    """Returns the paths of the params that were gathered before their use."""
    return sorted({event.path for event in report.early})


def compiled_step(loss_fn, init_fn, batch, stage):
    """Returns a train step that is compiled for 16 TPU chips, in bfloat16."""
    mesh, tx = zero.make_mesh(topology="v5p:2x2x4"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=stage, precision="bf16", overlap=False)
    state = zero.abstract_state(lambda _: jax.tree.map(jnp.asarray, init_fn()), tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    return step.lower(state, jax.ShapeDtypeStruct(batch, jnp.bfloat16)).compile()


def compiled_traffic(loss_fn, init_fn, batch, stage):
    """Returns what such a step sends."""
    return zero.comms.measure(compiled_step(loss_fn, init_fn, batch, stage))


def activations(report):
    """Returns what is sent beside the gathers of params and the reduce-scatters of gradients."""
    params = [row for row in report.rows if row.kind == "reduce-scatter" or (row.is_named and "gather" in row.kind)]
    return report.sent_bytes - sum(row.total_sent_bytes for row in params)
