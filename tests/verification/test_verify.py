"""Steps that were compiled for TPUs have the numbers of one device; wrong ones are found."""

import functools
import itertools
import json
import re
import warnings

import command_line
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import covering_array
from flax import nnx

import zero_jax as zero
from zero_jax.models import decoder, gpt
from zero_jax.sharding.topology import HARDWARE, missing_compiler

HERE = {"own_process": False}
RNG = np.random.default_rng(0)
TOKENS = {name: RNG.integers(0, 64, (16, 8), np.int32) for name in ("inputs", "targets")}
IMAGES = {"x": RNG.standard_normal((16, 8, 8, 4), np.float32), "y": RNG.integers(0, 10, 16, np.int32)}
ROWS = {"x": RNG.standard_normal((16, 32), np.float32), "y": RNG.standard_normal((16, 32), np.float32)}


def gpt_model():
    config = gpt.GPTConfig(vocab_size=64, seq_len=8, num_layers=2, d_model=64, num_heads=2)
    return gpt.loss_fn(config), functools.partial(gpt.init, config), TOKENS


def experts_model():
    config = decoder.DecoderConfig(vocab_size=64, seq_len=8, num_layers=2, d_model=64, num_heads=2, num_experts=4)
    return decoder.loss_fn(config), functools.partial(decoder.init, config), TOKENS


def table_model():
    """A recurrence whose body looks up a table that is not sharded, nor sliced by the scan."""

    def init(key):
        return {"table": jax.random.normal(key, (64, 10)), "out": jnp.ones((10, 128)), "decay": jnp.full(10, 0.9)}

    def loss_fn(params, batch):
        body = lambda h, token: (jnp.tanh(params["decay"] * h + params["table"][token]), None)  # noqa: E731
        h, _ = jax.lax.scan(body, jnp.zeros((len(batch["inputs"]), 10), params["table"].dtype), batch["inputs"].T)
        return jnp.square(h @ params["out"]).mean()

    return loss_fn, init, TOKENS


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(32, (3, 3), strides=(2, 2))(x)))
        x = nn.Conv(32, (3, 3), feature_group_count=32)(x)
        return nn.Dense(10)(nn.max_pool(x, (2, 2), (2, 2)).mean((1, 2)))


def linen_model():
    model = Convolutions()

    def loss_fn(params, batch):
        logits = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn, lambda key: model.init(key, IMAGES["x"][:1]), IMAGES


def nnx_model():
    def make(key):
        rngs = nnx.Rngs(key)
        return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 32, rngs=rngs))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
    loss_fn = lambda params, batch: jnp.square(nnx.merge(graph, params)(batch["x"]) - batch["y"]).mean()  # noqa: E731
    return loss_fn, lambda key: nnx.split(make(key))[1], ROWS


def equinox_model():
    make = lambda key: eqx.filter(eqx.nn.MLP(32, 32, 64, 2, key=key), eqx.is_array)  # noqa: E731
    static = eqx.partition(eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0)), eqx.is_array)[1]

    def loss_fn(params, batch):
        model = eqx.combine(params, static)
        errors = (jax.vmap(model)(batch["x"]) - batch["y"]) * batch["y"]
        return jnp.square(errors).sum() / jnp.maximum(jnp.square(batch["y"]).sum(), 1)

    return loss_fn, make, ROWS


MODELS = {
    "gpt": gpt_model, "experts": experts_model, "table": table_model, "linen": linen_model, "nnx": nnx_model,
    "equinox": equinox_model,
}  # fmt: skip
OPTIMIZERS = {"adamw": optax.adamw(1e-2), "adafactor": optax.adafactor(1e-2), "muon": optax.contrib.muon(1e-2)}
FACTORS = {
    "topology": ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"],
    "stage": [0, 1, 2, 3],
    "num_microbatches": [1, 2],
    "mesh": [{}, {"replica": 2}, {"model": 2}],
    "remat": ["own", "full"],
    "offload": [None, "state"],
    "quantize_grads": [None, "int8"],
    "precision": ["fp32", "bf16"],
    "model": ["gpt", "experts", "table", "framework"],
    "optimizer": list(OPTIMIZERS),
    "overlap": [True, False],  # with and without programs for the sparse cores, which take most of the time
}
FRAMEWORKS = ("linen", "nnx", "equinox")  # small models, which take turns
QUICK_MODELS = ("table",)  # whose first rows run on the newest JAX, too


