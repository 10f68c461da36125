"""Every stage, mesh, accumulation and precision trains as plain optax does on one device."""

import functools
import gc
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.experimental import pallas as pl
from reference import assert_close, loss_fn, make_batches, mesh_of, run_plain, run_zero

import zero_jax as zero
from zero_jax.training import StepLoss, global_norm
from zero_jax.training.grads import choice
from zero_jax.training.state import gathering

# Sums over a batch are made in another order on several devices: float32 rounds at 6e-8, and Adam's division by the
# gradient's own size magnifies that for small gradients, of which three steps of 0.01 make a few times 1e-6.
FLOAT32 = 1e-5
# As a share of the norm of each param's change. What two layers and a head compute forward and backward is rounded to
# bfloat16 (2^-9, half of its 8th bit) some ten times, and a gradient again in each of the three additions that sum it
# over 8 devices; independent errors add up to some four roundings on either side.
BFLOAT16 = 2.0**-6

NUM_STEPS = 3
STAGES = (0, 1, 2, 3)
MESH_NAMES = ("1", "2", "4", "8", "replica", "staged222", "staged24")

# Every stage, mesh and number of microbatches, and the pairs that run different code: stage 1 (and 0, in the same way)
# accumulates each device's gradients, stages 2 and 3 shards.
COVERING = [
    (0, "2", 1),
    (1, "staged222", 2),
    (1, "4", 4),
    (2, "staged24", 1),
    (3, "1", 1),
    (3, "8", 1),
    (3, "replica", 2),
]


def product_without(cases):
    """Returns every stage on every mesh, with 1 and 2 microbatches by turns, but for some cases; marked slow."""
    pairs = itertools.product(enumerate(STAGES), enumerate(MESH_NAMES))
    rest = [(stage, mesh, 1 + (i + j) % 2) for (i, stage), (j, mesh) in pairs]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in rest if case not in cases]


def optimizer():
    return optax.chain(reference.keep_grads(), optax.adamw(1e-2))


@functools.cache
def plain_run():
    return run_plain(loss_fn, optimizer(), make_batches(NUM_STEPS))


@pytest.mark.parametrize(("stage", "mesh", "num_microbatches"), COVERING + product_without(COVERING))
def test_equals_one_device(stage, mesh, num_microbatches):
    params, (grads, opt_state), losses = plain_run()
    state, history = run_zero(
        loss_fn,
        optimizer(),
        make_batches(NUM_STEPS),
        mesh=mesh_of(mesh),
        stage=stage,
        num_microbatches=num_microbatches,
    )
    assert_close([m.loss for m in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], grads, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    assert_close(state.opt_state[1], opt_state, tolerance=FLOAT32)
    np.testing.assert_allclose(history[-1].grad_norm, reference.norm(grads), rtol=FLOAT32)
    assert int(state.step) == NUM_STEPS and int(state.num_skipped_steps) == 0
    assert [bool(m.skipped) for m in history] == [False] * NUM_STEPS


# Each stage, mesh and number of microbatches; how they go together does not depend on the dtype.
BFLOAT16_COVERING = [
    (0, "4", 1),
    (1, "staged24", 2),
    (3, "replica", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, "2", 1), (2, "1", 2), (2, "8", 1), (3, "staged222", 1))
    ),
]


# Plain gradient descent: the change of the params is the sum of the gradients, so that their error can be told.
@functools.cache
def plain_changes(compute_dtype):
    params, _, losses = run_plain(loss_fn, optax.sgd(1e-2), make_batches(NUM_STEPS), compute_dtype=compute_dtype)
    return changes_of(params), losses


def changes_of(params):
    return jax.tree.map(lambda new, old: np.asarray(new) - old, params, reference.host_params())


@pytest.mark.parametrize(("stage", "mesh", "num_microbatches"), BFLOAT16_COVERING)
def test_bfloat16_equals_one_device(stage, mesh, num_microbatches):
    wanted, losses = plain_changes(jnp.bfloat16)
    exact, _ = plain_changes(None)
    state, history = run_zero(
        loss_fn,
        optax.sgd(1e-2),
        make_batches(NUM_STEPS),
        mesh=mesh_of(mesh),
        stage=stage,
        num_microbatches=num_microbatches,
        precision="bf16",
    )
    assert_close([m.loss for m in history], losses, tolerance=BFLOAT16)
    masters = state.params if state.master is None else state.master
    chex.assert_type(jax.tree.leaves(masters), jnp.float32)
    changes = changes_of(masters)
    for change, expected in zip(jax.tree.leaves(changes), jax.tree.leaves(wanted), strict=True):
        assert reference.norm(change - expected) <= BFLOAT16 * reference.norm(expected)
    # Nor is it farther from the truth than one device's bfloat16 is, but for chance.
    error, error_of_one = (reference.norm(jax.tree.map(np.subtract, x, exact)) for x in (changes, wanted))
    assert error <= 1.25 * error_of_one
    if state.master is not None:
        rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), state.master)
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, state.params), rounded)


