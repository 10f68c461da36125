"""What is given where something else was asked for is named, with what to give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reference import mesh_of
from two_layers import host_params, loss_fn, make_batch

import zero_jax as zero

MESH, CONFIG, TX = mesh_of("4"), reference.make_config(stage=3), optax.sgd(0.1)
PLACED = {"mesh": MESH, "config": CONFIG}


def init_state(params=None, **given):
    key = given.get("key", jax.random.key(0))
    return zero.init_state(host_params() if params is None else params, TX, key, **PLACED)


@functools.cache
def state():
    return init_state()


@functools.cache
def lowered():
    return zero.make_train_step(loss_fn, TX, **PLACED).lower(state(), make_batch())


KINDS = [
    (lambda: init_state(key=None), r"key=None is no key: give jax.random.key\(0\)"),
    (lambda: init_state(key=jnp.ones(2)), r"key=float32\[2\] is no key"),
    (lambda: init_state(key=jax.random.PRNGKey(0, impl="rbg")), r"key=uint32\[4\] is no key"),
    (lambda: init_state(key=jax.random.split(jax.random.key(0), 4)), r"key=key<fry>\[4\] is no key"),
    (lambda: init_state(jax.eval_shape(host_params)), "the params are shapes, without values: give arrays, or a func"),
    (lambda: zero.sharding_report("x", **PLACED), "params is 'x' of type str, no array: give arrays or jax.Shape"),
    (lambda: zero.sharding_report({"a": {"b": "x"}}, **PLACED), "params leaf 'a/b' is 'x' of type str"),
    (
        lambda: zero.state_shardings({"params": host_params(), "name": "x"}, **PLACED),
        "state leaf 'name' is 'x' .*out of the state, as zero.from_equinox",
    ),
    (lambda: zero.state_shardings((host_params(), 1), params=0, **PLACED), "params=0: give a path, such as .* '0'"),
    (lambda: zero.state_shardings([], **PLACED), "no params at 'params' .it has no leaves."),
    (lambda: zero.abstract_state(host_params(), TX, **PLACED), "init_fn=.* is no function: give a function of a key"),
    (lambda: zero.memory.measure(3), "compiled=3 has no as_text.. and no memory_analysis..: give what .*compile"),
    (lambda: zero.memory.measure(state()), "compiled=a TrainState of arrays has no as_text"),
    (lambda: zero.memory.measure(lowered()), "has no memory_analysis..: give what `.lower"),
    (lambda: zero.comms.measure(None), "compiled=None has no as_text"),
    (lambda: zero.memory.estimate(host_params(), **PLACED), "memory.estimate takes a TrainState, not a dict"),
    (lambda: zero.comms.estimate(host_params(), **PLACED), "comms.estimate takes a TrainState, not a dict"),
    (lambda: zero.trace_loss(loss_fn, state(), make_batch(), **PLACED), "a TrainState was given for params"),
    (lambda: zero.trace_loss(loss_fn, host_params(), {"inputs": "x"}, **PLACED), "batch leaf 'inputs' is 'x'"),
    (lambda: zero.make_train_step(loss_fn, TX, **PLACED).lower(state(), {"inputs": "x"}), "batch leaf 'inputs' is 'x'"),
    (lambda: zero.make_train_step(zero.MeshLoss(3), TX, **PLACED), "MeshLoss.make=3 is no function: give a function"),
    (lambda: zero.gather_on_use(None, P(), mesh=MESH), "fn=None is no function"),
    (lambda: zero.gather_on_use(host_params(), loss_fn, mesh=MESH), "fn={.* is no function: .*gather_on_use.fn, specs"),
    (lambda: zero.rematerialize(None, "full", mesh=MESH), "loss_fn=None is no function"),
    (lambda: zero.remat_report(None, host_params(), make_batch(), remat="full", mesh=MESH), "loss_fn=None is no fun"),
    (lambda: zero.Checkpointer(None), "directory=None is not a path: give the folder"),
    (lambda: zero.restore(3, init_fn=host_params, tx=TX, **PLACED), "directory=3 is not a path: give the folder"),
    (lambda: zero.restore("x", init_fn=host_params, tx=TX, mesh=MESH, config=None), "config=None: give a zero.ZeroC"),
    (lambda: zero.params_ema("x"), "ema_decay='x': give a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), KINDS)
def test_wrong_kinds(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_keys_of_old_are_keys():
    assert int(init_state(key=jax.random.PRNGKey(0)).step) == 0


def test_a_counter_of_python_is_a_leaf_like_others():
    """A loop of one's own may count its steps in a Python integer."""
    shardings = zero.state_shardings({"params": host_params(), "step": 3, "none": None}, **PLACED)
    assert shardings["step"].is_fully_replicated and shardings["none"] is None
    assert not shardings["params"]["in"].is_fully_replicated
    placed = jax.device_put({"params": host_params(), "step": 3, "none": None}, shardings)
    assert int(placed["step"]) == 3


