"""The gradient noise scale: what a step reports equals a computation by hand, and finds a noise scale that is known."""

import functools
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from covering import covering_array
from reference import loss_fn, make_batch, make_trainer, mesh_of

from zero_jax.training.noise_scale import NoiseScale, estimate_step

BATCH_SIZE = 48
# Sums of some thousand squares in float32, in another order.
FLOAT32 = 1e-5
# Stages 0 and 1 tell the gradients of devices apart, 2 and 3 those of microbatches and of copies of the params.
BY_DEVICE = {0: True, 1: True, 2: False, 3: False}
COVERING = [(1, "replica", 2), (3, "staged222", 3)]
MESH_NAMES = ("1", "2", "8", "replica", "staged222", "staged24")
REST = [
    pytest.param(*case, marks=pytest.mark.slow)
    for row in covering_array({"stage": tuple(BY_DEVICE), "mesh": MESH_NAMES, "num_microbatches": (2, 3)})
    if (case := tuple(row.values())) not in COVERING
]


def parts_of(batch, *, stage, mesh, num_microbatches):
    """Returns the parts of a batch: each device holds a contiguous share and cuts it into microbatches."""
    n, k, copies = mesh.size, num_microbatches, mesh.shape["replica"]
    cut = jax.tree.map(lambda x: x.reshape(n, k, -1, *x.shape[1:]), batch)
    shares = [range(i, i + 1) for i in range(n)] if BY_DEVICE[stage] else np.split(np.arange(n), copies)
    return [
        jax.tree.map(lambda x, share=share, j=j: x[np.array(share), j].reshape(-1, *x.shape[3:]), cut)
        for share in shares
        for j in range(k)
    ]


@functools.cache
def gradient_of(loss_fn):
    """Returns the compiled gradient of a loss function; tests of parts of one shape share its program."""
    return jax.jit(jax.grad(loss_fn))


def mean_square(parts, loss_fn, weigh=None):
    """Returns the mean by weight of the squared norms of parts' gradients, in float64, and how many have a weight."""
    grad_fn = gradient_of(loss_fn)
    weights = [1.0 if weigh is None else float(weigh(part)) for part in parts]
    squares = [
        reference.norm(grad_fn(reference.host_params(), part)) ** 2 if weight else 0.0
        for part, weight in zip(parts, weights, strict=True)
    ]
    return np.average(squares, weights=weights), sum(weight > 0 for weight in weights)


def one_step(loss_fn, batch, **fields):
    state, step = make_trainer(loss_fn, optax.sgd(1e-2), noise_scale=True, **fields)
    return step(state, batch)[1]


@pytest.mark.parametrize(("stage", "mesh", "num_microbatches"), [*COVERING, *REST])
def test_equals_a_computation_by_hand(stage, mesh, num_microbatches):
    fields = {"stage": stage, "mesh": mesh_of(mesh), "num_microbatches": num_microbatches}
    batch = make_batch(0, size=BATCH_SIZE)
    metrics = one_step(loss_fn, batch, **fields)
    expected, num_parts = mean_square(parts_of(batch, **fields), loss_fn)
    np.testing.assert_allclose(metrics.small_grad_norm_sq, expected, rtol=FLOAT32)
    shares = mesh_of(mesh).size if stage < 2 else mesh_of(mesh).shape["replica"]
    assert int(metrics.num_small_grads) == num_parts == num_microbatches * shares
    chex.assert_type([metrics.small_grad_norm_sq, metrics.num_small_grads], [jnp.float32, jnp.int32])
    assert metrics.small_grad_norm_sq.sharding.is_fully_replicated
    # The square of a mean is no larger than the mean of squares.
    assert float(metrics.small_grad_norm_sq) > float(metrics.grad_norm) ** 2


