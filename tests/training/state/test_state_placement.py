"""A state that does not lie as a step was compiled for is refused or moved at every call: one program, one trace."""

import sys
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from reference import mesh_of

import zero_jax as zero


def host_params():
    return {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.ones(8, np.float32)}


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"] + params["b"]).mean()


BATCH = np.ones((8, 8), np.float32)


@pytest.fixture(scope="module")
def trained():
    """A step that was called twice, the traces it may make, and its config and mesh."""
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(lambda *args: loss_fn(*args), n=1)
    mesh, config = mesh_of("4"), reference.make_config(stage=3)
    step = zero.make_train_step(traced_once, optax.adam(1e-2), mesh=mesh, config=config)
    make = lambda: zero.init_state(host_params(), optax.adam(1e-2), jax.random.key(0), mesh=mesh, config=config)  # noqa: E731
    state = make()
    for _ in range(2):
        state, _ = step(state, BATCH)
    return step, make, mesh


def of_other_names(x, mesh):
    """Returns an array with an equivalent sharding on a mesh of other names."""
    spec = PartitionSpec(*("d" if axis == "data" else None for axis in x.sharding.spec))
    return jax.device_put(x, NamedSharding(Mesh(mesh.devices.reshape(-1), ("d",)), spec))


MOVED = {
    "names": of_other_names,
    "host": lambda x, mesh: np.asarray(x),
    "NumPy's wider dtype": lambda x, mesh: np.asarray(x, np.float64 if x.dtype == jnp.float32 else None),
    "uncommitted": lambda x, mesh: jnp.asarray(np.asarray(x)),
}
REFUSED = {
    "replicated": (
        lambda x, mesh: jax.device_put(x, NamedSharding(mesh, PartitionSpec())),
        r"is sharded as P\(\)|is sharded as PartitionSpec\(\)",
    ),
    "one device": (lambda x, mesh: jax.device_put(x, jax.devices()[0]), "is sharded as SingleDeviceSharding"),
    "dtype": (lambda x, mesh: x.astype(jnp.float16) if x.dtype == jnp.float32 else x, "is float16, .* for float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_placements_are_refused_at_every_call(trained, name):
    step, make, mesh = trained
    change, message = REFUSED[name]
    state = make()
    changed = zero.TrainState(**{**vars(state), "params": jax.tree.map(lambda x: change(x, mesh), state.params)})
    with pytest.raises(ValueError, match=f"leaf 'params/b' of the state ({message})"):
        step(changed, BATCH)
    state, _ = step(state, BATCH)  # what was refused is not donated
    moved = jax.device_put(state, zero.state_shardings(state, mesh=mesh, config=reference.make_config(stage=3)))
    step(moved, BATCH)


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_equivalent_shardings_and_host_arrays_run_in_the_same_program(trained, change):
    step, make, mesh = trained
    changed = make()
    expected, _ = step(make(), BATCH)
    params, opt_state = jax.tree.map(lambda x: change(x, mesh), (changed.params, changed.opt_state))
    state, _ = step(zero.TrainState(**{**vars(changed), "params": params, "opt_state": opt_state}), BATCH)
    reference.assert_placed_alike(state, expected)
    reference.assert_close(state.params, expected.params, tolerance=0)


@pytest.mark.parametrize("make_rate", [jnp.asarray, np.float64, float], ids=["jax", "numpy", "python"])
def test_hyperparameters_are_set_as_with_one_device(make_rate):
    tx, rate = optax.inject_hyperparams(optax.adam)(1e-2), make_rate(0.5)
    state, step = reference.make_trainer(loss_fn, tx, mesh=mesh_of("4"), params=host_params(), stage=3)
    params, opt_state = host_params(), tx.init(host_params())
    for i in range(4):
        if i in (0, 2, 3):  # before the first step, and between two
            state.opt_state.hyperparams["learning_rate"] = opt_state.hyperparams["learning_rate"] = rate
        state, _ = step(state, BATCH)
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, BATCH), opt_state, params)
        params = optax.apply_updates(params, updates)
    reference.assert_close(state.params, params, tolerance=1e-5)
    assert float(rate) == 0.5, "what was put in is not donated"


def test_master_params_of_another_dtype_are_refused_at_first():
    state, step = reference.make_trainer(
        loss_fn, optax.sgd(0.1), mesh=mesh_of("4"), params=host_params(), stage=1, precision="bf16"
    )
    with pytest.raises(
        ValueError, match="'master/b' of the state is bfloat16, and the precision of the step has float32"
    ):
        step(zero.TrainState(**{**vars(state), "master": jax.tree.map(jnp.copy, state.params)}), BATCH)


IN_PLACE = {
    **REFUSED,
    "shape": (lambda x, mesh: x[:-1], "match|shape"),
    "deleted": (lambda x, mesh: x.delete(), "donated"),
    "no array": (lambda x, mesh: "w", "array"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_replaced_in_a_returned_state_is_refused(trained, name):
    """Nothing of the state that the last call returned is checked again, and its dicts can be changed."""
    step, make, mesh = trained
    state, _ = step(make(), BATCH)
    change, message = IN_PLACE[name]
    before, changed = state.params["b"], change(state.params["b"], mesh)
    state.params["b"] = before if changed is None else changed
    with pytest.raises(ValueError, match=message):
        step(state, BATCH)
    if name != "deleted":
        state.params["b"] = before
        step(state, BATCH)  # what was refused is not donated


def test_an_array_that_is_put_twice_into_a_returned_state_is_refused(trained):
    step, make, _ = trained
    state, _ = step(make(), BATCH)
    state.opt_state[0].mu["b"] = state.params["b"]
    with pytest.raises(ValueError, match="is the same array as 'params/b'"):
        step(state, BATCH)


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_values_that_are_put_into_a_returned_state_are_taken(trained, change):
    step, make, mesh = trained
    expected = step(step(make(), BATCH)[0], BATCH)[0]
    state, _ = step(make(), BATCH)
    state.params["b"] = change(state.params["b"], mesh)
    state, _ = step(state, BATCH)
    reference.assert_placed_alike(state, expected)
    reference.assert_close(state.params, expected.params, tolerance=0)


def test_a_step_does_not_keep_the_memory_of_a_state(trained):
    step, make, _ = trained
    state, _ = step(make(), BATCH)
    leaf = weakref.ref(state.params["b"])
    del state
    assert leaf() is None
    with pytest.raises(ValueError, match="not a NoneType"):
        step(None, BATCH)


def test_the_python_of_a_step_does_not_grow_with_the_leaves():
    """Counted in calls, after the first; jit's own dispatch is not Python."""

    def num_calls(num_params: int) -> int:
        mesh, config = mesh_of("4"), reference.make_config(stage=3)
        params = {f"w{i}": np.ones(4, np.float32) for i in range(num_params)}
        loss_fn = lambda params, batch: sum(x.sum() for x in params.values()) * batch["x"].mean()  # noqa: E731
        step = zero.make_train_step(loss_fn, optax.adam(1e-2), mesh=mesh, config=config)
        state = zero.init_state(params, optax.adam(1e-2), jax.random.key(0), mesh=mesh, config=config)
        batch = zero.shard_batch({"x": np.ones(8, np.float32)}, mesh=mesh)
        for _ in range(3):
            state, _ = step(state, batch)
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
        try:
            step(state, batch)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(2) == num_calls(12) < 40
