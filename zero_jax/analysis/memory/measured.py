"""Measures the memory of a compiled program on one device: arguments by group, temporaries at their peak by kind.

Gradients, gathered params, residuals and other temporaries are told apart by names and shapes.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax import hlo
from zero_jax.analysis.leaves import (
    STATE_GROUPS,
    ArgumentLeaf,
    argument_leaves,
    dims_key,
    group_of,
    not_donated,
    path_of,
    sum_by_group,
    unsharded_leaves,
    unsharded_warning,
)
from zero_jax.core.signatures import check_arguments, check_methods
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.hlo import Buffer, Heap, HeapLayout, Program

TEMPORARIES = ("grads", "gathered params", "residuals", "copied params", "collective buffers", "other temporaries")
# The groups that a loss function uses, and that are gathered for it.
_PARAMS = ("params", "master", "model_state")
# Dims of smaller arrays are ambiguous.
_SMALLEST_PARAM = 1024
_NUM_LARGEST = 12
_MAX_ON_CHIP_BYTES = 160 * 2**20
# In smaller heaps a compiler's padding may be many times the live bytes, and a ratio would be meaningless.
_SMALL_HEAP_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temporary:
    """A buffer that is alive at the peak, and which of `TEMPORARIES` it is."""

    kind: str
    buffer: Buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport(Report):
    """The memory of a compiled program in bytes per device; prints as a table.

    Attributes:
      arguments: Arguments in the device's memory by group, padding included.
      leaves: The arguments.
      argument_bytes: All arguments, by the compiler.
      output_bytes: All results, by the compiler.
      alias_bytes: Results that are written over donated arguments, by the compiler.
      temp_bytes: The compiler's `temp_size_in_bytes`. On XLA:CPU the heap of temporaries with its gaps; on XLA:TPU
        more than that (docs/fragmentation.md).
      heap_bytes: What temporaries take of the device's memory. On XLA:TPU the most that is alive at one time: by that,
        and not by `temp_bytes`, its compiler decides whether a program fits (docs/planning.md); elsewhere `temp_bytes`.
      generated_code_bytes: The program itself.
      layout: The heap of temporaries as the compiler assigns it; None where it does not report that.
      host_bytes: Arguments, results and temporaries in host memory.
      host_temp_bytes: The temporaries among them, such as offloaded residuals.
      live_peak_bytes: The most that temporaries take at one time, from the program's text (`hlo.peak`).
      temporaries: What those are, by kind, as far as names and shapes show.
      residual_bytes: The most that a device keeps at one time of what the forward pass has written for the backward
        pass, in its own memory and as far as the names of JAX show: residuals, logits, masks, but no gathered params.
      in_argument_bytes: Temporaries that are in the memory of results then, not counted in `temporaries`.
      on_chip_peak_bytes: The most that values take at one time in memory on the chip, such as VMEM.
      peak_phase: `forward`, `backward` or `update`: the phase of the step that has the peak.
      peak_op_name: The JAX name stack there.
      compiler_peak_bytes: The compiler's `peak_memory_in_bytes`, 0 if it gives none. It is not what a device needs:
        XLA:CPU leaves the temporaries out, and XLA:TPU adds to the arguments the largest heap of *one* memory space, be
        it VMEM, without the gaps.
      largest: The largest temporaries at the peak.
      largest_residuals: The largest buffers of `residual_bytes`.
      left_whole: Unsharded leaves of groups of the state that are otherwise sharded.
      not_donated: Leaves of the state that the program returns anew, beside those that it takes.
      warnings: What should be looked at.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> zero.memory.measure(compiled).arguments["params"]
      4096
    """

    arguments: Mapping[str, int]
    leaves: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    heap_bytes: int
    layout: HeapLayout | None
    generated_code_bytes: int
    host_bytes: int
    host_temp_bytes: int
    live_peak_bytes: int
    temporaries: Mapping[str, int]
    residual_bytes: int
    in_argument_bytes: int
    on_chip_peak_bytes: int
    peak_phase: str
    peak_op_name: str
    compiler_peak_bytes: int
    largest: tuple[Temporary, ...] = dataclasses.field(repr=False)
    largest_residuals: tuple[Buffer, ...] = dataclasses.field(repr=False)
    left_whole: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    not_donated: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]

    @property
    def by_group(self) -> dict[str, int]:
        """Bytes by group of the arguments and kind of the temporaries; together `peak_bytes` less new results."""
        unexplained = {"unexplained": self.unexplained_bytes} if self.unexplained_bytes > 0 else {}
        return {**self.arguments, **self.temporaries, **unexplained}

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

        Negative where the compiler shares more memory than the text shows.
        """
        return self.heap_bytes - self.live_peak_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """The heap of temporaries with its gaps; None where the compiler does not report it."""
        return None if self.layout is None else self.layout.allocated_bytes

    @property
    def fragmentation(self) -> float | None:
        """The heap with its gaps, over the most that is alive in it at one time; None where it is not known.

        Of a layout that the compiler reports it is exact, and at least 1. Else what is alive is worked out from the
        program's text, to some percent, so that a heap without gaps may come out a little below 1.
        """
        if self.layout is None:
            return None
        live = self.live_peak_bytes if self.layout.live_bytes is None else self.layout.live_bytes
        return self.layout.allocated_bytes / live if live else 1.0

    def __str__(self) -> str:
        def row(name: str, num_bytes: int, text: str = "") -> tuple[str, ...]:
            return name, format_bytes(num_bytes), f"{100 * num_bytes / max(self.total_bytes, 1):.1f}%", text

        rows = [("bytes per device", "", "", "")]
        rows += [row(f"  {group}", num_bytes) for group, num_bytes in self.arguments.items()]
        rows.append(row("arguments", self.argument_bytes, f"{format_bytes(self.alias_bytes)} of them donated"))
        if new := max(self.output_bytes - self.alias_bytes, 0):
            rows.append(row("new results", new))
        rows += [row(f"  {kind}", num_bytes) for kind, num_bytes in self.temporaries.items()]
        if self.unexplained_bytes:
            rows.append(row("  unexplained", self.unexplained_bytes, "gaps and scratch, by the compiler's total"))
        rows.append(row("temporaries", self.heap_bytes, f"peak in the {self.peak_phase} pass: {self.peak_op_name}"))
        rows += [row("program", self.generated_code_bytes)] if self.generated_code_bytes else []
        rows.append(row("total", self.total_bytes))
        rows += self._further_rows()
        lines = [aligned(rows, right=(1, 2)), "", "largest temporaries at the peak"]
        alike = collections.Counter(
            (x.buffer.shape, x.buffer.num_bytes, f"{x.kind}: {x.buffer.name_and_source}") for x in self.largest
        )
        largest = [
            (f"{count} x" if count > 1 else "", shape, format_bytes(count * num_bytes), text)
            for (shape, num_bytes, text), count in alike.items()
        ]
        lines.append(aligned(largest, right=(0, 2)) if largest else "none")
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])

    def _further_rows(self) -> list[tuple[str, ...]]:
        """Returns rows that are not summands of the total."""
        if self.fragmentation is None or self.allocated_bytes is None:
            rows = [("allocated", "unknown", "", "XLA:TPU reports it to a compile with memory.layout_options")]
        else:
            text = f"fragmentation {self.fragmentation:.3f}: the temporaries with gaps, over what is alive at once"
            if self.fragmentation > 2 and self.allocated_bytes < _SMALL_HEAP_BYTES:
                live = format_bytes(round(self.allocated_bytes / self.fragmentation))
                text = f"{live} alive at once: padding is the most of so small a heap"
            rows = [("allocated", format_bytes(self.allocated_bytes), "", text)]
        further = (
            ("residuals", self.residual_bytes, "at most at one time, saved by the forward pass for the backward pass"),
            ("beside them", self.in_argument_bytes, "of temporaries in results that are not written yet"),
            ("on the chip", self.on_chip_peak_bytes, "at most at one time"),
            ("host memory", self.host_bytes, f"{format_bytes(self.host_temp_bytes)} of it temporaries"),
        )
        return rows + [(name, format_bytes(size), "", text) for name, size, text in further if size]