def weighted_loss(params, batch):
    """A mean over tokens, of which examples have different numbers, down to none."""
    errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    num_tokens = batch["num_tokens"].sum()
    loss = (errors * batch["num_tokens"]).sum() / jnp.maximum(num_tokens, 1)
    bias = params["head"]["bias"]
    aux = {
        "num_tokens": num_tokens,
        "errors": errors,
        "error": loss,
        "bias": bias,
        "statistics": jnp.full(12, loss),  # as many as some microbatches have examples
        "count": errors.shape[0],
        "one": 1.0,
    }
    return loss, aux


def weighted_batches():
    batches = make_batches(2, size=48)
    for seed, batch in enumerate(batches):
        batch["num_tokens"] = np.random.default_rng(seed).integers(0, 9, 48).astype(np.float32)
        batch["num_tokens"][4:12] = 0  # some devices have microbatches of empty examples only
    return batches


@functools.cache
def plain_weighted_run():
    return run_plain(lambda *args: weighted_loss(*args)[0], optimizer(), weighted_batches())


@functools.cache
def first_aux():
    _, aux = jax.jit(weighted_loss)(reference.host_params(), weighted_batches()[0])
    return aux


@pytest.mark.parametrize(
    ("stage", "mesh", "num_microbatches", "loss_weight"),
    [
        (1, "replica", 2, "num_tokens"),
        pytest.param(3, "4", 4, "auto", marks=pytest.mark.slow),
        pytest.param(2, "staged24", 2, "auto", marks=pytest.mark.slow),
        pytest.param(0, "8", 1, "auto", marks=pytest.mark.slow),
        pytest.param(0, "8", 2, "num_tokens", marks=pytest.mark.slow),
        pytest.param(1, "4", 4, "auto", marks=pytest.mark.slow),
        pytest.param(1, "staged222", 2, "auto", marks=pytest.mark.slow),
        pytest.param(2, "8", 3, "num_tokens", marks=pytest.mark.slow),
        (3, "replica", 2, "auto"),
    ],
)
def test_microbatches_with_uneven_weights_equal_one_batch(stage, mesh, num_microbatches, loss_weight):
    params, (grads, _), losses = plain_weighted_run()
    state, history = run_zero(
        weighted_loss,
        optimizer(),
        weighted_batches(),
        mesh=mesh_of(mesh),
        stage=stage,
        num_microbatches=num_microbatches,
        loss_weight=loss_weight,
    )
    assert_close([m.loss for m in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], grads, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    aux, expected = dict(history[0].aux), dict(first_aux())
    assert aux["count"] == 48  # integers are summed: each call counts its own examples
    if loss_weight == "auto" and num_microbatches > 1:
        del aux["num_tokens"], expected["num_tokens"]  # like any floating entry that is not named it is averaged
    assert_close(aux, expected, tolerance=FLOAT32)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_empty_microbatches_count_for_nothing(stage):
    def zero_by_zero(params, batch):
        """The loss of an empty microbatch is 0 / 0."""
        errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
        return (errors * batch["num_tokens"]).sum() / batch["num_tokens"].sum()

    params, _, losses = plain_weighted_run()
    state, history = run_zero(
        zero_by_zero, optimizer(), weighted_batches(), mesh=mesh_of("8"), stage=stage, num_microbatches=3
    )
    assert_close([m.loss for m in history], losses, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)


def test_a_batch_with_nothing_to_learn_changes_nothing():
    state, step = reference.make_trainer(weighted_loss, optax.sgd(0.1), mesh=mesh_of("2"), stage=1, num_microbatches=2)
    state, metrics = step(state, weighted_batches()[0] | {"num_tokens": np.zeros(48, np.float32)})
    assert float(metrics.loss) == float(metrics.grad_norm) == 0
    chex.assert_trees_all_equal(reference.to_host(state.params), reference.host_params())


def scaled_loss(params, batch):
    return 100 * loss_fn(params, batch)


@functools.cache
def plain_clipped_run():
    clip = optax.clip_by_global_norm(CLIP_NORM)
    tx = optax.chain(reference.keep_grads(), clip, reference.keep_grads(), optax.sgd(0.1))
    return run_plain(scaled_loss, tx, make_batches(2))


CLIP_NORM = 0.5


@pytest.mark.parametrize(
    ("stage", "mesh", "by_optax"),
    [
        pytest.param(1, "replica", True, marks=pytest.mark.slow),
        (3, "4", False),
        pytest.param(2, "4", False, marks=pytest.mark.slow),
        pytest.param(0, "8", False, marks=pytest.mark.slow),
        pytest.param(3, "8", True, marks=pytest.mark.slow),
    ],
)
def test_clips_as_unsharded(stage, mesh, by_optax):
    params, (grads, _, clipped, _), _ = plain_clipped_run()
    clip = optax.clip_by_global_norm(CLIP_NORM) if by_optax else optax.identity()
    tx = optax.chain(clip, reference.keep_grads(), optax.sgd(0.1))
    clip_norm = None if by_optax else CLIP_NORM
    state, history = run_zero(scaled_loss, tx, make_batches(2), mesh=mesh_of(mesh), stage=stage, clip_norm=clip_norm)
    assert_close(state.params, params, tolerance=FLOAT32)
    assert_close(state.opt_state[1], clipped, tolerance=FLOAT32)
    np.testing.assert_allclose(reference.norm(state.opt_state[1]), CLIP_NORM, rtol=FLOAT32)
    assert float(history[-1].grad_norm) > 10 * CLIP_NORM  # the norm that is reported is the one before clipping
    np.testing.assert_allclose(history[-1].grad_norm, reference.norm(grads), rtol=FLOAT32)


LARGEST = float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_a_norm_does_not_overflow(dtype):
    """Of three leaves none has a norm that float32 does not hold; at 3e18 only the sum of their squares overflows."""
    for size in (0.0, 1e-12, 1.0, 3e18, 1e19, 1e25, LARGEST / 2):
        if size > float(jnp.finfo(dtype).max):
            continue
        rng = np.random.default_rng(0)
        arrays = [rng.uniform(-1, 1, shape) * size / 4 for shape in ((8,), (), (3, 4))]
        arrays = [jnp.asarray(x, dtype) * (1 - 1j if dtype == "complex64" else 1) for x in arrays]
        whole = [np.asarray(x, np.complex128) for x in arrays]
        measured = global_norm(arrays)
        expected = np.sqrt(sum(np.square(np.abs(x)).sum() for x in whole))
        assert measured.value.dtype == jnp.float32 and measured.first_nonfinite == -1
        np.testing.assert_allclose(measured.value, expected, rtol=1e-6)
        factor = min(1.0, 0.5 / expected) if expected else 1.0
        for x, y in zip(measured.clip(arrays, 0.5), whole, strict=True):
            rounding = 4 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(np.asarray(x, np.complex128), y * factor, rtol=rounding)


def test_a_norm_that_float32_does_not_hold_is_clipped_and_what_is_not_finite_is_named():
    most = [jnp.full((4, 4), LARGEST), jnp.full(9, -LARGEST)]
    measured = global_norm(most)
    assert measured.value == np.inf and measured.first_nonfinite == -1
    np.testing.assert_allclose(jnp.concatenate([x.ravel() for x in measured.clip(most, 1.0)]), [0.2] * 16 + [-0.2] * 9)
    for bad in (np.inf, -np.inf, np.nan):
        assert global_norm([*most, jnp.asarray([1.0, bad])]).first_nonfinite == 2


@pytest.mark.parametrize(
    ("stage", "num_microbatches"),
    [(3, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(0, 1, marks=pytest.mark.slow)],
)
def test_finite_gradients_are_clipped_whatever_their_size(stage, num_microbatches):
    """Plain optax clips 2.4e17 to 0: the sum of squares of four leaves overflows, that of none of them does."""
    params = {name: np.full((64, 64), 0.5, np.float32) for name in "abcd"}

    def linear(params, batch):
        return sum(x.sum() for x in params.values()) * batch["slope"].mean()

    fields = {"params": params, "mesh": mesh_of("2"), "stage": stage, "num_microbatches": num_microbatches}
    state, step = reference.make_trainer(linear, optax.sgd(0.125), clip_norm=1.0, **fields)
    for slope, skips in [(2.4e17, False), (np.inf, True), (1e25, False), (1e34, False)]:
        before = reference.to_host(state.params)
        state, metrics = step(state, {"slope": np.full(4, slope, np.float32)})
        assert bool(metrics.skipped) is skips and int(metrics.nonfinite_leaf) == (0 if skips else -1)
        np.testing.assert_allclose(metrics.grad_norm, slope * 128, rtol=FLOAT32)
        change = 0 if skips else 0.125 / 128
        assert_close(state.params, jax.tree.map(lambda x: x - np.float32(change), before), tolerance=1e-7)  # noqa: B023
    assert int(state.num_skipped_steps) == 1


def dropout_loss(params, batch, key):
    x = reference.predict(params, batch["tokens"])
    noise = jax.random.uniform(key, (x.shape[0],))
    error = jnp.square(x - batch["targets"]).mean(-1) * (noise < 0.5)
    return 2 * error.mean(), {"noise": noise}


@pytest.mark.parametrize(
    ("stage", "mesh"), [(3, "replica"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "8"), (1, "4")))]
)
def test_key_is_the_same_on_every_mesh(stage, mesh):
    tx, batches = optax.sgd(0.1), make_batches(2)
    state, step = reference.make_trainer(dropout_loss, tx, mesh=mesh_of(mesh), stage=stage, key=jax.random.key(3))
    key, params = jax.random.fold_in(state.key, 0), reference.host_params()
    (loss, aux), grads = jax.jit(jax.value_and_grad(dropout_loss, has_aux=True))(params, batches[0], key)
    state, first = step(state, batches[0])
    assert_close((first.loss, first.aux), (loss, aux), tolerance=FLOAT32)
    assert_close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), tolerance=FLOAT32)
    state, second = step(state, batches[0])
    assert not np.isclose(np.asarray(first.aux["noise"]), np.asarray(second.aux["noise"])).any()


