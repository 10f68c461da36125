"""Learning rates are functions of the step, and optimizers take the options that they know."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.trainer.optimizers import OptimizerConfig, make_optimizer, make_schedule
from zero_jax.training.ema import ema_params

STEPS = 100


def rates(num_steps=STEPS, **fields):
    """Returns the learning rate of each step, and what it would be after the last."""
    schedule = make_schedule(OptimizerConfig(**{"learning_rate": 2.0, **fields}), num_steps=num_steps)
    return np.array([float(schedule(step)) for step in range(num_steps + 1)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_every_schedule_warms_up_and_stays_within_bounds(schedule):
    found = rates(schedule=schedule, warmup_steps=9)
    np.testing.assert_allclose(found[:10], 2 * np.arange(1, 11) / 10 - 0.2 * np.arange(10) / 90, atol=0.03)
    assert found[0] == pytest.approx(0.2)
    assert found[9] == found.max() == pytest.approx(2)
    assert (np.diff(found[9:]) <= 1e-6).all()


@pytest.mark.parametrize(("schedule", "share"), [("cosine", 0.1), ("linear", 0), ("wsd", 0), ("constant", 1)])
def test_where_a_schedule_ends(schedule, share):
    assert rates(schedule=schedule, warmup_steps=10)[-1] == pytest.approx(2 * share, abs=1e-6)
    if schedule != "constant":
        found = rates(schedule=schedule, warmup_steps=10, final_learning_rate=0.25)
        assert found[-1] == pytest.approx(0.5)
        assert found[-2] > 0.5


def test_wsd_is_stable_and_then_falls_along_a_line():
    found = rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_learning_rate=0.5)
    np.testing.assert_allclose(found[10:81], 2)
    np.testing.assert_allclose(found[80:], np.linspace(2, 1, 21), rtol=1e-6)


def test_the_stable_phase_of_wsd_does_not_depend_on_the_length_of_the_run():
    short, long = rates(schedule="wsd", warmup_steps=10), rates(200, schedule="wsd", warmup_steps=10)
    np.testing.assert_array_equal(short[:91], long[:91])
    assert short[95] < long[95] == 2


def test_linear_is_a_line_and_none_of_them_needs_a_warm_up():
    np.testing.assert_allclose(rates(schedule="linear", warmup_steps=0), np.linspace(2, 0, 101), atol=1e-6)
    for schedule in ("wsd", "constant", "cosine"):
        assert rates(schedule=schedule, warmup_steps=0)[0] == 2


def test_a_schedule_may_be_traced():
    schedule = make_schedule(OptimizerConfig(schedule="wsd"), num_steps=STEPS)
    assert float(jax.jit(schedule)(jnp.int32(97))) == pytest.approx(float(schedule(97)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "wds"}, "schedule='wds': did you mean 'wsd'"),
        ({"schedule": "constant", "final_learning_rate": 0.1}, "'constant' does not fall"),
        ({"schedule": "cosine", "decay_fraction": 0.1}, "is for the schedule 'wsd'; 'cosine' has no such phase"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, "above 0 and at most 1"),
        ({"optimizer": "sgd", "beta1": 0.9}, "'sgd' has no beta1; it knows momentum"),
        ({"optimizer": "lion", "epsilon": 1e-8}, "'lion' has no epsilon; it knows beta1, beta2, mu_dtype"),
        ({"optimizer": "adamw", "momentum": 0.9}, "'adamw' has no momentum"),
        ({"optimizer": "adafactor", "beta2": 0.9}, "'adafactor' has no beta2"),
        ({"beta1": 1.0}, "beta1=1.0: give a number from 0 to below 1"),
        ({"epsilon": 0.0}, "epsilon=0.0: give a positive number"),
        ({"no_decay": "("}, "is not a regular expression"),
        ({"ema_decay": 1.0}, "ema_decay=1.0: give a number above 0 and below 1"),
        ({"weight_decay": float("nan")}, "weight_decay=nan: give a finite number"),
        ({"mu_dtype": "int8"}, "mu_dtype='int8' is no floating dtype: give 'bfloat16' or 'float32'"),
        ({"nu_dtype": "float17"}, "nu_dtype='float17' is no floating dtype: give 'bfloat16' or 'float32'"),
        ({"nu_dtype": "float16"}, "nu_dtype='float16' has not the range of float32"),
        ({"mu_dtype": "float64"}, "mu_dtype='float64' is wider than the params"),
        ({"optimizer": "lion", "nu_dtype": "bfloat16"}, "'lion' has no nu_dtype; it knows beta1, beta2, mu_dtype"),
        ({"optimizer": "adafactor", "mu_dtype": "bfloat16"}, "'adafactor' has no momentum of its own: give momentum"),
        ({"mu_dtype": "bfloat16", "beta1": 0.999}, "beta1=0.999: a step changes less.*give a beta1 of 0.996 at most"),
    ],
)
def test_what_no_optimizer_can_use(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_phases_longer_than_the_run():
    with pytest.raises(ValueError, match="leaves nothing of a run of 50 steps"):
        make_schedule(OptimizerConfig(warmup_steps=50), num_steps=50)
    config = OptimizerConfig(schedule="wsd", decay_fraction=0.6, warmup_steps=50)
    with pytest.raises(ValueError, match=r"leaves no room for warmup_steps=50: give at most 0\.5"):
        make_schedule(config, num_steps=100)


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (40, 10), (200, 50), (1000, 50)])
def test_the_usual_warmup_fits_any_run(num_steps, warmup_steps):
    found = make_schedule(OptimizerConfig(learning_rate=2), num_steps=num_steps)
    assert float(found(warmup_steps)) == pytest.approx(2)
    assert all(float(found(i)) < 2 for i in range(warmup_steps))


PARAMS = {"dense": {"kernel": jnp.full((4, 4), 0.5), "bias": jnp.ones(4)}, "embed": jnp.full((4, 4), 0.5)}


@functools.cache
def two_steps(**fields):
    """Returns PARAMS after two steps with gradients that differ, and the optimizer's state."""
    tx = make_optimizer(OptimizerConfig(warmup_steps=0, learning_rate=0.1, **fields), num_steps=10)
    params, state = PARAMS, jax.jit(tx.init)(PARAMS)
    update = jax.jit(tx.update)
    for scale in (1e-3, -2e-3):
        grads = jax.tree.map(lambda x, s=scale: s * jnp.arange(1.0, x.size + 1).reshape(x.shape), params)
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_moments_in_fewer_bytes(optimizer):
    """All of them are bfloat16, and a step is that of float32 moments but for their rounding."""
    fields = {"optimizer": optimizer, **({"momentum": 0.5} if optimizer == "adafactor" else {})}
    small = {"mu_dtype": "bfloat16", **({"nu_dtype": "bfloat16"} if optimizer in ("adamw", "muon") else {})}
    (params, state), (expected, wide) = two_steps(**fields, **small), two_steps(**fields)
    dtypes = {x.dtype for x in jax.tree.leaves(state) if x.shape == (4, 4)}
    assert dtypes == (
        {jnp.dtype("bfloat16")} if optimizer != "adafactor" else {*map(jnp.dtype, ("bfloat16", "float32"))}
    )
    assert jax.tree.structure(state) == jax.tree.structure(wide)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.1 * 2**-6), params, expected)


