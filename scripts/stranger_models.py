"""Models as people write them who know nothing of zero_jax, with widths that compile in seconds: `compare_by_hand.py`.

`MODELS` has by name the loss function, the function that makes params, and the shapes of a batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

EXAMPLES, TOKENS, FEATURES, HEADS, EXPERTS, VOCABULARY = 128, 512, 1024, 8, 8, 8192
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
Shape = jax.ShapeDtypeStruct


def weights(key: jax.Array, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns small random arrays."""
    keys = jax.random.split(key, len(shapes))
    return {name: 0.02 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def layers(key: jax.Array, number: int, **shapes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """Returns the params of the layers of a Python loop."""
    return [weights(k, **shapes) for k in jax.random.split(key, number)]


def norm(x: jax.Array) -> jax.Array:
    """Normalizes features."""
    wide = x.astype(jnp.float32)
    return ((wide - wide.mean(-1, keepdims=True)) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def attend(x: jax.Array, w: Any, bias: Any = 0.0) -> jax.Array:
    """Adds causal attention."""
    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
    y = norm(x) * w["scale"]
    q, k, v = (heads(y @ w[name]) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1]) + bias
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
    return x + out.reshape(x.shape) @ w["o"]


ATTENTION = {"scale": (FEATURES,), **dict.fromkeys("qkvo", (FEATURES, FEATURES))}
MLP = {"up": (FEATURES, 4 * FEATURES), "down": (4 * FEATURES, FEATURES)}


def alibi(params: Any, tokens: jax.Array) -> jax.Array:
    """A transformer with ALiBi and tied embeddings."""
    x, place = params["embed"][tokens[:, :-1]], jnp.arange(tokens.shape[1] - 1)
    bias = -(2.0 ** -jnp.arange(1, HEADS + 1))[:, None, None] * jnp.abs(place[:, None] - place)
    for w in params["layers"]:
        x = attend(x, w, bias)
        x = x + jax.nn.gelu(norm(x) * w["mlp_scale"] @ w["up"]) @ w["down"]
    return cross_entropy((norm(x) @ params["embed"].T).astype(jnp.float32), tokens[:, 1:]).mean()


def einsum_experts(params: Any, x: jax.Array) -> jax.Array:
    """Experts with a capacity, tokens sent to them and back by one-hot products."""
    target, capacity = x, x.shape[1] // EXPERTS
    for w in params:
        x = attend(x, w)
        share = jax.nn.softmax((x @ w["router"]).astype(jnp.float32))
        chosen = jax.nn.one_hot(share.argmax(-1), EXPERTS)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        sent = (jax.nn.one_hot(place, capacity) * chosen[..., None]).astype(x.dtype)
        y = jnp.einsum("btec,btd->ebcd", sent, norm(x))
        y = jnp.einsum("ebcf,efd->ebcd", jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", y, w["up"])), w["down"])
        x = x + jnp.einsum("ebcd,btec->btd", y, sent * (share * chosen).sum(-1)[..., None, None].astype(x.dtype))
    return jnp.square((x - target).astype(jnp.float32)).mean()


def gan(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """A generator and a discriminator, both losses and a gradient penalty in one."""
    real, noise = batch

    def score(w, x):
        return (jax.nn.leaky_relu(jax.nn.leaky_relu(x @ w["in"]) @ w["hidden"]) @ w["out"])[:, 0].astype(jnp.float32)

    w, made = params["discriminator"], jnp.tanh(jax.nn.relu(noise @ params["in"]) @ params["out"])
    loss = jax.nn.softplus(-score(w, real)) + jax.nn.softplus(score(w, lax.stop_gradient(made)))
    slope = jax.vmap(jax.grad(lambda x: score(w, x[None])[0]))(real).astype(jnp.float32)
    return (loss + jax.nn.softplus(-score(lax.stop_gradient(w), made)) + jnp.square(slope).sum(-1)).mean()


def two_views(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """One network on two views of each example, as in SimSiam."""

    def encode(x):
        for w in params["layers"]:
            x = x + jax.nn.gelu(norm(x) * w["scale"] @ w["up"]) @ w["down"]
        return x

    def likeness(x, y):
        x, y = (z / jnp.linalg.norm(z.astype(jnp.float32), axis=-1, keepdims=True) for z in (x, lax.stop_gradient(y)))
        return (x * y).sum(-1).mean()

    one, other = (encode(x) for x in batch)
    return -likeness(one @ params["head"], other) - likeness(other @ params["head"], one)


def resnet(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Residual blocks of convolutions with batch norm."""
    images, labels = batch
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    batch_norm = lambda x: (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)  # noqa: E731
    x = conv(images, params["stem"])
    for w in params["layers"]:
        y = jax.nn.relu(batch_norm(conv(x, w["one"])) * w["scale"] + w["bias"])
        x = jax.nn.relu(x + batch_norm(conv(y, w["two"])))
    return cross_entropy((x.mean((1, 2)) @ params["head"]).astype(jnp.float32), labels).mean()


def graph(params: Any, batch: tuple[jax.Array, ...]) -> jax.Array:
    """Messages along the edges of each example's graph, summed by `segment_sum`."""
    nodes, source, target = batch

    def sums(w, x, i, j):
        return jax.ops.segment_sum(jax.nn.relu(jnp.concatenate([x[i], x[j]], -1) @ w["message"]), j, len(x))

    for w in params:
        nodes = nodes + norm(jax.vmap(sums, (None, 0, 0, 0))(w, nodes, source, target)) @ w["update"]
    return jnp.square(nodes.mean(1).astype(jnp.float32)).mean()


ROWS = Shape((EXAMPLES * 64, FEATURES), jnp.float32)
TEXT = Shape((EXAMPLES, TOKENS + 1), jnp.int32)
SEQUENCES = Shape((EXAMPLES, TOKENS, FEATURES), jnp.float32)
EXPERT = {"up": (EXPERTS, FEATURES, 2 * FEATURES), "down": (EXPERTS, 2 * FEATURES, FEATURES)}
MODELS: dict[str, Any] = {
    "alibi": (
        alibi,
        lambda key: {
            **weights(key, embed=(VOCABULARY, FEATURES)),
            "layers": layers(key, 3, **ATTENTION, **MLP, mlp_scale=(FEATURES,)),
        },
        TEXT,
    ),
    "einsum_experts": (
        einsum_experts,
        lambda key: layers(key, 2, **ATTENTION, **EXPERT, router=(FEATURES, EXPERTS)),
        SEQUENCES,
    ),
    "gan": (
        gan,
        lambda key: {
            **weights(key, **{"in": (128, FEATURES), "out": (FEATURES, FEATURES)}),
            "discriminator": weights(
                key, **{"in": (FEATURES, 2 * FEATURES), "hidden": (2 * FEATURES, FEATURES), "out": (FEATURES, 1)}
            ),
        },
        (ROWS, Shape((EXAMPLES * 64, 128), jnp.float32)),
    ),
    "two_views": (
        two_views,
        lambda key: {
            **weights(key, head=(FEATURES, FEATURES)),
            "layers": layers(key, 2, **MLP, scale=(FEATURES,)),
        },
        (ROWS, ROWS),
    ),
    "resnet": (
        resnet,
        lambda key: {
            **weights(key, stem=(3, 3, 3, 256), head=(256, 1000)),
            "layers": layers(key, 3, one=(3, 3, 256, 256), two=(3, 3, 256, 256), scale=(256,), bias=(256,)),
        },
        (Shape((EXAMPLES, 32, 32, 3), jnp.float32), Shape((EXAMPLES,), jnp.int32)),
    ),
    "graph": (
        graph,
        lambda key: layers(key, 2, message=(2 * FEATURES, FEATURES), update=(FEATURES, FEATURES)),
        (
            Shape((EXAMPLES, 128, FEATURES), jnp.float32),
            Shape((EXAMPLES, 512), jnp.int32),
            Shape((EXAMPLES, 512), jnp.int32),
        ),
    ),
}
