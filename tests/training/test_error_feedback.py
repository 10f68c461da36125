"""Error feedback of quantized gradients: what is applied follows what was computed, through whatever a run does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, restore

FEATURES, LAYERS, BATCH = 256, 2, 32
FEEDBACK = zero.Quantize(grads="int4", grads_over="replica", error_feedback=True)
SUM = optax.chain(optax.trace(1.0), optax.scale(0.0))  # the params stay; the trace is the sum of the gradients
MESH = dict(replica=2, data=4)


def init(key):
    keys = jax.random.split(key, 2)
    return {
        "up": jax.random.normal(keys[0], (LAYERS, FEATURES, 2 * FEATURES)) / 16,
        "down": jax.random.normal(keys[1], (LAYERS, 2 * FEATURES, FEATURES)) / 22,
        "gain": jnp.ones(FEATURES),  # too small to be sharded
    }


def loss_fn(params, batch):
    def layer(h, each):
        return h + jnp.tanh(h @ each["up"]) @ each["down"], None

    h, _ = jax.lax.scan(layer, batch["x"], {"up": params["up"], "down": params["down"]})
    return (jnp.square(h * params["gain"] - batch["y"]).mean(1) * batch["weight"]).mean()


def make_batch(weight=1.0):
    keys = jax.random.split(jax.random.key(1), 2)
    x, y = (jax.random.normal(key, (BATCH, FEATURES)) for key in keys)
    return {"x": x, "y": y, "weight": jnp.full(BATCH, weight)}


@functools.cache
def exact():
    return jax.tree.map(np.asarray, jax.grad(loss_fn)(init(jax.random.key(0)), make_batch()))


def make(quantize=FEEDBACK, *, mesh=None, tx=SUM, **settings):
    mesh = mesh or zero.make_mesh(**MESH)
    config = zero.ZeroConfig(quantize=quantize, **settings)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    return state, zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)


def summed(state):
    """Returns the sum of the gradients that were applied."""
    return jax.tree.map(np.asarray, state.opt_state[0].trace)


def check_conserved(state, num_steps, *, names=("up", "down")):
    """What was applied and what is still to be added are, to rounding, what was computed."""
    for name in names:
        expected = num_steps * exact()[name]
        found = summed(state)[name] + np.asarray(state.grad_errors[name]).sum(0)
        np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


def drift(state, num_steps, name="up"):
    """Returns how far the sum of what was applied is from the exact one, of one step's gradient."""
    return np.linalg.norm(summed(state)[name] - num_steps * exact()[name]) / np.linalg.norm(exact()[name])


SPLIT = dict(data=8, data_layout=(4, 2))
MASTERS = zero.Precision(param="float32", compute="float32", master="float32")
CASES = {
    "stage 3": ({}, MESH),
    "four replicas, stage 2, microbatches": (dict(stage=2, num_microbatches=2), dict(replica=4, data=2)),
    "stage 1": (dict(stage=1), MESH),
    "data, stage 1, microbatches": (dict(stage=1, num_microbatches=2, over="data"), dict(data=8)),
    "one of two axes of data": (dict(stage=1, num_microbatches=2, over="data_0"), SPLIT),
    "secondary, between slices": (dict(secondary=("data_0",), over="data_1"), SPLIT),
    "model": (dict(param_specs={"up": PartitionSpec(None, None, "model")}), dict(replica=2, data=2, model=2)),
    "params on the host": (dict(offload="all"), MESH),
    "masters on the host": (dict(stage=2, precision=MASTERS, offload="state"), MESH),
    "remat": (dict(remat="full"), MESH),
}
FAST = {"stage 1"}
# Without error feedback the sum drifts away, here in one program and in one of several reductions.
DRIFTS = {"stage 1", "data, stage 1, microbatches"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_sum_of_applied_gradients_follows_the_exact_one(name):
    settings, sizes = CASES[name]
    over, settings = settings.get("over", "replica"), {key: x for key, x in settings.items() if key != "over"}
    quantize, mesh = dataclasses.replace(FEEDBACK, grads_over=over), zero.make_mesh(**sizes)
    state, step = make(quantize, mesh=mesh, **settings)
    before = jax.tree.map(lambda x: x.sharding, state)
    num_steps = 5
    for _ in range(num_steps):
        state, _ = step(state, make_batch())
    assert state.grad_errors["gain"] is None
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, before))
    check_conserved(state, num_steps)
    assert all(np.abs(state.grad_errors[path]).max() > 0 for path in ("up", "down"))  # something was dropped
    assert drift(state, num_steps) < 0.25
    if name in DRIFTS:
        plain, step = make(dataclasses.replace(quantize, error_feedback=False), mesh=mesh, **settings)
        for _ in range(num_steps):
            plain, _ = step(plain, make_batch())
        assert plain.grad_errors is None and drift(plain, num_steps) > 0.09 * num_steps  # each step drops the same


