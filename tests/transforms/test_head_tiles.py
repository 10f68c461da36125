"""Heads that are made and merged tile by tile: the same values and derivatives, where a TPU runs fused attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax as zero
from zero_jax.transforms import heads_by_tiles


def loss_of(num_heads, num_keys, size, places):
    """Returns the loss of a scanned, checkpointed attention layer with grouped heads and turned queries."""

    @jax.checkpoint
    def layer(h, params):
        q, k, v = (h @ params[name] for name in ("q", "k", "v"))
        q = jnp.roll(q.reshape(2, places, num_heads, size), 3, axis=-1)
        k, v = (x.reshape(2, places, num_keys, size) for x in (k, v))
        out = zero.dot_product_attention(q, k, v, is_causal=True, implementation="splash")
        return jnp.tanh(out.reshape(h.shape) @ params["out"]), None

    def loss(params, h):
        return jnp.square(jax.lax.scan(layer, h, params)[0]).mean()

    keys = iter(jax.random.split(jax.random.key(0), 5))
    features = num_heads * size
    widths = {"q": features, "k": num_keys * size, "v": num_keys * size, "out": features}
    params = {name: jax.random.normal(next(keys), (2, features, n)) / 16 for name, n in widths.items()}
    return loss, params, jax.random.normal(next(keys), (2, places, features))


def num_tiled(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("permutation=(0, 3, 1, 2, 4)")


@pytest.mark.slow
def test_values_and_derivatives_are_the_same():
    loss, params, h = loss_of(num_heads=2, num_keys=1, size=128, places=128)
    tiled = heads_by_tiles(loss)
    assert num_tiled(tiled, params, h) == 3 and num_tiled(loss, params, h) == 0
    expected, found = (jax.jit(jax.value_and_grad(fn, (0, 1)))(params, h) for fn in (loss, tiled))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("size", "places"), [(64, 128), (128, 12)])
def test_other_reshapes_stay_as_they_are(size, places):
    """Heads that are no whole tiles."""
    loss, params, h = loss_of(num_heads=2, num_keys=2, size=size, places=places)
    assert num_tiled(heads_by_tiles(loss), params, h) == 0