def rows():
    rows = covering_array({name: list(range(len(values))) for name, values in FACTORS.items()})
    turns = itertools.cycle(FRAMEWORKS)
    return [row | {"framework": next(turns) if is_of_frameworks(row) else ""} for row in rows]


def is_of_frameworks(row):
    return FACTORS["model"][row["model"]] == "framework"


def settings(row):
    """The values of a row, without those that a config refuses together."""
    values = {name: FACTORS[name][row[name]] for name in FACTORS}
    values["model"] = row["framework"] or values["model"]
    if values["stage"] == 0 or values["mesh"] or values["model"] == "table":  # whose leaves are too small for it
        values["quantize_grads"] = None
    if values["stage"] == 0:
        values["offload"] = None
    if values["model"] == "experts":  # whose choice of experts is another one after rounding to bfloat16
        values["precision"] = "fp32"
    if values["model"] in ("table", "linen", "nnx", "equinox"):  # these have no blocks
        values["remat"] = "own"
    return values


def marked(rows):
    """Returns the rows as parameters, slow but for the first one of each quick model."""
    quick = {row["model"]: row for row in reversed(rows) if FACTORS["model"][row["model"]] in QUICK_MODELS}
    for row in rows:
        marks = [] if row in quick.values() else [pytest.mark.slow]
        yield pytest.param(row, marks=marks, id="-".join(map(str, row.values())))


@pytest.mark.tpu_compiler
@pytest.mark.full_effort
@pytest.mark.parametrize("row", list(marked(rows())))
def test_compiled_steps_equal_one_device(row):
    values = settings(row)
    model, optimizer = values.pop("model"), OPTIMIZERS[values.pop("optimizer")]
    topology, mesh = values.pop("topology"), values.pop("mesh")
    loss_fn, init_fn, batch = MODELS[model]()
    config = zero.ZeroConfig(**values, clip_norm=1.0, min_shard_size=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a step of these settings sends
        found = zero.verify(
            loss_fn, init_fn, optimizer, batch, topology=topology, config=config, num_steps=1, **mesh, **HERE
        )
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.full_effort
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="mended in JAX 0.12")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_table_that_a_loop_looks_up(stage):
    """XLA's `while-loop-all-reduce-code-motion` loses parts of the table's gradient: openxla/xla#49143."""
    loss_fn, init_fn, batch = table_model()
    find = functools.partial(
        zero.verify, loss_fn, init_fn, optax.sgd(0.1), batch, topology="v4:2x2x1", num_steps=1, **HERE
    )
    unguarded = find(config=zero.ZeroConfig(stage=stage, compiler_options={"xla_disable_hlo_passes": None}))
    assert {"params/table", "grad_norm"} <= {leaf.path for leaf in unguarded.wrong}, str(unguarded)
    assert "DIFFERS" in str(unguarded) and "WRONG" in str(unguarded)
    guarded = find(config=zero.ZeroConfig(stage=stage, compiler_options={"xla_disable_hlo_passes": "dce"}))
    assert guarded.ok and guarded.to_json()["ok"], str(guarded)


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(HARDWARE["h100"]) is not None, reason="no GPU compiler: zero-jax[gpu-compiler]")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", ["table", "gpt"])
def test_programs_for_gpus_equal_one_device(model, stage):
    loss_fn, init_fn, batch = MODELS[model]()
    config = zero.ZeroConfig(stage=stage)
    found = zero.verify(loss_fn, init_fn, optax.adamw(1e-2), batch, topology="h100:1x4", config=config, num_steps=1)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, 3])
