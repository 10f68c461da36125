"""Compiles a job, by default in another process: a compiler that crashes or runs out of memory ends that one alone.

Where blocks keep what fits (`remat="auto"`), what the compiler needs corrects what was estimated to be left.
Like every launcher, this module reads the environment and passes a changed one to the processes that it starts.
"""

import collections
import contextlib
import dataclasses
import glob
import importlib.util
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from zero_jax.core.extras import extra
from zero_jax.core.files.user_cache import cache_folder
from zero_jax.core.signatures import check_arguments
from zero_jax.planning.errors import CompilerCrash
from zero_jax.planning.job import Job
from zero_jax.planning.key import program_settings
from zero_jax.planning.report import PlanReport, by_time, make_report
from zero_jax.sharding.topology import missing_compiler, parse
from zero_jax.training import StepLoss, chosen_values
from zero_jax.transforms import Remat, ValueChoice, resolve_remat

# How often the compiled memory corrects a budget that was not given, and the share of the memory that is left free.
_MORE_COMPILES, _LEAST_ROOM = 2, 0.03
# The share of what is left over that a further value may take: the compiler needs some of it to place the value.
_USED_SLACK = 0.8
# The files that the process reads and writes, in a folder of their own.
_JOB, _RESULT, _PRINTED, _ERRORS = "job", "result", "printed", "errors"
_SECONDS_BETWEEN_LINES = 15
_SECONDS_TO_HINT, _QUICKER = 60, "most of this is the code: --quick (quick=True) leaves it out, with the same traffic"
# Lines that libtpu prints whenever its process crashes, whatever the reason.
_NOISE = re.compile(r"^\s*(?:PC: )?@ |\bRAW: |^https://symbolize|^=== Source Location|^WARNING: ")
# Keeps JAX and libtpu from looking for devices, and libtpu from taking the lock that only one process can have.
COMPILE_ONLY: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def report_on(
    job: Job, *, on_phase: Callable[[str], None], known: Sequence[Remat] = (), **options: Any
) -> PlanReport | None:
    """Compiles a job in this process like `make_report`, for a budget of its blocks chosen first; None if `known`."""
    remat = resolve_remat(job.config.remat)
    if remat.policy != "auto":
        return make_report(job, on_phase=on_phase, **options)
    on_phase("choosing what blocks keep")
    choice = _choice(job, remat)
    if choice.remat in known:  # it would be the same program
        return None
    report = make_report(_with_remat(job, choice.remat), on_phase=on_phase, **options)
    return dataclasses.replace(report, values=choice, remat=str(resolve_remat(choice.policy_name)))


def _with_remat(job: Job, remat: Remat) -> Job:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, remat=remat))


def _choice(job: Job, remat: Remat) -> ValueChoice:
    mesh, config = job.mesh(), _with_remat(job, remat).config
    state = job.state(mesh)
    choice = chosen_values(StepLoss.of(job.loss_fn, state.variables, mesh=mesh, config=config), state, job.batch)
    assert choice is not None
    return choice


