"""Lookups of one element of each row by a comparison of places: the same values and derivatives, and less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import covering_array
from reference import mesh_of

import zero_jax as zero
from zero_jax.training.loss.program import StepLoss
from zero_jax.transforms import lookups_by_place

INDICES = np.array([[0, 6, -1, 7, -7, -8, 3]])  # the places of a row of 7, from both ends, and beyond


def num_lookups(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("= gather[")


def picked(rows, indices, axis, mode):
    return jnp.take_along_axis(rows, jnp.expand_dims(indices, axis), axis=axis, mode=mode).squeeze(axis)


def by_example(rows, indices, axis, mode):
    """Looks up in each row by itself; a dynamic slice goes to the nearest place."""
    del mode
    pick = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
    return jax.vmap(jax.vmap(pick))(jnp.moveaxis(rows, axis, -1), indices)


def numbered(rows, indices, axis, mode):
    rows = jnp.moveaxis(rows, axis, -1)
    examples, places = (jnp.arange(n) for n in rows.shape[:2])
    return jax.jit(lambda x, i: x.at[examples[:, None], places, i].get(mode=mode))(rows, indices)


LOOK_UPS = {look_up.__name__: look_up for look_up in (picked, by_example, numbered)}
FACTORS = {
    "look_up": [*LOOK_UPS],
    "num_examples": [1, 3],
    "axis": [-1, 1],
    "mode": ["fill", "clip", "promise_in_bounds"],
    "dtype": ["float32", "bfloat16"],
}


@pytest.mark.parametrize("row", covering_array(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_values_and_derivatives_are_the_same(row):
    num_examples, axis, mode, dtype = (row[name] for name in ("num_examples", "axis", "mode", "dtype"))
    look_up = LOOK_UPS[row["look_up"]]
    rows = jax.random.normal(jax.random.key(0), (num_examples, 7, 7)).astype(dtype).at[0, 2, 2].set(jnp.inf)
    indices = jnp.tile(INDICES, (num_examples, 1)) % (7 if mode == "promise_in_bounds" else 100)

    def loss(rows, indices):
        return jnp.sin(look_up(rows, indices, axis, mode).astype(jnp.float32)) * jnp.arange(7.0)

    by_place = lookups_by_place(loss)
    assert (num_lookups(loss, rows, indices), num_lookups(by_place, rows, indices)) == (1, 0)
    of_each = [jax.vjp(lambda rows, fn=fn: fn(rows, indices), rows) for fn in (loss, by_place)]
    (expected, expected_pullback), (found, pullback) = of_each
    np.testing.assert_array_equal(found, expected)
    cotangent = jnp.arange(1.0, 1 + found.size).reshape(found.shape)
    np.testing.assert_array_equal(*(np.float32(pull(cotangent)[0]) for pull in (pullback, expected_pullback)))


@pytest.mark.parametrize(
    "look_up",
    [
        lambda rows, indices, *_: rows[jnp.abs(indices)],  # rows of a table
        lambda rows, indices, *_: jnp.take_along_axis(rows, indices[:, None], axis=-1, mode="clip"),  # several
        lambda rows, indices, *_: picked(jnp.int32(rows), indices, -1, "clip"),  # no floats
        lambda rows, indices, *_: rows[jnp.arange(3)[:, None], indices % 7, jnp.arange(6, -1, -1)],  # backwards
        lambda rows, indices, *_: rows[jnp.arange(3)[:, None], jnp.arange(7), jnp.arange(7)],  # a diagonal
        lambda rows, indices, *_: rows[jnp.arange(2)[:, None], jnp.arange(7), indices[:2]],  # a part of the rows
        lambda rows, indices, *_: rows[jnp.arange(3)[:, None], jnp.arange(7) - 1, indices],  # other rows
        lambda rows, indices, *_: rows[jnp.arange(3), jnp.arange(7)[:, None], indices.T],  # in another order
    ],
)
def test_other_lookups_stay_as_they_are(look_up):
    def loss(rows, indices):
        return look_up(rows, indices, -1, "clip").sum()

    rows, indices = jnp.ones((3, 7, 7)), jnp.tile(INDICES, (3, 1))
    assert num_lookups(lookups_by_place(loss), rows, indices) == 1


def test_rows_may_be_numbered_by_what_is_reshaped_or_transposed():
    def loss(rows, indices):
        return rows[jnp.arange(3).reshape(3, 1), jnp.broadcast_to(jnp.arange(7)[:, None], (7, 3)).T, indices]

    rows, indices = jax.random.normal(jax.random.key(0), (3, 7, 7)), jnp.tile(INDICES, (3, 1))
    by_place = lookups_by_place(loss)
    assert (num_lookups(loss, rows, indices), num_lookups(by_place, rows, indices)) == (1, 0)
    np.testing.assert_array_equal(by_place(rows, indices), loss(rows, indices))


def test_zeros_that_are_places_along_the_dim_of_the_indices_are_no_numbers_of_rows():
    """That dim is as long as there are dims to look up in, here 2, as many as rows: each row would be its own."""

    def loss(rows, indices):
        zeros = jax.lax.broadcasted_iota(jnp.int32, (2, 1), 1)
        numbers = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
        return jax.lax.gather(rows, jnp.concatenate([zeros, indices[:, None]], 1), numbers, (1, 1))

    rows, indices = jnp.arange(10.0).reshape(2, 5), jnp.array([3, 4])
    np.testing.assert_array_equal(lookups_by_place(loss)(rows, indices), [3, 4])


def test_other_hardware_looks_up():
    def loss_fn(params, batch):
        return picked(params["rows"], batch["indices"], -1, "clip").sum()

    params, batch = {"rows": jnp.ones((1, 7, 7))}, {"indices": jnp.array(INDICES)}
    loss = StepLoss.of(loss_fn, params, mesh=mesh_of("1"), config=zero.ZeroConfig(stage=0))
    assert num_lookups(loss.to_place(), params, batch, jax.random.key(0)) == 1


def numbered_loss(logits, targets):
    examples, places = (jnp.arange(n) for n in targets.shape)
    return -jax.nn.log_softmax(logits)[examples[:, None], places, targets]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.full_effort
@pytest.mark.parametrize(
    ("stage", "num_microbatches", "losses_of"),
    [
        (3, 1, optax.softmax_cross_entropy_with_integer_labels),
        (1, 2, optax.softmax_cross_entropy_with_integer_labels),
        (3, 1, numbered_loss),
    ],
)
def test_a_step_on_tpus_has_no_logits_in_float32(stage, num_microbatches, losses_of):
    """Neither where a loss is of all devices' examples, nor where it is of one at a time, as at stage 1."""
    places, vocabulary = 1024, 16384

    def loss_fn(params, batch):
        logits = batch["x"] @ params["head"]
        losses = losses_of(logits.astype(jnp.float32), batch["targets"])
        return losses.mean(), {}

    x = jax.ShapeDtypeStruct((4 * num_microbatches, places, 128), jnp.float32)
    batch = {"x": x, "targets": jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)}
    config = zero.ZeroConfig(stage=stage, num_microbatches=num_microbatches)
    init_fn = lambda key: {"head": jnp.zeros((128, vocabulary))}  # noqa: E731
    plan = zero.plan(loss_fn, init_fn, optax.sgd(0.1), batch=batch, topology="v5e:2x2", config=config, quick=True)
    # The logits in bfloat16 and their gradient, which takes the same place, and a little for params.
    assert plan.memory.heap_bytes < 1.7 * 2 * places * vocabulary