def token_loss(params, batch):
    """A mean over tokens, of which examples have different numbers, down to none."""
    errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    return (errors * batch["num_tokens"]).sum() / batch["num_tokens"].sum()


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_are_weighed_by_their_tokens_and_empty_ones_left_out(stage):
    num_microbatches, mesh = 3, mesh_of("4")
    fields = {"stage": stage, "mesh": mesh, "num_microbatches": num_microbatches}
    batch = make_batch(0, size=BATCH_SIZE)
    num_tokens = np.random.default_rng(1).integers(0, 9, (4, num_microbatches, 4)).astype(np.float32)
    num_tokens[1, 0] = 0  # a device's share of a microbatch
    num_tokens[:, 2] = 0  # and a whole one: its mean is 0 / 0
    batch["num_tokens"] = num_tokens.reshape(-1)
    metrics = one_step(token_loss, batch, **fields)
    weigh = lambda part: part["num_tokens"].sum()  # noqa: E731
    expected, num_parts = mean_square(parts_of(batch, **fields), token_loss, weigh)
    np.testing.assert_allclose(metrics.small_grad_norm_sq, expected, rtol=FLOAT32)
    assert int(metrics.num_small_grads) == num_parts == {1: 7, 3: 2}[stage]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_scale_and_clipping_leave_it_alone(stage):
    fields = {"stage": stage, "mesh": mesh_of("2"), "num_microbatches": 2}
    batch = make_batch(0, size=BATCH_SIZE)
    metrics = one_step(loss_fn, batch, precision="fp16", clip_norm=1e-3, **fields)
    assert float(metrics.loss_scale) > 1
    assert float(metrics.grad_norm) > 1e-3
    expected, _ = mean_square(parts_of(batch, **fields), loss_fn)
    # float16 rounds at 2^-11, and rounding errors of some ten operations add to a norm as independent ones do.
    np.testing.assert_allclose(metrics.small_grad_norm_sq, expected, rtol=2.0**-8)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_without_microbatches_nothing_is_told(stage):
    state, step = make_trainer(loss_fn, optax.sgd(1e-2), stage=stage, mesh=mesh_of("2"), noise_scale=True)
    metrics = jax.eval_shape(step.program.step, state, make_batch(0))[1]
    assert metrics.grad_norm is not None
    assert metrics.small_grad_norm_sq is None and metrics.num_small_grads is None
    assert NoiseScale().update(grad_norm=1.0, small_grad_norm_sq=None, num_small_grads=None, batch_size=8) is None


def test_frozen_params_do_not_count():
    labels = {"embed": "frozen", "layers": "trained", "head": "frozen"}
    tx = optax.multi_transform({"trained": optax.sgd(1e-2), "frozen": optax.set_to_zero()}, labels)
    batch = make_batch(0, size=BATCH_SIZE)
    fields = {"stage": 2, "mesh": mesh_of("2"), "num_microbatches": 2}
    state, step = make_trainer(loss_fn, tx, noise_scale=True, **fields)
    metrics = step(state, batch)[1]
    grad_fn = gradient_of(loss_fn)
    squares = [reference.norm(grad_fn(reference.host_params(), p)["layers"]) ** 2 for p in parts_of(batch, **fields)]
    np.testing.assert_allclose(metrics.small_grad_norm_sq, np.mean(squares), rtol=FLOAT32)


# The loss |w - x|^2 / 2 with x ~ N(mu, sigma^2 I) in D dims has the gradient w - x, so that G = w - mu,
# tr(Sigma) = D sigma^2 and the noise scale is D sigma^2 / |w - mu|^2.
D, SIGMA, QUADRATIC_BATCH, NOISE_SCALE = 2048, 0.5, 32, 20.0


def quadratic_loss(params, batch):
    w = params["w"]
    return 0.5 * jnp.square(w.astype(jnp.float32) - batch["x"]).sum(-1).mean()


def quadratic_batch(seed):
    rng = np.random.default_rng(seed)
    mu = np.full(D, -SIGMA / math.sqrt(NOISE_SCALE))  # w is 0
    return {"x": (mu + SIGMA * rng.standard_normal((QUADRATIC_BATCH, D))).astype(np.float32)}


def relative_error_of_the_ratio(*, num_parts, num_steps):
    """Returns the relative standard error of the ratio of averages over steps, to first order.

    The mean and the variance of a normal sample are independent, so the noise `S` and the square `Q` of the batch's
    gradient are, and the signal is `Q - S / B`:

        var S = 2 (D sigma^2)^2 / (D (K - 1))                     chi-squared with D (K - 1) degrees of freedom
        var Q = 4 |G|^2 sigma^2 / B + 2 D (sigma^2 / B)^2         of |G + e|^2 with e ~ N(0, sigma^2 / B I)
        var signal = var Q + var S / B^2,  cov(S, signal) = -var S / B
    """
    noise, signal = D * SIGMA**2, D * SIGMA**2 / NOISE_SCALE
    var_noise = 2 * noise**2 / (D * (num_parts - 1))
    var_square = 4 * signal * SIGMA**2 / QUADRATIC_BATCH + 2 * D * (SIGMA**2 / QUADRATIC_BATCH) ** 2
    var_signal = var_square + var_noise / QUADRATIC_BATCH**2
    covariance = -var_noise / QUADRATIC_BATCH
    relative = var_noise / noise**2 - 2 * covariance / (noise * signal) + var_signal / signal**2
    return math.sqrt(relative / num_steps)