def _slack(report: PlanReport, choice: ValueChoice) -> float:
    """Returns the bytes by which the budget of a compiled program may be larger, below 0 if it has to be smaller."""
    limit = (1 - _LEAST_ROOM) * report.usable_bytes
    # A refusal without a figure counts as a tenth too much.
    needed = 1.1 * limit if report.needed_bytes is None else report.needed_bytes
    slack = limit - needed
    gaining = (row for row in choice.rows if not row.place or (row.place == "offloaded" and row.waited_seconds))
    return slack if slack < 0 or any(row.num_bytes <= _USED_SLACK * slack for row in gaining) else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a plan is compiled: its name, cache, process, time limit, log and depth, as `plan` takes them."""

    name: str = "plan"
    cache: str | os.PathLike[str] | None = "default"
    own_process: bool = True
    timeout_seconds: float | None = None
    log: Callable[[str], None] = lambda line: None
    quick: bool = False

    def __post_init__(self) -> None:
        check_arguments(**vars(self))

    @property
    def cache_path(self) -> pathlib.Path | None:
        """The folder of compiled programs, None without a cache."""
        if self.cache is None:
            return None
        return cache_folder("programs") if self.cache in ("default", "") else pathlib.Path(self.cache)


def compile_plan(job: Job, options: CompileOptions, *, fills: bool = True) -> PlanReport:
    """Compiles a job as `call_for` does, and returns the report on it.

    Where blocks keep what a budget chooses, and that is not given, it is compiled up to three times, with the budget
    that the program before has left; the fastest that fits is returned. Unless `fills`, the first that fits is.
    """
    # Only a process of its own can end a compiler that goes on, and nothing else is compiled beside that.
    quick = options.quick and options.own_process
    arguments = {"name": options.name, "cache": options.cache_path, "quick": quick}
    hint = "" if quick or parse(job.topology).hardware.platform != "tpu" else _QUICKER
    remat, reports = resolve_remat(job.config.remat), list[PlanReport]()
    is_open = remat.policy == "auto" and remat.budget_gb is None
    for _ in range(1 + _MORE_COMPILES if is_open else 1):
        known = tuple(x.values.remat for x in reports if x.values)
        report = call_for(report_on, job, {**arguments, "known": known}, options, hint=hint)
        if report is None:
            break
        reports.append(report)
        if report.values is None or (report.fits and not fills):
            break
        slack = _slack(report, report.values)
        budget_bytes = report.values.kept_bytes + slack
        if not slack or budget_bytes < 0:
            break
        policy = resolve_remat(report.values.policy_name)
        job = _with_remat(job, dataclasses.replace(policy, budget_gb=int(budget_bytes / 1e6) / 1e3))
    return min(reports, key=by_time)


def call_for(
    work: Callable[..., Any], job: Job, arguments: Mapping[str, Any], options: CompileOptions, *, hint: str = ""
) -> Any:
    """Returns `work(job, **arguments, on_phase=...)`, called in another process if the options say so.

    That process has the compiler of the job's hardware. Functions that cannot be imported are pickled by value.
    `on_phase` is called with what is being done. A `hint` is logged if that takes more than a minute.

    Raises:
      ValueError: as `work` does, the compiler is not installed, or a function cannot be pickled.
      ModelError: a function of the model raised.
      CompilerCrash: the process ended without a result.
      KeyboardInterrupt: raised again after the process was killed.
    """
    where = f"{options.name} on {job.topology}"
    if not options.own_process:
        return work(job, **arguments, on_phase=lambda phase: options.log(f"{where}: {phase}"))
    with extra("plan"):
        import cloudpickle
    hardware = parse(job.topology).hardware
    if missing := missing_compiler(hardware):
        raise ValueError(f"topology {job.topology!r}: {missing}")
    with tempfile.TemporaryDirectory(prefix="zero_jax-") as name:
        folder = pathlib.Path(name)
        result = folder / _RESULT
        (folder / _JOB).write_bytes(_pickled((work, job, dict(arguments), program_settings())))
        status = _run(folder, _environment(hardware.platform, name), where=where, options=options, hint=hint)
        if not result.exists():
            raise CompilerCrash(_why_no_result(status, folder, options))
        outcome = cloudpickle.loads(result.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _pickled(value: Any) -> bytes:
    """Pickles by cloudpickle, with file names of functions, which 3.1.2 and later hide; raises `ValueError`."""
    import cloudpickle

    plain: Any = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: types.CodeType) -> tuple[Any, tuple[Any, ...]]:
        make, arguments = plain[types.CodeType](code)
        return make, tuple(code.co_filename if x == "<dynamic-code>" else x for x in arguments)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = collections.ChainMap({types.CodeType: reduce_code}, plain)

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            # Such a class is made without its fields there, which it gets one by one. Equinox notes them at the start.
            if isinstance(obj, type) and type(obj).__module__.startswith("equinox.") and reduced is not NotImplemented:
                raise TypeError(f"the Equinox module {obj.__qualname__} of {obj.__module__} cannot be made again there")
            return reduced

    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    except Exception as error:  # of any kind: objects raise what they like
        raise ValueError(
            f"the model cannot be sent to the process that compiles it ({type(error).__name__}: {error}): keep locks, "
            "open files, generators, devices and meshes out of what loss_fn, init_fn and tx refer to (a function of "
            "the mesh is zero.MeshLoss(make)), or define them in a module, so that they are imported there, or compile "
            "in this process (own_process=False)"
        ) from error
    return file.getvalue()


def _phase(folder: pathlib.Path) -> str:
    """Returns what the process is doing: the last line that it printed."""
    lines = (folder / _PRINTED).read_text(errors="replace").splitlines()
    return lines[-1] if lines else "starting"


def _run(
    folder: pathlib.Path, environment: Mapping[str, str], *, where: str, options: CompileOptions, hint: str
) -> int | None:
    """Runs the process to its end and logs its phases; returns its exit status, None after the time limit."""
    started, limit = time.monotonic(), options.timeout_seconds
    logged_at = started - _SECONDS_BETWEEN_LINES  # the first line is there at once
    command = [sys.executable, "-m", "zero_jax.planning.worker", str(folder), str(os.getpid())]
    with (
        (folder / _PRINTED).open("wb") as printed,
        (folder / _ERRORS).open("wb") as errors,
        subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=printed, stderr=errors,
            start_new_session=True,  # Ctrl-C reaches this process alone, which kills that one
        ) as process,
    ):  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=0.2)
                now = time.monotonic()
                if now - logged_at > _SECONDS_BETWEEN_LINES:
                    options.log(f"{where}: {_phase(folder)} ({now - started:.0f} s)")
                    logged_at = now
                if hint and now - started > _SECONDS_TO_HINT:
                    options.log(f"{where}: {hint}")
                    hint = ""
                if limit is not None and now - started > limit:
                    return None
        finally:
            process.kill()  # nothing, where it has ended


def _environment(platform: str, folder: str) -> dict[str, str]:
    """Returns an environment in which a compiler does not look for TPUs or GPUs, with temporary files in `folder`."""
    changes = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": folder, **COMPILE_ONLY}
    if platform == "cuda":
        changes["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"]  # no device to time kernels on
        spec = importlib.util.find_spec("nvidia")  # NVIDIA's wheels, of which the newest is taken
        roots = list(spec.submodule_search_locations or ()) if spec else []
        for toolkit in [folder for root in roots for folder in sorted(glob.glob(f"{root}/cu1[0-9]"))][-1:]:
            changes["PATH"] = os.pathsep.join([f"{toolkit}/bin", os.environ.get("PATH", "")])
            flags.append(f"--xla_gpu_cuda_data_dir={toolkit}")
        changes["XLA_FLAGS"] = " ".join(flags).strip()
    return {**os.environ, **changes}


def _why_no_result(status: int | None, folder: pathlib.Path, options: CompileOptions) -> str:
    name, phase = options.name, _phase(folder)
    if status is None:
        return f"{name}: still {phase} after {options.timeout_seconds:g} s, which is all the time it was given"
    lines = [line for line in (folder / _ERRORS).read_text(errors="replace").splitlines() if line.strip()]
    last = "\n  ".join(([line for line in lines if not _NOISE.search(line)] or lines)[-12:])
    if status == -signal.SIGKILL:
        return (
            f"{name}: the process was killed while {phase}; most likely this machine ran out of memory: compile fewer "
            "plans at once, or a model with scanned layers"
        )
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"{name}: the compiler's process {how} while {phase}. Its last words:\n  {last}"
