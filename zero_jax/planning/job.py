"""Compiles one train step for a topology, or takes its program from the cache."""

import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zero_jax.core.files.user_cache import evict_oldest, has_mark, read_entry, write_entry
from zero_jax.core.tree import PyTree, leading_dims
from zero_jax.hlo import HeapLayout, Program, layout_options, read_layout, read_scheduled
from zero_jax.planning.key import SCHEMA, compile_inputs, digest
from zero_jax.program.jaxprs import hlo_text
from zero_jax.sharding.mesh import make_mesh
from zero_jax.training import (
    CompilerOption,
    MeshLoss,
    StepOptions,
    TrainState,
    ZeroConfig,
    abstract_state,
    make_train_step,
    shapes_of_batch,
    step_options,
)

_SUFFIX, _QUICK_SUFFIX = ".program", ".scheduled.program"
_SECONDS_BETWEEN_LOOKS = 0.1
_CONSTANT = re.compile(r" = (?P<dtype>[a-z]\w*)\[[^=\n]*? constant\((?P<value>\{[^\n]*?\})\)(?=, |\n)")
_INTEGERS = re.compile(r"[su]\d+")
_MAX_CHARACTERS, _SHORT = 2**20, 2**6
_MARK = f"zero_jax program {SCHEMA}\n".encode()  # what an entry begins with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A train step to compile, as `plan` takes it, with the batch as `ShapeDtypeStruct`s; `init_fn` is never run.

    The compiler options are passed to `Lowered.compile` beside those of the config, which they replace.
    """

    loss_fn: Callable[..., Any] | MeshLoss
    init_fn: Callable[[jax.Array], PyTree]
    tx: optax.GradientTransformation
    batch: PyTree
    config: ZeroConfig
    topology: str
    replica: int = 1
    model: int = 1
    pipe: int = 1
    data_layout: Sequence[int] | None = None
    compiler_options: Mapping[str, Any] | None = None

    @property
    def batch_size(self) -> int:
        """Examples of a step: the largest leading dim of the batch."""
        return max(leading_dims(self.batch).values(), default=1)

    def mesh(self) -> Mesh:
        """Returns the mesh, of compile-only devices."""
        sizes: dict[str, Any] = {"replica": self.replica, "model": self.model, "pipe": self.pipe}
        return make_mesh(**sizes, topology=self.topology, data_layout=self.data_layout)

    def state(self, mesh: Mesh) -> TrainState:
        """Returns the abstract train state."""
        return abstract_state(self.init_fn, self.tx, mesh=mesh, config=self.config)

    def options(self, mesh: Mesh) -> StepOptions:
        """Returns the compiler options of the step: those of the config, and the job's own."""
        options = step_options(mesh, self.config)
        job_options = self.compiler_options or {}
        combined = [option for option in options.options if option.name not in job_options]
        combined += [CompilerOption(name=name, value=x, purpose="given to the plan") for name, x in job_options.items()]
        return dataclasses.replace(options, options=tuple(combined))


# Without a GPU to measure on, XLA:GPU finds no tiles for some products of rows that 16 does not divide, as 257 tokens.
_NO_TILES, _TRITON = "Couldn't find output tile sizes", "xla_gpu_enable_triton_gemm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledText:
    """What the compiler made of a job, as the cache keeps it: a program's text and figures, or why it was refused.

    It serves `zero.memory.measure` and `zero.comms.measure` as a `jax.stages.Compiled` does.
    """

    text: str = ""  # the HLO, of `program_text`; '' of a program that was refused
    stats: Mapping[str, int] = dataclasses.field(default_factory=dict)  # the figures of `memory_analysis()`, by name
    message: str = ""  # the compiler's error where the program needs more device memory than there is, else ''
    needed_bytes: int | None = None  # what a refused program needs, where the compiler reports it
    compile_seconds: float  # what compiling took, when it was done
    from_cache: bool  # whether it was done before
    cache_error: str = ""  # why it could not be put into the cache, or ''
    # The arguments, whose shapes newer programs for TPUs do not have; None where they are not known
    args_info: Any = None
    has_code: bool = True  # whether the compiler went on from the schedule to the code; without it there are no cycles

    def as_text(self) -> str:
        """Returns the program's text."""
        return self.text

    @functools.cached_property
    def program(self) -> Program:
        """The program, parsed once for all that read it."""
        return Program(self.text)

    def memory_analysis(self) -> Any:
        """Returns the compiler's figures as attributes."""
        return types.SimpleNamespace(**self.stats)

    @property
    def layout(self) -> HeapLayout | None:
        """The heap as the compiler assigned it, where it reported that."""
        allocated, live = (self.stats.get(f"heap_{kind}_bytes") for kind in ("allocated", "live"))
        return None if allocated is None else HeapLayout(allocated_bytes=allocated, live_bytes=live)


