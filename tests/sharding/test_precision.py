"""Low precision: dtypes of every group, and what happens to steps whose gradients are not finite."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import mesh_of

import zero_jax as zero
from zero_jax.sharding.precision import init_loss_scale, update_loss_scale
from zero_jax.training.optimizer.update import update_if

NUM_DEVICES = 4


def host_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / 4  # noqa: E731
    return {"count": np.arange(8), "in": normal(8, 16), "out": normal(16, 8)}


def make_batch(*, bad=None):
    """Returns a batch of one example a device, with a value put into the last device's if it is to be bad."""
    inputs = np.random.default_rng(1).standard_normal((2 * NUM_DEVICES, 8), dtype=np.float32)
    if bad is not None:
        inputs[-1] = bad
    return {"inputs": inputs}


def loss_fn(params, batch):
    inputs = batch["inputs"].astype(params["in"].dtype)
    return jnp.square(jnp.tanh(inputs @ params["in"]) @ params["out"]).mean()


def make_trainer(tx=None, **fields):
    return reference.make_trainer(
        loss_fn, optax.adam(0.01) if tx is None else tx, mesh=mesh_of("4"), params=host_params(), **fields
    )


def policy(*, param=jnp.float16, **fields):
    return zero.Precision(
        param=param,
        compute=param,
        reduce=param,
        master=jnp.float32,
        loss_scale=zero.LossScaleConfig(**fields) if fields else None,
    )


def copies(x):
    """Returns the value on every device."""
    return [np.asarray(shard.data).item() for shard in x.addressable_shards]


def snapshot(state):
    return reference.to_host((state.params, state.master, state.opt_state))


