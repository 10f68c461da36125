"""The module reads the collectives out of the text of a compiled XLA program: what is sent, how often, between whom.

Pure text to data, for `compiled.as_text()` of XLA:CPU, XLA:GPU and XLA:TPU. Four things make this more than a search
for `all-gather(`: a `while` repeats what its body sends, XLA:TPU prints one asynchronous collective several times, it
spells a reduce-scatter as a fused `all-reduce`, and the results of `-start` operations hold the operands as well.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

# How often the whole array goes round a ring of g devices, in units of (g - 1) / g; the other kinds send it in one hop.
_RING_PASSES = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}
_KINDS = "|".join((*_RING_PASSES, "collective-permute", "collective-broadcast"))
_KIND = re.compile(rf"({_KINDS})(-start)?")
_ANY_COLLECTIVE = re.compile(rf" (?:{_KINDS})(?:-start)?\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)[\s(].*\{$")
_LAYOUT_OR_COMMENT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_SHAPE_TOKEN = re.compile(r"([()])|([a-z]\w*)\[([^\]]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d, ]*\},? ?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|@?mesh[^{]*\{[^}]*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+, ?\d+\},? ?)*)\}")
_SLICES = re.compile(r"slice_sizes=\{(\{.*?\})\}")
_CALLER = re.compile(r"while|fusion|call|conditional|custom-call|[a-z-]+-start")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|(?:true|false)_computation)=%?([^\s,}]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max}
_PASS_THROUGH = ("copy", "copy-start", "copy-done", "convert", "bitcast", "reshape", "opt-barrier")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation of a compiled program, listed once however often XLA prints it.

    Attributes:
      kind: 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or 'collective-permute'; rarely
        'ragged-all-to-all' (its bytes are an upper bound) or 'collective-broadcast'.
      name: The instruction's name in the program.
      computation: The name of the HLO computation that holds it.
      dtypes: HLO dtype names, one for each array; a combined collective has several.
      replica_groups: Indices into the mesh's flat devices; for a permute, the rings and chains that its pairs form.
      source_target_pairs: A permute's (source, target) indices, else empty.
      full_bytes: All-gather: the result; reduce-scatter and all-reduce: the operand; all-to-all and permute: the
        operand that one device holds. As the program sends it, padding included.
      sent_bytes: What one device sends in one execution, in the ring model: (g - 1) / g of `full_bytes` for a group of
        g, twice that for an all-reduce, all of `full_bytes` for a permute.
      num_executions: Executions in a run of the program: the product of the trip counts of the loops around it.
      result_elements: Elements of the result that one device holds.
      channel_id: The HLO channel, which is not unique in a program.
      is_async: Whether other work may run between its start and its end.
      op_name: The JAX name stack from the metadata, or ''.
      source: 'file:line' from the metadata, or ''.
    """

    kind: str
    name: str
    computation: str
    dtypes: tuple[str, ...]
    replica_groups: Groups = dataclasses.field(repr=False)
    source_target_pairs: Groups = dataclasses.field(repr=False)
    full_bytes: int
    sent_bytes: float
    num_executions: int
    result_elements: int
    channel_id: int | None
    is_async: bool
    op_name: str
    source: str

    @property
    def group_size(self) -> int:
        """The number of devices in the largest group."""
        return max(map(len, self.replica_groups), default=1)

    @property
    def num_groups(self) -> int:
        """The number of groups that communicate side by side."""
        return len(self.replica_groups)

    @property
    def total_sent_bytes(self) -> float:
        """The bytes that one device sends over all executions."""
        return self.sent_bytes * self.num_executions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total:
    """The collectives of one kind and dtype added up, per device and run of the program."""

    kind: str
    dtype: str
    num_ops: int
    num_executions: int
    sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What one device sends in a run of the program, by kind and dtype, most bytes first; prints as a table."""

    totals: tuple[Total, ...]

    @property
    def sent_bytes(self) -> float:
        """The bytes that one device sends in a run of the program."""
        return sum(total.sent_bytes for total in self.totals)

    def __str__(self) -> str:
        """Lays the totals out as a table."""
        rows: list[tuple[str, ...]] = [("kind", "dtype", "ops", "executions", "sent bytes")]
        for total in self.totals:
            counts = (total.num_ops, total.num_executions, round(total.sent_bytes))
            rows.append((total.kind, total.dtype, *(f"{count:,}" for count in counts)))
        rows.append(("total", "", "", "", f"{round(self.sent_bytes):,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = ((*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])) for row in rows)
        return "\n".join("  ".join(cells) for cells in aligned)


def collectives(hlo_text: str, *, unknown_trip_count: int | None = None) -> tuple[Collective, ...]:
    """Lists the collectives that a compiled program executes.

    Args:
      hlo_text: What `compiled.as_text()` returns.
      unknown_trip_count: Executions to assume for a loop whose trip count the text does not settle, such as a
        `while_loop` on data.

    Returns:
      One entry for each operation, in the order of the text. Of a conditional's branches, the one that sends most.

    Raises:
      ValueError: The text has no entry computation, a collective in it cannot be read, or a loop around a collective
        has no known trip count and `unknown_trip_count` is not given.
    """
    program = _Program(hlo_text)
    found: dict[tuple[str, str], Collective] = {}
    chains: dict[tuple, list[tuple[str, str]]] = collections.defaultdict(list)
    for computation, instructions in program.computations.items():
        for instruction in instructions.values():
            kind = _KIND.fullmatch(instruction.opcode)
            # A -start that calls a computation wraps a collective that is printed, and found, in there.
            if kind and not (kind[2] and instruction.called.get("calls")):
                key = computation, instruction.name
                found[key] = one = _collective(program, computation, instruction)
                if "async_collective_fusion_config" in instruction.line:
                    chain = re.search(r'chain_id="(\d+)"', instruction.line)
                    chains[one.kind, one.channel_id, chain and chain[1]].append(key)
    # XLA:TPU repeats an asynchronous collective in each fusion that drives it on; it starts where it is handed to a
    # custom call. Channel and kind are not enough to tell the copies from other operations: unrelated ones share them.
    for keys in chains.values():
        starts = [key for key in keys if program.starts_asynchronously(key[0])]
        for key in set(keys).difference(starts or keys[:1]):
            del found[key]
    counts = _executions(program, found, unknown_trip_count)
    return tuple(dataclasses.replace(one, num_executions=counts[key]) for key, one in found.items() if counts[key])


def sent_bytes(program: str | Iterable[Collective]) -> float:
    """Adds up the bytes that one device sends in a run of a program.

    Args:
      program: The text of a compiled program, or its collectives.

    Returns:
      Bytes per device, in the ring model of `Collective.sent_bytes`.
    """
    found = collectives(program) if isinstance(program, str) else program
    return sum(one.total_sent_bytes for one in found)


def by_kind(program: str | Iterable[Collective]) -> Summary:
    """Adds up what one device sends in a run of a program, by kind and dtype.

    Args:
      program: The text of a compiled program, or its collectives.

    Returns:
      A summary that prints as a table.
    """
    rows: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for one in collectives(program) if isinstance(program, str) else program:
        rows[one.kind, "+".join(sorted(set(one.dtypes)))].append(one)
    totals = [
        Total(
            kind=kind,
            dtype=dtype,
            num_ops=len(found),
            num_executions=sum(one.num_executions for one in found),
            sent_bytes=sent_bytes(found),
        )
        for (kind, dtype), found in rows.items()
    ]
    return Summary(totals=tuple(sorted(totals, key=lambda total: -total.sent_bytes)))


class _Instruction(NamedTuple):
    name: str
    opcode: str
    shape: str
    line: str
    operands_at: int

    @property
    def operands(self) -> list[str]:
        text, depth, end = self.line, 1, self.operands_at
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inside = _LAYOUT_OR_COMMENT.sub("", text[self.operands_at : end - 1])
        return re.findall(r"%([^\s,()]+)", inside) or [part.split()[-1] for part in inside.split(",") if part.strip()]

    @property
    def called(self) -> dict[str, str]:
        """The computations that it calls, by role (a number for the branches of a conditional)."""
        lists = ",".join(_CALLED_LISTS.findall(self.line))
        listed = re.findall(r"[^%\s,]+", lists)
        return dict(_CALLED.findall(self.line)) | {str(number): name for number, name in enumerate(listed)}


class _Program:
    """The computations of an HLO module, who calls them, and the values of their integer constants."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.callers: dict[str, list[tuple[str, _Instruction]]] = collections.defaultdict(list)
        header = re.search(r"^HloModule.*", text, re.MULTILINE)
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=\d+", header[0] if header else "")
        self.num_devices = math.prod(_integers("".join(sizes)))
        self.entry = ""
        self._roots: dict[str, str] = {}
        self._tables: dict[str, dict[str, str]] = collections.defaultdict(dict)
        computation = table = ""
        for line in text.split("\n"):
            if line.startswith(" "):
                if match := _INSTRUCTION.match(line):
                    instruction = _Instruction(match[2], match[4], match[3], line, match.end())
                    self.computations[computation][instruction.name] = instruction
                    if match[1]:
                        self._roots[computation] = instruction.name
                    if _CALLER.fullmatch(instruction.opcode):
                        for called in instruction.called.values():
                            self.callers[called].append((computation, instruction))
                elif _ANY_COLLECTIVE.search(line):
                    raise ValueError(f"unreadable collective, please report this line: {line.strip()!r}")
            elif line.endswith("{") and (match := _COMPUTATION.match(line)):
                computation = match[2]
                self.computations[computation] = {}
                self.entry = computation if match[1] else self.entry
            elif not self.computations and line[:1].isdigit():
                key, _, value = line.partition(" ")
                self._tables[table][key] = value
            elif line.isalpha():
                table = line
        if not self.entry:
            raise ValueError("no ENTRY computation in the HLO: pass the text of a compiled program, compiled.as_text()")

    def starts_asynchronously(self, computation: str) -> bool:
        """Whether XLA:TPU starts an asynchronous collective in a computation."""
        return any('"AsyncCollectiveStart"' in one.line for one in self.computations[computation].values())

    def source(self, line: str) -> str:
        """The 'file:line' that an instruction's metadata names, directly or through the module's stack frame tables."""
        if match := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', line):
            return f"{match[1]}:{match[2] or 0}"
        ids = {"stack_frame_id": ""} | dict(re.findall(r"(stack_frame_id)=(\d+)", line))
        for table, key in (("StackFrames", "stack_frame_id"), ("FileLocations", "file_location_id")):
            ids |= dict(re.findall(r"(\w+)=(\d+)", self._tables[table].get(ids.get(key, ""), "")))
        file_name = self._tables["FileNames"].get(ids.get("file_name_id", ""), "").strip('"')
        return f"{file_name}:{ids['line']}" if file_name and "line" in ids else ""

    def num_trips(self, computation: str, loop: _Instruction) -> int | None:
        """The number of times that a loop's body runs: as XLA noted it, else from its start, step and condition."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(match[1])
        body, condition, initial = loop.called["body"], loop.called["condition"], loop.operands[0]
        varying: set[tuple] = set()

        def at_start(path: tuple) -> Any:
            return self._value(computation, initial, path, self._passed_by_callers(computation))

        def state(known: dict[tuple, int]) -> Callable[[int, tuple], Any]:
            def argument(_: int, path: tuple) -> Any:
                if path in known or not self._keeps(body, path):
                    varying.add(path)
                    return known.get(path)
                return at_start(path)

            return argument

        self._result(condition, (), state({}))
        if len(varying) != 1:
            return None
        (path,) = varying
        start = at_start(path)
        second = self._result(body, path, state({path: start}))
        third = self._result(body, path, state({path: second}))
        if start is None or second is None or third is None or not (step := second - start) or third - second != step:
            return None

        def goes_on(trips: int) -> Any:
            return self._result(condition, (), state({path: start + trips * step}))

        trips = bisect.bisect_left(range(2**40), True, key=lambda trips: not goes_on(trips))
        return trips if goes_on(0) is not None and trips < 2**40 else None

    def _value(self, computation: str, name: str, path: tuple, argument: Callable[[int, tuple], Any]) -> Any:
        """The integer (or whatever `argument` yields) at a path of tuple indices in a value, or None if unknown."""
        instruction = self.computations.get(computation, {}).get(name)
        if instruction is None:
            return None
        opcode, line, operands = instruction.opcode, instruction.line, instruction.operands

        def value(operand: str, path: tuple = ()) -> Any:
            return self._value(computation, operand, path, argument)

        if opcode == "constant":
            return int(operands[0]) if operands and re.fullmatch(r"-?\d+", operands[0]) else None
        if opcode == "parameter":
            return argument(int(operands[0]), path)
        if opcode == "get-tuple-element" and (match := re.search(r"\bindex=(\d+)", line)):
            return value(operands[0], (int(match[1]), *path))
        if opcode == "tuple" and path:
            return value(operands[path[0]], path[1:])
        if opcode in _PASS_THROUGH or (opcode == "while" and self._keeps(instruction.called["body"], path)):
            return value(operands[0], path)
        if opcode in ("fusion", "call"):
            return self._result(next(iter(instruction.called.values())), path, lambda i, path: value(operands[i], path))
        match = re.search(r"\bdirection=(\w+)", line) if opcode == "compare" else None
        function = _COMPARE.get(match[1]) if match else _ARITHMETIC.get(opcode)
        values = [value(operand) for operand in operands] if function else []
        return function(*values) if function and all(isinstance(value, int) for value in values) else None

    def _result(self, computation: str, path: tuple, argument: Callable[[int, tuple], Any]) -> Any:
        return self._value(computation, self._roots.get(computation, ""), path, argument)

    def _keeps(self, body: str, path: tuple) -> bool:
        """Whether a loop's body hands this part of its state on as it came."""
        mark = object()
        return self._result(body, path, lambda _, asked: mark if asked == path else None) is mark

    def _passed_by_callers(self, computation: str) -> Callable[[int, tuple], Any]:
        """The arguments of a computation, where its callers agree on them."""

        def argument(number: int, path: tuple) -> Any:
            values = set()
            for caller, call in self.callers[computation]:
                changes = call.opcode == "while" and not self._keeps(call.called["body"], path)
                if changes or call.opcode == "conditional":
                    return None
                values.add(self._value(caller, call.operands[number], path, self._passed_by_callers(caller)))
            return values.pop() if len(values) == 1 else None

        return argument


