"""One compile per config, donated memory, and trainers that leave each other and the process alone."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reference import mesh_of
from two_layers import host_params, loss_fn, make_batch

import zero_jax as zero

STEPS = 3


def make_trainer(loss_fn=loss_fn, tx=None, *, mesh="4", params=None, **fields):
    tx = optax.adam(0.01) if tx is None else tx
    return reference.make_trainer(
        loss_fn, tx, mesh=mesh_of(mesh), params=host_params() if params is None else params, **fields
    )


def traced_once(fn, times=1):
    chex.clear_trace_counter()
    return chex.assert_max_traces(lambda *args: fn(*args), n=times)


CONFIGS = {
    "stage 0": dict(stage=0, clip_norm=0.5),
    "stage 1 accumulating": dict(stage=1, num_microbatches=2, precision="bf16"),
    "stage 2": dict(stage=2, precision="fp16"),
    "stage 3": dict(stage=3, precision="bf16"),
    "stage 3 accumulating": dict(stage=3, num_microbatches=2, skip_nonfinite=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_traces_and_compiles_once(name):
    # On JAX 0.10 a jit's own cache counts typed keys twice, so a raw key is used here, and a typed one below.
    times = 1 + 2 * ("num_microbatches" in CONFIGS[name])  # on a batch and a part of it, to see if it is a mean
    times += "precision" in CONFIGS[name]  # and to see which floating leaves of the batch the model takes
    calls, adam = [], optax.adam(0.01)
    tx = optax.GradientTransformation(adam.init, lambda *args: calls.append(None) or adam.update(*args))
    state, step = make_trainer(traced_once(loss_fn, times), tx, key=jax.random.PRNGKey(0), **CONFIGS[name])
    for _ in range(STEPS):
        state, _ = step(state, make_batch())
    assert step._cache_size() == 1
    assert len(calls) == 1, "the optimizer is traced for the state, and that is the trace of the step"


def test_traces_once_with_a_typed_key_and_an_array_batch():
    state, step = make_trainer(traced_once(loss_fn), key=jax.random.key(0), stage=3)
    batch = zero.shard_batch(make_batch(), mesh=mesh_of("4"))
    state, _ = step(state, make_batch())  # placing a batch beforehand or not is the same program
    for _ in range(STEPS):
        state, _ = step(state, batch)


def test_a_state_made_of_device_arrays_compiles_once():
    """Such as one that was restored from a checkpoint: uncommitted scalars must not cost a second compile."""
    config = reference.make_config(stage=3)
    first, step = make_trainer(traced_once(loss_fn), stage=3)
    shardings = zero.state_shardings(first, mesh=mesh_of("4"), config=config)
    state = jax.device_put(jax.tree.map(np.asarray, first), shardings)
    for _ in range(2):
        state, _ = step(state, make_batch())
    assert step._cache_size() == 1


def test_python_numbers_in_params_and_optimizer_state():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, grads), {"count": state["count"] + 1, "begun": True}

    tx = optax.GradientTransformation(lambda params: {"count": 0, "begun": False}, update)
    loss = lambda params, batch: params["scale"] * loss_fn(params["net"], batch)  # noqa: E731
    params = {"net": host_params(), "scale": 2.0}
    state, step = make_trainer(traced_once(loss), tx, params=params, key=jax.random.PRNGKey(0), stage=3)
    for _ in range(STEPS):
        state, _ = step(state, make_batch())
    assert (int(state.opt_state["count"]), bool(state.opt_state["begun"])) == (STEPS, True)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_within_a_scan_are_those_steps(stage):
    batches = [make_batch() for _ in range(STEPS)]
    state, step = make_trainer(stage=stage)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    first, step = make_trainer(stage=stage)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    last, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(first, stacked)
    chex.assert_trees_all_close(metrics.loss, np.stack(losses), rtol=1e-6)
    reference.assert_close(last.params, state.params, tolerance=1e-6)
    reference.assert_placed_alike(last, state)


def test_evaluations_of_traced_params_are_traced_once():
    """A gradient that is not jitted calls the step with tracers each time, and jitted functions may call it often."""
    params, batch = host_params(), make_batch()
    evaluate = zero.make_eval_step(traced_once(loss_fn), mesh=mesh_of("4"), config=zero.ZeroConfig(stage=3))
    grads = [jax.grad(lambda params: evaluate(params, batch).loss)(params) for _ in range(2)]
    chex.assert_trees_all_equal(*grads)
    traced = jax.make_jaxpr(lambda params: [evaluate(params, batch).loss for _ in range(2)])(params)
    programs = [eqn.params for eqn in traced.eqns if "jaxpr" in eqn.params]
    assert [program["name"] for program in programs] == ["eval_step"] * 2


def test_one_of_several_processes_may_shard_a_batch_within_a_jitted_function(monkeypatch):
    """Its examples are those of all processes there."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = mesh_of("8")
    sharded = jax.jit(lambda x: zero.shard_batch({"x": x}, mesh=mesh)["x"])(np.ones((8, 2), np.float32))
    assert sharded.sharding.shard_shape(sharded.shape) == (1, 2)