@pytest.mark.parametrize(("stage", "num_microbatches"), [(1, 2), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_overflow_on_one_device_skips_the_step_on_all(stage, num_microbatches):
    precision = policy(initial=1024.0)
    state, step = make_trainer(stage=stage, num_microbatches=num_microbatches, precision=precision)
    state, metrics = step(state, make_batch())
    assert copies(metrics.skipped) == [False] * NUM_DEVICES and step.leaf_name(state, metrics.nonfinite_leaf) is None
    before = snapshot(state)
    state, metrics = step(state, make_batch(bad=1e30))  # finite in float32, infinite in float16
    assert copies(metrics.skipped) == [True] * NUM_DEVICES
    assert step.leaf_name(state, metrics.nonfinite_leaf) == "in"  # the first: `count` has no gradient
    assert copies(metrics.loss_scale) == [1024.0] * NUM_DEVICES  # that the step used; the next uses half
    assert copies(state.loss_scale.scale) == [512.0] * NUM_DEVICES
    assert copies(state.num_skipped_steps) == copies(metrics.num_skipped_steps) == [1] * NUM_DEVICES
    chex.assert_trees_all_equal(snapshot(state), before)
    state, metrics = step(state, make_batch())
    assert copies(metrics.skipped) == [False] * NUM_DEVICES and int(state.num_skipped_steps) == 1
    assert int(state.step) == 3
    with np.testing.assert_raises(AssertionError):
        chex.assert_trees_all_equal(snapshot(state), before)


def test_loss_scale_trajectory_is_exact():
    """Growth after 3 finite steps in a row, an eighth (not the floor) after each overflow, never below the floor."""
    config = dict(initial=8.0, growth_interval_steps=3, growth_factor=2.0, backoff_factor=0.125, floor=0.5)
    state, step = make_trainer(stage=2, precision=policy(**config))
    finite = [True] * 7 + [False, True, True, False, False] + [True] * 4 + [False]
    #          used by:  1  2  3   4   5   6   7   8  9 10 11   12   13   14   15 16 17
    expected_scales = [8, 8, 8, 16, 16, 16, 32, 32, 4, 4, 4, 0.5, 0.5, 0.5, 0.5, 1, 1]
    used, skipped = [], []
    for is_finite in finite:
        state, metrics = step(state, make_batch(bad=None if is_finite else np.nan))
        used.append(float(metrics.loss_scale))
        skipped.append(bool(metrics.skipped))
    assert used == expected_scales
    assert skipped == [not is_finite for is_finite in finite]
    assert float(state.loss_scale.scale) == 0.5 and int(state.num_skipped_steps) == 4


def test_loss_scale_neither_overflows_nor_falls_below_its_floor():
    config = zero.LossScaleConfig(initial=2.0**127, growth_interval_steps=1, floor=2.0**126)
    scale = init_loss_scale(config)
    grown = update_loss_scale(scale, jnp.array(True), config)
    assert float(grown.scale) == 2.0**127 and int(grown.num_finite_steps) == 0
    backed_off = update_loss_scale(update_loss_scale(scale, jnp.array(False), config), jnp.array(False), config)
    assert float(backed_off.scale) == 2.0**126


def test_scaling_changes_nothing_but_the_range():
    """Powers of two do not round, so that scaled and unscaled runs are bit-equal while nothing leaves the range."""
    states = []
    for precision in (policy(initial=256.0), policy()):
        state, step = make_trainer(stage=3, precision=precision, clip_norm=0.1)
        for _ in range(2):
            state, metrics = step(state, make_batch())
        states.append((snapshot(state), reference.to_host((metrics.loss, metrics.grad_norm))))
    chex.assert_trees_all_equal(*states)


def test_small_gradients_survive_in_float16():
    """Gradients of 1e-9 are nothing in float16 unless the loss is scaled."""
    small = lambda params, batch: 1e-8 * loss_fn(params, batch).astype(jnp.float32)  # noqa: E731
    norms = {}
    for name, precision in {"fp16": "fp16", "unscaled": policy()}.items():
        _, history = reference.run_zero(
            small, optax.sgd(1.0), [make_batch()], mesh=mesh_of("4"), params=host_params(), stage=1, precision=precision
        )
        norms[name] = float(history[0].grad_norm)
    exact = jax.jit(jax.grad(lambda params: small({**params, "count": 0}, make_batch())))(
        {name: x for name, x in host_params().items() if name != "count"}
    )
    # float16 has 11 bits; some ten roundings.
    np.testing.assert_allclose(norms["fp16"], reference.norm(exact), rtol=2.0**-8)
    assert norms["unscaled"] < 0.5 * norms["fp16"]


@pytest.mark.parametrize("stage", [0, 3])
def test_nan_on_one_device_is_seen_by_all(stage):
    state, step = make_trainer(stage=stage, precision="bf16", skip_nonfinite=False)
    state, metrics = step(state, make_batch(bad=np.nan))
    assert copies(metrics.skipped) == [False] * NUM_DEVICES  # as told
    assert np.isnan(copies(metrics.loss)).all() and np.isnan(copies(metrics.grad_norm)).all()
    assert copies(metrics.nonfinite_leaf) == [1] * NUM_DEVICES  # and yet it is told: `count`, `in`, `out`


def test_skips_unless_told_not_to():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(0.01))  # with a key in its state
    state, step = make_trainer(noisy, stage=2)
    before = snapshot(state)
    state, metrics = step(state, make_batch(bad=np.nan))
    assert copies(metrics.skipped) == [True] * NUM_DEVICES and int(metrics.num_skipped_steps) == 1
    chex.assert_trees_all_equal(snapshot(state), before)
    state, metrics = step(state, make_batch())
    assert copies(metrics.skipped) == [False] * NUM_DEVICES and int(metrics.num_skipped_steps) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_an_update_that_is_skipped_changes_no_bit(in_place):
    """Either way of skipping: params and state of any kind of leaf, of which the update narrows one."""

    def update(params, state):
        narrower = state["mean"].astype(jnp.bfloat16) * 2
        new = {"mean": narrower, "count": state["count"] + 1, "key": jax.random.fold_in(state["key"], 1)}
        return jax.tree.map(lambda p: p / 0, params), new

    params = {"w": jnp.asarray([np.nan, -0.0, 1e-45, 3.0], jnp.float32), "b": jnp.ones(3, jnp.bfloat16)}
    before = params, {"mean": jnp.arange(3.0), "count": jnp.int32(4), "key": jax.random.key(2)}
    step = jax.jit(lambda finite, state: update_if(finite, update, state, in_place=in_place))
    bits = lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)  # noqa: E731
    for finite in (False, True):
        want = update(*before) if finite else before
        for got, expected, old in zip(*map(jax.tree.leaves, (step(finite, before), want, before)), strict=True):
            assert got.dtype == old.dtype
            assert bits(got).tobytes() == bits(expected.astype(old.dtype) if got.ndim else expected).tobytes()


