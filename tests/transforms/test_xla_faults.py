"""What XLA gets wrong with sharded arguments, with nothing of zero_jax in it: docs/xla_faults.md.

A test that fails here means that XLA has mended a fault: take it out of the page and of `fuzzing`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from reference import mesh_of

pytestmark = pytest.mark.slow


def grads(loss_fn, *args, mesh, spec):
    """Returns the gradients of a function's first argument, with its last one whole and sharded."""
    both = jax.jit(jax.grad(loss_fn))
    sharded = jax.device_put(args[-1], NamedSharding(mesh_of(mesh), PartitionSpec(*spec)))
    return np.asarray(both(*args)), np.asarray(both(*args[:-1], sharded))


def test_the_gradient_of_a_slice_of_part_of_two_shards():
    rows = jnp.arange(192.0).reshape(24, 8) / 100
    want, got = grads(lambda w: jnp.sum(jnp.square(w[20:22])), rows, mesh="8", spec=("data",))
    assert np.abs(got - want).max() > 1
    want, got = grads(lambda w: jnp.sum(jnp.square(w[18:21])), rows, mesh="8", spec=("data",))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="mended in JAX 0.12")
def test_the_gradient_of_a_write():
    w, x = jnp.sin(jnp.arange(256.0)).reshape(16, 16), jnp.cos(jnp.arange(512.0)).reshape(32, 16)
    grad = jax.grad(lambda w, x: jnp.sum(jnp.square(x @ w.at[:, 3].set(0.0))))
    columns, rows = (NamedSharding(mesh_of("8"), PartitionSpec(*spec)) for spec in ((None, "data"), ("data",)))
    got = jax.jit(grad, out_shardings=columns)(w, jax.device_put(x, rows))
    assert np.abs(np.asarray(got) - grad(w, x)).max() > 1


def test_the_gradient_of_max_pooling():
    pooled = lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")  # noqa: E731
    column = jnp.sin(jnp.arange(16.0)).reshape(16, 1)
    want, got = grads(lambda a: jnp.sum(jnp.square(pooled(a))), column, mesh="8", spec=("data",))
    assert np.abs(got - want).max() > 1


def test_the_gradient_of_the_kernel_of_a_convolution():
    convolved = lambda kernel, a: lax.conv_general_dilated(a, kernel, (1,), "SAME")  # noqa: E731
    kernel, row = jnp.ones((1, 1, 3)), jnp.sin(jnp.arange(8.0)).reshape(1, 1, 8)
    loss_fn = lambda kernel, a: jnp.sum(jnp.square(convolved(kernel, a)))  # noqa: E731
    want, got = grads(loss_fn, kernel, row, mesh="staged24", spec=(None, None, "data_1"))
    np.testing.assert_allclose(got, 2 * want, rtol=1e-5)


def test_the_gradient_of_a_kernel_in_groups():
    dims, kernel, x = ("NWC", "WIO", "NWC"), jnp.ones((4, 1, 8)), jnp.sin(jnp.arange(4096.0)).reshape(16, 32, 8)
    convolved = lambda kernel, x: lax.conv_general_dilated(  # noqa: E731
        x, kernel, (1,), "SAME", dimension_numbers=dims, feature_group_count=8
    )
    loss_fn = lambda kernel, x: jnp.sum(jnp.square(convolved(kernel, x)))  # noqa: E731
    want, got = grads(loss_fn, kernel, x, mesh="model2", spec=("data",))
    np.testing.assert_allclose(got, 2 * want, rtol=1e-4)


def test_the_largest_of_values_with_a_nan():
    values = jnp.arange(8.0).at[5].set(jnp.nan)
    sharded = jax.device_put(values, NamedSharding(mesh_of("8"), PartitionSpec("data")))
    assert jnp.isnan(values.max()) and jax.jit(jnp.max)(sharded) == 7 and jax.jit(jnp.min)(sharded) == 0


def test_the_gradient_of_kernels_that_are_mapped():
    kernel, x = jnp.ones((3, 3, 4, 4)), jnp.sin(jnp.arange(512.0)).reshape(8, 1, 4, 4, 4)
    dims = ("NHWC", "HWIO", "NHWC")

    def loss_fn(kernel, x):
        return jnp.sum(jnp.square(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)))

    each = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))
    sharded = jax.device_put(x, NamedSharding(mesh_of("8"), PartitionSpec("data")))
    want, got = (np.asarray(each(kernel, a)) for a in (x, sharded))
    assert np.abs(got - want).max() > 0.1 * np.abs(want).max()
