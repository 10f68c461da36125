"""The memory of a compiled program on one device: arguments by group, and what its temporaries are at their peak."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.hlo_layout import Array, arrays, parse_shape
from zero_jax.hlo_memory import Buffer, Heap, peak
from zero_jax.hlo_program import KINDS, Program
from zero_jax.memory_leaves import (
    GROUPS,
    STATE_GROUPS,
    ArgumentLeaf,
    aligned,
    argument_leaves,
    group_of,
    left_whole,
    readable_bytes,
    sum_by_group,
    whole_warning,
)
from zero_jax.scopes import gathered_path

TEMPORARIES = ("grads", "gathered params", "residuals", "copied params", "collective buffers", "other temporaries")
# A gradient of the gather of a param, in contrast to a gather that is done again in the backward pass.
_GRAD_OF_GATHER = re.compile(r"transpose\([^/]*gather:")
# Smaller arrays than these share their dims with too much.
_SMALLEST_PARAM = 1024
_NUM_LARGEST = 12
_MAX_ON_CHIP_BYTES = 160 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temporary:
    """A buffer that is alive at the peak, and which of `TEMPORARIES` it is."""

    kind: str
    buffer: Buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a compiled program in bytes per device; prints as a table.

    Attributes:
      arguments: Arguments in the device's memory by group, padding included.
      leaves: The arguments one by one.
      argument_bytes: All arguments, by the compiler.
      output_bytes: All results, by the compiler.
      alias_bytes: Results that are written over donated arguments, by the compiler.
      temp_bytes: The compiler's `temp_size_in_bytes`: the heap of temporaries with its gaps.
      heap_bytes: What temporaries take of the device's memory. On XLA:TPU the most that is alive at one time: by that,
        and not by `temp_bytes`, its compiler decides whether a program fits (docs/planning.md); elsewhere `temp_bytes`.
      generated_code_bytes: The program itself.
      host_bytes: Arguments, results and temporaries in host memory.
      live_peak_bytes: The most that temporaries take at one time, from the program's text (`hlo_memory.peak`).
      temporaries: What those are, by kind, as far as names and shapes tell.
      in_argument_bytes: Temporaries that lie in donated arguments then, not counted in `temporaries`.
      on_chip_peak_bytes: The most that values take at one time in memory on the chip, such as VMEM.
      peak_phase: `forward`, `backward` or `update`: where in the step the peak lies.
      peak_op_name: The JAX name stack there.
      compiler_peak_bytes: The compiler's `peak_memory_in_bytes`, 0 if it gives none. It is not what a device needs:
        XLA:CPU leaves the temporaries out, and XLA:TPU adds to the arguments the largest heap of *one* memory space, be
        it VMEM, without the gaps.
      largest: The largest temporaries at the peak.
      left_whole: Leaves that are whole in groups of the state that are otherwise sharded.
      warnings: What is off.
    """

    arguments: Mapping[str, int]
    leaves: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    heap_bytes: int
    generated_code_bytes: int
    host_bytes: int
    live_peak_bytes: int
    temporaries: Mapping[str, int]
    in_argument_bytes: int
    on_chip_peak_bytes: int
    peak_phase: str
    peak_op_name: str
    compiler_peak_bytes: int
    largest: tuple[Temporary, ...] = dataclasses.field(repr=False)
    left_whole: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]

    @property
    def by_group(self) -> dict[str, int]:
        """Bytes by group of the arguments and kind of the temporaries; together `peak_bytes` less new results."""
        rest = {"unexplained": self.unexplained_bytes} if self.unexplained_bytes > 0 else {}
        return {**self.arguments, **self.temporaries, **rest}

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that are not written over them, and temporaries."""
        return self.argument_bytes + max(self.output_bytes - self.alias_bytes, 0) + self.heap_bytes

    @property
    def total_bytes(self) -> int:
        """What must fit into the device's memory: `peak_bytes` and the program."""
        return self.peak_bytes + self.generated_code_bytes

    @property
    def unexplained_bytes(self) -> int:
        """The part of the temporaries that the program's text does not explain, such as scratch of operations.

        Negative where the compiler shares more memory than the text tells.
        """
        return self.heap_bytes - self.live_peak_bytes

    @property
    def fragmentation(self) -> float:
        """The heap as laid out, over what is alive at its peak; 1 if nothing is."""
        return self.temp_bytes / self.live_peak_bytes if self.live_peak_bytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        figures = dataclasses.asdict(self)
        derived = ("peak_bytes", "total_bytes", "unexplained_bytes", "fragmentation")
        return figures | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        """Lays the report out as a table, with the largest temporaries and the warnings below."""

        def row(name: str, num_bytes: int, text: str = "") -> tuple[str, ...]:
            return name, readable_bytes(num_bytes), f"{100 * num_bytes / max(self.total_bytes, 1):.1f}%", text

        rows = [("bytes per device", "", "", "")]
        rows += [row(f"  {group}", num_bytes) for group, num_bytes in self.arguments.items()]
        rows.append(row("arguments", self.argument_bytes, f"{readable_bytes(self.alias_bytes)} of them donated"))
        if new := max(self.output_bytes - self.alias_bytes, 0):
            rows.append(row("new results", new))
        rows += [row(f"  {kind}", num_bytes) for kind, num_bytes in self.temporaries.items()]
        if self.unexplained_bytes:
            rows.append(row("  unexplained", self.unexplained_bytes, "gaps and scratch, by the compiler's total"))
        rows.append(row("temporaries", self.heap_bytes, f"peak in the {self.peak_phase} pass: {self.peak_op_name}"))
        rows.append(row("program", self.generated_code_bytes))
        rows.append(row("total", self.total_bytes))
        if self.temp_bytes > self.heap_bytes:
            rows.append(("laid out", readable_bytes(self.temp_bytes), "", "temporaries with the gaps between them"))
        if self.in_argument_bytes:
            rows.append(("beside them", readable_bytes(self.in_argument_bytes), "", "of temporaries in free arguments"))
        if self.on_chip_peak_bytes:
            rows.append(("on the chip", readable_bytes(self.on_chip_peak_bytes), "", "at most at one time"))
        if self.host_bytes:
            rows.append(("host memory", readable_bytes(self.host_bytes), "", ""))
        lines = [aligned(rows), "", "largest temporaries at the peak"]
        largest = [
            (one.buffer.shape, readable_bytes(one.buffer.num_bytes), f"{one.kind}: {one.buffer.name_and_source}")
            for one in self.largest
        ]
        lines.append(aligned(largest) if largest else "none")
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])


