"""Compiler options of a step: collectives that run beside computation, the memory of kernels, combined collectives.

By default XLA:TPU and XLA:GPU make most collectives of a step synchronous: nothing is computed while they run. The
tables have the options that change this, by hardware (docs/overlap.md has what each is worth). The ZeRO paper, section
6.2 (C_B): small messages are slow, so they are combined, but into buffers of a constant size and not into one buffer
for the entire model.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from zero_jax.program.subcalls import equations, equations_of
from zero_jax.sharding.topology import hardware_of
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import resolve_remat

Value = str | int | float | bool


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """A compiler option of a step."""

    name: str  # as the compiler calls it, without dashes
    value: Value  # a boolean, number or text
    purpose: str  # what it is for
    # Its value ('' for none) in a program that the compiler's fault does not concern; None if it guards against none
    unguarded: str | None = None

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.name}={value}: {self.purpose}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The compiler options of a step on some hardware, in the order in which they are passed."""

    options: tuple[CompilerOption, ...]
    unknown: tuple[str, ...]  # names of those that the compiler does not know, which are left out

    @property
    def values(self) -> dict[str, Value]:
        """The values by name, as `jax.jit(..., compiler_options=...)` takes them."""
        return {option.name: option.value for option in self.options}

    @property
    def unguarded(self) -> dict[str, Value] | None:
        """The values for a program without a scatter in a loop, where such programs have another value; else None."""
        guard = next((option for option in self.options if option.name == _DISABLE_PASSES), None)
        if guard is None or guard.unguarded is None:
            return None
        rest = {name: value for name, value in self.values.items() if name != _DISABLE_PASSES}
        return rest | ({_DISABLE_PASSES: guard.unguarded} if guard.unguarded else {})


_option = CompilerOption  # in the tables: name, value, purpose
_SPARSE_CORE_COLLECTIVES = (
    _option("xla_tpu_enable_sparse_core_collective_offload_all_gather", True,
            "all-gathers run on the SparseCores while the TensorCore computes"),
    _option("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", True,
            "all-gathers over two dims of the torus run there, too"),
    _option("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", True,
            "reduce-scatters run on the SparseCores while the TensorCore computes"),
)  # fmt: skip
_WHOLE_PRODUCTS = _option("xla_jf_spmd_threshold_for_windowed_einsum_mib", 1_000_000,
                          "products with a gather or a scatter are not cut into windows, each bound by memory or "
                          "by permutes")  # fmt: skip
_SPARSE_CORE = (
    *_SPARSE_CORE_COLLECTIVES,
    _option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", False,
            "all-gathers are not fused with computation, which would keep them on the TensorCore"),
    _WHOLE_PRODUCTS,
)  # fmt: skip
# A gather over a whole slice is native, as one operation, with this.
_NATIVE_GATHERS = _option("xla_tpu_prefer_async_allgather_to_allreduce", True,
                          "a gather over a whole slice is no all-reduce, which sends twice as much")  # fmt: skip
# What the steps of collectives rest on (`sharding/spec.py`, `chains.py`), with `overlap` or without: else
# reduce-scatters, and gathers of little, are all-reduces, which send twice as much, and on v4 and v5e part of the
# reduce-scatters over a ring are loops of small products.
_STEPS: Mapping[str, tuple[CompilerOption, ...]] = {
    **dict.fromkeys(("v4", "v5e"), (_WHOLE_PRODUCTS,)),
    "v6e": (
        *_SPARSE_CORE_COLLECTIVES,
        _option("xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter", True,
                "reduce-scatters over both dims of the torus run there, too"),
        _NATIVE_GATHERS,
    ),
}  # fmt: skip
# The same on more than `_MANY_DEVICES`, where shards of 1,024 rows have fewer than 8. XLA of TPU7x makes one collective
# of the steps, without a look at what is native; with few examples a device it sends less by its own choice.
_MANY_DEVICES = 128
_STEPS_OF_MANY: Mapping[str, tuple[CompilerOption, ...]] = {
    "tpu7x": (
        _option("xla_shardy_options", "enable_explicit_collectives:false",
                "reduce-scatters to few rows go in steps, not as all-reduces, which send twice as much"),
    ),
}  # fmt: skip
_COMBINED_GPU_BYTES = 2**30
_PIPELINED_GPU = {"all_gather": "next", "reduce_scatter": "last", "all_reduce": "last"}
_COMBINED_GPU = {kind: f"xla_gpu_{kind}_combine_threshold_bytes" for kind in _PIPELINED_GPU}


