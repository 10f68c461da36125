"""Train steps of adapters: every stage as one device, the base as it was, microbatches, checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapted import largest_difference
from jax.sharding import PartitionSpec as P
from reference import mesh_of, run_plain

import zero_jax as zero
from zero_jax.checkpoint import CheckpointConfig

TX = optax.adamw(1e-2)
WIDTH, LAYERS = 64, 3


def init_fn(key):
    up, down, head = jax.random.split(key, 3)
    return {
        "layers": {
            "up": jax.random.normal(up, (LAYERS, WIDTH, 2 * WIDTH)) / 8,
            "down": jax.random.normal(down, (LAYERS, 2 * WIDTH, WIDTH)) / 8,
            "norm": jnp.ones((LAYERS, WIDTH)),
        },
        "head": jax.random.normal(head, (WIDTH, 16)),
    }


def loss_fn(params, batch):
    def layer(x, p):
        return x * p["norm"] + jnp.tanh(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.square(x @ params["head"] - batch["y"].astype(x.dtype)).mean()


def make_batch():
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((32, WIDTH), np.float32), "y": rng.standard_normal((32, 16), np.float32)}


def adapters(**settings):
    return zero.Lora(rules={"layers/*": "sio"}, rank=4, **settings)


def begin(lora, mesh, **settings):
    config = zero.ZeroConfig(min_shard_size=8, **settings)
    make = lambda key: lora.init(init_fn(key), key)  # noqa: E731
    state = zero.init_state(make, TX, jax.random.key(0), mesh=mesh, config=config)
    return state, zero.make_train_step(lora.loss_fn(loss_fn), TX, mesh=mesh, config=config)


def trained(lora, *, steps=3, mesh="8", **settings):
    state, step = begin(lora, mesh_of(mesh), **settings)
    for _ in range(steps):
        state, metrics = step(state, make_batch())
    return state, float(metrics.loss)


def by_hand(lora, steps=3):
    """Trains the adapters in plain optax, on one device."""
    variables = jax.jit(lambda key: lora.init(init_fn(key), key))(jax.random.key(0))
    loss = lambda p, batch: lora.loss_fn(loss_fn)(p, batch, model_state=variables.model_state)[0]  # noqa: E731
    params, _, losses = run_plain(loss, TX, [make_batch()] * steps, params=variables.params)
    return params, float(losses[-1])


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        pytest.param(0, {"base": "own"}, marks=pytest.mark.slow),
        (3, {"base": "nf4_double", "dora": True}),
        *(
            pytest.param(s, {"base": b, "dora": d}, marks=pytest.mark.slow)
            for s, b, d in [
                (1, "int8", False),
                (2, "bfloat16", False),
                (2, "nf4", False),
                (3, "nf4", True),
                (3, "int8", False),
                (3, "own", True),
            ]
        ),
    ],
)
def test_every_stage_trains_as_one_device(stage, settings):
    lora = adapters(**settings)
    state, loss = trained(lora, stage=stage)
    params, expected = by_hand(lora)
    assert loss == pytest.approx(expected, rel=1e-5)
    # Adam divides by the gradient's own size: float32 sums in another order, three updates.
    assert largest_difference(state.params, params) < 1e-3
    assert len(jax.tree.leaves(state.opt_state)) == 2 * len(jax.tree.leaves(params)) + 1


SPECS = {
    "layers": {"up": P(None, None, "model"), "down": P(None, "model", None), "norm": P()},
    "head": P(None, "model"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "settings", "mesh"),
    [
        (3, {"base": "nf4_double", "dora": True}, "model2"),
        pytest.param(0, {"base": "int8"}, "model2", marks=pytest.mark.slow),
        pytest.param(1, {"base": "nf4", "dora": True}, "model2", marks=pytest.mark.slow),
        pytest.param(2, {"base": "own", "train": ("head",)}, "model4", marks=pytest.mark.slow),
        pytest.param(3, {"base": "int8", "train": ("head",)}, "model4", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_a_tensor_parallel_model_are_sharded_as_it_is(stage, settings, mesh):
    """Blocks that four devices do not divide stay whole, and the result is that of data parallelism in any case."""
    lora, size = adapters(**settings), mesh_of(mesh).shape["model"]
    specs = lora.param_specs(jax.eval_shape(init_fn, jax.random.key(0)), SPECS, mesh=mesh_of(mesh))
    state, loss = trained(lora, mesh=mesh, stage=stage, param_specs=specs)
    params, expected = by_hand(lora)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert largest_difference(state.params, params) < 1e-3

    def dims_over_model(x):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in x.sharding.spec]
        return [dim for dim, entry in enumerate(entries) if "model" in entry]

    up, down = (state.params[f"layers/{name}"] for name in ("up", "down"))
    assert [dims_over_model(x) for x in (up["a"], up["b"], down["a"], down["b"])] == [[], [2], [1], []]
    assert "magnitude" not in up or dims_over_model(up["magnitude"]) == [1]
    base = state.model_state["base"]["layers"]
    if settings["base"] == "own":
        assert (dims_over_model(base["up"]), dims_over_model(base["down"])) == ([2], [1])
        return
    row = [1] if size == 2 and settings["base"] == "int8" else []  # two blocks of 64 rows
    assert [dims_over_model(x) for x in (base["up"].codes, base["up"].scales)] == [[2], [2]]
    assert [dims_over_model(x) for x in (base["down"].codes, base["down"].scales)] == [row, row]


def test_the_base_stays_and_is_sharded_in_the_bytes_it_is_stored_in():
    lora = adapters(base="nf4")
    state, step = begin(lora, mesh_of("8"), stage=3, precision="bf16")
    before = jax.tree.map(np.asarray, state.model_state)
    up = state.model_state["base"]["layers"]["up"]
    assert (up.codes.dtype, up.codes.shape) == (jnp.uint8, (LAYERS, WIDTH // 2, 2 * WIDTH))
    assert up.codes.addressable_shards[0].data.nbytes == up.codes.nbytes // 8
    assert up.scales.addressable_shards[0].data.nbytes == up.scales.nbytes // 8
    assert state.model_state["base"]["head"].dtype == jnp.bfloat16
    state, _ = step(state, make_batch())
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.model_state))
    report = str(zero.sharding_report(state, mesh=mesh_of("8"), config=zero.ZeroConfig(min_shard_size=8)))
    assert "model_state/base/layers/up/codes" in report


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_microbatches_are_one_batch_without_a_warning(stage):
    """The frozen base does not change from one microbatch to the next, so gradients may be summed once."""
    lora = adapters(base="int8")
    _, loss = trained(lora, stage=stage, num_microbatches=2)
    assert loss == pytest.approx(by_hand(lora)[1], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_may_have_the_adapters_alone(tmp_path):
    lora, mesh = adapters(base="nf4"), mesh_of("8")
    config = zero.ZeroConfig(stage=3, min_shard_size=8)
    state, _ = trained(lora, steps=1, stage=3)
    small = dataclasses.replace(state, model_state=None)
    with zero.Checkpointer(tmp_path, config=CheckpointConfig()) as checkpointer:
        checkpointer.save(1, small)
    restored = zero.restore(tmp_path, init_fn=state.params, tx=TX, mesh=mesh, config=config).state
    whole = dataclasses.replace(restored, model_state=state.model_state)
    jax.tree.map(np.testing.assert_array_equal, lora.merge(whole), lora.merge(state))
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert num_bytes < 12 * sum(x.size for x in jax.tree.leaves(state.params)) + 60_000


def test_adapters_of_another_alpha_are_named(tmp_path):
    lora, other, mesh = adapters(base="own"), adapters(base="own", alpha=3), mesh_of("8")
    config = zero.ZeroConfig(stage=3, min_shard_size=8)
    state, _ = begin(lora, mesh, stage=3)
    with zero.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        without = {name: x for name, x in state.model_state.items() if "alpha" not in name}  # as of older releases
        checkpointer.save(2, dataclasses.replace(state, model_state=without))
    restore = lambda lora, step: zero.restore(  # noqa: E731
        tmp_path, step=step, init_fn=lambda key: lora.init(init_fn(key), key), tx=TX, mesh=mesh, config=config, log=str
    )
    (warning,) = restore(other, 1).warnings
    assert (
        "the checkpoint has model_state/alpha=16.0, the state has model_state/alpha=3.0: its params may be" in warning
    )
    for step in (1, 2):
        restored = restore(lora, step)
        assert not restored.warnings and jax.tree.structure(restored.state) == jax.tree.structure(state)
    with pytest.raises(ValueError, match=r"are of a Lora of alpha=16.0, and this one has alpha=3.0"):
        other.merge(state)


@pytest.mark.slow
def test_merged_params_go_on_as_plain_ones():
    lora, mesh, config = adapters(base="bfloat16"), mesh_of("8"), zero.ZeroConfig(stage=3, min_shard_size=8)
    state, _ = trained(lora, steps=2, stage=3)
    loss = zero.make_eval_step(lora.loss_fn(loss_fn), mesh=mesh, config=config)(state, make_batch()).loss
    params = lora.merge(state, dtype=jnp.float32)
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(init_fn, jax.random.key(0)))
    plain = zero.init_state(params, TX, jax.random.key(0), mesh=mesh, config=config)
    again = zero.make_eval_step(loss_fn, mesh=mesh, config=config)(plain, make_batch()).loss
    assert float(again) == pytest.approx(float(loss), rel=1e-5)
