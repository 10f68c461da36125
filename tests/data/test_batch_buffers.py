"""Batches stay in the device memory of the first one of their shape, and a loop holds no more arrays as it goes on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import mesh_of

import zero_jax as zero
from zero_jax.data.batches import BatchBuffers


def place(size=16, seed=0):
    return zero.shard_batch(reference.make_batch(seed, size), mesh=mesh_of("4"))


def places(batch):
    """Returns where in memory each device's shard of each leaf lies."""
    shards = [shard for x in jax.tree.leaves(batch) for shard in x.addressable_shards]
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


def test_batches_are_what_they_were_and_lie_where_the_first_one_lay():
    buffers, seen = BatchBuffers(), []
    for seed in range(4):
        given = place(seed=seed)
        shardings = jax.tree.map(lambda x: x.sharding, given)
        filled = buffers.fill(given)
        chex.assert_trees_all_equal(reference.to_host(filled), reference.make_batch(seed))
        assert jax.tree.map(lambda x: x.sharding, filled) == shardings
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
        seen.append(places(filled))
    assert seen == seen[:1] * 4
    assert buffers.num_bytes == sum(x.nbytes for x in jax.tree.leaves(filled))


def test_each_shape_has_buffers_of_its_own():
    buffers = BatchBuffers()
    first = places(buffers.fill(place(16)))
    other = places(buffers.fill(place(8)))
    assert not set(first) & set(other)
    assert places(buffers.fill(place(16, seed=1))) == first and places(buffers.fill(place(8, seed=1))) == other


def test_the_batch_before_is_gone_and_leaves_that_are_no_arrays_are_passed_on():
    buffers, key = BatchBuffers(), jax.random.key(3)
    batch = {"x": jnp.arange(4), "key": key, "name": "train", "none": None}
    old = buffers.fill(batch)
    new = buffers.fill({"x": jnp.arange(4) + 1, "key": key, "name": "next", "none": None})
    assert old["x"].is_deleted() and not key.is_deleted()
    assert (new["name"], new["none"], new["key"] is key) == ("next", None, True)
    assert new["x"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("buffered", [False, True])
def test_a_loop_holds_the_same_arrays_at_every_step(buffered):
    """With evaluation batches of other shapes in between; the arrays are counted after each step."""
    buffers = BatchBuffers()
    take = buffers.fill if buffered else (lambda batch: batch)
    state, step = reference.make_trainer(reference.loss_fn, optax.adam(1e-2), mesh=mesh_of("4"), stage=2)
    evaluate = zero.make_eval_step(reference.loss_fn, mesh=mesh_of("4"), config=reference.make_config(stage=2))
    held, plain = [], [np.asarray(0.0)]
    for seed in range(8):
        state, metrics = step(state, take(place(16, seed)))
        plain.append(np.asarray(metrics.loss))
        if seed % 2:
            plain.append(np.asarray(evaluate(state, take(place(8 + 4 * (seed % 4), seed))).loss))
        del metrics
        arrays = jax.live_arrays()
        held.append((len(arrays), sum(x.nbytes for x in arrays)))
    assert len(set(held[4:])) == 1
    assert np.isfinite(plain).all()


def test_losses_are_those_of_batches_without_buffers():
    def losses(take):
        state, step = reference.make_trainer(reference.loss_fn, optax.adam(1e-2), mesh=mesh_of("4"), stage=3)
        found = []
        for seed in range(4):
            state, metrics = step(state, take(place(16, seed)))
            found.append(metrics.loss)  # read at the end: steps and refills overlap as they like
        return [float(loss) for loss in found]

    assert losses(BatchBuffers().fill) == losses(lambda batch: batch)