@pytest.mark.parametrize(("stage", "mesh"), [(1, "replica"), pytest.param(3, "4", marks=pytest.mark.slow)])
def test_every_microbatch_has_its_own_key(stage, mesh):
    tx, batches = optax.sgd(0.1), make_batches(2)
    _, history = run_zero(dropout_loss, tx, batches, mesh=mesh_of(mesh), stage=stage, num_microbatches=2)
    noise = np.concatenate([m.aux["noise"] for m in history])
    assert len(np.unique(noise)) == 2 * reference.BATCH_SIZE


def batch_with_keys(impl=None):
    keys = jax.random.split(jax.random.key(5, impl=impl), reference.BATCH_SIZE)
    return make_batches(1)[0] | {"key": jax.random.key(5), "keys": keys}


def test_numbers_that_all_copies_of_the_params_would_draw_are_drawn_for_the_whole_batch():
    loss, batch = lambda params, batch: dropout_loss(params, batch, batch["key"])[0], batch_with_keys()
    _, (metrics,) = run_zero(loss, optax.sgd(0.1), [batch], mesh=mesh_of("replica"), stage=3)
    np.testing.assert_allclose(metrics.loss, loss(reference.host_params(), batch), rtol=FLOAT32)


def test_copies_of_params_that_one_branch_alone_uses():
    def branching(params, batch):
        is_small, weights = params["embed"].sum() < 1e9, batch["targets"][:, 0] > 0
        decay = jax.lax.cond(is_small, lambda: jnp.square(params["head"]["kernel"]).sum(), lambda: 0.0)
        return loss_fn(params, batch) + decay * (weights * batch["targets"][:, 0]).sum() / weights.sum()

    tx, batches = optax.sgd(0.1), make_batches(1)
    state, (metrics,) = run_zero(branching, tx, batches, mesh=mesh_of("replica"), stage=2)
    params, _, (loss,) = reference.run_plain(branching, tx, batches)
    assert_close((state.params, metrics.loss), (params, loss), tolerance=FLOAT32)


