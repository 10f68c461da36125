"""Peak memory of a scheduled XLA program: the buffers that are alive when its temporaries take most.

The TPU compiler reports how large its heap is, and not what is in it. This is worked out from the program here.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from zero_jax.hlo.op_names import gathered_path, phase_of
from zero_jax.hlo.opcodes import MOVES
from zero_jax.hlo.program import Instruction, Program, parse
from zero_jax.hlo.transfers import HOST_SPACE
from zero_jax.hlo.values import HloValue, LiveRanges

# Memory spaces of a layout: 0 is the device's memory, `HOST_SPACE` the host's; the others of a TPU are on the chip (1
# is VMEM). Those of a GPU are parts of its memory.
_DEVICE = 0
_NEAR = 50  # steps within which a name is taken for that of an instruction without one
_PASSES_NAME_ON = MOVES | {"get-tuple-element"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that is alive at the peak.

    Attributes:
      name: The instruction that wrote it last.
      computation: The computation of that instruction.
      opcode: What that instruction does.
      shape: Its dtype and dims, such as bf16[8,128].
      num_bytes: Its size, padding included.
      op_name: The JAX name stack of the instruction, or of what it copies; '' if the program has none.
      last_read_by: The JAX name stack of the last instruction that reads it; where that only copies, of the next
        instruction that has one; or ''.
      source: `file:line`, or ''.
    """

    name: str
    computation: str
    opcode: str
    shape: str
    num_bytes: int
    op_name: str
    last_read_by: str
    source: str

    @property
    def name_and_source(self) -> str:
        """What to call it to a person."""
        return f"{self.op_name or self.name} {self.source}".rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heap:
    """The memory of a program, in bytes per device.

    A temporary that fits into the memory of a result, before this is written and after the donated argument there, if
    there is one, is read for the last time, takes no memory of its own. Which ones the compiler places there is
    worked out by its rule, the largest first, into the smallest result that is free.
    """

    # The most that temporaries take at one time in the device's memory, beside the arguments and were they packed
    # without gaps.
    peak_bytes: int
    # The temporaries that are alive then, largest first, without those in the memory of results.
    live: tuple[Buffer, ...] = dataclasses.field(repr=False)
    # The temporaries that are in the memory of results then, donated arguments or not, largest first.
    in_arguments: tuple[Buffer, ...] = dataclasses.field(repr=False)
    # The JAX name stack of the instruction that runs then, or of the nearest one before it that has one.
    peak_op_name: str
    host_argument_bytes: int  # arguments in the host's memory
    host_peak_bytes: int  # the most that temporaries take at one time in the host's memory
    on_chip_peak_bytes: int  # the most that values take at one time in memory on the chip, such as VMEM
    # What the forward pass has written and the backward pass is still to read, when that is most, largest first; in the
    # device's memory, that of results included. Gathered params are not among them.
    residuals: tuple[Buffer, ...] = dataclasses.field(repr=False)
    # For each argument, in order, whether a result is written over it.
    donated: tuple[bool, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Allocation:
    """A buffer with its size and the spans of the schedule in which it is in use."""

    values: Sequence[HloValue]
    num_bytes: int
    spans: tuple[tuple[int, int], ...]

    def is_live(self, step: int) -> bool:
        return any(start <= step <= end for start, end in self.spans)


def peak(compiled: Any) -> Heap:
    """Returns the peak of a scheduled program's temporaries, and what is alive then."""
    program = parse(compiled)
    if not program.is_scheduled:
        raise ValueError(
            "the HLO is not scheduled, and its order says nothing about memory: pass the text of a compiled program, "
            "compiled.as_text(), and not lowered.as_text()"
        )
    values = LiveRanges(program)
    arguments, outputs = ({values.buffer_of(n) for n in numbers} for numbers in (values.arguments, values.outputs))
    fixed = arguments | outputs | {values.buffer_of(number) for number in values.constants}
    temporaries: dict[str, list[_Allocation]] = {"device": [], "host": [], "chip": []}
    results = []
    readers = _readers(values.steps)
    for number, shared in values.buffers().items():
        space = shared[0].array.space
        memory = "host" if space == HOST_SPACE else "chip" if program.has_tiles and space != _DEVICE else "device"
        if number not in fixed:
            temporaries[memory].append(_allocation(shared))
        elif number in outputs and memory == "device":
            results.append(_allocation(shared))
    heap, in_results = _reuse(temporaries["device"], results)
    peak_bytes, step = _top(heap)

    def alive(group: Sequence[_Allocation], step: int) -> tuple[Buffer, ...]:
        live = (x for x in group if x.is_live(step))  # without the values that are written after the step
        until = (dataclasses.replace(x, values=[y for y in x.values if y.start <= step]) for x in live)
        buffers = (_describe(program, allocation, readers) for allocation in until)
        return tuple(sorted((buffer for buffer in buffers if buffer.num_bytes), key=lambda buffer: -buffer.num_bytes))

    saved = [residual for x in temporaries["device"] if (residual := _saved(program, x, readers))]
    argument_arrays = (values.items[number].array for number in values.arguments)
    before = reversed(values.steps[max(step - _NEAR + 1, 0) : step + 1])
    return Heap(
        peak_bytes=peak_bytes,
        live=alive(heap, step),
        in_arguments=alive(in_results, step),
        peak_op_name=next(filter(None, (_op_name(program, instruction) for instruction in before)), ""),
        host_argument_bytes=sum(array.num_bytes for array in argument_arrays if array.space == HOST_SPACE),
        host_peak_bytes=_top(temporaries["host"])[0],
        on_chip_peak_bytes=_top(temporaries["chip"])[0],
        residuals=alive(saved, _top(saved)[1]),
        donated=tuple(values.buffer_of(number) in outputs for number in values.arguments),
    )


def _allocation(values: Sequence[HloValue]) -> _Allocation:
    spans: list[tuple[int, int]] = []
    for value in sorted(values, key=lambda value: value.start):
        if spans and value.start <= spans[-1][1] + 1:  # written as the one before is read for the last time
            spans[-1] = (spans[-1][0], max(spans[-1][1], value.end))
        else:
            spans.append((value.start, value.end))
    return _Allocation(values=values, num_bytes=max(value.array.num_bytes for value in values), spans=tuple(spans))


def _reuse(
    temporaries: Sequence[_Allocation], results: Iterable[_Allocation]
) -> tuple[list[_Allocation], list[_Allocation]]:
    """Splits temporaries into those with memory of their own and those in the memory of results."""
    free = [(result.num_bytes, list(result.spans)) for result in sorted(results, key=lambda result: result.num_bytes)]
    sizes = [size for size, _ in free]
    heap, in_results = [], []
    smallest = _top(temporaries)[0] / 1024  # what is smaller hardly counts, and there may be many
    # As the compiler assigns memory: the largest first, of equal ones that which is alive for longest.
    for allocation in sorted(temporaries, key=lambda x: (-x.num_bytes, x.spans[0][0] - x.spans[-1][1])):
        large = allocation.num_bytes >= smallest
        first = bisect.bisect_left(sizes, allocation.num_bytes) if large else len(free)
        for _, taken in free[first:]:
            if all(end < start or last < begin for start, last in taken for begin, end in allocation.spans):
                taken += allocation.spans
                in_results.append(allocation)
                break
        else:
            heap.append(allocation)
    return heap, in_results


def _top(allocations: Iterable[_Allocation]) -> tuple[int, int]:
    """The most bytes that are alive at one step, and the first such step."""
    changes: collections.Counter = collections.Counter()
    for allocation in allocations:
        for start, end in allocation.spans:
            changes[start] += allocation.num_bytes
            changes[end + 1] -= allocation.num_bytes
    most = now = at = 0
    for step in sorted(changes):
        now += changes[step]
        if now > most:
            most, at = now, step
    return most, at


def _readers(steps: Sequence[Instruction]) -> list[str]:
    """For each step its JAX name stack, or in place of none that of the nearest step after it."""
    names, near = [""], 0  # what the program returns is alive for one step more
    for instruction in reversed(steps):
        own = instruction.op_name
        near = 0 if own else near + 1
        names.append(own or (names[-1] if near < _NEAR else ""))
    return names[::-1]


def _saved(program: Program, allocation: _Allocation, readers: Sequence[str]) -> _Allocation | None:
    """The part of an allocation's life in which it holds what the forward pass keeps for the backward pass."""

    def is_residual(value: HloValue) -> bool:
        name = _name_of(program, value)
        phases = phase_of(name), phase_of(readers[value.end])
        return phases == ("forward", "backward") and not gathered_path(name)

    residuals = [value for value in allocation.values if is_residual(value)]
    return _allocation(residuals) if residuals else None


def _describe(program: Program, allocation: _Allocation, names: Sequence[str]) -> Buffer:
    """Names a buffer after the last instruction that wrote it; a loop only carries it."""
    written = sorted(allocation.values, key=lambda value: value.start)
    real = [value for value in written if value.instruction.opcode not in ("while", "conditional")] or written
    named = [value for value in real if _name_of(program, value)]
    last = (named or real)[-1]
    return Buffer(
        name=last.instruction.name,
        computation=last.instruction.computation,
        opcode=last.instruction.opcode,
        shape=str(last.array),
        num_bytes=allocation.num_bytes,
        op_name=_name_of(program, last),
        last_read_by=names[allocation.spans[-1][1]],
        source=program.source(last.instruction.line),
    )


def _name_of(program: Program, value: HloValue) -> str:
    """The JAX name stack of a value, or of what it is a copy of."""
    return value.op_name or _op_name(program, value.instruction)


def _op_name(program: Program, instruction: Instruction) -> str:
    """The JAX name stack of an instruction, or of what it copies."""
    for _ in range(8):  # copies of copies
        if name := instruction.op_names(1)[0]:
            return name
        passes = instruction.base in _PASSES_NAME_ON or (
            instruction.opcode == "fusion" and len(instruction.operands) == 1
        )
        operand = program.operand(instruction, 0)
        if not passes or operand is None:
            return ""
        instruction = operand
    return ""