def _pipelined(kind: str, which: str) -> CompilerOption:
    """Returns the option for a kind of collective in loops; JAX 0.11 brought the names of today."""
    purpose = f"{kind.replace('_', '-')}s of a loop's {which} iteration run beside this one's computation"
    if jax.__version_info__ < (0, 11):
        return _option(f"xla_gpu_enable_pipelined_{kind}", True, purpose)
    return _option(f"xla_gpu_pipeline_{kind}", "COLLECTIVE_PIPELINING_MODE_ON", purpose)


_GPU = (
    _option("xla_gpu_enable_latency_hiding_scheduler", True,
            "computation is scheduled between the start and the end of a collective"),
    *(_pipelined(kind, which) for kind, which in _PIPELINED_GPU.items()),
    *(_option(name, _COMBINED_GPU_BYTES, f"{kind.replace('_', '-')}s of a layer are one collective, of up to 1 GiB")
      for kind, name in _COMBINED_GPU.items()),
)  # fmt: skip
# Inside a host it makes up for what the pipelining computes; between hosts it exposes more than that.
_GPU_HOST = (
    *_GPU,
    _option("xla_gpu_enable_while_loop_double_buffering", True,
            "loops run two iterations at a time, so that values of the next are not copied"),
)  # fmt: skip
_QUEUING = _option("xla_tpu_enable_sparse_core_offload_queuing_in_lhs", True,
                   "several collectives wait for the SparseCores while the TensorCore computes")  # fmt: skip
# Below 64 chips an axis `data` covers all three dims of a torus of v5p, and a gather over it is one operation.
_WHOLE_TORUS = _option("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", True,
                       "all-gathers over three dims of the torus run there, too")  # fmt: skip
# What lets collectives run beside computation on TPUs, by the name of the hardware. What is not here has no options:
# XLA:CPU runs one thing after another. Left out: `xla_tpu_enable_async_collective_fusion` for all-gathers, of which
# libtpu 0.0.44 warns ("incorrect results, hang, SDC") on everything but v5e.
_OVERLAP: Mapping[str, tuple[CompilerOption, ...]] = {
    "v5p": (*_SPARSE_CORE, _WHOLE_TORUS, _QUEUING),
    "v6e": (*_SPARSE_CORE, _QUEUING),
    "tpu7x": (*_SPARSE_CORE, _NATIVE_GATHERS),
}
# On-chip memory that one kernel may take, by the name of the hardware. By default large products get less, read their
# operands more often, and reach 61% (v6e) to 84% (v5p) of the peak (docs/overlap.md).
_KERNEL_MEMORY_KIB: Mapping[str, int] = {"v5p": 49_152, "v6e": 98_304, "tpu7x": 65_536}
# The options of `ZeroConfig.combine_bytes` by platform; a larger array is still moved by one collective. XLA:TPU
# combines all-reduces (libtpu: cross-replica sums). It combines reduce-scatters of one layer whatever the options are,
# all-gathers never. XLA:CPU combines nothing.
_COMBINE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpu", "cuda", "rocm"), tuple(_COMBINED_GPU.values())),
    "tpu": ("xla_jf_crs_combiner_threshold_in_bytes",),
    "cpu": (),
}
# XLA:GPU of JAX 0.10 annotates slices of host memory in loops with rows of another iteration (docs/xla_faults.md). With
# this, a program that would copy these ends with an error. XLA of JAX 0.12 annotates them right.
_VERIFIED = _option("xla_gpu_experimental_dynamic_slice_fusion_verify_offsets", True,
                    "wrong rows of an array in host memory are an error (JAX 0.10's XLA may copy some)")  # fmt: skip