def test_microbatches_that_draw_the_same_numbers_are_warned_of():
    def lower(loss, impl=None):
        fields = {"mesh": mesh_of("8"), "stage": 1, "num_microbatches": 2}
        state, step = reference.make_trainer(loss, optax.sgd(0.1), **fields)
        step.lower(state, batch_with_keys(impl))

    with pytest.warns(
        UserWarning,
        match=r"another one .* numbers are drawn for examples at .*test_parity.py:.* \(take the one that loss_fn",
    ):
        lower(lambda params, batch: dropout_loss(params, batch, jax.random.key(0))[0])
    # As many for all batches, and by the keys of the examples.
    lower(lambda params, batch: loss_fn(params, batch) * jax.random.uniform(jax.random.key(0)))
    by_keys = lambda params, batch: loss_fn(params, batch) * jax.vmap(jax.random.uniform)(batch["keys"]).mean()  # noqa: E731
    lower(by_keys)
    with pytest.warns(UserWarning, match="another one .* numbers are drawn for examples at"):
        lower(by_keys, "rbg")


@jax.custom_vjp
def noisy(x, key):
    return x + jax.random.uniform(key, x.shape)


noisy.defvjp(lambda x, key: (noisy(x, key), None), lambda _, cotangent: (cotangent, None))
FIXED = lambda: jax.random.PRNGKey(0)  # noqa: E731
AS_THE_BATCH = {
    "a call with another derivative": lambda x: noisy(x, FIXED()),
    "a loop": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + jax.random.uniform(FIXED(), x.shape)), (0, x)
    )[1],
    "bits": lambda x: x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1],
    "a sum of the batch": lambda x: noisy(x, jax.random.fold_in(FIXED(), x.sum().astype(int))),
    "a line that draws 16 for all": lambda x: x + [jax.random.uniform(FIXED(), n) for n in (16, x.shape)][1],
}
AS_ALL_PARTS = {
    "each example": lambda x: jax.lax.map(lambda x: noisy(x, jax.random.fold_in(FIXED(), x.astype(int))), x),
    "a vector": lambda x: x + jax.lax.fori_loop(0, 2, lambda i, y: noisy(y, jax.random.fold_in(FIXED(), i)), 0.0),
}


