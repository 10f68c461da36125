"""What an optimizer freezes is neither differentiated nor gathered: read from its update, whatever it is called."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import quick_by_turns
from gathering import examples, normal
from reference import mesh_of

import zero_jax as zero
from zero_jax import comms
from zero_jax.training.optimizer.update import trace_update

PARAMS = {"base": normal(16, 64), "head": normal(64, 16)}
LABELS = {"base": "frozen", "head": "trained"}


def freezing(frozen, trained=None):
    return optax.multi_transform({"frozen": frozen, "trained": trained or optax.adamw(1e-2)}, LABELS)


def zeros_of(tx):
    return optax.GradientTransformation(tx.init, lambda g, s, p=None: (jax.tree.map(jnp.zeros_like, g), s))


ZERO = optax.set_to_zero()
OPTIMIZERS = {  # the optimizer, whether it reads the gradient of `base`, whether it leaves it alone
    "adamw": (optax.adamw(1e-2), True, False),
    "set_to_zero": (freezing(ZERO), False, True),
    "masked": (optax.chain(optax.adamw(1e-2), optax.masked(ZERO, {"base": True, "head": False})), True, False),
    "masked, factored": (optax.chain(optax.masked(ZERO, {"base": True, "head": False}), optax.sgd(1e-2)), False, True),
    "by another name": (freezing(zeros_of(optax.identity())), False, True),
    "zeros times a factor": (freezing(optax.chain(ZERO, optax.scale(-0.5))), False, True),
    "decay alone": (freezing(optax.chain(ZERO, optax.add_decayed_weights(0.1))), False, False),
    "a factor that may be infinite": (freezing(optax.chain(ZERO, optax.scale_by_schedule(jnp.sqrt))), False, False),
    "in steps": (optax.MultiSteps(freezing(ZERO), 2), True, False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_is_read_from_the_update(name):
    tx, reads, alone = OPTIMIZERS[name]
    traced = trace_update(tx, PARAMS, tx.init(PARAMS), mesh=None)
    needed = traced.needed_grads
    assert needed == [reads, True]
    assert traced.unchanged(needed) == [alone, False]


def loss(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["base"].astype(x.dtype)) @ params["head"].astype(x.dtype)))


@pytest.mark.parametrize(("stage", "precision"), quick_by_turns([0, 1, 2, 3], ["fp32", "bf16"]))
def test_frozen_params_stay_bit_for_bit_and_the_others_are_trained(stage, precision):
    mesh, tx = mesh_of("8"), freezing(ZERO)
    config = zero.ZeroConfig(stage=stage, precision=precision, min_shard_size=1)
    init = jax.tree.map(lambda x: np.where(np.abs(x) < 0.02, np.float32(-0.0), x), PARAMS)
    state = zero.init_state(lambda _: jax.tree.map(jnp.asarray, init), tx, jax.random.key(0), mesh=mesh, config=config)
    before = jax.tree.map(np.asarray, (state.params, state.master))
    step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
    for _ in range(2):
        state, _ = step(state, examples())
    for old, new in zip(before, (state.params, state.master), strict=True):
        if new is not None:
            assert old["base"].tobytes() == np.asarray(new["base"]).tobytes()
            assert not np.array_equal(old["head"], np.asarray(new["head"]))
    if state.master is not None and stage < 3:
        np.testing.assert_array_equal(state.params["head"], state.master["head"].astype(jnp.bfloat16))
    assert step._cache_size() == 1


@pytest.mark.parametrize(("stage", "sent"), [(1, 2 * 1024), (2, 2 * 1024), (3, 3 * 1024 + 2 * 1024)])
def test_the_estimate_knows_what_is_frozen(stage, sent):
    """Of two leaves of 1024 elements, one is only gathered, at stage 3."""
    mesh, tx, config = mesh_of("8"), freezing(ZERO), zero.ZeroConfig(stage=stage, min_shard_size=1)
    state = zero.abstract_state(lambda _: jax.tree.map(jnp.asarray, PARAMS), tx, mesh=mesh, config=config)
    assert comms.estimate(state, mesh=mesh, config=config, tx=tx).sent_bytes == sent * 4 * 7 / 8
    assert comms.estimate(state, mesh=mesh, config=config).sent_bytes == (2 if stage < 3 else 3) * 2048 * 4 * 7 / 8


@pytest.mark.tpu_compiler
def test_frozen_params_do_not_move_at_stage_2():
    pytest.importorskip("libtpu")
    mesh, tx, config = (
        zero.make_mesh(topology="v5p:2x2x4"),
        freezing(ZERO),
        zero.ZeroConfig(stage=2, precision="bf16", overlap=False),
    )
    shapes = {"base": (512, 512), "head": (512, 512)}
    state = zero.abstract_state(lambda _: {k: jnp.zeros(s) for k, s in shapes.items()}, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
    report = comms.measure(step.lower(state, jax.ShapeDtypeStruct((256 * mesh.size, 512), jnp.bfloat16)).compile())
    ideal = comms.estimate(state, mesh=mesh, config=config, tx=tx)
    assert report.sent_bytes == pytest.approx(ideal.sent_bytes, rel=0.02), report
