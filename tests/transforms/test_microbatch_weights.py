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


def test_a_bound_of_what_is_no_sum_over_examples_is_warned_of():
    """An old key is an array, as the examples are."""

    def loss_fn(params, batch, key):
        return divided_by(lambda _: jnp.maximum(5 * jax.random.uniform(key), 7))(params, batch)

    with pytest.warns(UserWarning, match="the loss is divided by what is no sum over examples, with a bound"):
        run(loss_fn, reference.make_batch(0), stage=3)


@pytest.mark.slow
def test_a_batch_whose_divisor_is_zero_has_no_finite_loss():
    batch = reference.make_batch(0)
    _, (metrics,) = run(boxes_loss, batch | {"tokens": np.maximum(batch["tokens"], 5)}, stage=1)
    assert np.isinf(metrics.loss) and metrics.skipped
