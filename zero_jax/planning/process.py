"""Compiling in processes of their own: a compiler that crashes or eats the machine's memory takes nothing with it.

Like every launcher, this module reads the environment and hands a changed one to the processes that it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from zero_jax.core.extras import extra
from zero_jax.planning.errors import CompilerCrash
from zero_jax.planning.job import Job
from zero_jax.planning.key import program_settings
from zero_jax.planning.report import PlanReport
from zero_jax.sharding.topology import missing_compiler, parse

_SECONDS_BETWEEN_LINES = 15
# What libtpu adds when its process crashes, whatever the reason.
_NOISE = re.compile(r"^\s*(?:PC: )?@ |\bRAW: |^https://symbolize|^=== Source Location|^WARNING: ")
# What keeps JAX and libtpu from looking for devices, and libtpu from locking itself for one process.
COMPILE_ONLY: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compile_apart(
    job: Job,
    *,
    name: str,
    cache: pathlib.Path | None,
    timeout_seconds: float | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Makes the report of a job in a process of its own.

    Args:
      job: the job; its functions are sent by value where they cannot be imported.
      name: what to call it.
      cache: folder of compiled programs, or None.
      timeout_seconds: ends the process after that time.
      log: takes lines that tell how it goes.

    Raises:
      ValueError: what `make_report` raises.
      ModelError: a function of the job's raised.
      CompilerCrash: the process ended without a result.
      KeyboardInterrupt: as it came; the process is ended first.
    """
    with extra("plan"):
        import cloudpickle

    if timeout_seconds is not None and not (isinstance(timeout_seconds, int | float) and timeout_seconds > 0):
        raise ValueError(
            f"timeout_seconds={timeout_seconds!r}: give a positive number of seconds, or None for no limit"
        )
    hardware = parse(job.topology).hardware
    missing = missing_compiler(hardware)
    if missing:
        raise ValueError(f"topology {job.topology!r}: {missing}")
    with tempfile.TemporaryDirectory(prefix="zero_jax-") as folder:
        files = _Files(pathlib.Path(folder))
        options = {"name": name, "cache": cache, "settings": program_settings()}
        files.job.write_bytes(cloudpickle.dumps((job, options)))
        status = _run(files, _environment(hardware.platform, folder), f"{name} on {job.topology}", timeout_seconds, log)
        if not files.result.exists():
            raise CompilerCrash(_why(status, files, name, timeout_seconds))
        outcome = cloudpickle.loads(files.result.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@dataclasses.dataclass(frozen=True)
class _Files:
    folder: pathlib.Path

    @property
    def job(self) -> pathlib.Path:
        return self.folder / "job"

    @property
    def result(self) -> pathlib.Path:
        return self.folder / "result"

    @property
    def phases(self) -> pathlib.Path:
        return self.folder / "phases"

    @property
    def errors(self) -> pathlib.Path:
        return self.folder / "errors"

    def phase(self) -> str:
        """Returns what the process said last that it is doing."""
        lines = self.phases.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "starting"


def _run(
    files: _Files,
    environment: Mapping[str, str],
    what: str,
    timeout_seconds: float | None,
    log: Callable[[str], None],
) -> int | None:
    """Runs the process to its end; returns its exit status, or None if its time was up."""
    started = told_at = time.monotonic()
    told = ""
    with _process(files, environment) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            now, phase = time.monotonic(), files.phase()
            if phase != told or now - told_at > _SECONDS_BETWEEN_LINES:
                log(f"{what}: {phase} ({now - started:.0f} s)")
                told, told_at = phase, now
            if timeout_seconds is not None and now - started > timeout_seconds:
                return None


@contextlib.contextmanager
def _process(files: _Files, environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Starts the process, and sees to it that it is gone afterwards, whatever happens meanwhile."""
    paths = [str(files.job), str(files.result)]
    command = [sys.executable, "-m", "zero_jax.planning.worker", *paths, str(os.getpid())]
    with files.phases.open("wb") as phases, files.errors.open("wb") as errors:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=phases, stderr=errors,
            start_new_session=True,  # Ctrl-C comes to this process, which ends that one
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(platform: str, folder: str) -> dict[str, str]:
    """Returns the environment in which a compiler finds neither a TPU nor a GPU, and does not look for one.

    What it leaves in temporary files goes with the folder.
    """
    told = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": folder, **COMPILE_ONLY}
    if platform == "cuda":
        told["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"]  # nothing to time kernels on
        for toolkit in _cuda_toolkits():
            told["PATH"] = os.pathsep.join([f"{toolkit}/bin", os.environ.get("PATH", "")])
            flags.append(f"--xla_gpu_cuda_data_dir={toolkit}")
        told["XLA_FLAGS"] = " ".join(flags).strip()
    return {**os.environ, **told}


def _cuda_toolkits() -> list[str]:
    """Returns the folder that NVIDIA's wheels share, if they are installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [folder for root in roots for folder in sorted(glob.glob(f"{root}/cu1[0-9]"))][-1:]


def _why(status: int | None, files: _Files, name: str, timeout_seconds: float | None) -> str:
    """Says why there is no result."""
    phase = files.phase()
    if status is None:
        return f"{name}: still {phase} after {timeout_seconds:.0f} s, which is all the time it was given"
    lines = [line for line in files.errors.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if not _NOISE.search(line)] or lines
    last = "\n  ".join(said[-12:])
    if status == -signal.SIGKILL:
        return (
            f"{name}: the process was killed while {phase}; most likely this machine ran out of memory: compile fewer "
            "plans at once, or a model with scanned layers"
        )
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"{name}: the compiler's process {how} while {phase}. Its last words:\n  {last}"
