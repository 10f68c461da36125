"""The process that compiles one job: `python -m zero_jax.plan_worker JOB RESULT`, started by `zero_jax.plan`.

A compiler that crashes or runs out of the machine's memory ends this process, and nothing else. What it does is told on
standard output, a line each.
"""

from __future__ import annotations

import pathlib
import sys
import traceback

import cloudpickle
import jax

from zero_jax.plan_report import make_report


def main(job_path: str, result_path: str) -> int:
    """Compiles the job in one file and leaves the report, or what went wrong, in another."""
    # Topologies are compile-only: the one backend that runs anything is the CPU.
    jax.config.update("jax_platforms", "cpu")
    job, options = cloudpickle.loads(pathlib.Path(job_path).read_bytes())
    try:
        outcome = make_report(job, **options, on_phase=lambda phase: print(phase, flush=True))
    except Exception as error:
        outcome = error if isinstance(error, ValueError) else RuntimeError(traceback.format_exc())
    path = pathlib.Path(result_path)
    partial = path.with_suffix(".partial")
    partial.write_bytes(cloudpickle.dumps(outcome))
    partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