def test_an_evaluation_is_not_run_on_a_donated_state():
    """On a CPU the process itself would end."""
    evaluate = zero.make_eval_step(loss_fn, **PLACED)
    given = init_state()
    loss = evaluate(given, make_batch()).loss
    assert np.isfinite(loss)
    jax.tree.map(lambda x: x.delete(), given.params)
    for donated in (given, given.params):
        with pytest.raises(ValueError, match=r"was given to a step before .*go on with the state that the step"):
            evaluate(donated, make_batch())


@pytest.mark.parametrize("name", ["evaluate", "grads", "lower"])
def test_a_state_on_other_devices_is_refused(name):
    placed = {"mesh": mesh_of("2"), "config": CONFIG}
    step = zero.make_train_step(loss_fn, TX, **placed)
    call = {"evaluate": zero.make_eval_step(loss_fn, **placed), "grads": step.grads, "lower": step.lower}[name]
    with pytest.raises(ValueError, match=r"of devices 0, 1, 2, 3, and the step was made for the mesh .*'data': 2"):
        call(init_state(), make_batch())


def test_params_on_the_same_devices_in_another_order_are_refused():
    mesh = mesh_of("2")
    turned = jax.sharding.Mesh(mesh.devices[..., ::-1, :], mesh.axis_names)
    params = jax.device_put(init_state().params, jax.sharding.NamedSharding(turned, P("data")))
    with pytest.raises(ValueError, match=r"in another order: .*of params alone zero.Variables\(params=params\)"):
        zero.make_eval_step(loss_fn, mesh=mesh, config=CONFIG)(params, make_batch())


def of_shards(call):
    """Calls a function of a batch in a `jax.shard_map` over it."""
    mapped = jax.shard_map(lambda x: call(x).loss[None], mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    return jax.jit(mapped)(make_batch())


@pytest.mark.parametrize("name", ["train", "grads", "evaluate", "init"])
def test_a_step_is_not_called_on_shards(name):
    step, evaluate = zero.make_train_step(loss_fn, TX, **PLACED), zero.make_eval_step(loss_fn, **PLACED)
    calls = {
        "train": lambda batch: step(state(), batch)[1],
        "grads": lambda batch: step.grads(state(), batch)[0],
        "evaluate": lambda batch: evaluate(state(), batch),
        "init": lambda batch: init_state(),
    }
    state()
    with pytest.raises(ValueError, match=r"called within a jax.shard_map.*call it outside, with the whole"):
        of_shards(calls[name])


def test_a_gradient_through_a_step_leaves_its_state():
    """The step is differentiated by its batch; what the backward pass reads of the state was donated."""
    step, given, batch = zero.make_train_step(loss_fn, TX, **PLACED), init_state(), make_batch()
    scaled = lambda scale: {**batch, "inputs": batch["inputs"] * scale}  # noqa: E731
    slope = jax.grad(lambda scale: step(given, scaled(scale))[1].loss)(1.0)
    want = jax.grad(lambda scale: loss_fn(host_params(), scaled(scale)))(1.0)
    np.testing.assert_allclose(slope, want, rtol=1e-5)
    assert not given.step.is_deleted()


def test_steps_may_be_within_a_checkpoint():
    """Whose policy keeps something: in it JAX refuses a `jax.checkpoint` that has barriers before some arrays alone."""
    step, given, batch, params = zero.make_train_step(loss_fn, TX, **PLACED), init_state(), make_batch(), host_params()

    def scaled(scale, tree):
        return jax.tree.map(lambda x: x * scale if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def plain(scale):
        before = scaled(scale, params)
        grads = jax.grad(loss_fn)(before, batch)
        return loss_fn(jax.tree.map(lambda x, grad: x - 0.1 * grad, before, grads), batch)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def trained(scale):
        return step(step(scaled(scale, given), batch)[0], batch)[1].loss

    np.testing.assert_allclose(jax.jit(jax.grad(trained))(1.0), jax.grad(plain)(1.0), rtol=1e-4)


def test_traffic_is_not_read_with_another_mesh():
    compiled = lowered().compile()
    assert zero.comms.measure(compiled, mesh=MESH).rows
    with pytest.raises(ValueError, match=r"compiled for 4 devices, and the mesh .* has 8: give the mesh that"):
        zero.comms.measure(compiled, mesh=mesh_of("8"))