def measure(compiled: Any, *, layout: HeapLayout | None = None) -> MemoryReport:
    """Reads the memory of a compiled program.

    Args:
      compiled: A `jax.stages.Compiled`, or anything with its `as_text()` and `memory_analysis()`.
      layout: From `read_layout`; without it the fragmentation of a TPU program is not known.

    Raises:
      ValueError: The program has no text or no analysis, as one that was loaded from a cache of another backend.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> report = zero.memory.measure(compiled)
      >>> {"params", "opt_state", "batch"} <= report.arguments.keys()
      True
    """
    check_methods(
        "compiled", compiled, ("as_text", "memory_analysis"), remedy="give what `.lower(...).compile()` returns"
    )
    check_arguments(layout=layout)
    program, analysis = hlo.parse(compiled), compiled.memory_analysis()
    if analysis is None:
        raise ValueError(f"{type(compiled).__name__} has no memory analysis: pass what `.lower(...).compile()` returns")
    return _measured(program, analysis, argument_leaves(program, compiled), layout)


def _measured(
    program: Program, analysis: Any, leaves: tuple[ArgumentLeaf, ...], layout: HeapLayout | None
) -> MemoryReport:
    """Returns the report of a program with these arguments, whose sizes the compiler's analysis has."""
    size = lambda name: int(getattr(analysis, f"{name}_size_in_bytes", 0))  # noqa: E731
    heap, is_tpu = hlo.peak(program), program.has_tiles
    temp_bytes = size("temp")
    if layout is None and not is_tpu:  # elsewhere `temp` is the heap itself
        layout = HeapLayout(allocated_bytes=temp_bytes, live_bytes=None)
    on_device = [leaf for leaf in leaves if not leaf.on_host]
    temporaries = classify(heap, leaves)
    unsharded = unsharded_leaves(on_device)
    by_kind = {kind: sum(x.buffer.num_bytes for x in temporaries if x.kind == kind) for kind in TEMPORARIES}
    # A donated array in host memory is an argument and a result there, once.
    host_bytes = sum(size(f"host_{name}") for name in ("argument", "output", "temp")) - size("host_alias")
    compiler_peak_bytes, heap_bytes = int(getattr(analysis, "peak_memory_in_bytes", 0)), temp_bytes
    if is_tpu:
        # XLA:TPU reports the largest heap of any one memory space. A heap that does not fit on the chip is that of the
        # device's memory. The reported peak includes host memory.
        largest_heap = compiler_peak_bytes - size("argument") - host_bytes
        heap_bytes = max(heap.peak_bytes, largest_heap if largest_heap > _MAX_ON_CHIP_BYTES else 0)
    undonated = not_donated(program, leaves, heap.donated)
    warnings = [unsharded_warning(on_device, unsharded), _donation_warning(leaves, heap.donated, undonated)]
    # Shapes and layouts are read from the text: the compiler's own sum shows whether they are read rightly.
    if (total := sum(leaf.num_bytes for leaf in on_device)) != size("argument"):
        by_text = f"the arguments add up to {total:,} bytes by the program's text"
        warnings.insert(0, f"{by_text}, and to {size('argument'):,} by the compiler")
    return MemoryReport(
        arguments=sum_by_group(on_device),
        leaves=leaves,
        argument_bytes=size("argument"),
        output_bytes=size("output"),
        alias_bytes=size("alias"),
        temp_bytes=temp_bytes,
        heap_bytes=heap_bytes,
        layout=layout,
        generated_code_bytes=size("generated_code"),
        host_bytes=max(host_bytes, heap.host_argument_bytes + heap.host_peak_bytes),
        host_temp_bytes=max(size("host_temp"), heap.host_peak_bytes),
        live_peak_bytes=heap.peak_bytes,
        temporaries={kind: num_bytes for kind, num_bytes in by_kind.items() if num_bytes},
        residual_bytes=sum(buffer.num_bytes for buffer in heap.residuals),
        in_argument_bytes=sum(buffer.num_bytes for buffer in heap.in_arguments),
        on_chip_peak_bytes=heap.on_chip_peak_bytes,
        peak_phase=hlo.phase_of(heap.peak_op_name) or "update",  # what has no name is of neither pass
        peak_op_name=heap.peak_op_name,
        compiler_peak_bytes=compiler_peak_bytes,
        largest=temporaries[:_NUM_LARGEST],
        largest_residuals=heap.residuals[:_NUM_LARGEST],
        left_whole=unsharded,
        not_donated=undonated,
        warnings=tuple(warning for warning in warnings if warning),
    )