# Passes of the compiler that make wrong programs, by platform, and the first JAX release whose XLA is right
# (docs/xla_faults.md). This one takes a gradient that a loop's body adds to by a scatter for a sum that may be reduced
# across devices after the loop; the body clears it on all devices but one in each iteration (openxla/xla#49143).
_DISABLE_PASSES = "xla_disable_hlo_passes"
_CODE_MOTION = (("while-loop-all-reduce-code-motion", (0, 12)),)
_WRONG_PASSES = dict.fromkeys(("tpu", "gpu", "cuda", "rocm"), _CODE_MOTION)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Primitives that write to a part of an array, and those of which it is not known.
_WRITES = re.compile(r".*scatter|dynamic_update_slice|pallas_call|ffi_call|.*callback")
_UNKNOWN = re.compile(r"No such compile option: '([^']+)'")


def compiler_options(*, mesh: Mesh, config: ZeroConfig) -> dict[str, Value]:
    """Returns the compiler options that `make_train_step` compiles with, for a step that you compile yourself.

    They are for `jax.jit(step, compiler_options=...)` or `lowered.compile(compiler_options=...)`. A step of
    `make_train_step` has them already, unless it is called within another jitted function: JAX takes the options of
    the outermost function alone, so give them to that.

    Args:
      mesh: the mesh, of real or compile-only devices.
      config: `overlap`, `compiler_options` and `combine_bytes` are read.

    Returns:
      The values by the options' names; none on a CPU. An option that the compiler does not know is left out, with a
      warning.

    Raises:
      ValueError: `combine_bytes` for a platform whose options are not known.

    Example:
      >>> zero.compiler_options(mesh=mesh, config=config)
      {}
    """
    check_config(config).axes_of(mesh)
    return step_options(mesh, config).values


