"""CPU seconds of lowering a train step of many unrolled layers, against plain `jax.jit` of the same loss and optimizer.

Run: `python scripts/bench_lowering.py`; prints a table with the ratio of the medians. Rounds are interleaved, so that
other load on the machine hits both alike. With `--calls` it counts calls of functions, which load does not change.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import os
import pstats
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import optax
from bench_host import medians

import zero_jax as zero

WIDTH, HEADS, VOCAB, SEQUENCE, BATCH = 64, 4, 256, 32, 32


def init(key: jax.Array, num_layers: int) -> Any:
    """Returns the params of a small decoder, a dict for each layer."""
    shapes = {"qkv": (WIDTH, 3, WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        weights = {name: 0.02 * jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}
        return {**weights, "norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}

    first, *keys = jax.random.split(key, num_layers + 1)
    return {"embed": 0.02 * jax.random.normal(first, (VOCAB, WIDTH)), "layers": [layer(key) for key in keys]}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """Applies attention and an MLP, `[batch, sequence, width]` in and out."""
    queries, keys, values = jnp.moveaxis(jnp.einsum("bsd,dke->bske", norm(x, params["norm1"]), params["qkv"]), 2, 0)
    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(queries), heads(keys)) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(values)).reshape(x.shape)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(norm(x, params["norm2"]) @ params["up"]) @ params["down"]


def loss_of(checkpoint: bool) -> Callable[[Any, Any], jax.Array]:
    """Returns the loss of the decoder, each layer in a `jax.checkpoint` or not."""
    block = jax.checkpoint(layer) if checkpoint else layer

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["inputs"]]
        for each in params["layers"]:
            x = block(x, each)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return loss_fn


def plain(loss_fn: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the train step that a JAX program without the library has."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def seconds(lower: Callable[[], Any]) -> float:
    """Returns the CPU seconds of a lowering without what JAX remembers of an earlier one."""
    jax.clear_caches()
    start = time.process_time()
    lower()
    return time.process_time() - start


def million_calls(lower: Callable[[], Any]) -> float:
    """Returns the calls of functions, Python's and C's, of a lowering, without what JAX remembers of an earlier one."""
    lower()
    jax.clear_caches()
    with cProfile.Profile() as profile:
        lower()
    return pstats.Stats(profile).total_calls / 1e6  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--calls", action="store_true", help="count millions of calls of functions, in one round")
    args = parser.parse_args()
    measure, what = (million_calls, "millions of calls") if args.calls else (seconds, "CPU seconds")
    rounds = 1 if args.calls else args.rounds
    tx, mesh = optax.adamw(1e-3), zero.make_mesh()
    init_fn = functools.partial(init, num_layers=args.layers)
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32) for name in ("inputs", "targets")}
    opt_shapes = jax.eval_shape(tx.init, shapes)
    print(f"{args.layers} layers, jax {jax.__version__}: {what} of lower(), medians of {rounds} rounds")
    print(f"{'checkpoint':<11}{'stage':>6}{'microbatches':>14}{'plain':>8}{'zero_jax':>10}{'ratio':>7}")
    for checkpoint in (False, True):
        loss_fn = loss_of(checkpoint)
        cases: dict[Any, Callable[[], Any]] = {}
        for stage in args.stages:
            for k in args.microbatches:
                config = zero.ZeroConfig(stage=stage, num_microbatches=k)
                state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
                step = functools.partial(zero.make_train_step, loss_fn, tx, mesh=mesh, config=config)
                cases[stage, k] = functools.partial(lambda step, state: step().lower(state, batch), step, state)
        jitted = functools.partial(jax.jit, plain(loss_fn, tx))
        cases["plain"] = functools.partial(lambda jitted: jitted().lower(shapes, opt_shapes, batch), jitted)
        times = medians({case: functools.partial(measure, lower) for case, lower in cases.items()}, rounds)
        base = times.pop("plain")
        for (stage, k), zero_seconds in times.items():
            row = f"{checkpoint!s:<11}{stage:>6}{k:>14}{base:>8.2f}{zero_seconds:>10.2f}{zero_seconds / base:>7.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