def plan_of_copies(loss):
    made = StepLoss.of(loss, jnp.float32(1), mesh=mesh_of("replica"), config=reference.make_config(stage=3))
    return choice.judge(made, (jnp.float32(1), jnp.ones(16), jax.random.key(0))).plan


@pytest.mark.parametrize("what", [*AS_THE_BATCH, *AS_ALL_PARTS])
def test_numbers_that_are_drawn_for_examples_are_found_wherever_they_are(what):
    plan = plan_of_copies(lambda params, x: (params * {**AS_THE_BATCH, **AS_ALL_PARTS}[what](x)).mean())
    assert ("numbers are drawn for examples at" in plan.why_not_once) == (what in AS_THE_BATCH)


def test_branches_on_activations_alone_are_summed_over_copies_once_a_step():
    branch = lambda params, x: jax.lax.cond(params > 0, jnp.sin, jnp.cos, params * x).mean()  # noqa: E731
    within = lambda params, x: jax.lax.cond(x.size > params, lambda: params, lambda: 2 * params) * x.mean()  # noqa: E731
    kernel = lambda ref, out: pl.when(ref[0] > 0)(lambda: out.__setitem__(..., 2 * ref[...]))  # noqa: E731
    row = lambda x: pl.pallas_call(kernel, jax.ShapeDtypeStruct((1,), x.dtype))(x[None])[0]  # noqa: E731
    plans = [plan_of_copies(x) for x in (branch, within, lambda params, x: params * jax.vmap(row)(x).mean())]
    assert [bool(plan.once_over) for plan in plans] == [True, False, True]


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_evaluates_without_an_optimizer(stage):
    config, batch = reference.make_config(stage=stage), weighted_batches()[0]
    evaluate = zero.make_eval_step(weighted_loss, mesh=mesh_of("4"), config=config)
    metrics = evaluate(reference.host_params(), batch)
    assert_close(metrics.aux, first_aux(), tolerance=FLOAT32)
    assert_close(metrics.loss, first_aux()["error"], tolerance=FLOAT32)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(2, "fp32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "bf16"), (1, "fp32"), (2, "bf16")))],
)
def test_stacks_are_gathered_layer_by_layer_to_the_same_values(stage, precision, monkeypatch):
    """After the update a large stack is gathered row by row into the params that it replaces."""
    batches = make_batches(3)
    fields = {"mesh": mesh_of("staged222"), "stage": stage, "precision": precision}
    at_once, _ = run_zero(loss_fn, optimizer(), batches, **fields)
    monkeypatch.setattr(gathering, "_GATHERED_AT_ONCE_BYTES", 0)
    rows, original = set(), gathering._gather_leaf

    def noted(placement, leaf, x):
        if x.shape[0] < leaf.shape[0]:
            rows.add(leaf.path)
        return original(placement, leaf, x)

    monkeypatch.setattr(gathering, "_gather_leaf", noted)
    in_rows, _ = run_zero(loss_fn, optimizer(), batches, **fields)
    assert {path.split("/")[-1] for path in rows} >= {"w_in", "w_out"}
    chex.assert_trees_all_equal(reference.to_host(in_rows.params), reference.to_host(at_once.params))
    reference.assert_placed_alike(in_rows, at_once)