def _donation_warning(
    leaves: Sequence[ArgumentLeaf], donated: Sequence[bool], undonated: Sequence[ArgumentLeaf]
) -> str | None:
    """Returns a warning if a train step does not write the state that it returns over the state that it takes."""
    # A program without optimizer state, such as an evaluation, returns no new state.
    if not undonated or not any(leaf.group == "opt_state" for leaf in leaves):
        return None
    state = zip(leaves, donated, strict=True)
    saved = sum(leaf.num_bytes for leaf, is_donated in state if is_donated and leaf.group in STATE_GROUPS)
    lost = sum(leaf.num_bytes for leaf in undonated)
    return (
        f"only {format_bytes(saved)} of the {format_bytes(saved + lost)} of {', '.join(STATE_GROUPS)} that the "
        f"program takes and returns are donated: it holds {len(undonated)} leaves twice, the largest "
        f"{undonated[0].path}: pass donate_argnums to jax.jit"
    )


def classify(heap: Heap, leaves: Sequence[ArgumentLeaf]) -> tuple[Temporary, ...]:
    """Returns the kind of each temporary at the peak, by its name, its readers and its shape."""
    params = [leaf for leaf in leaves if leaf.group in _PARAMS]
    local = {dims for leaf in params for dims in _dims_of_grads(leaf.dims)}
    gathered = {dims for leaf in params for dims in _dims_of_grads(leaf.global_dims)}

    def kind_of(buffer: Buffer) -> str:
        (array,) = hlo.arrays(hlo.parse_shape(buffer.shape))
        dims, name, is_gather = dims_key(array.dims), buffer.op_name, buffer.opcode.startswith("all-gather")
        written, read, is_of_params = hlo.phase_of(name), hlo.phase_of(buffer.last_read_by), dims in gathered | local
        is_argument = "(" not in name and group_of(path_of(name)) in _PARAMS  # a name stack has brackets
        is_cast = name.endswith("convert_element_type") and written == "update" and dims in local
        # A loop over stacked layers takes the params of one layer out of the stack.
        if is_argument or is_cast or ("dynamic_index_in_dim" in name and is_of_params):
            return "copied params"
        is_scoped = is_gather or hlo.gathered_path(name) or name.endswith("sharding_constraint")
        can_be_gathered = dims in gathered and (dims not in local or is_gather)
        if can_be_gathered and is_scoped and not hlo.GRAD_OF_GATHER.search(name):
            return "gathered params"
        is_zeros = buffer.opcode == "broadcast"  # that gradients are added to
        is_made = is_zeros or (written in ("backward", "") and "rematted_computation" not in name)
        if is_of_params and is_made and read != "forward":
            return "grads"
        if (written, read) == ("forward", "backward"):
            return "residuals"
        return "collective buffers" if hlo.split_opcode(buffer.opcode)[0] in hlo.COLLECTIVES else "other temporaries"

    return tuple(Temporary(kind=kind_of(buffer), buffer=buffer) for buffer in heap.live)


def _dims_of_grads(dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Returns the dims of a param, and of one layer of it if it may be a stack of layers."""
    shapes = [dims, dims[1:]] if len(dims) >= 3 else [dims]
    return {dims_key(shape) for shape in shapes if math.prod(shape) >= _SMALLEST_PARAM}
