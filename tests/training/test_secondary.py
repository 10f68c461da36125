"""A secondary shard of the params (hpZ): the same numbers, other placements, and what moves over the slow axis."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import (
    PARAM_SPECS,
    assert_close,
    init_params,
    loss_fn,
    make_batch,
    make_batches,
    make_config,
    make_trainer,
    mesh_of,
    run_plain,
    run_zero,
)

import zero_jax as zero
from zero_jax.sharding.mesh import axes_of, secondary_axes

# Sums over a batch are made in another order: as in test_parity.
FLOAT32 = 1e-5
NUM_STEPS = 2
SECONDARY = ("data_0",)


def split_mesh(**sizes):
    """Returns a mesh whose first axis of `data` stands for a slice, and the second for the network between two."""
    return zero.make_mesh(devices=jax.devices(), data_layout=(8 // 2 // sizes.get("model", 1), 2), **sizes)


def mixing_loss(params, batch):
    """A loss that depends on the whole batch: it cannot be computed copy by copy."""
    loss = loss_fn(params, batch)
    error = batch["targets"] - batch["targets"].mean(0)
    return loss * jnp.square(error).mean() ** 0.5 + jnp.tanh(loss)


def drawing_loss(params, batch, key):
    """A loss with random numbers, which are those of the whole batch."""
    noise = jax.random.normal(key, batch["targets"].shape)
    return loss_fn(params, {**batch, "targets": batch["targets"] + noise})


def aux_loss(params, batch):
    """Aux that can be combined from parts of a batch, and the loss of each example among it."""
    return loss_fn(params, batch), {"first": batch["tokens"][:, 0], "sum": batch["tokens"].sum()}


def largest_loss(params, batch):
    """Aux that cannot."""
    return loss_fn(params, batch), {"largest": batch["targets"].max()}


LOSSES = [(loss_fn, 2), (mixing_loss, 1), (aux_loss, 1), (aux_loss, 2), (largest_loss, 2), (drawing_loss, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "num_microbatches"), LOSSES)
def test_equals_without_it(loss, num_microbatches):
    fields = {"stage": 3, "num_microbatches": num_microbatches, "mesh": split_mesh()}
    runs = [
        run_zero(loss, optax.adamw(1e-2), make_batches(NUM_STEPS), secondary=x, **fields) for x in (False, SECONDARY)
    ]
    (state, history), (other, others) = runs
    assert_close(other.params, state.params, tolerance=FLOAT32)
    assert_close(other.opt_state, state.opt_state, tolerance=FLOAT32)
    assert_close([m.loss for m in others], [m.loss for m in history], tolerance=FLOAT32)
    assert_close([m.aux for m in others], [m.aux for m in history], tolerance=FLOAT32)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16", "num_microbatches": 2, "remat": "full"},
        pytest.param({"model": 2}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "frozen"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "sgd", "precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"replica": 2}, marks=pytest.mark.slow),
    ],
)
def test_equals_plain_training(fields):
    """Of settings that are not those of the other test; in low precision to what its rounding allows."""
    labels = lambda params: {**dict.fromkeys(params, "train"), "embed": "freeze"}  # noqa: E731
    optimizers = {
        "sgd": optax.sgd(1e-2),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "frozen": optax.multi_transform({"train": optax.sgd(1e-2), "freeze": optax.set_to_zero()}, labels),
    }
    fields = dict(fields)
    tx, sizes = (
        optimizers[fields.pop("optimizer", "sgd")],
        {x: fields.pop(x) for x in ("model", "replica") if x in fields},
    )
    if "replica" in sizes:
        mesh = zero.make_mesh(devices=jax.devices(), replica=2, data_layout=(2, 2))
    else:
        mesh = split_mesh(**sizes)
    fields |= {"param_specs": PARAM_SPECS} if "model" in sizes else {}
    low = "precision" in fields
    compute = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(fields.get("precision"))
    params, _, losses = run_plain(loss_fn, tx, make_batches(NUM_STEPS), compute_dtype=compute)
    state, history = run_zero(loss_fn, tx, make_batches(NUM_STEPS), mesh=mesh, stage=3, secondary=SECONDARY, **fields)
    tolerance = 2.0**-6 if low else FLOAT32
    assert_close([m.loss for m in history], losses, tolerance=tolerance)
    assert_close(state.masters, params, tolerance=tolerance)


def axes_in(x):
    """Returns the mesh axes that shard an array."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in x.sharding.spec]
    return {axis for entry in entries for axis in entry}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_placement_and_price(precision):
    """Params are sharded over the inner axis alone, all else over both; the estimate has the price."""
    mesh = split_mesh()
    state, step = make_trainer(loss_fn, optax.adamw(1e-2), mesh=mesh, stage=3, secondary=SECONDARY, precision=precision)
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = step(state, make_batch(0))
    assert jax.tree.map(lambda x: x.sharding, state) == before
    kernel, moment = state.params["layers"]["w_in"], state.opt_state[0].mu["layers"]["w_in"]
    assert axes_in(kernel) == {"data_0"} and axes_in(moment) == {"data_0", "data_1"}
    assert (state.master is None) == (precision == "fp32")
    config = make_config(stage=3, secondary=SECONDARY, precision=precision)
    estimate = zero.memory.estimate(state, mesh=mesh, config=config)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
    without = make_config(stage=3, precision=precision)
    before = zero.memory.estimate(
        zero.abstract_state(lambda _: state.masters, optax.adamw(1e-2), mesh=mesh, config=without),
        mesh=mesh,
        config=without,
    )
    assert estimate.by_group["params"] == held
    assert estimate.secondary_bytes == estimate.state_bytes - before.state_bytes > 0
    assert "for the secondary shard" in str(estimate)
    assert "sharded over data_0 alone" in str(zero.sharding_report(state, mesh=mesh, config=config))
    explained = sum(x.device_bytes for x in estimate.differences if x.group == "params")
    assert np.isclose(explained, held - next(g.formula_bytes for g in estimate.groups if g.name == "params"))


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_slow_axis_moves_shards_once_a_step(num_microbatches):
    """Over the slow axis nothing moves but a gradient's shard and the new params, each once, as the formula says."""
    mesh, config = split_mesh(), make_config(stage=3, secondary=SECONDARY, num_microbatches=num_microbatches)
    tx = optax.adamw(1e-2)
    state = zero.abstract_state(init_params, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(0))
    measured = zero.comms.measure(step.lower(state, batch).compile(), mesh=mesh)
    estimated = zero.comms.estimate(state, mesh=mesh, config=config, tx=tx)
    slow = lambda rows: sum(row.total_sent_bytes for row in rows if "data_1" in row.axes)  # noqa: E731
    scalars = 200  # the loss, the norm and whether all is finite
    assert slow(estimated.rows) > 10 * scalars
    assert abs(slow(measured.rows) - slow(estimated.rows)) <= scalars + 0.01 * slow(estimated.rows)