def _executions(
    program: _Program, found: dict[tuple[str, str], Collective], unknown_trip_count: int | None
) -> collections.Counter:
    """The executions of each collective in one run of the program, by the keys of `found`."""

    def sent(counts: collections.Counter) -> float:
        return sum(found[key].sent_bytes * count for key, count in counts.items())

    @functools.cache
    def within(computation: str) -> collections.Counter:
        counts = collections.Counter()
        for instruction in program.computations.get(computation, {}).values():
            key = computation, instruction.name
            if key in found:
                counts[key] += 1
            elif instruction.opcode == "while":
                body, condition = (within(instruction.called[role]) for role in ("body", "condition"))
                trips = program.num_trips(computation, instruction) if body or condition else 0
                trips = unknown_trip_count if trips is None else trips
                if trips is None:
                    raise ValueError(
                        f"the loop {instruction.name!r} of {computation!r} holds collectives, and the program does not "
                        "tell its trip count: pass unknown_trip_count"
                    )
                counts.update({key: count * trips for key, count in body.items()})
                counts.update({key: count * (trips + 1) for key, count in condition.items()})
            elif instruction.opcode == "conditional":
                counts.update(max(map(within, instruction.called.values()), key=sent))
            elif _CALLER.fullmatch(instruction.opcode):
                for called in instruction.called.values():
                    counts.update(within(called))
        return counts

    return within(program.entry)