@pytest.mark.parametrize("name", ["stage 1 accumulating", "stage 3"])
def test_state_is_donated(name):
    state, step = make_trainer(**CONFIGS[name])
    per_device_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    memory = step.lower(state, make_batch()).compile().memory_analysis()
    # The base key is not donated where it is only read and comes back as it was; nothing larger may be missing.
    assert per_device_bytes - 16 <= memory.alias_size_in_bytes <= per_device_bytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 256  # the metrics
    old = state
    state, _ = step(old, make_batch())
    left = [x for x in jax.tree.leaves(old) if not x.is_deleted()]
    assert sum(x.nbytes for x in left) <= 16
    with pytest.raises(
        ValueError, match=r"donated \(leaf '.*' is deleted\).*go on with the state that the step returned"
    ):
        step(old, make_batch())
    step(state, make_batch())  # which works still


def test_what_a_state_is_made_from_is_not_donated():
    mesh = mesh_of("4")
    params = {**host_params(), "bias": np.ones(1, np.float32), "key": jax.random.key(1)}
    first = jax.device_put(params, jax.devices()[0])  # memory that the first of four devices could go on with
    whole = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
    sharded = zero.init_state(params, optax.adam(0.01), jax.random.key(0), mesh=mesh, config=reference.make_config())
    key = jax.random.key(0)
    for given in (first, whole, sharded.params, params):
        state, step = make_trainer(params=given, key=key, stage=3)
        step(state, make_batch())
        assert not any(x.is_deleted() for x in jax.tree.leaves((given, key)) if isinstance(x, jax.Array))
        chex.assert_trees_all_equal(reference.to_host(given), reference.to_host(params))


def test_an_exception_leaves_a_usable_step():
    fails = True

    def sometimes(params, batch):
        if fails:
            raise ZeroDivisionError("in the loss")
        return loss_fn(params, batch)

    state, step = make_trainer(sometimes, stage=3)
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        step(state, make_batch())
    fails = False
    state, _ = step(state, make_batch())
    with pytest.raises(ValueError, match="batch leaf 'inputs' has 6 examples"):
        step(state, make_batch(6))
    with pytest.raises(TypeError, match="dot_general"):
        step(state, {"inputs": np.ones((16, 9), np.float32)})
    state, metrics = step(state, make_batch())
    assert int(state.step) == 2 and np.isfinite(float(metrics.loss))


def test_two_trainers_do_not_disturb_each_other():
    def run(names, *, interleaved):
        trainers = {name: list(make_trainer(**configs[name])) for name in names}
        losses = {name: [] for name in names}
        order = names * STEPS if interleaved else [name for name in names for _ in range(STEPS)]
        for name in order:
            trainer = trainers[name]
            trainer[0], metrics = trainer[1](trainer[0], make_batch())
            losses[name].append(float(metrics.loss))
        return losses

    configs = {
        "one": dict(stage=3, precision="bf16"),
        "other": dict(stage=1, mesh="2", tx=optax.sgd(0.1), loss_fn=lambda p, b: 2 * loss_fn(p, b)),
    }
    alone = run(["one"], interleaved=False) | run(["other"], interleaved=False)
    assert run(["one", "other"], interleaved=True) == alone


@pytest.mark.parametrize("name", ["stage 1 accumulating", "stage 2"])
def test_steps_move_nothing_between_host_and_devices(name):
    state, step = make_trainer(**CONFIGS[name])
    batch = zero.shard_batch({**make_batch(), "scale": np.float32(1)}, mesh=mesh_of("4"))
    state, _ = step(state, batch)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, metrics = step(state, batch)
    assert np.isfinite(float(metrics.loss))


@pytest.mark.slow
def test_simulated_devices_have_one_program_in_flight():
    """More than 32 can deadlock them (docs/xla_faults.md)."""
    mesh, tx = mesh_of("8"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=1, min_shard_size=0)

    def long_loss(params, batch):
        return jax.numpy.mean(jax.lax.fori_loop(0, 40, lambda _, x: jax.numpy.tanh(x @ params), batch) ** 2)

    params = np.eye(256, dtype=np.float32)
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
    assert state.params.is_ready()
    batch = zero.shard_batch(np.ones((4096, 256), np.float32), mesh=mesh)
    assert zero.make_eval_step(long_loss, mesh=mesh, config=config)(state, batch).loss.is_ready()
    _, metrics = zero.make_train_step(long_loss, tx, mesh=mesh, config=config)(state, batch)
    assert metrics.loss.is_ready()


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_that_is_a_number(stage):
    """As where a part of a loss is switched off."""
    state, step = make_trainer(lambda params, batch: 3.0, stage=stage, num_microbatches=2)
    _, metrics = step(state, make_batch())
    assert (float(metrics.loss), float(metrics.grad_norm)) == (3.0, 0.0)


def test_aux_of_python_numbers():
    def with_aux(params, batch):
        return loss_fn(params, batch), {"temperature": 0.5, "size": batch["inputs"].shape[0], "none": None}

    for fields in (dict(stage=0), dict(stage=3)):
        state, step = make_trainer(with_aux, **fields)
        _, metrics = step(state, make_batch())
        assert float(metrics["aux"]["temperature"]) == 0.5 and int(metrics.aux["size"]) == 16
        assert metrics.aux["none"] is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A batch that looks at its leaves when it is made, also of tracers."""

    inputs: jax.Array
    scale: jax.Array

    def __post_init__(self):
        assert not np.shape(self.scale) and self.scale is not None


def test_microbatches_of_a_class_that_checks_its_leaves():
    def scaled(params, batch):
        return loss_fn(params, {"inputs": batch.inputs}) * batch.scale

    state, step = make_trainer(scaled, stage=3, num_microbatches=2)
    _, metrics = step(state, Checked(**make_batch(), scale=np.float32(2)))
    np.testing.assert_allclose(metrics.loss, 2 * loss_fn(host_params(), make_batch()), rtol=1e-5)
