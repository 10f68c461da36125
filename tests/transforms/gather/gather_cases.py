"""Functions of params for the tests of `gather_on_use`, each a way to use params that models have.

`CASES` holds them by name, with their params and what is gathered before its use.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gathering import (
    BATCH_SIZE,
    FEATURES,
    HIDDEN,
    LAYERS,
    LENGTH,
    ROWS,
    block,
    examples,
    mlp,
    normal,
    stacked,
    tokens,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

policies = jax.checkpoint_policies


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    early: tuple[str, ...]  # what is gathered before its use
    options: dict[str, Any]


CASES: dict[str, Case] = {}


def case(params, *args, early=(), name=None, **options):
    """Registers a scalar function of params, to be checked against itself untransformed."""

    def register(fn):
        CASES[name or fn.__name__] = Case(fn, params, args, early, options)
        return fn

    return register


def mean_square(x):
    return jnp.mean(jnp.square(x))


# --- layers, unscanned and scanned, with and without jax.checkpoint --------------------------------------------------


def python_loop(remat, params, x):
    for layer in params:
        x = (remat(block) if remat else block)(x, layer)
    return mean_square(x)


def scanned_loop(remat, params, x):
    return mean_square(lax.scan(lambda x, layer: ((remat(block) if remat else block)(x, layer), None), x, params)[0])


def named_block(x, params):
    hidden = checkpoint_name(jnp.tanh(x @ checkpoint_name(params["up"], "weight")), "hidden")
    return x + hidden @ checkpoint_name(params["down"].T, "weight").T


REMATS = {
    "kept": None,
    "remat": jax.checkpoint,
    "dots_saveable": functools.partial(jax.checkpoint, policy=policies.dots_saveable),
    "everything_saveable": functools.partial(jax.checkpoint, policy=policies.everything_saveable),
    "names": lambda _: jax.checkpoint(named_block, policy=policies.save_only_these_names("hidden", "weight")),
    "anything_but": lambda _: jax.checkpoint(named_block, policy=policies.save_anything_except_these_names("weight")),
}

for _name, _remat in REMATS.items():
    case([mlp(seed) for seed in range(LAYERS)], examples(), name=f"loop, {_name}")(
        functools.partial(python_loop, _remat)
    )
    case(stacked(LAYERS), examples(), name=f"scan, {_name}")(functools.partial(scanned_loop, _remat))


@case(mlp(), examples())
def checkpointed_whole(params, x):
    return jax.checkpoint(lambda params, x: mean_square(block(x, params)))(params, x)


# --- loops -----------------------------------------------------------------------------------------------------------


@case(stacked(LAYERS), examples())
def reverse_scan(params, x):
    x, means = lax.scan(lambda x, layer: (block(x, layer), x.mean()), x, params, reverse=True, unroll=2)
    return mean_square(x) + means.sum()


@case(stacked(2, LAYERS), examples())
def nested_scans(params, x):
    return mean_square(lax.scan(lambda x, group: (scanned_layers(x, group), None), x, params)[0])


def scanned_layers(x, params):
    return lax.scan(lambda x, layer: (block(x, layer), None), x, params)[0]


@case(mlp(), examples(), early=("down", "up"))
def params_as_carry(params, x):
    def descend(params, x):
        grads = jax.grad(lambda params: mean_square(block(x, params)))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    params, _ = lax.scan(descend, params, x.reshape(2, 8, FEATURES))
    return mean_square(block(x, params))


def rnn(params, x):
    def cell(h, x):
        return jnp.tanh(h @ params["recurrent"] + x @ params["input"]), None

    return mean_square(lax.scan(cell, jnp.zeros(x.shape[1:]), x)[0])


RNN = {"recurrent": normal(FEATURES, FEATURES, seed=5), "input": normal(FEATURES, FEATURES, seed=6)}
SEQUENCES = normal(LENGTH, BATCH_SIZE, FEATURES, seed=7, scale=1.0)
case(RNN, SEQUENCES, name="rnn, gathered once")(rnn)
case(RNN, SEQUENCES, name="rnn, gathered in each iteration", max_hoisted_bytes=0)(rnn)


@case(RNN | {"bias": normal(FEATURES)}, SEQUENCES)
def shared_by_steps_of_a_python_loop(params, x):
    h = jnp.zeros(x.shape[1:])
    for step in x:
        inputs = jax.checkpoint(jnp.matmul)(step, params["input"])
        h = jnp.tanh(h @ params["recurrent"] + inputs + params["bias"] @ params["recurrent"].T)
    return mean_square(h)


@case(RNN | {"bias": normal(FEATURES), "out": normal(2 * FEATURES, FEATURES)}, SEQUENCES)
def recurrent_params_in_many_forms(params, x):
    def cell(carry, x):
        h, c = carry
        both = jnp.concatenate([h, x], axis=-1) @ jnp.concatenate([params["recurrent"], params["input"]])
        c = jax.nn.sigmoid(both + params["bias"]) * c + jax.jit(jnp.matmul)(x, params["recurrent"].T)
        h = jax.checkpoint(jnp.tanh)(jnp.concatenate([h, c], axis=-1) @ params["out"])
        return (h, c), jnp.einsum("ij,bj->bi", params["input"], x)

    zeros = jnp.zeros(x.shape[1:])
    (h, _), ys = lax.scan(cell, (zeros, zeros), x)
    return mean_square(h) + mean_square(ys)


@case(RNN, SEQUENCES)
def recurrent_params_in_nested_loops(params, x):
    def outer(h, x):
        def inner(_, h):
            return jnp.tanh(h @ params["recurrent"] + x @ params["input"])

        return lax.fori_loop(0, 2, inner, h), (h @ params["input"]).sum()

    h, sums = lax.scan(jax.checkpoint(outer), jnp.zeros(x.shape[1:]), x)
    return mean_square(h) + sums.mean()


@case(RNN, SEQUENCES)
def recurrent_params_of_each_example(params, x):
    def run(x):
        def cell(h, x):
            return jnp.tanh(params["recurrent"] @ h + params["input"] @ x), None

        return lax.scan(cell, jnp.zeros(FEATURES), x)[0]

    return mean_square(jax.vmap(run, in_axes=1)(x))


@case(stacked(LAYERS), examples())
def fori_loop_over_layers(params, x):
    return mean_square(lax.fori_loop(0, LAYERS, lambda i, x: block(x, jax.tree.map(lambda p: p[i], params)), x))


@case(stacked(LAYERS), examples())
def scan_over_layer_numbers(params, x):
    def layer(x, i):
        pick = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        return block(x, {"up": pick(params["up"]), "down": jnp.take(params["down"], i, axis=0)}), None

    return mean_square(lax.scan(layer, x, jnp.arange(LAYERS))[0])


@case({"w": normal(FEATURES, HIDDEN)}, examples())
def map_over_examples(params, x):
    return mean_square(lax.map(lambda x: x @ params["w"], x))


@case({"w": normal(FEATURES, FEATURES)}, examples())
def associative_scan(params, x):
    return mean_square(lax.associative_scan(jnp.matmul, x[:4, :, None] * params["w"]))


@case({"w": normal(8, FEATURES, FEATURES)}, examples())
def scan_over_the_sharded_dim(params, x):
    return mean_square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0])


CASES["scan_over_the_sharded_dim"].options["specs"] = {"w": P("data")}


# --- branches and functions with their own derivatives ---------------------------------------------------------------


@case(mlp(), examples())
def cond(params, x):
    return mean_square(lax.cond(x.sum() > 0, lambda: block(x, params), lambda: x @ params["up"] @ params["down"]))


@case(mlp() | {"bias": normal(HIDDEN)}, examples())
def cond_with_operands(params, x):
    def yes(params, x):
        return block(x, params)

    def no(params, x):
        return x * params["bias"].sum()

    return mean_square(lax.cond(x.sum() < 1e3, no, yes, params, x))


@case(stacked(LAYERS), examples())
def switch(params, x):
    branches = [lambda x, i=i: block(x, jax.tree.map(lambda p: p[i], params)) for i in range(LAYERS)]
    return mean_square(lax.switch((x.sum() > -1e3).astype(int) + 1, branches, x))


@jax.custom_jvp
def sine_jvp(x, w):
    return jnp.sin(x @ w)


@sine_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return sine_jvp(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)


@case(mlp(), examples())
def custom_jvp(params, x):
    return mean_square(sine_jvp(x, params["up"]) @ params["down"])


@jax.custom_vjp
def sine_vjp(x, w):
    return jnp.sin(x @ w)


def sine_backward(residuals, cotangent):
    x, w = residuals
    cotangent = cotangent * jnp.cos(x @ w)
    return cotangent @ w.T, x.T @ cotangent


sine_vjp.defvjp(lambda x, w: (sine_vjp(x, w), (x, w)), sine_backward)


@case(mlp(), examples())
def custom_vjp(params, x):
    return mean_square(sine_vjp(x, params["up"]) @ params["down"])


@case(mlp(), examples())
def gradient_inside(params, x):
    return mean_square(jax.grad(lambda x: jnp.sum(block(x, params) ** 2))(x))


@case(mlp(), examples())
def jit_inside(params, x):
    return mean_square(jax.jit(block)(x, params))


@case({"w": normal(FEATURES, FEATURES)}, examples())
def linear_solve(params, x):
    return mean_square(jnp.linalg.solve(3 * jnp.eye(FEATURES) + params["w"], x.T))


# --- lookups ---------------------------------------------------------------------------------------------------------

TABLE = {"table": normal(ROWS, FEATURES, seed=8), "w": normal(FEATURES, FEATURES, seed=9)}


@case(TABLE, tokens())
def tied_embedding(params, tokens):
    return mean_square(jnp.tanh(params["table"][tokens] @ params["w"]) @ params["table"].T)


@case(TABLE, tokens())
def take(params, tokens):
    taken = jnp.take(params["table"], tokens, axis=0) + jnp.take(params["table"], tokens, axis=0, mode="clip")
    return mean_square(taken @ params["w"])


@case(TABLE, tokens())
def one_hot(params, tokens):
    return mean_square(jax.nn.one_hot(tokens, ROWS) @ params["table"] @ params["w"])


@case(TABLE, tokens())
def vmapped_lookup(params, tokens):
    rows = jax.vmap(jax.vmap(lambda token: params["table"][token]))(tokens)
    along = jax.vmap(lambda row: jnp.take_along_axis(params["table"], row[:, None], axis=0))(tokens)
    return mean_square((rows + along) @ params["w"])


@case(TABLE, tokens())
def checkpointed_lookup(params, tokens):
    return mean_square(jax.checkpoint(lambda params: jnp.tanh(params["table"][tokens]) @ params["w"])(params))


@case({"table": normal(ROWS, FEATURES), "position": normal(64, FEATURES, seed=1)}, tokens())
def position_tables(params, tokens):
    x = params["table"][tokens]
    x += params["position"][:LENGTH] + lax.dynamic_slice_in_dim(params["position"], tokens[0, 0], LENGTH)
    return mean_square(x + jnp.take(params["position"], jnp.arange(LENGTH), axis=0))


@case({"experts": normal(8, FEATURES, HIDDEN), "router": normal(FEATURES, 8)}, examples())
def experts(params, x):
    weights = jax.nn.softmax(x @ params["router"])
    everywhere = jax.vmap(lambda w: x @ w)(params["experts"])
    chosen = params["experts"][jnp.argmax(weights, axis=-1)]
    return mean_square(jnp.einsum("be,ebf->bf", weights, everywhere) + jnp.einsum("bd,bdf->bf", x, chosen))


# --- params among themselves -----------------------------------------------------------------------------------------


@case({"qkv": normal(FEATURES, 3 * FEATURES), "out": normal(2, 8, FEATURES)}, normal(BATCH_SIZE, LENGTH, FEATURES))
def attention(params, x):
    query, key, value = jnp.split(params["qkv"], 3, axis=-1)
    q_BTHK, k_BTHK = ((x @ w).reshape(*x.shape[:2], 2, 8) for w in (query, key))
    v_BTHK = jnp.einsum("btd,dhk->bthk", x, value.reshape(FEATURES, 2, 8))
    y_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True)
    return mean_square(jnp.einsum("bthk,hkd->btd", y_BTHK, params["out"]))


@case({"a": normal(FEATURES, HIDDEN), "b": normal(FEATURES, HIDDEN, seed=1), "c": normal(HIDDEN, FEATURES)}, examples())
def concatenations(params, x):
    rows = jnp.concatenate([params["a"], params["b"]], axis=0).reshape(2, FEATURES, HIDDEN).sum(0)
    columns = jnp.concatenate([params["a"], params["b"]], axis=1)
    stack = jnp.stack([params["a"], params["c"].T])
    return mean_square(x @ rows) + mean_square(x @ columns) + mean_square(jnp.einsum("bd,sdf->bsf", x, stack))


@case([normal(FEATURES, FEATURES, seed=seed) for seed in range(LAYERS)], examples())
def stacked_in_the_loss(params, x):
    return mean_square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))[0])


@case({"w": normal(FEATURES, HIDDEN)}, examples())
def reshapes(params, x):
    w = params["w"]
    ways = [
        w.reshape(-1).reshape(HIDDEN, FEATURES).T,
        w.T.reshape(4, 8, FEATURES).swapaxes(0, 2).reshape(FEATURES, HIDDEN),
        w[None, :, None].squeeze(2)[0],
        w.reshape(2, 8, 4, 8).transpose(1, 3, 0, 2).reshape(64, 8).reshape(FEATURES, HIDDEN),
    ]
    slices = [x @ w[::-1], x @ w[:, ::2], x[:, :4] @ w[4:8], x @ w[:, 3:5]]
    return sum(mean_square(x @ way) for way in ways) + sum(map(mean_square, slices))


LORA = {"w": normal(FEATURES, FEATURES), "a": normal(FEATURES, 8), "b": normal(8, FEATURES)}


@case(LORA, examples())
def lora(params, x):
    return mean_square(x @ (params["w"] + 0.5 * params["a"] @ params["b"]))


STACKED_LORA = jax.tree.map(lambda p: np.stack([p] * LAYERS), LORA)


@case(STACKED_LORA, examples())
def lora_merged_before_the_scan(params, x):
    merged = params["w"] + jnp.einsum("ldr,lrf->ldf", params["a"], params["b"])
    return mean_square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, merged)[0])


@case({"a": STACKED_LORA["a"], "b": STACKED_LORA["b"]}, examples(), early=("a and b",))
def factors_multiplied_before_the_scan(params, x):
    products = jnp.einsum("ldr,lrf->ldf", params["a"], params["b"])
    return mean_square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, products)[0])


@case(mlp() | {"unused": normal(FEATURES, FEATURES), "only_decayed": normal(HIDDEN)}, examples())
def regularizers(params, x):
    kernels = {name: params[name] for name in ("up", "down", "only_decayed")}
    decay = sum(jnp.sum(w**2) + jnp.abs(w).max() for w in jax.tree.leaves(kernels))
    return mean_square(block(x, params)) + 0.01 * decay + 0.1 * jnp.vdot(params["up"], params["up"])


@case({"w": normal(8, 4, 4, 8)}, normal(8, 8, 8, 4, scale=1.0))
def convolution(params, x):
    kernel = params["w"].reshape(4, 4, 8, 8)[:, :, :4]
    return mean_square(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


@case({"w": normal(FEATURES, HIDDEN)}, examples())
def odd_operations(params, x):
    w = params["w"]
    ways = [
        jnp.tril(w),
        jnp.pad(w, ((0, 0), (1, 1)))[:, 1:-1],
        jnp.roll(w, 1, axis=0),
        jnp.repeat(w, 2, axis=1)[:, ::2],
        jnp.tile(w, (1, 2))[:, :HIDDEN],
        jnp.sort(w, axis=0),
        jnp.cumsum(w, axis=1) / HIDDEN,
        jnp.where(w > 0, w, 0.1 * w),
        jnp.clip(w, -0.2, 0.2),
        jax.nn.softmax(w),
        jax.nn.gelu(w),
        w + lax.stop_gradient(jnp.round(w) - w),
        w.astype(jnp.bfloat16).astype(jnp.float32),
        w * jax.random.bernoulli(jax.random.key(0), 0.5, w.shape),
    ]
    return sum(mean_square(x @ way) for way in ways)


@case({"w": normal(FEATURES, FEATURES)}, examples())
def orthogonalized(params, x):
    w = params["w"] / jnp.linalg.norm(params["w"])
    for _ in range(8):  # Newton-Schulz: each iteration uses the last one's result three times
        w = 1.5 * w - 0.5 * (w @ w.T) @ w
    return mean_square(x @ w)


@case({"w": normal(FEATURES, FEATURES)}, examples())
def spectral_norm(params, x):
    w = params["w"]

    def iterate(_, u):
        v = w @ (w.T @ u)
        return v / jnp.linalg.norm(v)

    u = lax.fori_loop(0, 3, iterate, jnp.ones(FEATURES))
    return mean_square(x @ (w / (u @ w @ (w.T @ u))))


@case({"w": normal(FEATURES, FEATURES)}, examples())
def long_recipe(params, x):
    w = params["w"]
    for _ in range(15):  # deeper than a recipe may be
        w = 0.99 * w + 0.001 * jnp.sin(w) @ w
    return mean_square(x @ w)


@case({"w": [normal(FEATURES, FEATURES, seed=seed) for seed in range(12)]})
def constant_input(params):
    x = jnp.sin(jnp.arange(BATCH_SIZE * FEATURES, dtype=jnp.float32)).reshape(BATCH_SIZE, FEATURES)
    for w in params["w"]:
        x = x + jnp.tanh(x @ w)
    return mean_square(x)


@case(mlp() | {"empty": np.zeros((0, FEATURES), np.float32), "scale": np.float32(2.0), "one": np.ones(1)}, examples())
def scalars_and_empty_leaves(params, x):
    return mean_square(block(x, params)) * params["scale"] * params["one"].sum() + params["empty"].sum()


@case({"w": normal(BATCH_SIZE, FEATURES)}, examples())
def activations_of_the_params_shape(params, x):
    return mean_square((x * params["w"] + params["w"]) @ params["w"].T)
