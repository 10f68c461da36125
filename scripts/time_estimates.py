"""Prints what is estimated of settings before they are compiled, beside their programs: memory, bytes sent and time.

    python scripts/time_estimates.py scripts/estimated_settings.txt [WORD ...]

Each line of the file has options of `zero-jax plan`; with words, the lines that have one of them are taken. No
accelerator is needed, only its compiler, which stops before the code. Programs are taken from the cache where they are
in it. The exit status is 0 if nine of ten estimates of memory are within 15%, and of bytes and seconds within 25%.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import sys

import jax

from zero_jax import planning
from zero_jax.cli.commands import parse
from zero_jax.cli.plan import Request, read_request
from zero_jax.core.text_tables import aligned
from zero_jax.planning.auto import remat_policies
from zero_jax.planning.estimates import Estimator
from zero_jax.planning.job import Job
from zero_jax.planning.ranking import Candidate, Figures
from zero_jax.transforms import resolve_remat

TOLERANCES = {"GB": 0.15, "sent GB": 0.25, "s": 0.25}


def estimated(job: Job) -> Figures:
    """Returns what a search estimates of a job, whose setting is the only one."""
    config, num_devices = job.config, job.mesh().size
    remat, offload = resolve_remat(config.remat).name, config.resolved_offload()
    same = ("stage", "num_microbatches", "keep_gathered", "secondary", "attention", "overlap", "pipeline")
    setting = Candidate(
        **{name: getattr(config, name) for name in same},
        **{axis: getattr(job, axis) for axis in ("replica", "model", "pipe")},
        data=num_devices // (job.replica * job.model * job.pipe),
        batch_size=job.batch_size,
        remat=remat,
        offload=offload and offload.what,
        experts=bool(config.experts),
        quantize=bool(config.resolved_quantize()),
    )
    policies = remat_policies(job.loss_fn, config, (remat,), {})
    return Estimator(dataclasses.replace(job, replica=1, model=1, pipe=1), policies).estimate(setting)


def pairs_of(request: Request) -> dict[str, tuple[float, float]]:
    """Returns the estimated and the compiled figures of a setting; without time if it does not fit."""
    figures, report = estimated(request.job(request.zero)), request.compile(request.zero, quick=True)
    pairs = {"GB": (figures.bytes / 1e9, (report.needed_bytes or 0) / 1e9)}
    if report.comms is not None:
        pairs["sent GB"] = (report.comms_estimate.sent_bytes / 1e9, report.comms.sent_bytes / 1e9)
    return pairs if report.time is None else pairs | {"s": (figures.seconds, report.time.step_seconds)}


def main(path: str, *words: str) -> int:
    """Prints the table."""
    for name, value in planning.COMPILE_ONLY.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    lines = [x for x in pathlib.Path(path).read_text().splitlines() if x and not x.startswith("#")]
    rows, near = [("options", *TOLERANCES)], []
    for line in [x for x in lines if not words or any(word in x for word in words)]:
        pairs = pairs_of(read_request(parse(["plan", *line.split()])))
        # No estimate is near to a figure that the program does not have.
        ratios = {name: a / b if b else math.inf if a else 1.0 for name, (a, b) in pairs.items()}
        near += [abs(ratio - 1) <= TOLERANCES[name] for name, ratio in ratios.items()]
        cells = (f"{a:.4g} / {b:.4g} = {ratios[name]:.2f}" for name, (a, b) in pairs.items())
        rows.append((line, *cells, *[""] * (len(TOLERANCES) - len(pairs))))
        print(*rows[-1], sep=" | ", flush=True)
    print(aligned(rows))
    return 0 if sum(near) >= 0.9 * len(near) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
