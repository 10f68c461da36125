"""The primitive that moves an array through a chain of shardings, and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

from zero_jax.program import jaxprs
from zero_jax.sharding.chains import Chain, reshard, reshard_p
from zero_jax.transforms.gather.uses import refuse_gathered


def chain(*specs, mesh="8", **fields):
    return Chain(tuple(NamedSharding(mesh_of(mesh), spec) for spec in specs), **fields)


FORWARD, BACKWARD = chain(P(), barrier=True), chain(P("data"))
W = np.arange(32, dtype=np.float32).reshape(8, 4)


def placed(w):
    """Returns a shard: a jitted function runs where its arguments are."""
    return jax.device_put(w, NamedSharding(mesh_of("8"), P("data")))


def gather(w, forward=FORWARD, backward=BACKWARD):
    return reshard(w, forward=forward, backward=backward)


def test_reshard_moves_and_changes_nothing():
    out = jax.jit(gather)(placed(W))
    np.testing.assert_array_equal(out, W)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of("8"), P()), 2)
    np.testing.assert_array_equal(gather(W), W)  # without jit
    assert gather(W, Chain(), Chain()) is W
    ints = np.arange(8)
    np.testing.assert_array_equal(jax.jit(gather)(ints), ints)


def test_gradient_takes_the_other_chain():
    grad = jax.jit(jax.grad(lambda w: (gather(w) ** 2).sum()))(placed(W))
    np.testing.assert_array_equal(grad, 2 * W)
    assert grad.sharding.is_equivalent_to(NamedSharding(mesh_of("8"), P("data")), 2)


def test_gradient_of_the_gradient_takes_the_first_chain_again():
    def gradient(w):
        return jax.grad(lambda w: (gather(w) ** 3).sum())(w).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(gradient))(W), 6 * W)


def test_jvp_and_linear_transpose():
    out, tangent = jax.jit(lambda w: jax.jvp(gather, (w,), (2 * w,)))(W)
    np.testing.assert_array_equal(tangent, 2 * W)
    np.testing.assert_array_equal(out, W)
    (cotangent,) = jax.jit(lambda w: jax.linear_transpose(gather, w)(w))(W)
    np.testing.assert_array_equal(cotangent, W)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_leaves_the_new_dim_free(axis):
    w = np.stack([W, 2 * W], axis=axis)
    mapped = jax.vmap(gather, in_axes=axis, out_axes=axis)
    np.testing.assert_array_equal(jax.jit(mapped)(w), w)
    grad = jax.jit(jax.grad(lambda w: (mapped(w) ** 2).sum()))(w)
    np.testing.assert_array_equal(grad, 2 * w)


def test_vmap_of_vmap():
    w = np.stack([np.stack([W, 2 * W]), np.stack([3 * W, 4 * W])])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(gather)))(w), w)


def test_staged_chain():
    forward = chain(P("data_0"), P(), mesh="staged24", barrier=True)
    backward = chain(P(("data_0", "data_1")), mesh="staged24")
    out, pullback = jax.vjp(lambda w: gather(w, forward, backward), W)
    np.testing.assert_array_equal(out, W)
    np.testing.assert_array_equal(pullback(W)[0], W)


def test_dtype_of_a_chain_rounds_and_comes_back():
    narrow = chain(P("data"), dtype=jnp.bfloat16)
    w = W + 0.001
    out, grad = jax.jit(jax.value_and_grad(lambda w: (gather(w, FORWARD, narrow) * w).sum()))(w)
    assert grad.dtype == jnp.float32
    rounded = w.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(grad, w + rounded)  # only what went through the chain is rounded
    np.testing.assert_allclose(out, (w * w).sum(), rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda x: gather(x, narrow))(np.arange(8)), np.arange(8))  # ints are not cast


def count(jaxpr, primitive):
    """Returns the number of equations of a primitive, inner jaxprs included."""
    eqns = jaxprs.open_jaxpr(jaxpr)[0].eqns
    return sum(
        (eqn.primitive is primitive) + sum(count(j, primitive) for j in jaxprs.inner_jaxprs(eqn)) for eqn in eqns
    )


def test_policies_never_save_what_was_gathered():
    everything = jax.checkpoint_policies.everything_saveable

    def num_reshards(policy):
        layer = jax.checkpoint(lambda w, x: jnp.sin(x @ gather(w)).sum(), policy=policy)
        return count(jax.make_jaxpr(jax.grad(layer, argnums=(0, 1)))(W, W[:, :1].T), reshard_p)

    # Forward, and the gradient's way back; then gathered again between the two.
    assert num_reshards(everything) == 2
    assert num_reshards(refuse_gathered(everything)) == 3
    assert refuse_gathered(None) is None
