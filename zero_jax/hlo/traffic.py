"""Lists the collectives of a compiled XLA program: what is sent, how often, between which devices.

Pure text to data, for `compiled.as_text()` of XLA:CPU, XLA:GPU and XLA:TPU. Four things make this more than a search
for `all-gather(`: a `while` repeats what its body sends, XLA:TPU prints one asynchronous collective several times, it
spells a reduce-scatter as a fused `all-reduce`, and the results of `-start` operations hold the operands as well.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from zero_jax.hlo.layout import Array, arrays, parse_shape
from zero_jax.hlo.opcodes import COLLECTIVES, calls
from zero_jax.hlo.program import Instruction, Program, integers, parse

Groups = tuple[tuple[int, ...], ...]  # the devices of each group
# How often the whole array goes round a ring of g devices, in units of (g - 1) / g; the other kinds send it in one hop.
_RING_PASSES = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+, ?\d+\},? ?)*)\}")
_SLICES = re.compile(r"slice_sizes=\{(\{.*?\})\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """An operation that sends."""

    name: str  # the instruction's name in the program
    computation: str  # the name of the HLO computation that holds it
    sent_bytes: float  # what one device sends in one execution
    num_executions: int = 1  # executions in a run of the program: the product of the trip counts of the loops around it

    @property
    def total_sent_bytes(self) -> float:
        """The bytes that one device sends over all executions."""
        return self.sent_bytes * self.num_executions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(Sent):
    """A collective operation of a compiled program, listed once however often XLA prints it.

    `sent_bytes` are those of the ring model: (g - 1) / g of `full_bytes` for a group of g, twice that for an
    all-reduce, all of `full_bytes` for a permute.
    """

    # 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or 'collective-permute'; rarely 'ragged-all-to-all'
    # (its bytes are an upper bound) or 'collective-broadcast'.
    kind: str
    arrays: tuple[Array, ...] = dataclasses.field(repr=False)  # its results; a combined collective has several
    # Indices into the mesh's flat devices; for a permute, the rings and chains that its pairs form.
    replica_groups: Groups = dataclasses.field(repr=False)
    source_target_pairs: Groups = dataclasses.field(repr=False)  # A permute's (source, target) indices, else empty
    # All-gather: the result; reduce-scatter and all-reduce: the operand; all-to-all and permute: the operand that one
    # device holds. As the program sends it, padding included.
    full_bytes: int
    channel_id: int | None  # the HLO channel, which is not unique in a program
    is_async: bool  # whether other work may run between its start and its end
    op_names: tuple[str, ...]  # for each array the JAX name stack from the metadata, or ''
    source: str  # `file:line` from the metadata, or ''

    @property
    def op_name(self) -> str:
        """The JAX name stack of the first array, or ''."""
        return self.op_names[0]

    @property
    def parts(self) -> list[Collective]:
        """The collective as one for each array, where XLA combined several and their names say which array is whose."""
        if len(set(self.op_names)) == 1:
            return [self]
        total = sum(array.packed_bytes for array in self.arrays) or 1
        shares = [array.packed_bytes / total for array in self.arrays]
        return [
            dataclasses.replace(
                self,
                op_names=(name,),
                arrays=(array,),
                full_bytes=round(self.full_bytes * share),
                sent_bytes=self.sent_bytes * share,
            )
            for name, array, share in zip(self.op_names, self.arrays, shares, strict=True)
        ]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """HLO dtype names, one for each array."""
        return tuple(array.dtype for array in self.arrays)

    @property
    def group_size(self) -> int:
        """The number of devices in the largest group."""
        return max(map(len, self.replica_groups), default=1)


def collectives(compiled: Any, *, unknown_trip_count: int | None = None) -> tuple[Collective, ...]:
    """Lists the collectives that a compiled program executes, in the order of the text.

    A loop whose trip count the text does not settle, such as a `while_loop` on data, is executed `unknown_trip_count`
    times; without that it raises `ValueError`. Of a conditional's branches, the one that sends most is listed.
    """
    program = parse(compiled)
    by_key: dict[tuple[str, str], Collective] = {}
    chains: dict[tuple, list[tuple[str, str]]] = collections.defaultdict(list)
    for instruction in program.instructions():
        # A -start that calls a computation wraps a collective that is printed, and listed, in there.
        wraps = instruction.part and (instruction.part != "start" or instruction.called.get("calls"))
        if instruction.base in COLLECTIVES and not wraps:
            by_key[instruction.key] = collective = _collective(program, instruction)
            if "async_collective_fusion_config" in instruction.line:
                chain = re.search(r'chain_id="(\d+)"', instruction.line)
                chains[collective.kind, collective.channel_id, chain and chain[1]].append(instruction.key)
    # XLA:TPU repeats an asynchronous collective in each fusion that drives it on; it starts where it is handed to a
    # custom call. Channel and kind are not enough to tell the copies from other operations: unrelated ones share them.
    for keys in chains.values():
        starts = [key for key in keys if program.drives(key[0], "Start")]
        for key in set(keys).difference(starts or keys[:1]):
            del by_key[key]
    return with_executions(program, by_key, unknown_trip_count)


def sent_bytes(listed: Iterable[Collective]) -> float:
    """Adds up the bytes that one device sends in a run of a program, from its `collectives`."""
    return sum(collective.total_sent_bytes for collective in listed)


def with_executions(program: Program, by_key: Mapping[tuple[str, str], Any], unknown_trip_count: int | None) -> tuple:
    """Returns the operations, by computation and name, that run at all in one run of a program, with how often."""

    def sent(counts: collections.Counter) -> float:
        return sum(by_key[key].sent_bytes * count for key, count in counts.items())

    @functools.cache
    def within(computation: str) -> collections.Counter:
        counts = collections.Counter()
        for instruction in program.computations.get(computation, {}).values():
            if instruction.key in by_key:
                counts[instruction.key] += 1
            elif instruction.opcode == "while":
                body, condition = (within(instruction.called[role]) for role in ("body", "condition"))
                # Of a loop that sends nothing the trip count need not be known.
                trips = program.num_trips(instruction, unknown_trip_count) if body or condition else 0
                counts.update({key: count * trips for key, count in body.items()})
                counts.update({key: count * (trips + 1) for key, count in condition.items()})
            elif instruction.opcode == "conditional":
                counts.update(max(map(within, instruction.called.values()), key=sent))
            elif calls(instruction.opcode):
                for called in instruction.called.values():
                    counts.update(within(called))
        return counts

    counts = within(program.entry)
    return tuple(dataclasses.replace(by_key[key], num_executions=counts[key]) for key in by_key if counts[key])


def _collective(program: Program, instruction: Instruction) -> Collective:
    """Reads one instruction, which does not tell how often it runs."""
    line, kind, computation = instruction.line, instruction.base, instruction.computation
    try:
        sent = results = _sent_arrays(instruction, kind)
        if slices := _SLICES.search(line) if kind == "collective-permute" else None:
            sizes = [math.prod(integers(part)) for part in slices[1].split("},")]
            sent = [sent[0]._replace(dims=(size,)) for size in sizes]
        if kind == "collective-permute":
            if (match := _PAIRS.search(line)) is None:
                raise ValueError("no source_target_pairs of a known form")
            pairs, groups = rings(match[1])
        else:
            pairs, groups = (), groups_of(line, program.num_devices)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"unreadable collective ({error}), please report this line: {line.strip()!r}") from error
    full_bytes = sum(array.packed_bytes for array in sent)
    size = max(map(len, groups), default=1)
    if kind == "reduce-scatter":
        full_bytes *= size  # its result is a shard
    elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # XLA:TPU's fusion
        kind = "reduce-scatter"
    # In units of full_bytes / size: what has no ring sends all of it, unless it is alone.
    hops = _RING_PASSES[kind] * (size - 1) if kind in _RING_PASSES else size * (size > 1)
    wrapped = any(call.part == "start" for call in program.callers[computation])
    channel = re.search(r"\bchannel_id=(\d+)", line)
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation,
        arrays=tuple(results),
        replica_groups=groups,
        source_target_pairs=pairs,
        full_bytes=full_bytes,
        sent_bytes=full_bytes * hops / size,
        channel_id=int(channel[1]) if channel else None,
        is_async=(instruction.part == "start" and '"is_sync":true' not in line)
        or "async_collective_fusion" in line
        or wrapped,
        op_names=tuple(instruction.op_names(len(results))),
        source=program.source(line),
    )


def _sent_arrays(instruction: Instruction, kind: str) -> list[Array]:
    """The arrays of a collective's result; of a `-start`, which yields (operands, results, ...), the results."""
    shape = parse_shape(instruction.shape)
    if instruction.part and not isinstance(shape, Array):
        # An older all-reduce-start yields its results alone.
        shape = shape if kind == "all-reduce" and isinstance(shape[0], Array) else shape[1]
    sent = list(arrays(shape))
    if not sent:
        raise ValueError("no array in its shape")
    return sent


