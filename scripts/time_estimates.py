"""Compiles a GPT with a spread of settings, and prints the time of a step that the planner estimated beside it.

No accelerator is needed, only its compiler. Programs are taken from the cache where they are in it. The exit status is
0 if at least nine of ten estimates are within 25% of the compiled program's time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.core.text_tables import aligned
from zero_jax.models import gpt
from zero_jax.planning import COMPILE_ONLY
from zero_jax.planning.auto import apply_setting, remat_policies
from zero_jax.planning.estimates import Estimator
from zero_jax.planning.plans import make_job
from zero_jax.planning.process import CompileOptions, compile_plan
from zero_jax.planning.ranking import Candidate
from zero_jax.pretrained import attend

TOLERANCE = 0.25
# Stage, replica, model, microbatches, remat.
SPREAD = (
    (3, 1, 1, 1, "own"), (2, 1, 1, 1, "own"), (1, 1, 1, 1, "own"), (0, 1, 1, 1, "own"),
    (3, 1, 1, 2, "own"), (3, 1, 1, 4, "own"), (2, 1, 1, 2, "own"), (1, 1, 1, 4, "own"),
    (3, 1, 1, 1, "dots"), (3, 1, 1, 1, "attention"), (3, 1, 1, 1, "full_offloaded"), (3, 1, 1, 4, "none"),
    (3, 1, 2, 1, "own"), (3, 1, 4, 1, "own"), (2, 1, 4, 1, "full_sharded"), (3, 1, 8, 4, "own"),
    (3, 4, 1, 2, "own"), (2, 2, 1, 2, "dots"), (2, 8, 1, 4, "none"), (1, 2, 2, 1, "own"),
)  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-7b", choices=gpt.PRESETS)
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--xla-attention", action="store_true", help="attention by XLA, not by a kernel")
    parser.add_argument("--no-overlap", action="store_true", help="without the options that overlap collectives")
    parser.add_argument("--first", type=int, default=len(SPREAD), help="how many of the settings")
    options = parser.parse_args()
    for name, value in COMPILE_ONLY.items():
        os.environ.setdefault(name, value)
    config = dataclasses.replace(gpt.PRESETS[options.model], seq_len=options.seq_len)
    tokens = jax.ShapeDtypeStruct((options.batch_size, config.seq_len), jnp.int32)
    job = make_job(
        loss_fn=gpt.loss_fn(config) if options.xla_attention else gpt.loss_fn(config, attend=attend),
        init_fn=functools.partial(gpt.init, config),
        tx=optax.adamw(3e-4),
        batch={"inputs": tokens, "targets": tokens},
        topology=options.topology,
        config=zero.ZeroConfig(
            precision="bf16",
            clip_norm=1.0,
            param_specs=gpt.param_specs(config),
            overlap=not options.no_overlap,
        ),
    )
    policies = remat_policies(job.loss_fn, job.config, tuple(dict.fromkeys(remat for *_, remat in SPREAD)), {})
    estimator = Estimator(job, policies)
    rows, ratios = [("setting", "estimated s", "compiled s", "ratio")], []
    for stage, replica, model, k, remat in SPREAD[: options.first]:
        if estimator.num_devices % (replica * model):
            continue
        setting = Candidate(
            stage=stage,
            replica=replica,
            model=model,
            data=estimator.num_devices // (replica * model),
            batch_size=options.batch_size,
            num_microbatches=k,
            remat=remat,
            overlap=not options.no_overlap,
        )
        seconds = estimator.step(setting).seconds
        report = compile_plan(apply_setting(setting, job, policies), CompileOptions(name=f"{setting}"))
        if report.time is None:
            rows.append((f"{setting}", f"{seconds:.3f}", "does not fit", ""))
            continue
        ratios.append(seconds / report.time.step_seconds)
        rows.append((f"{setting}", f"{seconds:.3f}", f"{report.time.step_seconds:.3f}", f"{ratios[-1]:.2f}"))
        print(*rows[-1], file=sys.stderr, flush=True)
    close = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    print(aligned(rows, right={1, 2, 3}))
    print(f"{close} of {len(ratios)} within {TOLERANCE:.0%}")
    return 0 if close >= 0.9 * len(ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