def test_stages_of_a_pipeline_that_take_gradients_in_their_loop(stage):
    config = gpt.GPTConfig(vocab_size=64, seq_len=8, num_layers=2, d_model=32, num_heads=2, scan=True)
    fields = {"stage": stage, "precision": "fp32", "num_microbatches": 4, "pipeline": "1f1b"}
    verification = zero.verify(
        gpt.loss_fn(config), functools.partial(gpt.init, config), optax.adamw(1e-3), TOKENS,
        topology="v5p:2x2x1", config=zero.ZeroConfig(**fields), pipe=2, num_steps=1, **HERE,
    )  # fmt: skip
    assert verification.ok, str(verification)


@pytest.mark.tpu_compiler
def test_a_batch_in_the_dtypes_of_numpy_is_taken_as_by_a_step():
    batch = {"tokens": RNG.integers(0, 64, (16, 8)), "targets": RNG.standard_normal((16, 8)), "scale": 0.5}
    assert [x.dtype for x in (batch["tokens"], batch["targets"])] == [np.int64, np.float64]
    init_fn = lambda key: {"table": jax.random.normal(key, (64, 16))}  # noqa: E731

    def loss_fn(params, batch):
        return batch["scale"] * jnp.square(params["table"][batch["tokens"]].sum(-1) - batch["targets"]).mean()

    config = zero.ZeroConfig(stage=2, num_microbatches=2)
    found = zero.verify(loss_fn, init_fn, optax.sgd(0.1), batch, topology="v5e:2x2", config=config, num_steps=1, **HERE)
    assert found.ok, str(found)


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_leaves_that_rounding_may_change_by_as_much_are_not_called_equal():
    """As of a layer before one of zeros, which has no gradient."""
    batch = {"x": jnp.ones((8, 8)), "y": jnp.zeros((8, 8))}
    params = {"up": jnp.eye(8) / 3, "down": jnp.zeros((8, 8))}
    loss = lambda p, b: jnp.square(b["x"] @ p["up"] @ p["down"] - b["y"] - 1).mean()  # noqa: E731
    config = zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=1)
    fields = {"topology": "v5e:2x2", "config": config, "num_steps": 1, "log": lambda _: None}
    found = zero.verify(loss, lambda key: params, optax.adam(1e-3), batch, **fields)
    assert found.ok and {"params/up", "opt_state/0/mu/up"} <= {leaf.path for leaf in found.untested}
    assert "not tested: rounding may change params/up" in str(found) and not re.search(r"e\+(?!00)", str(found))


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_params_that_are_in_16_bits_by_themselves_are_rounded_as_such():
    """Of `fp32`, which leaves each leaf in the dtype that it is made in."""
    loss_fn, init_fn, batch = nnx_model()
    narrow = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_fn(key))  # noqa: E731
    cast = {name: x.astype(jnp.bfloat16) for name, x in batch.items()}
    config = zero.ZeroConfig(stage=3, precision="fp32")
    found = zero.verify(loss_fn, narrow, optax.adamw(1e-2), cast, topology="v5p:2x2x1", config=config, **HERE)
    assert found.ok, str(found)


def test_dtypes_without_a_tolerance_of_their_own_have_that_of_their_rounding():
    from zero_jax.verification.verify import _tolerance

    params = {"w": jnp.ones(2), "count": jnp.ones(2, jnp.int32)}
    in_8_bits = zero.ZeroConfig(precision=zero.Precision(compute=jnp.float8_e5m2))
    assert _tolerance(in_8_bits, params) == 4 * 0.25 and _tolerance(zero.ZeroConfig(), params) == 1e-4