def test_does_not_skip_where_told_not_to():
    state, step = make_trainer(stage=1, precision=policy(initial=8.0), skip_nonfinite=False)
    state, metrics = step(state, make_batch(bad=np.nan))
    assert not bool(metrics.skipped) and np.isnan(np.asarray(state.master["in"])).all()


def test_params_that_are_infinite_on_purpose_stay_so():
    params = {**host_params(), "mask": np.array([0, -np.inf] * 8, np.float32)}
    tx = optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {name: "b" if name == "mask" else "a" for name in params}
    )
    loss = lambda params, batch: loss_fn(params, batch) + jnp.exp(params["mask"]).sum()  # noqa: E731
    state, history = reference.run_zero(loss, tx, [make_batch()], mesh=mesh_of("4"), params=params, stage=3)
    assert int(history[0].nonfinite_leaf) == -1 and not bool(history[0].skipped)
    np.testing.assert_array_equal(state.params["mask"], params["mask"])


def test_large_float16_gradients_are_finite():
    """The square of 300 is infinite in float16."""
    params = {"w": np.ones(8, np.float16)}
    loss = lambda params, batch: 300 * (params["w"].astype(jnp.float32) * batch["inputs"].mean(0)).sum()  # noqa: E731
    batch = {"inputs": np.ones((NUM_DEVICES, 8), np.float32)}
    _, (metrics,) = reference.run_zero(
        loss, optax.sgd(1e-4), [batch], mesh=mesh_of("4"), params=params, stage=1, skip_nonfinite=True
    )
    assert not bool(metrics.skipped) and int(metrics.nonfinite_leaf) == -1
    np.testing.assert_allclose(metrics.grad_norm, 300 * 8**0.5, rtol=2.0**-10)  # float16 has 11 bits


DTYPES = {
    # policy: whole params, master params (None: the params are the masters), what the loss sees; per stage
    "fp32": {0: ("f4", None, "f4"), 1: ("f4", None, "f4"), 3: ("f4", None, "f4")},
    "bf16": {0: ("bf16", "f4", "bf16"), 2: ("bf16", "f4", "bf16"), 3: ("f4", None, "bf16")},
    "fp16": {1: ("f2", "f4", "f2"), 3: ("f4", None, "f2")},
}
NAMES = {"f4": jnp.float32, "f2": jnp.float16, "bf16": jnp.bfloat16}


