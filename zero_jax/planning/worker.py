"""The process that compiles one job for `zero_jax.plan`: `python -m zero_jax.planning.worker JOB RESULT [PARENT]`.

A compiler that crashes or runs out of the machine's memory ends this process, and nothing else. What it does is told on
standard output, a line each. However the process that wants the result ends, this one does not go on without it.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle
import jax

from zero_jax.planning.errors import explain
from zero_jax.planning.report import make_report
from zero_jax.planning.user_modules import install

_SECONDS_BETWEEN_LOOKS = 1.0


def main(job_path: str, result_path: str, parent: str | None = None) -> int:
    """Compiles the job in one file and leaves the report, or what went wrong, in another.

    With the number of its parent process it ends when that does, and takes the folder of the job with it.
    """
    if parent is not None:
        folder = pathlib.Path(job_path).parent
        threading.Thread(target=_end_with, args=(int(parent), folder), daemon=True).start()
    # Topologies are compile-only: the one backend that runs anything is the CPU.
    jax.config.update("jax_platforms", "cpu")
    install()
    try:
        job, options = cloudpickle.loads(pathlib.Path(job_path).read_bytes())
        _take_over(options.pop("settings", {}))
        outcome = make_report(job, **options, on_phase=lambda phase: print(phase, flush=True))
    except Exception as error:
        outcome = explain(error)
    path = pathlib.Path(result_path)
    partial = path.with_suffix(".partial")
    partial.write_bytes(cloudpickle.dumps(outcome))
    partial.replace(path)
    return 0


def _take_over(settings: Mapping[str, Any]) -> None:
    """Sets what the process that wants the result has set of JAX, so that the program is the one it would run."""
    for name, value in settings.items():
        if name in jax.config.values and jax.config.values[name] != value:
            jax.config.update(name, value)


def _end_with(parent: int, folder: pathlib.Path) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