def measure(compiled: Any) -> MemoryReport:
    """Reads the memory of a compiled program.

    Args:
      compiled: A `jax.stages.Compiled`, or anything with its `as_text()` and `memory_analysis()`.

    Raises:
      ValueError: The program gives no text or no analysis, as one that was loaded from a cache of another backend.
    """
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    if not text or analysis is None:
        raise ValueError(
            f"{type(compiled).__name__} does not tell its text or memory: pass what `.lower(...).compile()` returns"
        )
    stats = {name: int(getattr(analysis, f"{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias")}
    heap, program = peak(text), Program(text)
    leaves = argument_leaves(program, compiled)
    on_device = [leaf for leaf in leaves if not leaf.on_host]
    found = classify(heap, leaves)
    whole = left_whole(on_device)
    kinds = collections.Counter()
    for one in found:
        kinds[one.kind] += one.buffer.num_bytes
    host = [getattr(analysis, f"host_{name}_size_in_bytes", 0) for name in ("argument", "output", "temp")]
    host_alias = getattr(analysis, "host_alias_size_in_bytes", 0)
    warnings = [
        _argument_warning(on_device, stats["argument"]),
        whole_warning(on_device, whole),
        _donation_warning(program, on_device, stats["alias"]),
    ]
    return MemoryReport(
        arguments=sum_by_group(on_device),
        leaves=leaves,
        argument_bytes=stats["argument"],
        output_bytes=stats["output"],
        alias_bytes=stats["alias"],
        temp_bytes=int(analysis.temp_size_in_bytes),
        heap_bytes=_heap_bytes(heap, analysis, is_tpu=":T(" in text),
        generated_code_bytes=int(getattr(analysis, "generated_code_size_in_bytes", 0)),
        host_bytes=max(sum(host) - host_alias, heap.host_argument_bytes + heap.host_peak_bytes),
        live_peak_bytes=heap.peak_bytes,
        temporaries={kind: kinds[kind] for kind in TEMPORARIES if kinds[kind]},
        in_argument_bytes=sum(one.num_bytes for one in heap.in_arguments),
        on_chip_peak_bytes=heap.on_chip_peak_bytes,
        peak_phase=phase_of(heap.peak_op_name) or "update",
        peak_op_name=heap.peak_op_name,
        compiler_peak_bytes=int(getattr(analysis, "peak_memory_in_bytes", 0)),
        largest=found[:_NUM_LARGEST],
        left_whole=whole,
        warnings=tuple(warning for warning in warnings if warning),
    )


def phase_of(op_name: str) -> str:
    """Returns `forward`, `backward`, `update`, or '' for no name: JAX's name stacks have jvp( and transpose( in."""
    if not op_name:
        return ""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "update"


def classify(heap: Heap, leaves: Sequence[ArgumentLeaf]) -> tuple[Temporary, ...]:
    """Says of each temporary at the peak what it is, as far as its name, its readers and its shape tell."""
    params = [leaf for leaf in leaves if leaf.group in ("params", "master")]
    local = {dims for leaf in params for dims in _dims_of_grads(leaf.dims)}
    whole = {dims for leaf in params for dims in _dims_of_grads(leaf.whole_dims or leaf.dims)}
    is_collective = re.compile(rf"({KINDS})(-start|-done)?")

    def is_gathered(one: Buffer, dims: tuple[int, ...]) -> bool:
        gathers = bool(gathered_path(one.op_name)) or one.op_name.endswith("sharding_constraint")
        scoped = (gathers or one.opcode.startswith("all-gather")) and not _GRAD_OF_GATHER.search(one.op_name)
        return dims in whole and (dims not in local or one.opcode.startswith("all-gather")) and scoped

    def is_grad(one: Buffer, dims: tuple[int, ...]) -> bool:
        written = phase_of(one.op_name) in ("backward", "") and "rematted_computation" not in one.op_name
        return dims in whole | local and written and phase_of(one.last_read_by) != "forward"

    def is_copied(one: Buffer, dims: tuple[int, ...]) -> bool:
        path = "/".join(re.findall(r"[^.\[\]'\"\\]+", one.op_name))
        is_argument = "(" not in one.op_name and group_of(path) in ("params", "master")
        cast = one.op_name.endswith("convert_element_type") and phase_of(one.op_name) == "update" and dims in local
        # A loop over stacked layers takes the params of one layer out of the stack.
        sliced = "dynamic_index_in_dim" in one.op_name and dims in whole | local
        return is_argument or cast or sliced

    def is_residual(one: Buffer, _: tuple[int, ...]) -> bool:
        return phase_of(one.op_name) == "forward" and phase_of(one.last_read_by) == "backward"

    def is_collective_buffer(one: Buffer, _: tuple[int, ...]) -> bool:
        return bool(is_collective.fullmatch(one.opcode))

    rules: tuple[tuple[str, Callable[[Buffer, tuple[int, ...]], bool]], ...] = (
        ("copied params", is_copied),
        ("gathered params", is_gathered),
        ("grads", is_grad),
        ("residuals", is_residual),
        ("collective buffers", is_collective_buffer),
        ("other temporaries", lambda one, dims: True),
    )

    def kind_of(one: Buffer) -> str:
        (array,) = arrays(parse_shape(one.shape))
        return next(kind for kind, holds in rules if holds(one, _dims(array.dims)))

    return tuple(Temporary(kind=kind_of(one), buffer=one) for one in heap.live)


def _heap_bytes(heap: Heap, analysis: Any, *, is_tpu: bool) -> int:
    """Returns what temporaries take of the device's memory."""
    if not is_tpu:
        return int(analysis.temp_size_in_bytes)
    # XLA:TPU reports the largest heap of one memory space: where that is more than fits on the chip, it is this one.
    own = int(getattr(analysis, "peak_memory_in_bytes", 0)) - int(analysis.argument_size_in_bytes)
    return max(heap.peak_bytes, own) if own > _MAX_ON_CHIP_BYTES else heap.peak_bytes


def _dims(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims without those of 1, in any order: XLA transposes and reshapes gradients as it likes."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def _dims_of_grads(dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The dims of a param, and of one layer of it if it may be a stack of layers."""
    found = [dims, dims[1:]] if len(dims) >= 3 else [dims]
    return {_dims(one) for one in found if Array("f32", one, "", 0, 0).unpadded_bytes >= 4 * _SMALLEST_PARAM}


def _argument_warning(leaves: Sequence[ArgumentLeaf], argument_bytes: int) -> str | None:
    total = sum(leaf.num_bytes for leaf in leaves)
    if total == argument_bytes:
        return None
    return f"the arguments add up to {total:,} bytes by the program's text, and to {argument_bytes:,} by the compiler"


def _donation_warning(program: Program, leaves: Sequence[ArgumentLeaf], alias_bytes: int) -> str | None:
    """Tells if a program that returns a train state does not write it over the one that it was given."""
    root = next(one for one in program.computations[program.entry].values() if one.line.lstrip().startswith("ROOT "))
    returned = collections.Counter((array.dtype, array.dims) for array in arrays(parse_shape(root.shape)))
    updated = 0
    for leaf in leaves:
        if leaf.group in STATE_GROUPS and returned[leaf.dtype, leaf.dims]:
            returned[leaf.dtype, leaf.dims] -= 1
            updated += leaf.num_bytes
    if not any(leaf.group == "opt_state" for leaf in leaves) or alias_bytes >= 0.99 * updated:
        return None
    return (
        f"only {readable_bytes(alias_bytes)} of the {readable_bytes(updated)} of {', '.join(GROUPS[:3])} that the "
        "program takes and returns are donated: the step holds the state twice; pass donate_argnums to jax.jit"
    )
