"""A layer of linear attention, `S = decay * S + k v'`, as a loop over time in each form that models write it in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from gathering import normal
from jax import lax

HEADS = 16


def step(decay, state, inputs):
    q, k, v = inputs
    state = decay[:, :, None] * state + k[..., :, None] * v[..., None, :]
    return state, jnp.einsum("...hk,...hkv->...hv", q, state)


def zeros(q):
    """Returns the state before the first step, which no example is part of."""
    return jnp.zeros((*q.shape[:-3], HEADS, q.shape[-1], q.shape[-1]), q.dtype)


def by_time(arrays):
    return jax.tree.map(lambda x: jnp.moveaxis(x, -3, 0), arrays)


def scanned(decay, *qkv):
    """All take queries, keys and values `[batch, time, heads, features]`."""
    states = functools.partial(step, decay)
    return jnp.moveaxis(lax.scan(states, zeros(qkv[0]), by_time(qkv))[1], 0, -3)


def by_example(decay, *qkv):
    return jax.vmap(functools.partial(scanned, decay))(*qkv)


def in_chunks(decay, *qkv):
    """A scan over chunks, each a rematerialized scan over time."""
    chunk = jax.checkpoint(lambda state, qkv: lax.scan(functools.partial(step, decay), state, qkv))
    chunks = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), by_time(qkv))
    outs = lax.scan(chunk, zeros(qkv[0]), chunks)[1]
    return jnp.moveaxis(outs.reshape(-1, *outs.shape[2:]), 0, -3)


def into_a_buffer(decay, *qkv):
    def body(i, carry):
        state, out = carry
        state, y = step(decay, state, [lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in qkv])
        return state, lax.dynamic_update_index_in_dim(out, y, i, 1)

    return lax.fori_loop(0, qkv[0].shape[1], body, (zeros(qkv[0]), jnp.zeros_like(qkv[0])))[1]


def in_a_branch(decay, *qkv):
    return lax.cond(decay.sum() > 0, functools.partial(scanned, decay), lambda *qkv: qkv[2], *qkv)


ONES = np.ones(HEADS, np.float32)


@jax.custom_vjp
def own_derivative(decay, *qkv):
    """It closes over a constant, by which its rule has no derivative, as JAX's `odeint` does."""
    return jax.jit(scanned)(decay * jnp.asarray(ONES, decay.dtype)[:, None], *qkv)


own_derivative.defvjp(
    lambda *args: (scanned(*args), args), lambda args, cotangent: jax.vjp(scanned, *args)[1](cotangent)
)

FORMS = [scanned, by_example, in_chunks, into_a_buffer, in_a_branch, own_derivative]


def init(d, num_layers):
    shapes = {name: (num_layers, d, d) for name in "qkvo"} | {"decay": (num_layers, d)}
    return {name: normal(*shape, scale=0.1) for name, shape in shapes.items()}


def loss(form, params, x):
    """Returns a mean square over `[batch, time, features]`, of rematerialized layers in a scan."""

    @jax.checkpoint
    def layer(x, params):
        qkv = [(x @ params[name]).reshape(*x.shape[:-1], HEADS, -1) for name in "qkv"]
        decay = jax.nn.sigmoid(params["decay"].reshape(HEADS, -1))
        return x + form(decay, *qkv).reshape(x.shape) @ params["o"], None

    return jnp.mean(jnp.square(lax.scan(layer, x, params)[0].astype(jnp.float32)))