@pytest.mark.parametrize(("stage", "num_microbatches"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_params_of_8_bits(stage, num_microbatches):
    """JAX promotes them to no other dtype."""

    def loss(params, batch):
        w_in = params["layers"]["w_in"].astype(jnp.float32)
        return loss_fn({**params, "layers": {**params["layers"], "w_in": w_in}}, batch)

    params = reference.host_params()
    params = {**params, "layers": {**params["layers"], "w_in": params["layers"]["w_in"].astype(jnp.float8_e4m3fn)}}
    expected, _, losses = run_plain(loss, optax.sgd(1e-2), make_batches(2), params=params)
    state, history = run_zero(
        loss,
        optax.sgd(1e-2),
        make_batches(2),
        mesh=mesh_of("4"),
        params=params,
        stage=stage,
        num_microbatches=num_microbatches,
    )
    # The gradient of each microbatch is rounded to 3 bits, as that of the batch is.
    assert_close([m.loss for m in history], losses, tolerance=FLOAT32 if num_microbatches == 1 else 1e-3)
    assert state.params["layers"]["w_in"].dtype == expected["layers"]["w_in"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("dtype", ["int4", pytest.param("uint4", marks=pytest.mark.slow)])
def test_integers_of_4_bits(dtype):
    """JAX promotes them to no other dtype, either: a frozen base beside trained weights."""
    params = reference.host_params()
    base = jax.random.randint(jax.random.key(5), params["layers"]["w_in"].shape, 0, 8).astype(dtype)

    def loss(params, batch):
        quantized = params.get("base", base).astype(jnp.float32)
        w_in = params["layers"]["w_in"] + 0.01 * quantized
        return loss_fn({**params, "layers": {**params["layers"], "w_in": w_in}}, batch)

    expected, _, losses = run_plain(loss, optax.sgd(1e-2), make_batches(2), params=params)
    given = {**params, "base": base}
    state, history = run_zero(loss, optax.sgd(1e-2), make_batches(2), mesh=mesh_of("4"), params=given, stage=3)
    assert_close([m.loss for m in history], losses, tolerance=FLOAT32)
    trained = {name: x for name, x in state.params.items() if name != "base"}
    assert_close(reference.to_host(trained), expected, tolerance=FLOAT32)
    assert state.params["base"].dtype == dtype and not state.params["base"].is_fully_replicated


GRAPH = {"nodes": 24, "edges": 40}


def graph_batch():
    """Returns a graph: edges are pairs of the positions of nodes, so the leaves differ in their leading dim."""
    rng = np.random.default_rng(0)
    return {
        "nodes": rng.normal(size=(GRAPH["nodes"], 16)).astype(np.float32),
        "edges": rng.integers(0, GRAPH["nodes"], (GRAPH["edges"], 2)).astype(np.int32),
        "targets": rng.normal(size=(GRAPH["nodes"], 8)).astype(np.float32),
        "size": np.float32(GRAPH["nodes"]),
    }


def graph_loss(params, batch):
    nodes = batch["nodes"] @ params["in"]
    senders, receivers = batch["edges"].T
    nodes = jax.nn.relu(nodes + jax.ops.segment_sum(nodes[senders], receivers, num_segments=len(nodes)))
    errors = nodes @ params["out"] - batch["targets"]
    return jnp.square(errors).sum() / batch["size"], {"errors": errors}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "replica": 2}], ids=str)