KNOWN = [(1, 2, "bf16"), (2, 4, "fp32")]
KNOWN_REST = [
    pytest.param(*case, marks=pytest.mark.slow)
    for row in covering_array({"stage": tuple(BY_DEVICE), "k": (2, 4), "precision": ("fp32", "bf16")})
    if (case := tuple(row.values())) not in KNOWN
]


@pytest.mark.parametrize(("stage", "num_microbatches", "precision"), [*KNOWN, *KNOWN_REST])
def test_finds_a_noise_scale_that_is_known(stage, num_microbatches, precision):
    num_steps = 100
    fields = {"stage": stage, "num_microbatches": num_microbatches, "precision": precision, "mesh": mesh_of("8")}
    params = {"w": np.zeros(D, np.float32)}
    state, step = make_trainer(quadratic_loss, optax.sgd(0.0), params=params, noise_scale=True, **fields)
    noise_scale = NoiseScale(decay=0.999)
    for seed in range(num_steps):
        state, metrics = step(state, quadratic_batch(seed))
        value = noise_scale.update(
            grad_norm=float(metrics.grad_norm),
            small_grad_norm_sq=float(metrics.small_grad_norm_sq),
            num_small_grads=int(metrics.num_small_grads),
            batch_size=QUADRATIC_BATCH,
        )
    assert value is not None and noise_scale.estimate is not None
    num_parts = num_microbatches * (8 if stage < 2 else 1)
    error = relative_error_of_the_ratio(num_parts=num_parts, num_steps=num_steps)
    # 4 standard errors, 3 to 5 percent; the seeds are fixed. bfloat16 gradients are rounded at 2^-9, which adds 1e-6 to
    # a squared norm.
    assert error < 0.013
    assert value == pytest.approx(NOISE_SCALE, rel=4 * error)
    # A variance from 100 samples is known to sqrt(2 / 100) = 14%, so its root to 7%: 4 of those.
    assert noise_scale.estimate.error_examples == pytest.approx(error * NOISE_SCALE, rel=0.28)


def test_estimates_are_unbiased_with_uneven_parts():
    """Parts of 1 to 9 tokens, whose gradients have the variance Sigma / tokens; 40,000 steps at once."""
    rng = np.random.default_rng(0)
    dims, num_steps, tokens = 3, 40_000, np.array([1.0, 9.0, 2.0, 4.0])
    true_grad, sigma = np.array([0.5, -1.0, 0.25]), np.array([1.0, 2.0, 0.5])
    grads = true_grad + rng.standard_normal((num_steps, 4, dims)) * sigma / np.sqrt(tokens)[:, None]
    small = (np.square(grads).sum(-1) * tokens).sum(-1) / tokens.sum()
    big = np.linalg.norm((grads * tokens[:, None]).sum(1) / tokens.sum(), axis=-1)
    estimates = [
        estimate_step(grad_norm=b, small_grad_norm_sq=s, num_small_grads=4, batch_size=int(tokens.sum()))
        for b, s in zip(big, small, strict=True)
    ]
    expected_values = np.square(true_grad).sum(), np.square(sigma).sum()  # of the signal, and of the noise
    for values, expected in zip(np.array(estimates).T, expected_values, strict=True):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(num_steps)
        assert values.std() / math.sqrt(num_steps) < 0.01 * expected


def test_is_the_paper_s_formula():
    """Appendix A.1, for 3 parts of 4 examples."""
    big, small, b_big, b_small = 2.0, 5.0, 12, 4
    found = estimate_step(grad_norm=math.sqrt(big), small_grad_norm_sq=small, num_small_grads=3, batch_size=b_big)
    signal, noise = found
    assert signal == pytest.approx((b_big * big - b_small * small) / (b_big - b_small))
    assert noise == pytest.approx((small - big) / (1 / b_small - 1 / b_big))


def feed(noise_scale, steps, batch_size=64):
    for grad_norm, small in steps:
        noise_scale.update(grad_norm=grad_norm, small_grad_norm_sq=small, num_small_grads=4, batch_size=batch_size)
    return noise_scale


