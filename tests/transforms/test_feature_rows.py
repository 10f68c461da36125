"""Features in rows: the same values and derivatives, where a product is of examples on a mesh of the batch's axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gathering import compiled_step, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms import features_in_rows


def loss_of(*, places_first=False):
    """Returns the loss of two scanned, checkpointed layers, which may have the examples along the second dim."""

    @jax.checkpoint
    def layer(h, params):
        return h + jnp.tanh(h @ params["up"]) @ params["down"], None

    def loss(params, h):
        h = jnp.swapaxes(h, 0, 1) if places_first else h
        return jnp.square(jax.lax.scan(layer, h, params)[0]).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (2, 128, 256), "down": (2, 256, 128)}
    params = {
        name: jax.random.normal(key, shape) / 16 for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return loss, params, jax.random.normal(keys[2], (8, 16, 128))


def num_in_rows(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("zero_rows[")


def test_values_and_derivatives_are_the_same():
    loss, params, h = loss_of()
    mesh = mesh_of("4")
    rows = features_in_rows(loss, mesh=mesh, axes=axes_of(mesh))
    assert num_in_rows(rows, params, h) == 2 and num_in_rows(loss, params, h) == 0
    params, h = jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(h, NamedSharding(mesh, P("data")))
    expected, found = (jax.jit(jax.value_and_grad(fn, (0, 1)))(params, h) for fn in (loss, rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)  # order of sums


@pytest.mark.parametrize(("mesh", "places_first"), [("model2", False), ("4", True)])
def test_other_products_stay_as_they_are(mesh, places_first):
    """Of a mesh with other axes, and without examples along the first dim, where a shard of it is no shard of these."""
    loss, params, h = loss_of(places_first=places_first)
    mesh = mesh_of(mesh)
    assert num_in_rows(features_in_rows(loss, mesh=mesh, axes=axes_of(mesh)), params, h) == 0


def test_products_of_experts_are_in_rows_with_their_examples_first():
    """Of `[B, E, C, F]` by `[E, F, G]`, whichever `einsum` has first."""
    mesh, keys = mesh_of("4"), jax.random.split(jax.random.key(0), 3)
    x, up, down = (
        jax.random.normal(k, s) / 8 for k, s in zip(keys, [(8, 3, 4, 128), (3, 128, 256), (3, 256, 128)], strict=True)
    )

    def loss(params, x):
        hidden = jnp.tanh(jnp.einsum("becf,efg->becg", x, params["up"]))
        return jnp.square(jnp.einsum("egf,becg->becf", params["down"], hidden)).mean()

    params, rows = {"up": up, "down": down}, features_in_rows(loss, mesh=mesh, axes=axes_of(mesh))
    assert num_in_rows(rows, params, x) == 2
    params, x = jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
    expected, found = (jax.jit(jax.value_and_grad(fn, (0, 1)))(params, x) for fn in (loss, rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("shape", [(128, 128), (2, 128, 128)])
def test_products_of_complex_numbers_compile_for_tpus(shape):
    """XLA:TPU, which makes pairs of them, takes no layout of an array of complex numbers; of gradients neither."""
    pytest.importorskip("libtpu")

    def loss(params, x):
        of_params = jax.lax.complex(*(params[name].astype(jnp.float32) for name in ("real", "imag")))
        for weight in (of_params, params["complex"]):
            for each in weight.reshape(-1, *shape[-2:]):
                x = (x.astype(jnp.complex64) @ each).real
        return jnp.square(x).mean()

    init = lambda: {"real": normal(*shape), "imag": normal(*shape), "complex": 1j * normal(*shape)}  # noqa: E731
    assert compiled_step(loss, init, (32, 16, 128), 3)