@pytest.mark.slow
def test_a_skipped_step_and_another_loss_scale_leave_the_errors_as_they_are():
    """The scale doubles with every finite step, and halves with the others; errors are of unscaled gradients."""
    scale = zero.LossScaleConfig(initial=1024.0, growth_interval_steps=1)
    precision = zero.Precision(compute="float32", master="float32", loss_scale=scale)
    state, step = make(precision=precision)
    for _ in range(3):
        state, metrics = step(state, make_batch())
    assert metrics.loss_scale == 4096
    errors = jax.tree.map(np.asarray, state.grad_errors)
    state, metrics = step(state, make_batch(np.inf))
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, state.grad_errors, errors)
    for _ in range(3):
        state, metrics = step(state, make_batch())
    check_conserved(state, 6)


def test_errors_stay_finite_where_the_optimizer_skips_steps():
    state, step = make(tx=optax.apply_if_finite(SUM, 5), skip_nonfinite=False)
    for weight in (1.0, np.nan, 1.0):
        state, _ = step(state, make_batch(weight))
    check_conserved(dataclasses.replace(state, opt_state=state.opt_state.inner_state), 2)


@pytest.mark.slow
def test_frozen_params_and_those_of_other_paths_have_no_errors():
    freeze = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: "freeze" if "up" in jax.tree_util.keystr(path) else "train", params
    )
    tx = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, freeze)
    state, step = make(tx=optax.chain(tx, zero.params_ema(0.9)))
    state, _ = step(state, make_batch())
    assert state.grad_errors["up"] is None and np.abs(state.grad_errors["down"]).max() > 0
    state, step = make(dataclasses.replace(FEEDBACK, error_feedback={"up": True}))
    state, _ = step(state, make_batch())
    assert state.grad_errors["down"] is None
    check_conserved(state, 1, names=["up"])


@pytest.mark.slow
def test_gradients_to_look_at_are_those_that_the_next_step_applies():
    state, step = make()
    state, _ = step(state, make_batch())
    _, grads = step.grads(state, make_batch())
    expected, before = np.asarray(grads["up"]), summed(state)["up"]
    state, _ = step(state, make_batch())
    np.testing.assert_allclose(summed(state)["up"] - before, expected, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "sizes", "share"),
    [
        ({}, MESH, 1 / 4),
        pytest.param(dict(stage=1, num_microbatches=2, over="data"), dict(data=8), 1, marks=pytest.mark.slow),
    ],
)
def test_memory_is_4_bytes_a_param_over_the_devices_of_a_replica(settings, sizes, share):
    over, settings = settings.get("over", "replica"), {key: x for key, x in settings.items() if key != "over"}
    mesh, tx = zero.make_mesh(**sizes), optax.adamw(1e-3)
    config = zero.ZeroConfig(quantize=dataclasses.replace(FEEDBACK, grads_over=over), precision="bf16", **settings)
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    expected = 4 * share * 2 * LAYERS * FEATURES * 2 * FEATURES
    estimate = zero.memory.estimate(state, mesh=mesh, config=config, tx=tx)
    (group,) = (group for group in estimate.groups if group.name == "grad_errors")
    assert group.device_bytes == group.formula_bytes == expected
    assert "grad_errors" in str(estimate)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    report = zero.memory.measure(
        zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, shapes).compile()
    )
    assert report.by_group["grad_errors"] == expected and not report.not_donated
    shardings = zero.state_shardings(state, mesh=mesh, config=config)
    assert shardings == jax.tree.map(lambda x: x.sharding, state)


def saved(folder, state):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)


@pytest.mark.slow
def test_a_checkpoint_has_the_errors_and_other_replicas_share_their_sum(tmp_path):
    state, step = make()
    state, _ = step(state, make_batch())
    saved(tmp_path, state)
    errors = jax.tree.map(np.asarray, state.grad_errors)
    fields = dict(init_fn=init, tx=SUM, log=str)
    found = restore(tmp_path, mesh=zero.make_mesh(**MESH), config=zero.ZeroConfig(quantize=FEEDBACK), **fields)
    assert not found.warnings
    jax.tree.map(np.testing.assert_array_equal, found.state.grad_errors, errors)
    mesh, config = zero.make_mesh(replica=4, data=2), zero.ZeroConfig(stage=2, quantize=FEEDBACK)
    found = restore(tmp_path, mesh=mesh, config=config, **fields)
    assert found.warnings == (
        "errors of 2 quantized gradients are those of 2 devices, not 4: each has an equal share of their sum",
    )
    check_conserved(found.state, 1)
    step = zero.make_train_step(loss_fn, SUM, mesh=mesh, config=config)
    state, _ = step(found.state, make_batch())
    check_conserved(state, 2)
    plain = dataclasses.replace(FEEDBACK, error_feedback=False)
    found = restore(tmp_path, mesh=mesh, config=zero.ZeroConfig(quantize=plain), **fields)
    assert found.state.grad_errors is None
    assert found.warnings == ("errors of 2 quantized gradients were dropped: the config has no error feedback there",)