@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("adamw", "beta1", 0.5),
        ("adamw", "beta2", 0.5),
        ("adamw", "epsilon", 0.1),
        ("sgd", "momentum", 0.1),
        ("lion", "beta1", 0.999),
        ("adafactor", "momentum", 0.5),
        ("adafactor", "epsilon", 0.1),
        ("muon", "momentum", 0.1),
        ("muon", "beta1", 0.1),
        ("muon", "epsilon", 0.1),
    ],
)
def test_options_reach_the_optimizer(optimizer, option, value):
    usual, _ = two_steps(optimizer=optimizer)
    other, _ = two_steps(optimizer=optimizer, **{option: value})
    different = [bool((a != b).any()) for a, b in zip(jax.tree.leaves(usual), jax.tree.leaves(other), strict=True)]
    assert any(different)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_no_decay_leaves_what_it_names_alone(optimizer):
    fields = {"optimizer": optimizer, "weight_decay": 0.5}
    decayed, _ = two_steps(**fields)
    spared, _ = two_steps(**fields, no_decay=".*/kernel")
    free, _ = two_steps(optimizer=optimizer, weight_decay=0.0)
    assert (spared["dense"]["kernel"] == free["dense"]["kernel"]).all()
    assert (spared["dense"]["kernel"] != decayed["dense"]["kernel"]).all()
    assert (spared["embed"] == decayed["embed"]).all()
    assert (spared["dense"]["bias"] == free["dense"]["bias"]).all()


def test_no_decay_that_names_no_leaf():
    tx = make_optimizer(OptimizerConfig(no_decay="kernel"), num_steps=100)
    with pytest.raises(ValueError, match=r"no_decay: 'kernel' matches the path of no leaf; some are dense/kernel"):
        tx.init(PARAMS)


def test_an_average_is_kept_where_asked_for():
    assert ema_params(two_steps()[1]) is None
    params, state = two_steps(ema_decay=0.5, no_decay="embed")
    average = ema_params(state)
    assert jax.tree.structure(average) == jax.tree.structure(params)
    assert all((a != p).any() for a, p in zip(jax.tree.leaves(average), jax.tree.leaves(params), strict=True))