def _collective(program: _Program, computation: str, instruction: _Instruction) -> Collective:
    """Reads one instruction; `num_executions` is not known from it."""
    line, kind = instruction.line, instruction.opcode.removesuffix("-start")
    is_start = kind != instruction.opcode
    try:
        arrays = _arrays(instruction.shape)
        # A -start yields (operands, results, ...), but an older all-reduce-start yields its results alone.
        if is_start and instruction.shape.startswith("((" if kind == "all-reduce" else "("):
            arrays = [array for array in arrays if array[0] == 1]
        if slices := _SLICES.search(line) if kind == "collective-permute" else None:
            sizes = [math.prod(_integers(part)) for part in slices[1].split("},")]
            arrays = [(0, arrays[0][1], size) for size in sizes]
        if kind == "collective-permute":
            pairs, groups = _rings(_attribute(_PAIRS, line))
        else:
            given = _attribute(_GROUPS, line) if "replica_groups=" in line else "{}"
            pairs, groups = (), _groups(given, program.num_devices)
        full_bytes = sum(-(-elements * _bits(dtype) // 8) for _, dtype, elements in arrays)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"unreadable collective ({error}), please report this line: {line.strip()!r}") from error
    size = max(map(len, groups), default=1)
    result_elements = sum(elements for _, _, elements in arrays)
    if kind == "reduce-scatter":
        full_bytes *= size
    elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind, result_elements = "reduce-scatter", result_elements // size
    hops = _RING_PASSES[kind] * (size - 1) if kind in _RING_PASSES else size * (size > 1)
    wrapped = any(call.opcode.endswith("-start") for _, call in program.callers[computation])
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    channel = re.search(r"\bchannel_id=(\d+)", line)
    return Collective(
        kind=kind,
        name=instruction.name,
        computation=computation,
        dtypes=tuple(dtype for _, dtype, _ in arrays),
        replica_groups=groups,
        source_target_pairs=pairs,
        full_bytes=full_bytes,
        sent_bytes=full_bytes * hops / size,
        num_executions=1,
        result_elements=result_elements,
        channel_id=int(channel[1]) if channel else None,
        is_async=(is_start and '"is_sync":true' not in line) or "async_collective_fusion" in line or wrapped,
        op_name=op_name[1] if op_name else "",
        source=program.source(line),
    )


def _attribute(pattern: re.Pattern, line: str) -> str:
    if match := pattern.search(line):
        return match[1]
    raise ValueError(f"no {pattern.pattern.partition('=')[0]} of a known form")


def _arrays(shape: str) -> list[tuple[int, str, int]]:
    """The arrays of a shape: (place in the outermost tuple, dtype, number of elements)."""
    arrays, depth, place = [], 0, -1
    for parenthesis, dtype, dims in _SHAPE_TOKEN.findall(_LAYOUT_OR_COMMENT.sub("", shape)):
        place += depth == 1 and parenthesis != ")"
        depth += {"(": 1, ")": -1}.get(parenthesis, 0)
        if dtype:
            # A dynamic dim is printed as <=8.
            sizes = [int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim]
            arrays.append((place, dtype, math.prod(sizes)))
    if not arrays:
        raise ValueError("no array in its shape")
    return arrays


def _bits(dtype: str) -> int:
    """The width of an element: the first number in the dtype's name, as in f8e4m3fn, s4 and bf16."""
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else {"pred": 8, "token": 0}[dtype]


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


@functools.lru_cache(maxsize=4096)
def _groups(text: str, num_devices: int) -> Groups:
    """The groups of {{0,1},{2,3}}, {} (all), [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4], device_ids=(0,2,..) {'b'}."""
    if text == "{}":
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return tuple(tuple(_integers(group)) for group in text.split("},"))
    if text.startswith("["):
        shape, _, ids = text.partition("<=")
        groups = _device_ids(ids).reshape(_integers(shape))
    else:
        groups = _mesh_groups(text)
    return tuple(map(tuple, groups.tolist()))


def _device_ids(text: str) -> np.ndarray:
    """The ids of [4,2]T(1,0), which is a range reshaped and transposed, or of a plain list."""
    if not text.startswith("["):
        return np.array(_integers(text))
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return ids.transpose(_integers(order)) if order else ids


def _mesh_groups(text: str) -> np.ndarray:
    """The groups along axes of a mesh, or parts of axes: 'a':(2)4 is the factor 4 of 'a' after a major factor 2."""
    mesh, _, named = text.partition("{")
    mesh, _, ids = mesh.partition("device_ids=(")
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
def _rings(text: str) -> tuple[Groups, Groups]:
    """A permute's pairs, and the groups of devices that they link."""
    pairs = tuple(zip(*[iter(_integers(text))] * 2, strict=True))
    group_of: dict[int, list[int]] = {}
    for source, target in pairs:
        one, other = (group_of.setdefault(device, [device]) for device in (source, target))
        if one is not other:
            one += other
            group_of.update(dict.fromkeys(other, one))
    return pairs, tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