@pytest.mark.slow
def test_a_checkpoint_without_errors_begins_with_zeros(tmp_path):
    """As one of an earlier release; stage 1 with microbatches has errors that no other stage has."""
    saved(tmp_path, make(None)[0])
    mesh, quantize = zero.make_mesh(data=8), dataclasses.replace(FEEDBACK, grads_over="data")
    config = zero.ZeroConfig(stage=1, num_microbatches=2, quantize=quantize)
    lines = []
    found = restore(tmp_path, init_fn=init, tx=SUM, mesh=mesh, config=config, log=lines.append)
    assert lines == ["the checkpoint has no errors of 2 quantized gradients (error feedback): they begin with zeros"]
    assert not np.asarray(found.state.grad_errors["up"]).any()
    state, _ = zero.make_train_step(loss_fn, SUM, mesh=mesh, config=config)(found.state, make_batch())
    check_conserved(state, 1)


@pytest.mark.parametrize(
    ("quantize", "sizes", "settings", "message"),
    [
        (dict(grads_over=None), dict(data=8), {}, r"over 'data' at each use of a param.*grads_over='replica'"),
        (dict(grads_over=("replica", "data")), MESH, {}, r"over 'data' at each use of a param.*leave error_feedback"),
        (dict(grads_over=None), SPLIT, dict(stage=1, num_microbatches=2), r"over \['data_0', 'data_1'\], one after"),
        (dict(error_feedback={"no": True}), MESH, {}, "error_feedback.*'no'"),
        (dict(error_feedback={"gain": True}), MESH, {}, "error_feedback.*'gain' matches no leaf to quantize"),
    ],
)
def test_what_error_feedback_cannot_be_had_for(quantize, sizes, settings, message):
    with pytest.raises(ValueError, match=message):
        make(dataclasses.replace(FEEDBACK, **quantize), mesh=zero.make_mesh(**sizes), **settings)


def test_states_and_optimizers_that_do_not_fit():
    state, step = make()
    plain, plain_step = make(dataclasses.replace(FEEDBACK, error_feedback=False))
    with pytest.raises(
        ValueError, match=r"holds no other leaf, and the step needs down float32\[2, 2, 512, 256\].*Make the state"
    ):
        step(plain, make_batch())
    with pytest.raises(ValueError, match=r"holds down float32\[2, 2, 512, 256\], and the step needs no other leaf"):
        plain_step(state, make_batch())
    mesh = zero.make_mesh(**MESH)
    with pytest.raises(ValueError, match=r"errors of the quantized gradients of 'down'.*no error feedback"):
        zero.state_shardings(state, mesh=mesh, config=zero.ZeroConfig())
    state, step = make(tx=optax.lbfgs())
    with pytest.raises(ValueError, match=r"takes gradients at other params .*leave error_feedback out"):
        step(state, make_batch())


def test_on_one_replica_nothing_is_sent_and_there_are_no_errors():
    state, step = make(mesh=zero.make_mesh(data=8))
    state, _ = step(state, make_batch())
    assert state.grad_errors is None


@pytest.mark.slow
@pytest.mark.parametrize(("over", "sizes"), [("replica", MESH), ("data", dict(data=8))])
def test_errors_of_float64_gradients_are_float32_too(over, sizes):
    """They became float64, which the next step refused; over replicas the step was not traced."""
    params, batch = jax.tree.map(np.float64, (init(jax.random.key(0)), make_batch()))
    exact()  # in float32
    with jax.enable_x64(True):
        mesh, quantize = zero.make_mesh(**sizes), dataclasses.replace(FEEDBACK, grads_over=over)
        config = zero.ZeroConfig(stage=1, num_microbatches=2, quantize=quantize)
        state = zero.init_state(params, SUM, jax.random.key(0), mesh=mesh, config=config)
        step = zero.make_train_step(loss_fn, SUM, mesh=mesh, config=config)
        for _ in range(2):
            state, _ = step(state, batch)
        assert {x.dtype for x in jax.tree.leaves(state.grad_errors)} == {jnp.dtype("float32")}
        check_conserved(state, 2)