@pytest.mark.parametrize(("precision", "stage"), [(p, s) for p, stages in DTYPES.items() for s in stages])
def test_dtypes_of_each_group(precision, stage):
    param, master, compute = DTYPES[precision][stage]
    seen = []

    def spy(params, batch):
        seen.append({x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)})
        return loss_fn(params, batch)

    config = reference.make_config(stage=stage, precision=precision)
    tx = optax.chain(reference.keep_grads(), optax.adam(0.01))
    mesh = mesh_of("4")
    state = zero.abstract_state(lambda key: jax.tree.map(jnp.asarray, host_params()), tx, mesh=mesh, config=config)
    step = zero.make_train_step(spy, tx, mesh=mesh, config=config)
    new_state, metrics = jax.eval_shape(step.program.step, state, make_batch())
    for one in (state, new_state):
        floats = lambda tree: {x.dtype for x in jax.tree.leaves(tree) if x.ndim and x.dtype != jnp.int32}  # noqa: E731
        assert floats(one.params) == {jnp.dtype(NAMES[param])}
        assert floats(one.master) == (set() if master is None else {jnp.dtype(NAMES[master])})
        assert floats(one.opt_state) == {jnp.dtype(NAMES[master or param])}  # and so are the gradients it is given
        assert one.params["count"].dtype == jnp.int32
    # Traced once more where the batch has floats: to find out which of them the model takes.
    assert 1 <= len(seen) <= 2 and all(found == {jnp.dtype(NAMES[compute])} for found in seen)
    assert metrics.loss.dtype == metrics.grad_norm.dtype == metrics.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_master_params_of_the_same_dtype(stage):
    """A master dtype equal to what the params have already must not make two names for one buffer."""
    state, step = make_trainer(stage=stage, precision=zero.Precision(master=jnp.float32))
    for _ in range(2):
        state, metrics = step(state, make_batch())
    assert np.isfinite(float(metrics.loss))


def test_policies_print_their_dtypes():
    assert str(zero.Precision(param=jnp.bfloat16, compute="bfloat16", master=np.float32)).splitlines() == [
        "param     bfloat16",
        "compute   bfloat16",
        "reduce    as initialized",
        "master    float32",
        "optimizer float32 (as the optimizer makes it)",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: zero.ZeroConfig(precision="bf61"),
            r"unknown precision 'bf61': did you mean 'bf16'\?.*fp32, bf16, fp16",
        ),
        (lambda: zero.ZeroConfig(precision=16), "unknown precision 16: .*choose one of"),
        (lambda: zero.ZeroConfig(precision=None), "unknown precision None: choose one of"),
        (lambda: zero.ZeroConfig(precision=jnp.bfloat16), "unknown precision .*zero.Precision"),
        (lambda: zero.Precision(param=jnp.int8), "Precision.param=.*floating dtype"),
        (lambda: zero.Precision(compute="bf16"), "Precision.compute='bf16'.*floating dtype such as jnp.bfloat16"),
        (lambda: zero.LossScaleConfig(growth_interval_steps=0), "growth_interval_steps >= 1"),
        (lambda: zero.LossScaleConfig(backoff_factor=1.0), "0 < backoff_factor < 1"),
        (lambda: zero.LossScaleConfig(growth_factor=0.5), "growth_factor >= 1"),
        (lambda: zero.LossScaleConfig(initial=1.0, floor=2.0), "0 < floor <= initial"),
        (lambda: zero.LossScaleConfig(floor=0.0), "0 < floor <= initial"),
        (lambda: zero.LossScaleConfig(initial=float("inf")), "initial"),
        (lambda: zero.LossScaleConfig(initial=float("nan")), "initial"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("fields", [dict(stage=1, num_microbatches=2), dict(stage=3)], ids=str)
def test_strict_promotion_of_dtypes_is_for_the_users_code(fields):
    """`jax_numpy_dtype_promotion="strict"` refuses bfloat16 beside float32, which sums are in."""

    def loss_fn(params, batch):
        return jnp.square(batch["x"] @ params["w"]).mean()

    params, batch = {"w": np.ones((8, 64), np.float32)}, {"x": np.ones((8, 8), np.float32)}
    with jax.numpy_dtype_promotion("strict"):
        state, step = reference.make_trainer(
            loss_fn, optax.sgd(0.1), mesh=mesh_of("4"), params=params, precision="bf16", **fields
        )
        config = reference.make_config(stage=fields["stage"], precision="bf16")
        metrics = zero.make_eval_step(loss_fn, mesh=mesh_of("4"), config=config)(state, batch)
        state, stepped = step(state, batch)
    assert metrics.loss == stepped.loss == 64
