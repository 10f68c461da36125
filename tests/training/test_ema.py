"""The average of the params is right, is sharded as the optimizer's state does, and rests when a step is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, assert_placed_alike, mesh_of, num_shards, run_plain

from zero_jax.core.tree import leaf_names
from zero_jax.training.ema import ParamsEmaState, ema_params, params_ema

DECAY = 0.9
# Sums over a batch are made in another order on several devices, which float32 rounds at 6e-8.
TOLERANCE = 2e-6


def adam():
    return optax.chain(optax.adam(1e-2), params_ema(DECAY))


def test_it_is_the_weighted_mean_of_the_params_after_each_update():
    tx = optax.chain(optax.sgd(0.1), params_ema(DECAY))
    params = {"w": jnp.arange(4.0)}
    state = tx.init(params)
    np.testing.assert_array_equal(ema_params(state)["w"], params["w"])
    seen = []
    for i in range(5):
        updates, state = tx.update({"w": jnp.full(4, float(i**2))}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"], np.float64))
        weights = DECAY ** np.arange(len(seen))[::-1]
        np.testing.assert_allclose(ema_params(state)["w"], np.average(seen, axis=0, weights=weights), rtol=1e-6)


@pytest.mark.parametrize("decay", [0.1, 0.999, 0.99999])
def test_the_initial_params_have_no_weight(decay):
    tx = params_ema(decay)
    params = {"w": jnp.full(3, 100.0)}
    _, state = tx.update({"w": jnp.full(3, -99.0)}, tx.init(params), params)
    # The step from the initial params cancels to float32's rounding of values around 100.
    np.testing.assert_allclose(state.ema["w"], 1.0, rtol=2e-5)


def test_it_is_kept_in_float32_and_follows_small_steps_of_bfloat16():
    tx = params_ema(0.99)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(params)
    assert state.ema["w"].dtype == jnp.float32
    update = jax.jit(tx.update)
    for _ in range(3):
        updates = {"w": jnp.full(3, 1 / 128, jnp.bfloat16)}
        updates, state = update(updates, state, params)
        params = optax.apply_updates(params, updates)
    weights = 0.99 ** np.arange(3)[::-1]
    expected = np.average(1 + np.arange(1, 4) / 128, weights=weights)
    np.testing.assert_allclose(state.ema["w"], expected, rtol=1e-6)
    assert updates["w"].dtype == params["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_it_equals_one_device_and_is_sharded_as_the_state_is(stage):
    batches = reference.make_batches(3)
    _, plain_state, _ = run_plain(reference.loss_fn, adam(), batches)
    state, step = reference.make_trainer(reference.loss_fn, adam(), mesh=mesh_of("4"), stage=stage)
    before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for batch in batches:
        state, _ = step(state, batch)
        assert_placed_alike(state, before)
    average, moments = ema_params(state.opt_state), state.opt_state[0][0].mu
    assert_close(average, ema_params(plain_state), tolerance=TOLERANCE)
    assert_placed_alike(average, moments)
    assert {num_shards(x) for x in jax.tree.leaves(average)} == {1 if stage == 0 else 4}


@pytest.mark.slow
def test_in_mixed_precision_it_averages_the_master_params():
    tx = optax.chain(optax.adam(1e-2), params_ema(DECAY))
    state, step = reference.make_trainer(reference.loss_fn, tx, mesh=mesh_of("2"), stage=1, precision="bf16")
    state, _ = step(state, reference.make_batch(0))
    average = ema_params(state.opt_state)
    assert {x.dtype.name for x in jax.tree.leaves(average)} == {"float32"}
    assert_close(average, state.master, tolerance=1e-6)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state.master)
    assert (average["embed"] != rounded["embed"]).any()


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_skipped_step_does_not_move_it(stage):
    state, step = reference.make_trainer(reference.loss_fn, adam(), mesh=mesh_of("2"), stage=stage, skip_nonfinite=True)
    state, _ = step(state, reference.make_batch(0))
    before = reference.to_host(ema_params(state.opt_state))
    bad = reference.make_batch(1)
    bad["targets"][0] = np.nan
    state, metrics = step(state, bad)
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, reference.to_host(ema_params(state.opt_state)), before)
    state, _ = step(state, reference.make_batch(2))
    assert (reference.to_host(ema_params(state.opt_state))["embed"] != before["embed"]).any()


def test_its_leaves_are_named_by_the_params_paths():
    state = adam().init({"block": {"kernel": jnp.ones((2, 2))}})
    assert [name for name in leaf_names(state) if "/ema/" in name] == ["1/ema/block/kernel"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, every_k_schedule=2),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.multi_transform({"all": tx}, lambda params: jax.tree.map(lambda _: "all", params)),
        lambda tx: optax.chain(optax.clip(1.0), optax.ema(0.5), tx),
    ],
)
def test_it_is_found_anywhere(wrap):
    params = {"w": jnp.arange(3.0)}
    average = ema_params(wrap(adam()).init(params))
    np.testing.assert_array_equal(average["w"], params["w"])


def test_none_and_two_of_them():
    params = {"w": jnp.ones(3)}
    assert ema_params(optax.ema(0.9).init(params)) is None
    with pytest.raises(ValueError, match="keeps 2 averages"):
        ema_params(optax.chain(params_ema(0.9), params_ema(0.5)).init(params))
    with pytest.raises(ValueError, match="ema_decay=1"):
        params_ema(1)
    with pytest.raises(ValueError, match="averages params"):
        params_ema(0.5).update(params, ParamsEmaState(jnp.int32(0), params))
