"""The process that compiles one job, of `zero.plan` or `zero.verify`.

Its command is `python -m zero_jax.planning.worker FOLDER [PARENT]`: it reads the file `job` there, and writes `result`.

A compiler that crashes or runs out of memory ends this process alone. Each phase is printed to standard output. This
process ends when its parent does.
"""

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
from zero_jax.planning.user_modules import install

_SECONDS_BETWEEN_CHECKS = 1.0


def main(folder: str, parent: str | None = None) -> int:
    """Compiles the job of a folder, and writes report or error there; ends, and removes it, with a `parent` process."""
    job_path, result_path = (pathlib.Path(folder, name) for name in ("job", "result"))
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(int(parent), folder), daemon=True).start()
    # Devices of topologies only compile; the CPU is the only backend that runs anything.
    jax.config.update("jax_platforms", "cpu")
    install()
    try:
        work, job, arguments, settings = cloudpickle.loads(job_path.read_bytes())
        _copy_settings(settings)
        outcome = work(job, **arguments, on_phase=lambda phase: print(phase, flush=True))
    except Exception as error:
        outcome = explain(error)
    partial = result_path.with_suffix(".partial")
    partial.write_bytes(cloudpickle.dumps(outcome))
    partial.replace(result_path)
    return 0


def _copy_settings(settings: Mapping[str, Any]) -> None:
    """Sets JAX's settings to those of the parent process, so that both would compile the same program."""
    for name, value in settings.items():
        if name in jax.config.values and jax.config.values[name] != value:
            jax.config.update(name, value)


def _exit_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # not after threads of the compiler, which may have hours to go