@functools.cache
def some_steps(num_steps=60, signal=4.0, noise=64.0, batch_size=64):
    rng = np.random.default_rng(2)
    grads = np.sqrt(signal / 16) + rng.standard_normal((num_steps, 4, 16)) * math.sqrt(4 * noise / batch_size / 16)
    return [(np.linalg.norm(step.mean(0)), np.square(step).sum(-1).mean()) for step in grads]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    clean, mixed = NoiseScale(), NoiseScale()
    for step in some_steps():
        feed(clean, [step])
        feed(mixed, [step, (value, 1.0), (1.0, value), (value, value)])
    assert mixed.to_json() == clean.to_json()


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_spoils_its_own_step_only(stage):
    batches = [make_batch(seed, size=BATCH_SIZE) for seed in range(3)]
    fields = {"stage": stage, "mesh": mesh_of("2"), "num_microbatches": 2, "skip_nonfinite": True}
    state, step = make_trainer(loss_fn, optax.sgd(0.0), noise_scale=True, **fields)
    values = []
    for seed in (0, 1, 2):
        batch = batches[seed] if seed != 1 else {**batches[1], "targets": np.full_like(batches[1]["targets"], np.nan)}
        state, metrics = step(state, batch)
        values.append(float(metrics.small_grad_norm_sq))
    assert np.isfinite(values).tolist() == [True, False, True]


def test_goes_on_exactly_from_json():
    steps = some_steps()
    whole = feed(NoiseScale(decay=0.95), steps)
    first = feed(NoiseScale(decay=0.95), steps[:31])
    second = feed(NoiseScale.from_json(json.loads(json.dumps(first.to_json()))), steps[31:])
    assert second.to_json() == whole.to_json()
    assert second.estimate == whole.estimate
    broken = {**whole.to_json(), "surplus": 1}
    with pytest.raises(ValueError, match="surplus"):
        NoiseScale.from_json(broken)
    with pytest.raises(ValueError, match="weight_sq"):
        NoiseScale.from_json({name: x for name, x in whole.to_json().items() if name != "weight_sq"})


@pytest.mark.parametrize(("fields", "message"), [({"decay": 1.0}, "decay=1.0"), ({"min_steps": 1}, "min_steps=1")])
def test_settings_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        NoiseScale(**fields)


def test_is_unknown_until_it_is_known():
    noise_scale = NoiseScale(min_steps=20)
    steps = some_steps()
    feed(noise_scale, steps[:19])
    assert noise_scale.estimate is None and noise_scale.advice(1 << 20) is None
    feed(noise_scale, steps[19:20])
    assert noise_scale.estimate.num_steps == 20
    assert "20 steps" in str(noise_scale.estimate)
    # Parts that have nothing in common: the mean's square is all noise, and the estimate of the signal is below 0.
    assert feed(NoiseScale(), [(0.9, 4.0)] * 30).estimate is None


def test_latest_steps_count_most():
    steps = some_steps(num_steps=60)
    smoothed = feed(NoiseScale(decay=0.9, min_steps=2), [(1.0, 100.0)] * 20 + list(steps) * 2)
    assert smoothed.estimate.num_examples == pytest.approx(
        feed(NoiseScale(decay=0.9, min_steps=2), steps).estimate.num_examples, rel=1e-3
    )


def test_identical_parts_have_no_noise():
    assert feed(NoiseScale(), [(2.0, 4.0)] * 20).estimate.num_examples == 0


def test_advises_when_the_batch_is_past_diminishing_returns():
    # Noise scale 64 / 4 = 16.
    noise_scale = feed(NoiseScale(), some_steps())
    estimate = noise_scale.estimate
    assert 0 < estimate.error_examples < 0.25 * estimate.num_examples
    assert abs(estimate.num_examples - 16) < 3 * estimate.error_examples
    assert noise_scale.advice(16) is None
    # Past twice the noise scale, but not beyond doubt.
    assert noise_scale.advice(math.ceil(2 * estimate.num_examples)) is None
    assert noise_scale.advice(math.ceil(2 * (estimate.num_examples + 2 * estimate.error_examples))) is not None
    text = noise_scale.advice(1600, unit="documents")
    assert "1,600 documents" in text and "diminishing" in text
    # A hundredth: half the batch takes 1.02 / 1.01 the steps and .51 / 1.01 the examples.
    assert "1.01 times the steps" in text and "0.50 times the documents" in text
    few = feed(NoiseScale(min_steps=2), some_steps()[:2])
    assert few.estimate is None or few.advice(24) is None