def test_a_batch_may_be_one_graph(stage, axes):
    def init(key):
        return {"in": jax.random.normal(key, (16, 64)) / 4, "out": jax.random.normal(key, (64, 8)) / 8}

    mesh, tx = zero.make_mesh(**axes), optax.adam(0.01)
    config = zero.ZeroConfig(stage=stage, precision="fp32", min_shard_size=1)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(graph_loss, tx, mesh=mesh, config=config)
    params = jax.tree.map(np.asarray, jax.device_get(state.params))
    opt_state = tx.init(params)
    for _ in range(3):
        (loss, aux), grads = jax.value_and_grad(graph_loss, has_aux=True)(params, graph_batch())
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, graph_batch())
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.aux["errors"], aux["errors"], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), params, rtol=1e-4, atol=1e-5)
    assert zero.make_eval_step(graph_loss, mesh=mesh, config=config)(state, graph_batch()).loss < loss


def test_gradients_of_one_graph_cannot_be_sent_quantized():
    config = zero.ZeroConfig(stage=3, precision="fp32", min_shard_size=1, quantize=zero.Quantize(grads="int8"))
    mesh, tx = zero.make_mesh(data=8), optax.sgd(0.1)
    init = lambda key: {"in": jnp.ones((16, 64)), "out": jnp.ones((64, 8))}  # noqa: E731
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(graph_loss, tx, mesh=mesh, config=config)
    with pytest.raises(ValueError, match=r"quantize: .* because the leaves of its batch differ in their leading dim"):
        step(state, graph_batch())


@pytest.mark.parametrize(("stage", "axes"), [(0, {"data": 8}), (1, {"data": 4, "replica": 2}), (3, {"data": 8})])
def test_leaves_without_elements(stage, axes):
    """A batch without extra features, a layer without a bias: `[examples, 0]` and `[0]`."""

    def loss(params, batch):
        error = batch["x"] @ params["w"] + params["bias"].sum()
        return jnp.square(error).mean() + batch["extra"].sum(-1).mean(), {"error": error, "extra": batch["extra"]}

    batch = {"x": make_batches(1, 32)[0]["targets"], "extra": np.zeros((32, 0), np.float32)}
    params = {"w": np.ones((8, 8), np.float32), "bias": np.zeros(0, np.float32)}
    fields = {"mesh": zero.make_mesh(**axes), "stage": stage, "num_microbatches": 4, "params": params}
    state, (metrics,) = run_zero(loss, optax.sgd(0.1), [batch], **fields)
    expected, _, losses = run_plain(lambda *args: loss(*args)[0], optax.sgd(0.1), [batch], params=params)
    assert_close((state.params, metrics.loss), (expected, losses[0]), tolerance=1e-5)
    assert_close(metrics.aux, loss(params, batch)[1], tolerance=1e-5)


@pytest.mark.parametrize(
    ("stage", "mesh_sizes", "config"),
    [
        pytest.param(3, {}, {}, marks=pytest.mark.slow),
        (3, {}, {"remat": "full", "num_microbatches": 2}),
        (1, {}, {"num_microbatches": 2}),
        pytest.param(1, {"pipe": 2}, {"num_microbatches": 2}, marks=pytest.mark.slow),
        (1, {"pipe": 2}, {"num_microbatches": 2, "pipeline": "1f1b"}),
    ],
)
def test_no_tracer_outlives_its_trace(stage, mesh_sizes, config):
    """`jax.checking_leaks` is how users look for tracers that they kept: steps keep none of their own."""

    def loss_fn(params, tokens):
        layer = lambda x, p: (x + jnp.tanh(x @ p["w"] + p["bias"]), None)  # noqa: E731
        return jnp.square(jax.lax.scan(layer, params["table"][tokens], params["layers"])[0]).mean()

    mesh, config = zero.make_mesh(**mesh_sizes), reference.make_config(stage=stage, **config)
    layers = {"w": np.ones((4, 16, 16), np.float32), "bias": np.zeros((4, 16), np.float32)}
    params = {"table": np.ones((64, 16), np.float32), "layers": layers}
    state = zero.init_state(params, optax.adam(1e-2), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, optax.adam(1e-2), mesh=mesh, config=config)
    evaluate = zero.make_eval_step(loss_fn, mesh=mesh, config=config)
    batch = zero.shard_batch(np.ones(32, np.int32), mesh=mesh)
    gc.freeze()  # JAX looks through all objects of the process after each trace, and needs those that are made here
    try:
        with jax.checking_leaks():
            step.lower(state, batch)
            evaluate(state, batch)
    finally:
        gc.unfreeze()
