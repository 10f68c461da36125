"""A mesh that the user has set (`jax.set_mesh`) for other code of theirs is not that of a step."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, make_config, mesh_of
from two_layers import host_params, loss_fn, make_batch

import zero_jax as zero

CONFIG, TX = make_config(stage=3, min_shard_size=8), optax.sgd(0.1)
OTHER_MESHES = [
    ((4,), (AxisType.Explicit,), slice(4)),
    ((2, 4), (AxisType.Explicit, AxisType.Auto), slice(8)),
    ((2, 2), (AxisType.Auto, AxisType.Auto), slice(4)),
    ((4,), (AxisType.Auto,), slice(4, 8)),
]


def other_mesh(sizes, types, devices):
    return jax.make_mesh(sizes, ("data", "own")[: len(sizes)], axis_types=types, devices=jax.devices()[devices])


def shardings():
    return zero.state_shardings({"params": host_params()}, mesh=mesh_of("4"), config=CONFIG)["params"]


def drawn(key):
    """Returns params of the shapes of `host_params`, from keys that are split."""
    first, second = jax.random.split(key)
    return jax.tree.map(lambda x: jax.random.normal(first, x.shape) + jax.random.normal(second), host_params())


@pytest.mark.parametrize("other", OTHER_MESHES, ids=str)
def test_a_step_is_on_its_own_mesh(other):
    mesh, batch = mesh_of("4"), make_batch()
    expected, grads = jax.jit(jax.value_and_grad(loss_fn))(host_params(), batch)
    with jax.set_mesh(other_mesh(*other)):
        on_devices = jax.tree.map(jax.numpy.asarray, host_params())
        for params in (drawn, host_params(), on_devices, lambda _: jax.tree.map(jax.numpy.asarray, host_params())):
            state = zero.init_state(params, TX, jax.random.key(0), mesh=mesh, config=CONFIG)
        batch = jax.tree.map(jax.numpy.asarray, batch)
        step = zero.make_train_step(loss_fn, TX, mesh=mesh, config=CONFIG)
        step.lower(state, batch)
        evaluate = zero.make_eval_step(loss_fn, mesh=mesh, config=CONFIG)
        losses = [step.grads(state, batch)[0], evaluate(state, batch).loss]
        state, metrics = step(state, batch)
        np.testing.assert_allclose([*losses, metrics.loss], expected, rtol=1e-5)
        assert jax.sharding.get_mesh() == other_mesh(*other)
    updated = jax.tree.map(lambda x, g: x - 0.1 * g, host_params(), grads)
    assert_close(jax.device_get(state.params), updated, tolerance=1e-5)


def test_arrays_of_a_mesh_of_explicit_axes_are_taken():
    """`jax.make_mesh` makes such axes by default, and arrays on the same devices look as if they were in place."""
    mesh, explicit, config = mesh_of("4"), other_mesh(*OTHER_MESHES[0]), make_config(stage=0)
    params = jax.device_put(host_params(), NamedSharding(explicit, P()))
    batch = jax.device_put(make_batch(), NamedSharding(explicit, P("data")))
    state = zero.init_state(params, TX, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, TX, mesh=mesh, config=config)
    losses = [zero.make_eval_step(loss_fn, mesh=mesh, config=config)(state, batch).loss]
    state, metrics = step(state, zero.shard_batch(batch, mesh=mesh))
    np.testing.assert_allclose([*losses, metrics.loss], loss_fn(host_params(), make_batch()), rtol=1e-5)
    step(state, batch)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("spec", [P(), P("data")])
def test_params_of_a_mesh_of_explicit_axes_are_evaluated(stage, spec):
    """`evaluate` takes params that no state holds."""
    params = jax.device_put(host_params(), NamedSharding(other_mesh(*OTHER_MESHES[0]), spec))
    evaluate = zero.make_eval_step(loss_fn, mesh=mesh_of("4"), config=make_config(stage=stage))
    loss = evaluate(params, make_batch()).loss
    np.testing.assert_allclose(loss, loss_fn(host_params(), make_batch()), rtol=1e-5)


def test_checkpoints_are_on_their_own_mesh(tmp_path):
    mesh = mesh_of("4")
    with jax.set_mesh(other_mesh(*OTHER_MESHES[0])):
        state = zero.init_state(host_params(), TX, jax.random.key(0), mesh=mesh, config=CONFIG)
        with zero.Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, state)
        back = zero.restore(tmp_path, init_fn=host_params(), tx=TX, mesh=mesh, config=CONFIG)
    assert_close(jax.device_get(back.state.params), host_params(), tolerance=0)


def test_reports_are_of_their_own_mesh():
    with jax.set_mesh(other_mesh(*OTHER_MESHES[0])):
        report = zero.gather_report(loss_fn, shardings(), host_params(), make_batch(), mesh=mesh_of("4"))
    assert {event.path for event in report.events} == {"in", "out"}


def test_a_function_traced_for_another_mesh_is_refused():
    """Its arrays are of the types of that mesh."""
    gathered = zero.gather_on_use(loss_fn, shardings(), mesh=mesh_of("4"))
    message = r"set the mesh data=4 \(Explicit\), and this is for .*data=4 \(Auto\).*jax.set_mesh\(mesh\), or none"
    with jax.set_mesh(other_mesh(*OTHER_MESHES[0])), pytest.raises(ValueError, match=message):
        jax.jit(gathered)(host_params(), make_batch())
    with jax.set_mesh(mesh_of("4")):
        loss = jax.jit(gathered)(host_params(), make_batch())
    np.testing.assert_allclose(loss, loss_fn(host_params(), make_batch()), rtol=1e-5)
