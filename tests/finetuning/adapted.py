"""A loss function that uses its weights in every way that adapters know, and the formula of adapted weights."""

import jax
import jax.numpy as jnp
import numpy as np

import zero_jax as zero

RANK = 4
RULES = {"embed": "io", "q": "ioo", "o": "iio", "stack": "sio", "conv": "iio", "odd": "io"}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 4


def init_params():
    return {
        "embed": normal(0, 32, 64),
        "q": normal(1, 64, 4, 16),
        "o": normal(2, 4, 16, 64),
        "stack": normal(3, 3, 64, 64),
        "conv": normal(4, 3, 64, 64),
        "odd": normal(5, 64, 64),
        "bias": normal(6, 64),
    }


def loss_fn(params, tokens):
    """A lookup, kernels of many dims, a stack that is scanned and indexed, a convolution, a tied table."""
    x = params["embed"][tokens]
    h = jnp.einsum("btd,dhk->bthk", x, params["q"])
    x = x + jnp.einsum("bthk,hkd->btd", jnp.tanh(h), params["o"])
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), x, params["stack"])
    for i in range(3):
        x = x + jnp.tanh(x @ params["stack"][i].T)
    x = x + jax.lax.conv_general_dilated(x, params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = x + jax.lax.cond(x.sum() < 0, lambda w: jnp.tanh(x @ (w * 2)), lambda w: jnp.tanh(x @ w.T), params["odd"])
    return jnp.square(jax.nn.log_softmax((x + params["bias"]) @ params["embed"].T / 8)).mean()


def moved(variables):
    """Returns variables whose adapters change the weights."""
    adapters = {
        name: {**a, "b": normal(100 + i, *a["b"].shape)} for i, (name, a) in enumerate(variables.params.items())
    }
    return zero.Variables(params=adapters, model_state=variables.model_state)


def adapt(base, adapters, scale):
    """Returns `W + scale A B`, DoRA's if there are magnitudes, written out."""
    params = dict(base)
    for name, adapter in adapters.items():
        labels, weight = RULES[name], base[name]
        stack, ins = labels.count("s"), labels.count("i")
        a, b = adapter["a"], adapter["b"]
        product = a.reshape(*a.shape[:stack], -1, RANK) @ b.reshape(*b.shape[:stack], RANK, -1)
        weight = weight + scale * product.reshape(weight.shape)
        if "magnitude" in adapter:
            axes = tuple(range(stack, stack + ins))
            norm = jax.lax.stop_gradient(jnp.sqrt(jnp.square(weight).sum(axes, keepdims=True)))
            weight = weight / norm * jnp.expand_dims(adapter["magnitude"], axes)
        params[name] = weight
    return params


def largest_difference(a, b):
    """Returns the largest difference of leaves, relative to the largest element of each."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - y).max() / np.abs(y).max()) for x, y in pairs)