@pytest.mark.tpu_compiler
def test_wrong_numbers_are_found(monkeypatch):
    """A reference with another learning rate or clipping differs in what these change, and nowhere else."""
    from zero_jax.verification import reference

    loss_fn, init_fn, batch = nnx_model()
    monkeypatch.setattr(reference.Reference, "update", lambda self, state, grads, loss, batch: (
        jax.tree.map(lambda p, g: p - 0.1003 * g, state.masters, grads), state.opt_state
    ))  # fmt: skip
    found = zero.verify(
        loss_fn, init_fn, optax.sgd(0.1), batch, topology="v5e:2x2", config=zero.ZeroConfig(), num_steps=1, **HERE
    )
    assert {leaf.path.partition("/")[0] for leaf in found.wrong} == {"params"} and len(found.wrong) == 4, str(found)


OWN_MODEL = """
import jax, jax.numpy as jnp, numpy as np

def init(key): return {"w": jax.random.normal(key, (32, 32))}
def loss(params, batch): return jnp.square(batch["x"] @ params["w"]).mean()
def batch(): return {"x": np.random.default_rng(0).standard_normal((6, 32), np.float32)}
"""


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("own", [True, False])
def test_the_command_verifies_a_small_model_of_the_same_form(own, tmp_path, capsys):
    """A preset is made small; a model of the user's own is as it is, its examples repeated to the batch's size."""
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    names = [f"--{name}={tmp_path}/mine.py:{name}" for name in ("loss", "init", "batch")]
    model = names if own else ["--model=llama-3-8b", "--num-layers=1", "--d-model=128", "--d-hidden=64", "--seq-len=32"]
    hardware = ["--topology=v5p:2x2x1", "--replica=2", "--cache=none", "--precision=fp32", "--attention=own"]
    status, out, errors = command_line.run(["plan", "--verify", "--json", *hardware, *model], capsys)
    report = json.loads(out)
    assert status == 0 and report["verification"]["ok"], errors
    paths = {leaf["path"] for leaf in report["verification"]["leaves"]}
    assert ("params/w" if own else "params/embed") in paths and {"loss", "grad_norm"} < paths
    assert report["verification"]["mesh"] == {"replica": 2, "data": 2, "model": 1}


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_a_loss_that_is_another_one_on_microbatches_is_reported_as_such():
    loss_fn, init_fn, batch = nnx_model()
    of_all = lambda params, batch: jnp.sqrt(loss_fn(params, batch))  # noqa: E731
    config = zero.ZeroConfig(num_microbatches=2)
    found = zero.verify(of_all, init_fn, optax.sgd(0.1), batch, topology="v5e:2x2", config=config, num_steps=1, **HERE)
    assert not found.ok and "warned: the loss on microbatches may be another one" in str(found)


def test_what_cannot_be_verified_is_refused_before_anything_is_compiled():
    loss_fn, init_fn, batch = nnx_model()
    verify = functools.partial(zero.verify, loss_fn, init_fn, optax.sgd(0.1), topology="v5e:2x2", **HERE)
    config = zero.ZeroConfig()
    with pytest.raises(ValueError, match=r"'x' is a ShapeDtypeStruct, give an array"):
        verify(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch), config=config)
    for name, value in (("num_steps", 0), ("tolerance", -1.0), ("seed", 1.5)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            verify(batch, config=config, **{name: value})


@pytest.mark.tpu_compiler
def test_keys_of_parts_and_large_states_are_refused():
    noisy = lambda params, batch, key: jnp.square(batch["x"] @ params["w"] + jax.random.normal(key)).mean()  # noqa: E731
    verify = functools.partial(zero.verify, noisy, tx=optax.sgd(0.1), batch=ROWS, topology="v5e:2x2", **HERE)
    small = lambda key: {"w": jnp.ones((32, 32))}  # noqa: E731
    with pytest.raises(ValueError, match="each with a key of its own"):
        verify(small, config=zero.ZeroConfig(num_microbatches=2))
    with pytest.raises(ValueError, match=r"hold .* GB of train state"):
        verify(lambda key: {"w": jnp.ones((32, 2**28))}, config=zero.ZeroConfig())
    assert verify(small, config=zero.ZeroConfig(stage=1), num_steps=1).ok