def compile_job(
    job: Job,
    mesh: Mesh,
    state: TrainState,
    *,
    cache: pathlib.Path | None,
    on_phase: Callable[[str], None],
    quick: bool = False,
) -> CompiledText:
    """Lowers and compiles a job, or takes what the compiler made of it from the folder `cache`.

    A `quick` job for TPUs is compiled to its schedule; the compiler goes on in a thread, until this process ends.
    """
    on_phase("lowering")
    lowered = make_train_step(job.loss_fn, job.tx, mesh=mesh, config=job.config).lower(state, job.batch)
    paths = {}
    if cache is not None:
        key = digest(compile_inputs(lowered, job, mesh))
        paths = {True: cache / f"{key}{_SUFFIX}"} | ({False: cache / f"{key}{_QUICK_SUFFIX}"} if quick else {})
    for has_code, path in paths.items():
        if saved := _load(path):
            return CompiledText(**saved, args_info=lowered.args_info, from_cache=True, has_code=has_code)
    on_phase("compiling")
    start = time.perf_counter()
    saved, has_code = compile_lowered(lowered, job.compiler_options or {}, quick=quick)
    saved["compile_seconds"] = time.perf_counter() - start
    error = _save(paths[has_code], saved) if paths else ""
    return CompiledText(**saved, args_info=lowered.args_info, from_cache=False, cache_error=error, has_code=has_code)


def compile_lowered(lowered: Any, options: Mapping[str, Any], *, quick: bool) -> tuple[dict[str, Any], bool]:
    """Returns a program's text and figures, or why the compiler refuses it, and whether it has code.

    If it is `quick`, the compiler is left before the code; it goes on in a thread, which ends with this process.
    """
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as dump:
            compile = functools.partial(lowered.compile, compiler_options={**layout_options(dump), **options})
            # Not in a `with`, which would wait for the compiler at its end; the folder may get more files of it, too.
            compiling = ThreadPoolExecutor(1).submit(compile) if quick else None
            while compiling and not compiling.done():
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                if scheduled := read_scheduled(dump):
                    text, sizes, layout = scheduled
                    return {"stats": sizes | _figures(layout), "text": text}, False
            compiled, layout = compiling.result() if compiling else compile(), {}
            with contextlib.suppress(ValueError):  # the user's options redirect the dump
                layout = _figures(read_layout(dump))
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES in str(error) and _TRITON not in options:
            return compile_lowered(lowered, {**options, _TRITON: False}, quick=quick)
        needed = _needed_bytes(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) and needed is None:
            raise
        return {"needed_bytes": needed, "message": str(error).split("\n\n")[0][:2000]}, True
    analysis = compiled.memory_analysis()
    stats = {name: int(getattr(analysis, name)) for name in dir(analysis) if name.endswith("_in_bytes")}
    return {"stats": stats | layout, "text": program_text(compiled)}, True


def program_text(compiled: Any) -> str:
    """Returns a program's text with its arrays of integers, by which block-sparse kernels skip blocks."""
    try:
        text = hlo_text(compiled)
    except ValueError:  # another release, or backend
        return compiled.as_text()
    return _CONSTANT.sub(_shortened, text)


def _shortened(match: re.Match) -> str:
    """Elides a constant that cannot be a kernel's block mask."""
    longest = _MAX_CHARACTERS if _INTEGERS.fullmatch(match["dtype"]) else _SHORT
    return match[0] if len(match["value"]) <= longest else match[0].replace(match["value"], "{...}")


def _figures(layout: HeapLayout) -> dict[str, int]:
    return {f"heap_{name}": size for name, size in dataclasses.asdict(layout).items() if size is not None}


def _needed_bytes(message: str) -> int | None:
    """Reads how much memory a program needs from the compiler's error."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"(?:Used|HLO temporaries \(|required[^(]*\()\s*([\d.]+)([KMGT])", message)
    return int(float(match[1]) * units[match[2]]) if match else None


def _save(path: pathlib.Path, saved: Mapping[str, Any]) -> str:
    """Writes a result to the cache, bounds that, and returns why it could not be written, or ''."""
    try:
        write_entry(path, gzip.compress(json.dumps(saved).encode(), compresslevel=3), mark=_MARK)
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"
    any_version = _MARK[: _MARK.rindex(b" ")]  # entries of other releases take room too
    evict_oldest(path.parent, is_own=lambda x: x.suffix == _SUFFIX and has_mark(x, any_version), keep=path)
    return ""


def _load(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads a result; returns None if it cannot be read or is damaged, which its checksum shows."""
    content = read_entry(path, mark=_MARK)
    return None if content is None else json.loads(gzip.decompress(content))


def batch_shapes(batch: PyTree) -> PyTree:
    """Returns the shapes of a batch of arrays, numbers or `ShapeDtypeStruct`s; raises `ValueError` for others."""
    if not jax.tree.leaves(batch):
        raise ValueError(f"the batch {batch!r} holds no arrays: give arrays or jax.ShapeDtypeStructs [examples, ...]")
    return shapes_of_batch(batch)


def batch_of(batch: PyTree, batch_size: int) -> PyTree:
    """Returns a batch's shapes with another leading dim, which has to be one for all leaves that have any."""
    sizes = leading_dims(batch)
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the leaves of the batch differ in their leading dim: {sizes}; no batch of {batch_size} examples can be "
            "made of it: plan it as it is, with zero.plan(..., batch=...)"
        )
    resize = lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]) if x.ndim else (), x.dtype)  # noqa: E731
    return jax.tree.map(resize, batch_shapes(batch))
