"""Parts of a batch that have nothing, or next to nothing, to divide their sum by."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import mesh_of

SLOW = pytest.mark.slow


def boxes_loss(params, batch):
    """As in detection: a loss of all examples over the number of boxes, which most devices have none of."""
    boxes = (batch["tokens"][:, 0] < 5).sum()
    errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    return 2 * errors.sum() / boxes, {"boxes": boxes}


def regularized(params, batch):
    loss, aux = boxes_loss(params, batch)
    add = jax.jit(lambda loss: 0.1 * jnp.square(params["head"]["kernel"]).sum() + loss)
    return add(loss) - params["head"]["bias"].sum(), aux


def weighed_loss(params, batch):
    """By weights so small that the epsilon is a part of their sum, which counts once in the batch."""
    weights = 1e-3 * jnp.abs(batch["targets"]).mean(-1)
    errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    return (weights * errors).sum() / (weights.sum() + 1e-5), {"boxes": weights.sum()}


def bounded_loss(params, batch):
    """Bounds and epsilons one after the other, of which the largest counts; most parts are below it."""
    boxes = (batch["tokens"][:, 0] < 5).sum().astype(jnp.float32)
    errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    divisor = jnp.maximum(jnp.maximum(boxes + 1e-5, 0.5) + 1e-5, 1.0) + 1e-6
    return errors.sum() / divisor + errors.sum() / divisor, {"boxes": boxes}


def divided_by(divisor):
    """A mean over the examples, divided by what is the same in all parts: no bound of it is one of a sum of parts."""

    def loss_fn(params, batch):
        errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
        return errors.mean() / divisor(batch), {}

    return loss_fn


def run(loss_fn, batch, **fields):
    return reference.run_zero(loss_fn, optax.sgd(0.01), [batch], mesh=mesh_of("8"), num_microbatches=2, **fields)


@pytest.mark.parametrize(
    ("loss_fn", "fields"),
    [
        (regularized, {"stage": 1}),
        (bounded_loss, {"stage": 1}),
        pytest.param(weighed_loss, {"stage": 1}, marks=SLOW),
        pytest.param(weighed_loss, {"stage": 3}, marks=SLOW),
        pytest.param(boxes_loss, {"stage": 0}, marks=SLOW),
        pytest.param(boxes_loss, {"stage": 1, "loss_weight": "boxes"}, marks=SLOW),
        pytest.param(regularized, {"stage": 3}, marks=SLOW),
    ],
)
def test_parts_with_little_to_divide_by(loss_fn, fields):
    batch = reference.make_batch(0)
    state, (metrics,) = run(loss_fn, batch, **fields)
    params, _, (loss,) = reference.run_plain(lambda *args: loss_fn(*args)[0], optax.sgd(0.01), [batch])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    reference.assert_close(state.params, params, tolerance=1e-5)


@pytest.mark.parametrize(
    "divisor",
    [
        lambda batch: jnp.maximum(batch["scale"], 7),
        pytest.param(lambda batch: batch["scale"] * 1e-5 + 1e-5, marks=SLOW),
        pytest.param(lambda batch: jnp.maximum(jnp.ones(5).sum() * batch["scale"], 30), marks=SLOW),
    ],
)
def test_a_divisor_that_is_the_same_in_all_parts(divisor):
    batch = reference.make_batch(0) | {"scale": np.float32(5)}
    state, (metrics,) = run(divided_by(divisor), batch, stage=1)
    params, _, (loss,) = reference.run_plain(lambda *args: divided_by(divisor)(*args)[0], optax.sgd(0.01), [batch])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    reference.assert_close(state.params, params, tolerance=1e-5)


def test_a_divisor_that_is_drawn_is_no_weight():
    """An old key is an array, as the examples are."""

    def loss_fn(params, batch, key):
        return divided_by(lambda _: jnp.maximum(0 * jax.random.uniform(key), 7))(params, batch)

    batch = reference.make_batch(0)
    _, (metrics,) = run(loss_fn, batch, stage=3)
    expected, _ = jax.jit(divided_by(lambda _: 7))(reference.host_params(), batch)
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)


@pytest.mark.parametrize(("stage", "fields"), [(1, {}), pytest.param(3, {"loss_weight": "kept"}, marks=SLOW)])
def test_a_mask_that_is_drawn_is_counted_as_it_is_drawn(stage, fields):
    """By the key of each part: the weighted mean of ones is 1 only by the sum of the weights of all parts."""

    def loss_fn(params, batch, key):
        kept = jax.random.bernoulli(key, 0.4, batch["targets"].shape[:1])
        ones = 1 + 0 * reference.predict(params, batch["tokens"]).mean(-1)
        return (kept * ones).sum() / jnp.maximum(kept.sum(), 1), {"kept": kept.sum()}

    _, (metrics,) = run(loss_fn, reference.make_batch(0), stage=stage, **fields)
    np.testing.assert_allclose(metrics.loss, 1, rtol=1e-6)
    assert 0 < int(metrics.aux["kept"]) < 16


def errors_of(params, batch):
    return jnp.square(batch["x"] @ params["w"]).mean(-1)


def with_count(form):
    """A loss of the examples that a mask leaves: of their sum, their number and a function of both."""

    def loss_fn(params, batch):
        return form((errors_of(params, batch) * batch["mask"]).sum(), batch["mask"].sum())

    return loss_fn


def of_boxes(params, batch):
    """Parts without boxes have a loss all the same, which `lax.cond` leaves out of them alone."""
    n, total = (batch["mask"] > 0).sum(), errors_of(params, batch).sum()
    return jax.lax.cond(n > 0, lambda: total / n, lambda: jnp.zeros(()))


FORMS = {
    "bound": with_count(lambda s, n: s / jnp.maximum(n, 1)),
    "guard": with_count(lambda s, n: s / jnp.where(n > 0, n, 1)),
    "other guard": with_count(lambda s, n: s / jnp.where(n == 0, 1, n)),
    "sum of guards": with_count(lambda s, n: s / (n + (n == 0))),
    "branch of the divisor": with_count(lambda s, n: s / jax.lax.cond(n > 0, lambda: n, lambda: 1.0)),
    "branch": with_count(lambda s, n: jax.lax.cond(n > 0, lambda: s / n, lambda: 0.0)),
    "branch of boxes": of_boxes,
    "choice": with_count(lambda s, n: 2 * jnp.where(n > 0, s / n, 0)),
    "choice and guard": with_count(lambda s, n: jnp.where(n > 0, s / jnp.where(n > 0, n, 1), 0)),
    "weights": lambda p, b: errors_of(p, b) @ (b["mask"] / b["mask"].sum()),
    "mean of weights": lambda p, b: (errors_of(p, b) * (b["mask"] / jnp.maximum(b["mask"].sum(), 1))).sum(),
    "running sums": lambda p, b: jnp.cumsum(
        (jnp.square(b["x"] @ p["w"]) * b["mask"][:, None]).sum(0) / jnp.maximum(b["mask"].sum(), 1)
    )[-1:].sum(),
    "reciprocal": with_count(lambda s, n: s * (1 / n)),
    "power": with_count(lambda s, n: s * n**-1),
    "and a number": with_count(lambda s, n: s / (n + 1) / 2),
    "root": with_count(lambda s, n: s / jnp.sqrt(n)),
    "share": lambda p, b: (errors_of(p, b) * b["mask"]).mean() / jnp.maximum(b["mask"].mean(), 0.3),
    "unguarded": with_count(lambda s, n: s / n),
    "average": lambda p, b: jnp.average(errors_of(p, b), weights=b["mask"]),
    "where": lambda p, b: jnp.mean(errors_of(p, b), where=b["mask"] > 0),
    "sum": with_count(lambda s, n: s),
    "two divisors": lambda p, b: FORMS["bound"](p, b) + FORMS["bound"](p, b | {"mask": 1 - b["mask"]}),
    "bound and a term": lambda p, b: FORMS["bound"](p, b) + 0.1 * jnp.square(p["w"]).sum(),
    "penalty": lambda p, b: errors_of(p, b).mean() + jnp.square(p["w"]).sum() / (1 + b["mask"].sum()),
}
SIZE = 32


def masked_batch(share):
    """Examples of which a share counts: none of the first parts, and none at all if it is 0."""
    rng = np.random.default_rng(0)
    mask = (rng.random(SIZE) < share).astype(np.float32)
    mask[: SIZE // 4] = 0
    return {"x": rng.standard_normal((SIZE, 8), dtype=np.float32), "mask": mask}


def steps_of(loss_fn, *batches, **fields):
    """Returns the params, the loss, and whether it is skipped of each step."""
    params = {"w": np.random.default_rng(1).standard_normal((8, 8), dtype=np.float32) / 3}
    state, step = reference.make_trainer(loss_fn, optax.sgd(0.1), mesh=mesh_of("4"), params=params, **fields)
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append((np.asarray(state.params["w"]), np.asarray(metrics.loss), bool(metrics.skipped)))
    return found


def forms():
    """Each form once, by turns on two microbatches at stage 1 and on four at stage 3; some of the first are fast."""
    for number, name in enumerate(FORMS):
        is_fast = name in ("guard", "branch of boxes", "two divisors")
        yield pytest.param(name, 2, 1) if is_fast else pytest.param(name, *((2, 1), (4, 3))[number % 2], marks=SLOW)


@pytest.mark.parametrize(("name", "num_microbatches", "stage"), list(forms()))
def test_forms_of_a_masked_mean_are_those_of_the_whole_batch(name, num_microbatches, stage):
    """Without examples that count, too: a step that is skipped with one microbatch is skipped with more."""
    batches = masked_batch(0.5), masked_batch(0)
    whole = steps_of(FORMS[name], *batches, stage=stage)
    parts = steps_of(FORMS[name], *batches, stage=stage, num_microbatches=num_microbatches)
    for expected, found in zip(whole, parts, strict=True):
        assert found[2] == expected[2]
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        (lambda s, n: jnp.sqrt(s / n), lambda n: jnp.ones(2)),
        (lambda s, n: jnp.sqrt(s) / n, lambda n: n),
    ],
)
def test_what_is_no_mean_is_what_the_warning_says(form, weights, stage):
    loss_fn, batch = with_count(form), masked_batch(0.5)
    with pytest.warns(UserWarning, match="mean of the losses of 2 microbatches, each by itself") as warned:
        ((_, loss, _),) = steps_of(loss_fn, batch, stage=stage, num_microbatches=2)
    params = {"w": np.random.default_rng(1).standard_normal((8, 8), dtype=np.float32) / 3}
    take = lambda i: jax.tree.map(lambda x: x.reshape(4, 2, 4, *x.shape[1:])[:, i].reshape(16, *x.shape[1:]), batch)  # noqa: E731
    parts = [take(0), take(1)]
    count = weights(np.array([part["mask"].sum() for part in parts]))
    assert ("weighted by what each is a mean over" in str(warned[0].message)) == (count[0] != count[1])
    np.testing.assert_allclose(loss, np.average([loss_fn(params, part) for part in parts], weights=count), rtol=1e-5)


@pytest.mark.parametrize(("guard", "skipped"), [(1, False), pytest.param(0, True, marks=SLOW)])
def test_a_named_weight_of_nothing(guard, skipped):
    def loss_fn(params, batch):
        total, count = (errors_of(params, batch) * batch["mask"]).sum(), batch["mask"].sum()
        return total / jnp.maximum(count, guard), {"count": count}

    fields = {"stage": 1, "loss_weight": "count"}
    ((params, loss, found),) = steps_of(loss_fn, masked_batch(0), num_microbatches=2, **fields)
    (expected,) = steps_of(loss_fn, masked_batch(0), **fields)
    assert found == expected[2] == skipped
    np.testing.assert_allclose(loss, expected[1])
    np.testing.assert_allclose(params, expected[0])


@pytest.mark.slow
def test_a_batch_whose_divisor_is_zero_has_no_finite_loss():
    batch = reference.make_batch(0)
    _, (metrics,) = run(boxes_loss, batch | {"tokens": np.maximum(batch["tokens"], 5)}, stage=1)
    assert np.isinf(metrics.loss) and metrics.skipped
