#!/usr/bin/env python3
"""Trains a tiny GPT with evaluations of changing shape and records its memory: does a training loop leak?

    scripts/fragmentation.py --steps 1000 --plot docs/fragmentation.png

On 8 simulated CPU devices. After every step it records the live arrays and their bytes, the addresses of the state and
the batches, and the resident memory of the process. It runs twice, each in its own process: without and with
`BatchBuffers`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
from typing import Any

NUM_DEVICES = 8
EVAL_SIZES = (8, 16, 24, 40)  # examples of the evaluation batches, in turn
EVAL_LENGTHS = (32, 48)


@dataclasses.dataclass(kw_only=True)
class Watched:
    """Records of each step: live arrays, bytes over all devices, resident bytes of the process; and addresses."""

    num_arrays: list[int] = dataclasses.field(default_factory=list)
    array_bytes: list[int] = dataclasses.field(default_factory=list)
    resident_bytes: list[int] = dataclasses.field(default_factory=list)
    state_places: int = 0
    batch_places: int = 0


def watch(num_steps: int, eval_every: int, buffered: bool) -> Watched:
    """Runs the training loop and returns its records."""
    import jax
    import numpy as np
    import optax

    import zero_jax as zero
    from zero_jax.data.batches import BatchBuffers
    from zero_jax.models import gpt

    mesh, tx = zero.make_mesh(data=NUM_DEVICES), optax.adamw(1e-3)
    model = gpt.GPTConfig(vocab_size=256, seq_len=48, num_layers=2, d_model=64)
    config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=0, overlap=False)
    state = zero.init_state(functools.partial(gpt.init, model), tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(model), tx, mesh=mesh, config=config)
    evaluate = zero.make_eval_step(gpt.loss_fn(model), mesh=mesh, config=config)
    rng, buffers = np.random.default_rng(0), BatchBuffers()

    def batch(size: int, length: int) -> Any:
        tokens = rng.integers(0, 256, (size, length + 1), dtype=np.int32)
        placed = zero.shard_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh=mesh)
        return buffers.fill(placed) if buffered else placed

    def places(tree: Any) -> tuple[int, ...]:
        arrays = [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]
        return tuple(x.addressable_shards[0].data.unsafe_buffer_pointer() for x in arrays)

    seen, state_places, batch_places = Watched(), set(), set()
    for number in range(num_steps):
        given = batch(16, 48)
        batch_places.add(places(given))
        state, metrics = step(state, given)
        del given
        if number % eval_every == 0:
            turn = number // eval_every
            size, length = EVAL_SIZES[turn % len(EVAL_SIZES)], EVAL_LENGTHS[turn % len(EVAL_LENGTHS)]
            float(evaluate(state, batch(size, length)).loss)
        float(metrics.loss)
        del metrics
        state_places.add(places(state))
        arrays = jax.live_arrays()
        seen.num_arrays.append(len(arrays))
        seen.array_bytes.append(sum(x.nbytes for x in arrays))
        seen.resident_bytes.append(resident_bytes())
    seen.state_places, seen.batch_places = len(state_places), len(batch_places)
    return seen


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(runs: dict[str, Watched], marks: list[int]) -> str:
    """Returns a table of the records of some steps."""
    lines = [f"{'batches':<12}{'step':>6}{'arrays':>8}{'array bytes':>13}{'resident MiB':>14}"]
    for name, run in runs.items():
        for mark in marks:
            figures = run.num_arrays[mark - 1], run.array_bytes[mark - 1], run.resident_bytes[mark - 1] / 2**20
            lines.append(f"{name:<12}{mark:>6}{figures[0]:>8}{figures[1]:>13,}{figures[2]:>14.1f}")
        lines.append(f"  the state was in {run.state_places} set(s) of buffers, training batches in {run.batch_places}")
    return "\n".join(lines)


def draw(runs: dict[str, Watched], path: pathlib.Path) -> None:
    """Plots bytes and resident memory over the steps."""
    from zero_jax.analysis.figures import new_figure, save_figure

    figure = new_figure(path, width=9, height=3.4)
    arrays, resident = figure.subplots(1, 2)
    for style, (name, run) in zip(("-", "--"), runs.items(), strict=False):
        steps = range(1, len(run.num_arrays) + 1)
        arrays.plot(steps, [size / 2**20 for size in run.array_bytes], style, label=name)
        resident.plot(steps, [size / 2**20 for size in run.resident_bytes], style, label=name)
    for axes, title in ((arrays, "live arrays, all devices (MiB)"), (resident, "resident memory of the process (MiB)")):
        axes.set(title=title, xlabel="step", ylim=(0, 1.15 * axes.get_ylim()[1]))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    save_figure(figure, path)


def main() -> None:
    """Runs both loops, prints the table and plots the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--plot", type=pathlib.Path, help="file for a plot")
    parser.add_argument("--json", action="store_true", help="print the records of every step instead of a table")
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)}
    runs = {}
    for name, buffered in (("as they come", False), ("buffered", True)):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            runs[name] = pool.submit(watch, options.steps, options.eval_every, buffered).result()
    if options.plot:
        draw(runs, options.plot)
    marks = sorted({max(1, round(options.steps * part)) for part in (0.05, 0.1, 0.25, 0.5, 0.75, 1)})
    print(json.dumps({n: dataclasses.asdict(r) for n, r in runs.items()}) if options.json else table(runs, marks))


if __name__ == "__main__":
    main()
