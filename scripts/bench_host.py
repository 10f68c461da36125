"""Times what the host does for a run beside what does the same without zero_jax, on one CPU device.

    python scripts/bench_host.py step          # the dispatch of a step, beside that of the `jax.jit` function in it

Rounds are interleaved and medians compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero


def medians(runs: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, float]:
    """Returns the median of what each function returns, over interleaved rounds."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(num_rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            results[name].append(runs[name]())
    return {name: statistics.median(values) for name, values in results.items()}


def step_dispatch(num_rounds: int) -> None:
    """Prints the seconds that a call takes before it returns, by the number of leaves of the state."""
    mesh = zero.make_mesh(devices=jax.devices()[:1])
    print(f"{'leaves':>8}{'zero_jax us':>14}{'jax.jit us':>12}{'ratio':>8}")
    for num_params in (3, 32, 332):  # adam has two more leaves of each param, and the state four scalars

        def init_fn(key: jax.Array, num: int = num_params) -> dict[str, jax.Array]:
            return {f"w{i}": jnp.full((8,), 1.0) for i in range(num)}

        def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
            return sum((x * batch["x"].mean(0)).sum() for x in params.values())

        tx, config = optax.adam(1e-3), zero.ZeroConfig(stage=3)
        batch = zero.shard_batch({"x": np.ones((4, 8), np.float32)}, mesh=mesh)
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

        def calls(call: Callable[[Any, Any], Any], state: Any, batch: Any = batch) -> Callable[[], float]:
            current = [call(jax.block_until_ready(state), batch)[0]]

            def run() -> float:
                seconds = []
                for _ in range(20):
                    jax.block_until_ready(current[0])
                    start = time.perf_counter()
                    current[0], _ = call(current[0], batch)
                    seconds.append(time.perf_counter() - start)
                return statistics.median(seconds)

            return run

        states = [zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config) for _ in range(2)]
        num_leaves, plain = len(jax.tree.leaves(states[0])), step.jitted(states[0])
        times = medians({"zero_jax": calls(step, states[0]), "jax.jit": calls(plain, states[1])}, num_rounds)
        ours, theirs = 1e6 * times["zero_jax"], 1e6 * times["jax.jit"]
        print(f"{num_leaves:>8}{ours:>14.1f}{theirs:>12.1f}{ours / theirs:>8.2f}", flush=True)


TOPICS = {"step": step_dispatch}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    args = parser.parse_args()
    TOPICS[args.topic](args.rounds)


if __name__ == "__main__":
    main()
