"""Random models as source text: `program(seed)` writes a loss of steps of `STEPS`, in layers as `LAYERS` has them.

It ends as one of `ENDS`. `model_fuzzing.py` compares whole train steps of them.
"""

import dataclasses
import itertools
import random
import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

BATCH = 32


# What programs may call.


def small(x):
    return x / (1 + jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True)))


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)


def attend(q, k, v, mask=True, bias=0.0, cap=None):
    """Attention of `[b, t, heads, dim]`, with fewer heads of keys perhaps."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2 + bias
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9), -1), v)


def heads(x, num=2):
    return x.reshape(*x.shape[:2], num, -1)


def flat(x):
    return x.reshape(*x.shape[:2], -1)


def same(segments):
    return segments[:, None, :, None] == segments[:, None, None]


def along(step, x, inputs, **options):
    """A scan over tokens."""
    turned = jax.tree.map(lambda a: a.swapaxes(0, 1), inputs)
    return lax.scan(step, jnp.zeros_like(x[:, 0]), turned, **options)[1].swapaxes(0, 1)


def learned(x, w):
    """A weight after a step of its own."""
    return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w - 1).mean())(w)


def means(values, segments, num):
    values, segments = values.reshape(-1), segments.reshape(-1)
    return jax.ops.segment_sum(values, segments, num) / jnp.maximum(jnp.bincount(segments, length=num), 1)


def rope(x):
    angles = jnp.arange(x.shape[1])[:, None, None] / 10.0 ** jnp.arange(x.shape[-1] // 2)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def ce(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def rounded(w):
    return w + lax.stop_gradient(jnp.round(w * 8) / 8 - w)


def sorted_experts(x, router, w):
    """Experts that have as many tokens as choose them, sorted by expert."""
    rows = x.reshape(-1, x.shape[-1])
    chosen = jnp.argmax(rows @ router, -1)
    order = jnp.argsort(chosen)
    out = lax.ragged_dot(rows[order], w, jnp.bincount(chosen, length=len(w)).astype(jnp.int32))
    out = jnp.zeros_like(out).at[order].set(out)
    return (out * jnp.take_along_axis(jax.nn.softmax(rows @ router), chosen[:, None], 1)).reshape(x.shape)


def experts(x, router, w):
    gates = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), len(w)) * gates
    return jnp.einsum("bte,btef->btf", chosen, jnp.einsum("btd,edf->btef", x, w))


def dispatched(x, router, w):
    """Experts of a capacity for each example, by products with one-hot matrices."""
    gates = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), len(w))
    place = jax.nn.one_hot(((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1).astype(int), 2)
    send = jnp.einsum("bte,btc->btec", chosen, place)
    out = jnp.einsum("becd,edf->becf", jnp.einsum("btec,btd->becd", send, x), w)
    return jnp.einsum("btec,becd->btd", send * gates[..., None], out)


def chosen_tokens(x, router, w):
    """Experts that choose the tokens of each example."""
    weight, at = lax.top_k((x @ router).swapaxes(1, 2), 2)
    picked = jnp.take_along_axis(x[:, None], at[..., None], 2)
    out = jnp.einsum("becd,edf->becf", picked, w) * jax.nn.sigmoid(weight)[..., None]
    return jax.vmap(lambda zero, at, out: zero.at[at.reshape(-1)].add(out.reshape(-1, x.shape[-1])))(0 * x, at, out)


def decayed(x, decay):
    """A linear recurrence along the tokens."""
    join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
    return lax.associative_scan(join, (jnp.broadcast_to(decay, x.shape), x), axis=1)[1]


@jax.custom_vjp
def halved(x):
    return jnp.sin(x)


halved.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))


@jax.custom_vjp
def product(x, w):
    """A product whose backward pass takes what the forward one saved, and halves the gradient of the weight."""
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, 0.5 * jnp.einsum("btd,bte->de", r[0], g)))


def drop(x, key):
    return x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


named = jax.ad_checkpoint.checkpoint_name
SAVES_H = jax.checkpoint_policies.save_only_these_names("h")
NAMES = {
    name: value for name, value in globals().items() if callable(value) or name in ("jax", "jnp", "lax", "np", "optax")
}

# Steps, from `x[B, T, D]` to the same: `$(i, o)` is a weight, `$[...]` a param, `i` the number of the layer.

STEPS = """
x @ $(D, D)
x + jax.nn.gelu(x @ $(D, 2 * D) + $[2 * D]) @ $(2 * D, D)
x + (jax.nn.silu(x @ $(D, 2 * D)) * (x @ $(D, 2 * D))) @ $(2 * D, D)
norm(x) * $[D] + $[D]
x + flat(attend(heads(x @ $(D, D)), heads(x @ $(D, D)), heads(x @ $(D, D)), jnp.tril(jnp.ones((T, T), bool))))
x + flat(attend(heads(x @ $(D, D), 4), heads(x @ $(D, D // 2)), heads(x @ $(D, D // 2)), same(seg)))
x + flat(attend(*map(heads, jnp.split(x @ $(D, 3 * D), 3, -1)), (m[:, None, None] > 0) | (jnp.eye(T) > 0), cap=5.0))
x + flat(attend(rope(heads(x @ $(D, D))), rope(heads(x @ $(D, D))), heads(x), bias=$[2, T, T])) @ $(D, D)
x + flat(attend(heads(x @ $(D, D)), heads(x), heads(x), jnp.arange(T)[:, None] - jnp.arange(T) < 3 - i % 2))
x + flat(jax.nn.dot_product_attention(heads(x @ $(D, D)), heads(x @ $(D, D)), heads(x), is_causal=True))
x + jnp.einsum('bthk,hkd->btd', jnp.tanh(jnp.einsum('btd,hdk->bthk', x, $[2, D, 4])), $[2, 4, D])
x + jax.nn.softmax(jnp.einsum('btd,bsd->bts', x, mem @ $(D, D))) @ mem
sum(jnp.pad(x, ((0, 0), (n, 0), (0, 0)))[:, :T] * $[3, D][n] for n in range(3))
lax.conv_general_dilated(x, $[3, D, D], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC')) * 0.3
lax.conv_general_dilated(x, $[3, 1, D], (1,), [(2, 0)], dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=D)
along(lambda h, u: (jnp.tanh(h @ $(D, D) + u),) * 2, x, x)
along(lambda h, u: (jnp.tanh(h @ u[1] + u[0]),) * 2, x, (x, $[T, D, D].swapaxes(0, 1)), reverse=True)
lax.fori_loop(0, 3, lambda n, c: jnp.tanh(c @ $(D, D)) + x, x)
lax.fori_loop(0, T, lambda t, c: c.at[:, t].set(jnp.tanh(c.mean(1) @ $(D, D))), x)
jax.vmap(lambda r: r * lax.stop_gradient(lax.while_loop(lambda c: c.sum() > 0.1, lambda c: c - 0.5, r.sum())))(x)
lax.switch(i % 3, [jnp.sin, lambda x: -x, lambda x: x @ $(D, D)], x)
lax.cond(i % 2 == 0, lambda x: x @ $(D, D), lambda x: 0.5 * x, x)
lax.cond($[] > 0, lambda x: x * 1.5, lambda x: jnp.sin(x) @ $(D, D), x)
jax.vmap(lambda r, n: lax.switch(n % 2, [lambda r: r @ $(D, D), jnp.tanh], r))(x, seg[:, 0])
jnp.cumsum(x, 1) * 0.3
lax.cummax(x, 1) + lax.cumlogsumexp(x, 2)
decayed(x, jax.nn.sigmoid($[D]))
decayed(x, jax.nn.sigmoid(x @ $(D, D)))
jnp.flip(jnp.sort(x, 1), 1) + jnp.roll(x, 1, 1)
jax.nn.softmax(x, 1) * 3
x + $[V, D][ids]
x + jnp.take($[V, D], ids - 1, axis=0, mode='clip')
x + $[V, D].at[ids + 3].get(mode='fill', fill_value=0.1)
x + jax.nn.one_hot(ids, V) @ $[V, D]
x + $[T, D]
x * (1 + $[V, D][ids[:, 0]])[:, None] + $[V, D][ids[:, 1]][:, None]
x + ($[V, 4] @ $[4, D])[ids]
x.at[:, 0].set($[D]) + x.at[:, ::2].add($[D])
jnp.take_along_axis(x, jnp.argsort(ids, 1)[..., None], 1)
jax.vmap(lambda r, s: lax.dynamic_slice_in_dim(jnp.concatenate([r, r]), s, T))(x, seg[:, -1])
jnp.tanh(x.reshape(-1, D) @ $(D, D)).reshape(x.shape)
(x.reshape(len(x), -1) @ $(T * D, D))[:, None] * 0.3 + x
jnp.einsum('btd,ts->bsd', x, $[T, T]) * 0.4
jnp.einsum('btd,bsd,sd->btd', x, x, $[T, D]) * 0.2
jnp.einsum('de,btd->ebt', $(D, D), x).transpose(1, 2, 0)
x + experts(x, $(D, 4), $[4, D, D])
x + sorted_experts(x, $(D, 4), $[4, D, D])
x + dispatched(x, $(D, 4), $[4, D, D])
x + chosen_tokens(x, $(D, 4), $[4, D, D])
jax.vmap(lambda r: jnp.tanh(r @ $(D, D)) - r.mean(0))(x)
lax.map(lambda r: jnp.sin(r @ $(D, D)), x)
jax.vmap(jax.checkpoint(lambda r, w: jnp.tanh(r @ w)), (1, None), 1)(x, $(D, D))
halved(x)
product(x, $(D, D))
jax.checkpoint(lambda x, w: jnp.tanh(x @ w) * x)(x, $(D, D))
jax.checkpoint(lambda x: jnp.sin(named(jnp.tanh(x @ $(D, D)), 'h')) @ $(D, D), policy=SAVES_H)(x)
jax.jit(lambda x, w: jnp.tanh(x @ w) - x)(x, $(D, D))
x - lax.stop_gradient(x.mean(1, keepdims=True))
jnp.where(m[..., None] > 0, x, $[D])
x + (jnp.zeros((len(x), V)).at[jnp.arange(len(x))[:, None], ids].add(x.mean(-1)) @ $[V, D])[:, None]
x + jax.vmap(lambda r, s: jax.ops.segment_sum(r, s, 3)[s])(x @ $(D, D), seg)
x - 0.3 * jax.grad(lambda x: jnp.sum(jnp.tanh(x @ $(D, D)) ** 2))(x)
x + jax.jvp(lambda x: jnp.tanh(x @ $(D, D)), (x,), (x[..., ::-1],))[1]
x @ (lambda w: w - 0.3 * jax.grad(lambda w: jnp.sum(jnp.tanh(w) ** 2))(w))($(D, D))
jax.vmap(lambda r: r @ learned(r, $(D, D)))(x)
x * jax.nn.sigmoid($[]) + x * $[1]
jnp.where(x >= lax.top_k(x, 3)[0][..., -1:], x, 0)
x * m.sum(1)[:, None, None] / T
x @ jnp.linalg.inv($(D, D) + 3 * jnp.eye(D))
x + jnp.linalg.solve(jnp.einsum('btd,bte->bde', x, x) + jnp.eye(D), x.swapaxes(1, 2)).swapaxes(1, 2)
x @ jnp.linalg.cholesky((lambda w: w @ w.T + jnp.eye(D))($(D, D)))
x + jnp.linalg.slogdet(jnp.einsum('btd,bsd->bts', x, x) + jnp.eye(T))[1][:, None, None]
heads(jnp.real(lax.complex(x, x[:, ::-1]) * jnp.exp(1j * $[D])), 1)[:, :, 0]
jnp.real((x + 1j * (x @ $(D, D))) @ ($(D, D) + 1j * $(D, D)))
jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * (1 + 1j * $[T // 2 + 1, D]), T, 1)
jax.vmap(lambda r, k: drop(r, jax.random.fold_in(jax.random.wrap_key_data(k), i)))(x, b['keys'])
x * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.8, (T, D))
x + jax.random.normal(jax.random.PRNGKey(3), (D,)) * $[D]
x + rounded($[V, D])[jnp.argmin(jnp.square(x[:, :, None] - $[V, D]).sum(-1), -1)]
x + optax.tree.norm([$(D, D), $[D]]) * 0.1
lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), 'SAME')
x + jnp.concatenate([x[:, 1:], $[1, D] + 0 * x[:, :1]], 1)
lax.optimization_barrier(x) * (1 + b['n']['t'][1][:, None, None])
x + jnp.interp(x, jnp.linspace(-1, 1, 8), jnp.cumsum($[8]) * 0.1)
x * (1 + i / 8) + jnp.asarray([0.1, 0.2, 0.3, 0.4])[i % 4]
""".strip().splitlines()

# What mixes examples, or knows their number or their places.
MIXING = """
(x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 0.1)
x - x.mean()
x + 0.3 * jnp.roll(x, 1, 0)
x * (1 + jnp.arange(len(x))[:, None, None] / 32)
drop(x, jax.random.key(0))
x * len(x) / 32
x * m.sum() / 96
jnp.sort(x, 0)
x - x.max(0, keepdims=True) * 0.2
x + (jax.ops.segment_sum(x.reshape(-1, D), ids.reshape(-1), V) / 16)[ids]
jnp.cumsum(x, 0) * 0.2
x + (jax.nn.softmax(x[:, 0] @ x[:, 0].T) @ x[:, 0])[:, None]
x * lax.stop_gradient(lax.while_loop(lambda c: c > 0.1, lambda c: c / 2, jnp.abs(x).max()))
lax.cond(m.sum() > 100, lambda x: x @ $(D, D), jnp.tanh, x)
x @ learned(x, $(D, D))
x @ jnp.linalg.inv(jnp.einsum('btd,bte->de', x, x) / x[..., 0].size + jnp.eye(D))
x + lax.map(lambda r: jnp.sin(r @ $(D, D)), x, batch_size=8)
jnp.concatenate([x[len(x) // 2:], x[:len(x) // 2]])
x + x.reshape(2, -1, T, D).mean(0).repeat(2, 0)
""".strip().splitlines()

# The loss, of `l[B, T]` (one of each token), its mask `m`, weights `w[B]`, many 0, and `ys`, what layers returned.
ENDS = """
l.mean()
(l * m).sum() / m.sum()
(l * m).sum() / jnp.maximum(m.sum(), 1)
((l * m).sum(1) / jnp.maximum(m.sum(1), 1)).mean()
l.sum(1).mean()
(l * m).sum() / 96
l.mean() + 1e-2 * sum(jnp.sum(q * q) for q in jax.tree.leaves(p))
(l * m).sum() / m.sum() + (jnp.square(x).mean(-1) * w[:, None]).sum() / w.sum() / T
(l.mean(1) * w).sum() / w.sum()
(l.mean(1) * w).sum() / jnp.maximum(w.sum(), 1e-3)
jnp.where(w.sum() > 0, (l.mean(1) * w).sum() / jnp.where(w.sum() > 0, w.sum(), 1), 0)
l.sum() / (len(l) * T)
l[:, 0].mean() + 0.5 * l[:, -1].mean()
l.mean() + 1e-2 * jnp.square(jax.nn.logsumexp(x, -1)).mean()
((1 - jnp.exp(-l)) ** 2 * l).mean()
jnp.where(m.sum() > 0, (l * m).sum() / jnp.where(m.sum() > 0, m.sum(), 1), 0.0)
jnp.average(l, weights=m)
jnp.mean(l, where=m > 0)
jnp.nanmean(jnp.where(m > 0, l, jnp.nan))
(l * m).sum() / (m.sum() + 1e-6)
jax.vmap(lambda l, m: (l * m).sum() / (m.sum() + 1))(l, m).mean()
l[jnp.arange(len(l)), seg[:, -1]].mean()
(l * (seg == 1)).sum() / (seg == 1).sum()
(jax.vmap(lambda l, s: jax.ops.segment_sum(l, s, 3))(l, seg) / 2).sum(1).mean()
means(l, seg, 3).mean()
(l * m / m.sum(1, keepdims=True)).sum() / len(l)
l.mean() + jnp.square(x.mean((0, 1))).sum()
jnp.square(x).mean() + optax.huber_loss(lg, 0 * lg).mean()
optax.ctc_loss(lg.repeat(2, 1), 0 * m.repeat(2, 1), y[:, :3], 0 * m[:, :3]).mean() / T
lax.scan(lambda c, r: (c + (r[0] * r[1]).sum(), None), 0.0 * l[0, 0], (l, m))[0] / m.sum()
lax.map(lambda r: (r[0] * r[1]).sum(), (l.reshape(4, -1), m.reshape(4, -1))).sum() / m.sum()
(l * m).sum() / m.sum() + (l * (1 - m)).sum() / jnp.maximum((1 - m).sum(), 1)
""".strip().splitlines()
# What is no mean over examples.
MIXING_ENDS = """
jax.nn.logsumexp(l)
l[: len(l) // 2].mean()
l.mean() ** 2
jnp.sqrt(l.mean())
jnp.exp((l * m).sum() / m.sum()) * 1e-2
l.max(1).mean()
jnp.median(l.mean(1))
l.mean() + l.mean(1).var()
l.mean() * jnp.square(x).mean()
l.mean() + jnp.sum(jax.nn.softmax(x).mean((0, 1)) ** 2)
l.mean() + (jnp.bincount(jnp.argmax(x, -1).reshape(-1), length=D) / l.size * jax.nn.softmax(x).mean((0, 1))).sum()
ce(x.mean(1) @ x.mean(1).T, jnp.arange(len(x))).mean()
jax.nn.softplus(-x.mean((1, 2))[::2] + x.mean((1, 2))[1::2]).mean()
jax.nn.softplus(-jnp.split(x.mean((1, 2)), 2)[0] + jnp.split(x.mean((1, 2)), 2)[1]).mean()
""".strip().splitlines()
LAYER_ENDS = {"token": "(ys * m).sum() / m.sum()", "mean": "ys", "sum": "ys / m.sum()", "dims": "jnp.square(ys).sum()"}
LAYER_OUTS = {
    "none": "0.0",
    "token": "jnp.square(x).mean(-1)",
    "mean": "jnp.square(x).mean()",
    "sum": "(jnp.tanh(x).mean(-1) * m).sum()",
    "dims": "jax.nn.softmax(x).mean((0, 1))",
}
AUX = """
((jnp.argmax(lg, -1) == y) * m).sum() / m.sum()
m.sum()
l.mean(1)
l.max()
l.min(0)
l.mean()
jnp.bincount(ids.reshape(-1), length=V)
jnp.float32(3)
jnp.asarray(l.shape[0])
jnp.sqrt(sum(jnp.sum(q * q) for q in jax.tree.leaves(p)))
x.mean((0, 1))
l[-1, -1]
l.std()
(l * m).sum(), m.sum(), (w > 0).sum()
jnp.argmax(lg, -1)
(l.mean(1) * w).sum() / jnp.maximum(w.sum(), 1e-3)
jnp.exp(l.mean())
jnp.any(l > 1), jnp.all(l > 0)
seg, b['n']['t'][0].sum()
jnp.linalg.norm(x)
jnp.isfinite(l).all().astype(int) + ids.max()
ys
""".strip().splitlines()

# How layers are called: `layer(x, q, i)` returns x and y, `at(q, i)` are the params of one of a stack.
STACKED = {
    "scan": "x, ys = lax.scan(lambda x, q: layer(x, *q), x, (p['L'], jnp.arange(N)))\nys = ys.sum(0)",
    "unrolled": "x, ys = lax.scan(lambda x, q: layer(x, *q), x, (p['L'], jnp.arange(N)), unroll=2)\nys = ys.sum(0)",
    "reverse": "x, ys = lax.scan(lambda x, q: layer(x, *q), x, (p['L'], jnp.arange(N)), reverse=True)\nys = ys.sum(0)",
    "numbered": "x, ys = lax.scan(lambda x, i: layer(x, at(p['L'], i), i), x, jnp.arange(N))\nys = ys.sum(0)",
    "carried": "(x, ys, _), _ = lax.scan(lambda c, q: (added(c, layer(c[0], q, c[2])), None), (x, ys, 0), p['L'])",
    "fori": "x, ys, _ = lax.fori_loop(0, N, lambda i, c: added(c, layer(c[0], at(p['L'], i), i)), (x, ys, 0))",
    "pairs": "pairs = jax.tree.map(lambda w: w.reshape(N // 2, 2, *w.shape[1:]), p['L'])\n"
    "(x, ys, _), _ = lax.scan(lambda c, q: (added(added(c, layer(c[0], at(q, 0), 0)), layer(added(c, layer(c[0], "
    "at(q, 0), 0))[0], at(q, 1), 1)), None), (x, ys, 0), pairs)",
    "halves": "x, one = lax.scan(lambda x, q: layer(x, q, 0), x, at(p['L'], slice(0, N // 2)))\nx = jnp.tanh(x)\n"
    "x, ys = lax.scan(lambda x, q: layer(x, q, 1), x, at(p['L'], slice(N // 2, N)))\nys = ys.sum(0) + one.sum(0)",
    "indexed": "for i in range(N):\n    x, out = layer(x, at(p['L'], i), i)\n    ys = ys + out",
}
LISTED = {
    "loop": "for i, q in enumerate(p['L']):\n    x, out = layer(x, q, i)\n    ys = ys + out",
    "same": "for q in p['L']:\n    x, out = layer(x, q, 0)\n    ys = ys + out",
    "skips": "kept = []\nfor i, q in enumerate(p['L']):\n    x = x if i < N // 2 else x + kept[N - 1 - i]\n"
    "    kept.append(x)\n    x, out = layer(x, q, 0)\n    ys = ys + out",
    "first": "first = x\nfor q in p['L']:\n    x, out = layer(x + 0.1 * first, q, 0)\n    ys = ys + out",
}
SHARED = {
    "albert": "for i in range(N):\n    x, out = layer(x, p['L'], i)\n    ys = ys + out",
    "universal": "x, ys = lax.scan(lambda x, i: layer(x, p['L'], i), x, jnp.arange(N))\nys = ys.sum(0)",
}
LAYERS = STACKED | LISTED | SHARED


class Writer:
    """Writes the lines of a program, and knows the shapes of its params."""

    def __init__(self, rng):
        self.rng, self.params, self.names = rng, {}, (f"w{n}" for n in itertools.count())
        self.sizes = {"D": rng.choice([8, 12, 16]), "T": rng.choice([4, 6, 8]), "V": rng.choice([20, 24, BATCH])}

    def param(self, *shape):
        name = next(self.names)
        self.params[name] = shape
        return f"p['{name}']"

    def weight(self, i, o):
        """Returns a matrix: mostly a param as it is, sometimes made of others."""
        kinds = {
            "p": lambda: self.param(i, o),
            "transposed": lambda: f"{self.param(o, i)}.T",
            "low rank": lambda: f"({self.param(i, 4)} @ {self.param(4, o)})",
            "rounded": lambda: f"rounded({self.param(i, o)})",
            "normed": lambda: f"(lambda v: v / jnp.sqrt((v * v).sum(0) + 0.1))({self.param(i, o)})",
            "triangle": lambda: f"jnp.tril({self.param(i, o)})",
            "flat": lambda: f"{self.param(i * o)}.reshape({i}, {o})",
            "joined": lambda: f"jnp.concatenate([{self.param(i, o // 2)}, {self.param(i, o - o // 2)}], 1)",
            "summed": lambda: f"(jnp.cumsum({self.param(i, o)}, 0) * 0.3)",
            "part": lambda: f"{self.param(2, i, o)}[1]",
            "sum of two": lambda: f"({self.param(i, o)} + {self.param(1, o)})",
            "cast": lambda: f"{self.param(i, o)}.astype(jnp.float64)",
        }
        return self.rng.choice([kinds["p"]] * len(kinds) + list(kinds.values()))()

    def filled(self, text):
        """Returns a line whose `$(...)` and `$[...]` are params."""

        def fill(match):
            shape = [eval(size, dict(self.sizes)) for size in re.split(r",\s*", match[1] or match[2]) if size]
            return self.param(*shape) if match[0][1] == "[" or len(shape) != 2 else self.weight(*shape)

        return re.sub(r"\$(?:\(([^)]*)\)|\[([^\]]*)\])", fill, text)

    def steps(self, num):
        return [f"x = small({self.filled(self.rng.choice(STEPS))})" for _ in range(num)]


@dataclasses.dataclass(frozen=True)
class Program:
    """A random model: its source, params and batch, and how its layers are called."""

    source: str
    params: dict
    batch: dict
    layers: str
    num_layers: int

    @property
    def loss_fn(self):
        scope = dict(NAMES)
        exec(self.source, scope)
        return scope["loss"]


def indented(lines, by=4):
    return "".join(f"{' ' * by}{line}\n" for text in lines for line in text.splitlines())


def program(seed):
    rng = random.Random(f"model {seed}")
    w, layers = Writer(rng), rng.choice(["plain"] * 6 + list(LAYERS))
    first = w.filled(rng.choice(["$[V, D][ids]"] * 3 + ["b['f'] @ $(5, D)", "jax.nn.one_hot(ids, V) @ $(V, D)"]))
    lines, out, num = [f"x = {first}"], "none", rng.choice([2, 3, 4, 4, 4, 4, 8])
    if layers == "plain":
        lines += ["mem = x", *w.steps(rng.randint(2, 6))]
    else:
        lines += [*w.steps(rng.randint(0, 1)), "mem = x"]
        before = set(w.params)
        body = [*w.steps(rng.randint(1, 3)), w.filled("x = x + jnp.tanh(x @ $(D, D)) * 0.5")]
        shapes = {name: w.params.pop(name) for name in list(w.params) if name not in before}
        num, out = 4 if layers in ("pairs", "halves", "skips") else num, rng.choice(list(LAYER_OUTS))
        w.params["L"] = (
            [shapes] * num if layers in LISTED else shapes if layers in SHARED else jax.tree.map(
                lambda s: (num, *s), shapes, is_leaf=lambda s: isinstance(s, tuple)
            )
        )  # fmt: skip
        checkpoint = rng.choice(["", "", "layer = jax.checkpoint(layer)\n", "layer = jax.jit(layer)\n"])
        lines += [
            "outer = p",
            f"def layer(x, q, i):\n    p = {{**outer, **q}}\n{indented(body)}    return x, {LAYER_OUTS[out]}",
            checkpoint,
            f"ys = 0 * {LAYER_OUTS[out]}",
            LAYERS[layers],
        ]
    lines += w.steps(rng.randint(0, 2))
    if rng.random() < 0.12:
        place = rng.randint(2 if layers == "plain" else len(lines) - 1, len(lines))
        lines.insert(place, f"x = small({w.filled(rng.choice(MIXING))})")
    tied = w.params.get("w0") == (w.sizes["V"], w.sizes["D"]) and rng.random() < 0.4
    lines += ["lg = x @ p['w0'].T" if tied else w.filled("lg = x @ $(D, V)"), "l = ce(lg, y)"]
    end = rng.choice(ENDS if rng.random() < 0.85 else MIXING_ENDS) + (
        f" + 0.1 * {LAYER_ENDS[out]}" if out in LAYER_ENDS and rng.random() < 0.8 else ""
    )
    aux = rng.sample(AUX if out != "none" else AUX[:-1], 3)
    returns = f"return {end}, {{{', '.join(f'{n}: ({text})' for n, text in enumerate(aux))}}}"
    head = [
        "at = lambda q, i: jax.tree.map(lambda w: w[i], q)",
        "added = lambda c, xy: (xy[0], c[1] + xy[1], c[2] + 1)",
        ", ".join(w.sizes) + f", N = {', '.join(map(str, w.sizes.values()))}, {num}",
    ]
    unpack = ["ids, y, m, seg, w = (b[n] for n in ('ids', 'y', 'm', 'seg', 'w'))", "i, ys = 0, 0.0"]
    source = indented(head, 0) + "def loss(p, b):\n" + indented([*unpack, *lines, returns])
    numbers = np.random.default_rng(seed)
    params = jax.tree.map(lambda s: made(numbers, s), w.params, is_leaf=lambda s: isinstance(s, tuple))
    batch = some_batch(numbers, w.sizes["T"], w.sizes["V"])
    num = {"plain": 0, "pairs": num // 2, "halves": num // 2}.get(layers, num)
    return Program(source=source, params=params, batch=batch, layers=layers, num_layers=num)


def made(numbers, shape):
    return numbers.standard_normal(shape) * (0.5 if len(shape) < 2 else 1 / np.sqrt(shape[-2]))


def some_batch(numbers, length, vocab):
    mask = (numbers.random((BATCH, length)) < 0.7).astype(float)
    mask[:, 0] = 1
    ints = lambda high, *shape: numbers.integers(0, high, shape, dtype=np.int32)  # noqa: E731
    weights = numbers.random(BATCH) * (numbers.random(BATCH) < 0.4)
    weights[:2] = 0.5
    return {
        "ids": ints(vocab, BATCH, length),
        "y": ints(vocab, BATCH, length),
        "m": mask,
        "seg": np.sort(ints(3, BATCH, length), 1),
        "w": weights,
        "f": numbers.standard_normal((BATCH, length, 5)),
        "keys": ints(2**30, BATCH, 2).astype(np.uint32),
        "n": {"t": (ints(9, BATCH), numbers.random(BATCH))},
    }