@pytest.mark.slow
def test_checkpoint_of_either_is_restored_by_the_other(tmp_path):
    mesh, tx = split_mesh(), optax.adamw(1e-2)
    fields = {"stage": 3, "precision": "bf16"}
    state, step = make_trainer(loss_fn, tx, mesh=mesh, secondary=SECONDARY, **fields)
    state, _ = step(state, make_batch(0))
    with zero.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    config, other = make_config(**fields), mesh_of("4")
    restored = zero.restore(tmp_path, init_fn=init_params, tx=tx, mesh=other, config=config).state
    other_step = zero.make_train_step(loss_fn, tx, mesh=other, config=config)
    assert_close(restored.masters, state.masters, tolerance=0)
    (_, metrics), (_, others) = step(state, make_batch(1)), other_step(restored, make_batch(1))
    assert_close(others.loss, metrics.loss, tolerance=2.0**-6)


@pytest.mark.parametrize(
    ("secondary", "message"),
    [
        (True, "no axis of `data` across slices or hosts"),
        (("data_2",), "'data_2' is no axis of `data`"),
        (("data_0", "data_1"), "not all and not none"),
        (("data_1",), r"data_axes=\('data_1', 'data_0'\)"),
    ],
)
def test_axes_that_make_no_secondary_shard(secondary, message):
    mesh = split_mesh()
    with pytest.raises(ValueError, match=message):
        secondary_axes(mesh, axes_of(mesh), secondary)


@pytest.mark.parametrize("fields", [{"secondary": 1}, {"secondary": ()}, {"secondary": True, "stage": 2}])
def test_config_refuses(fields):
    with pytest.raises(ValueError, match="secondary="):
        zero.ZeroConfig(**fields)


@pytest.mark.slow
def test_order_of_the_users_own_axes():
    """A mesh whose slow axis comes first: its axes are named in order, and the numbers are the same."""
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data_0", "data_1"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fields = {"stage": 3, "data_axes": ("data_1", "data_0")}
    runs = [
        run_zero(loss_fn, optax.sgd(1e-2), make_batches(1), mesh=mesh, secondary=x, **fields)
        for x in (False, ("data_1",))
    ]
    assert_close(runs[1][0].params, runs[0][0].params, tolerance=FLOAT32)
    assert runs[1][0].params["embed"].sharding.spec in (P(None, "data_1"), P("data_1"))
    assert dataclasses.replace(axes_of(mesh), secondary=("data_1",)).copies == ("data_0",)