_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d, ]*\},? ?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|@?mesh[^{]*\{[^}]*\})"
)


def groups_of(line: str, num_devices: int) -> Groups:
    """The groups of a collective's line; all devices in one where it says nothing."""
    match = _GROUPS.search(line)
    if not match and "replica_groups=" in line:
        raise ValueError("no replica_groups of a known form")
    return replica_groups(match[1] if match else "{}", num_devices)


@functools.lru_cache(maxsize=4096)
def replica_groups(text: str, num_devices: int) -> Groups:
    """The groups of {{0,1},{2,3}}, {} (all), [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4], device_ids=(0,2,..) {'b'}."""
    if text == "{}":
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return tuple(tuple(integers(group)) for group in text.split("},"))
    if text.startswith("["):
        shape, _, ids = text.partition("<=")
        groups = _device_ids(ids).reshape(integers(shape))
    else:
        groups = _mesh_groups(text)
    return tuple(map(tuple, groups.tolist()))


def _device_ids(text: str) -> np.ndarray:
    """The ids of [4,2]T(1,0), which is a range reshaped and transposed, or of a plain list."""
    if not text.startswith("["):
        return np.array(integers(text))
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    return ids.transpose(integers(order)) if order else ids


def _mesh_groups(text: str) -> np.ndarray:
    """The groups along axes of a mesh, or parts of axes: 'a':(2)4 is the factor 4 of 'a' after a major factor 2."""
    mesh, _, named = text.partition("{")
    mesh, _, ids = mesh.partition("device_ids=(")
    # Each axis is split where any part that is named begins or ends; the groups are along the named parts.
    cuts = {axis: {1, int(size)} for axis, size in re.findall(r"'?([^'\[<,= ]+)'?=(\d+)", mesh)}
    wanted = []
    for axis, major, size in re.findall(r"'?([^',:{} ]+)'?(?::\((\d+)\)(\d+))?", named):
        first = int(major or 1)
        last = first * int(size) if size else max(cuts[axis])
        cuts[axis] |= {first, last}
        wanted.append((axis, first, last))
    parts = [(axis, low, high) for axis, marks in cuts.items() for low, high in itertools.pairwise(sorted(marks))]
    dims = [high // low for _, low, high in parts]
    inner = []
    for axis, first, last in wanted:
        inner += [i for i, (name, low, _) in enumerate(parts) if name == axis and first <= low < last]
    outer = [i for i in range(len(parts)) if i not in inner]
    devices = _device_ids(ids) if ids else np.arange(math.prod(dims))
    return devices.reshape(dims).transpose(outer + inner).reshape(-1, math.prod(dims[i] for i in inner))


@functools.lru_cache(maxsize=4096)
def rings(text: str) -> tuple[Groups, Groups]:
    """A permute's pairs, and the groups of devices that they link."""
    numbers = integers(text)
    pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    group_of: dict[int, list[int]] = {}
    for source, target in pairs:
        group, other = (group_of.setdefault(device, [device]) for device in (source, target))
        if group is not other:
            group += other
            group_of.update(dict.fromkeys(other, group))
    return pairs, tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
