"""Times zero_jax's train step against a hand-written one and against plain `in_shardings`, on simulated CPU devices.

Every variant runs the same model on the same devices; rounds are interleaved and medians compared, because a single
run on a busy machine says nothing. On one device (`--devices 1`) the last variant is a plain `jax.jit`. Two processes:

    zero-jax launch -n 2 --devices-per-process 1 -- python scripts/bench_step.py --stages 0
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from bench_host import medians
from hand_written import loss_with_gathers, make_step, repeated

import zero_jax as zero
from zero_jax.cluster import join
from zero_jax.models import gpt

CONFIG = gpt.GPTConfig(num_layers=4, d_model=256, num_heads=4, vocab_size=512, seq_len=128)


def variants(stage: int, mesh, batch) -> dict:
    """Returns, for each variant of the step, a function that runs one step and returns its loss."""
    tx = optax.adamw(1e-3)
    init_fn, loss_fn = functools.partial(gpt.init, CONFIG), gpt.loss_fn(CONFIG)
    config = zero.ZeroConfig(stage=stage)
    runs = {}

    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    specs_of = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
    param_shardings, opt = specs_of(state.params), specs_of(state.opt_state)
    sharded_state = zero.abstract_state(init_fn, tx, mesh=mesh, config=zero.ZeroConfig(stage=3 if stage else 0))
    sharded = specs_of(sharded_state.params)

    def by_hand(pin: bool, skip_nonfinite: bool = False):
        loss = (
            loss_with_gathers(CONFIG, mesh, jax.tree.map(lambda s: s.spec, param_shardings))
            if pin and stage == 3
            else loss_fn
        )
        shardings = {"params": param_shardings, "sharded": sharded, "opt_state": opt}
        jitted = make_step(loss, tx, **shardings, pin=pin, skip_nonfinite=skip_nonfinite)
        params = jax.jit(init_fn, out_shardings=param_shardings)(jax.random.key(0))
        return repeated(jitted, params, jax.jit(tx.init, out_shardings=opt)(params), batch=batch)

    runs["zero_jax"] = repeated(step, state, batch=batch)
    runs["hand-written"] = by_hand(pin=True)
    runs["the same, skipping"] = by_hand(pin=True, skip_nonfinite=True)
    runs["in_shardings only"] = by_hand(pin=False)
    return runs


def measure(runs: dict, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Returns the median seconds of a step for each variant, over interleaved rounds."""
    losses = {name: float(run()) for name, run in runs.items()}  # compile and warm up
    assert np.ptp(list(losses.values())) < 1e-4, losses

    def seconds_of(run: Callable[[], jax.Array]) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            run().block_until_ready()
        return (time.perf_counter() - start) / num_steps

    return medians({name: functools.partial(seconds_of, run) for name, run in runs.items()}, num_rounds)


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, where this is the only process")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if join().num_processes == 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = zero.make_mesh()
    shape = (16 // jax.process_count(), CONFIG.seq_len + 1)  # the part of this process
    tokens = np.random.default_rng(jax.process_index()).integers(CONFIG.vocab_size, size=shape, dtype=np.int32)
    batch = zero.shard_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh=mesh)
    rows = []
    for stage in args.stages:
        print(f"stage {stage}: compiling and timing", file=sys.stderr, flush=True)
        rows.append({"stage": stage, "step_seconds": measure(variants(stage, mesh, batch), args.rounds, args.steps)})
    if jax.process_index():
        return
    if args.json:
        print(json.dumps({"model": str(CONFIG), "jax": jax.__version__, "rows": rows}))
        return
    names = list(rows[0]["step_seconds"])
    print(f"{'stage':<6}" + "".join(f"{name + ' ms':>22}" for name in names) + f"{'ours / hand-written':>22}")
    for row in rows:
        times = row["step_seconds"]
        ratio = times["zero_jax"] / times["hand-written"]
        print(f"{row['stage']:<6}" + "".join(f"{1e3 * times[name]:>22.1f}" for name in names) + f"{ratio:>22.3f}")


if __name__ == "__main__":
    main()