def step_options(mesh: Mesh, config: ZeroConfig) -> StepOptions:
    """Returns the compiler options of a step, each with what it is for; warns of those that are not known."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu" and not config.compiler_options:  # XLA:CPU runs one thing after another
        return StepOptions(options=(), unknown=())
    # One of this process's own, which it can compile for (`_unknown`).
    device = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    is_one_host = len({d.process_index for d in devices}) == 1
    requested = wanted_options(device, config, os.environ, is_one_host=is_one_host, has_many=mesh.size > _MANY_DEVICES)
    named = tuple((option.name, option.value) for option in requested)
    unknown = _unknown(_Compiler((device.platform, device.device_kind), device), named) if named else ()
    for name in unknown:
        _warn(name, device.device_kind)
    return StepOptions(options=tuple(option for option in requested if option.name not in unknown), unknown=unknown)


def wanted_options(
    device: Any,
    config: ZeroConfig,
    environment: Mapping[str, str],
    *,
    is_one_host: bool = False,
    has_many: bool = False,
) -> tuple[CompilerOption, ...]:
    """Returns the options that a config asks for on a device, whether its compiler knows them or not.

    Flags of the environment replace defaults, and what the config names replaces both.
    """
    options = {option.name: option for option in _defaults(device, is_one_host)} if config.overlap else {}
    hardware = getattr(hardware_of(device), "name", "")
    steps = _STEPS.get(hardware, ()) + (_STEPS_OF_MANY.get(hardware, ()) if has_many else ())
    options |= {option.name: option for option in steps}
    # An option of the program would win over the flag that the user has set for the process.
    for name in {name for flags in _flags(environment) for name in flags} if options else ():
        options.pop(name, None)
        options.pop(name.removeprefix("no"), None)  # --noxla_option is --xla_option=false
    if config.combine_bytes is not None:
        if device.platform not in _COMBINE:
            raise ValueError(
                f"combine_bytes={config.combine_bytes} is not known to apply to {device.platform!r}, only to "
                f"{', '.join(_COMBINE)}: leave it None"
            )
        purpose = "combine_bytes of the config"
        options |= {name: CompilerOption(name, config.combine_bytes, purpose) for name in _COMBINE[device.platform]}
    if _is_cuda(device) and jax.__version_info__ < (0, 12):
        offload = config.resolved_offload()  # a loop may read residuals in host memory, or params
        if resolve_remat(config.remat).offloads or (offload is not None and offload.what == "all"):
            options[_VERIFIED.name] = _VERIFIED
    for name, value in (config.compiler_options or {}).items():
        options.pop(name, None)
        if value is not None:
            options[name] = CompilerOption(name, _typed(value), "given in the config")
    is_removed = (config.compiler_options or {}).get(_DISABLE_PASSES, "") is None
    passes = [name for name, right in _WRONG_PASSES.get(device.platform, ()) if jax.__version_info__ < right]
    if passes and not is_removed:  # after all others, with those that they disable: the option is one list
        options[_DISABLE_PASSES] = _guard(passes, options.get(_DISABLE_PASSES), environment)
    return tuple(options.values())


def _guard(passes: Sequence[str], given: CompilerOption | None, environment: Mapping[str, str]) -> CompilerOption:
    """Returns the option that disables passes, beside those that the config or the environment disables."""
    of_environment = [flags.get(_DISABLE_PASSES, "") for flags in _flags(environment)]
    others = ",".join(filter(None, [str(given.value)] if given else of_environment))
    return CompilerOption(
        name=_DISABLE_PASSES,
        value=",".join(filter(None, [others, *passes])),
        purpose="the gradient of a table that a loop looks up is right (this release's XLA may lose parts of it)",
        unguarded=others,
    )


def scatters_in_loops(jaxpr: Any) -> bool:
    """Tells whether a loop in a jaxpr, open or closed, adds to or writes elements by index."""
    loops = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("scan", "while"))
    return any(_WRITES.match(eqn.primitive.name) for loop in loops for eqn in equations_of(loop))


def _defaults(device: Any, is_one_host: bool) -> tuple[CompilerOption, ...]:
    if _is_cuda(device):
        return _GPU_HOST if is_one_host else _GPU
    hardware = hardware_of(device)
    if hardware is None:
        return ()
    kib = _KERNEL_MEMORY_KIB.get(hardware.name)
    purpose = "large products keep more of their operands on the chip"
    memory = () if kib is None else (_option("xla_tpu_scoped_vmem_limit_kib", kib, purpose),)
    return _OVERLAP.get(hardware.name, ()) + memory


def _is_cuda(device: Any) -> bool:
    if device.platform not in ("gpu", "cuda"):
        return False
    return "rocm" not in str(getattr(device.client, "platform_version", "")).lower()


def _typed(value: Value) -> Value:
    """Returns true and false as booleans, which XLA:GPU does not take as text."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def flag_words(text: str) -> list[str]:
    """Returns the flags of `XLA_FLAGS` or `LIBTPU_INIT_ARGS`: a text, or the name of a file of them."""
    if text.strip() and not text.strip().startswith("-"):
        try:
            text = pathlib.Path(text.strip()).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return [text]
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _flags(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the flags of each variable of the environment, by their names without dashes."""
    words_of_each = [flag_words(environment.get(variable, "")) for variable in _FLAG_VARIABLES]
    pairs_of_each = [[word.partition("=") for word in words] for words in words_of_each]
    return [{name.lstrip("-"): value for name, _, value in pairs} for pairs in pairs_of_each]


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """A compiler by what identifies it, and a device that it compiles for."""

    kind: tuple[str, str]
    device: Any = dataclasses.field(compare=False)  # no part of a cache's key: each topology has devices of its own


@functools.cache
def _unknown(compiler: _Compiler, options: tuple[tuple[str, Value], ...]) -> tuple[str, ...]:
    """Returns the names of options that a compiler does not know: it is asked to compile a constant with them."""
    remaining, unknown = dict(options), []
    shape = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(compiler.device))
    while remaining:  # the error names the first option alone
        try:
            jax.jit(lambda x: x).lower(shape).compile(compiler_options=dict[str, Any](remaining))
            break
        except jax.errors.JaxRuntimeError as error:
            match = _UNKNOWN.search(str(error))
            if not (match and match[1] in remaining):
                break  # of another kind, such as a wrong value, which compiling the step reports
            del remaining[match[1]]
            unknown.append(match[1])
    return tuple(unknown)


@functools.cache
def _warn(name: str, device_kind: str) -> None:
    warnings.warn(
        f"the compiler for {device_kind} does not know the option {name!r}, which is left out: remove it with "
        f"ZeroConfig(compiler_options={{{name!r}: None}}), or use overlap=False",
        stacklevel=2,
    )
