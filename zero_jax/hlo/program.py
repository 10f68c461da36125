"""Parses the text of a compiled XLA program into computations and instructions, with the trip counts of its loops."""

import bisect
import collections
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zero_jax.hlo.layout import Array, arrays, parse_shape
from zero_jax.hlo.opcodes import KINDS, MOVES, calls, split_opcode

_ANY_COLLECTIVE = re.compile(rf" (?:{KINDS})(?:-start)?\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+)[\s(].*\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")  # of a computation
_LAYOUT_OR_COMMENT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|(?:true|false)_computation)=%?([^\s,}]+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED_LISTS = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max}
_LITERAL = re.compile(r" constant\((\{[-\d{}, ]*\})\)")  # an array of integers
_PASS_THROUGH = (MOVES - {"transpose"}) | {"opt-barrier"}  # the integers of an array stay in order


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    line: str
    operands_at: int  # where its operands start in the line
    computation: str  # the name of its computation

    @property
    def key(self) -> tuple[str, str]:
        """The names of its computation and its own, which no other instruction of the program has."""
        return self.computation, self.name

    @property
    def base(self) -> str:
        """Its opcode; of a part of an asynchronous operation, that of the whole."""
        return split_opcode(self.opcode)[0]

    @property
    def part(self) -> str:
        """`start`, `update` or `done` for a part of an asynchronous operation, else ''."""
        return split_opcode(self.opcode)[1]

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its result, in order."""
        return list(arrays(parse_shape(self.shape)))

    @property
    def op_name(self) -> str:
        """The JAX name stack of the operation that it was made from, or ''."""
        match = _OP_NAME.search(self.line)
        return match[1].replace("\\'", "'") if match else ""

    def op_names(self, count: int) -> list[str]:
        """Returns the name stacks of `count` arrays of its result, which XLA:GPU merges where it combines operations.

        Where it has none for each, all have the first.
        """
        names = _merged(self.op_name)
        return names if len(names) == count else names[:1] * count

    @property
    def attributes_at(self) -> int:
        """Where its attributes start in the line, behind the bracket that closes its operands."""
        text, depth, end = self.line, 1, self.operands_at
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        return end

    @property
    def operands_text(self) -> str:
        """What is between the brackets of its operands: names, a literal, or the number of a parameter."""
        return self.line[self.operands_at : self.attributes_at - 1]

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        inside = _LAYOUT_OR_COMMENT.sub("", self.operands_text)
        return re.findall(r"%([^\s,()]+)", inside) or [part.split()[-1] for part in inside.split(",") if part.strip()]

    @property
    def called(self) -> dict[str, str]:
        """The computations that it calls, by role (a number for the branches of a conditional)."""
        lists = ",".join(_CALLED_LISTS.findall(self.line))
        listed = re.findall(r"[^%\s,]+", lists)
        return dict(_CALLED.findall(self.line)) | {str(number): name for number, name in enumerate(listed)}

    @property
    def first_called(self) -> str:
        """The first of the computations that it calls, the only one of a fusion; '' for none."""
        return next(iter(self.called.values()), "")


class Program:
    """The computations of an HLO module (`compiled.as_text()`), and the values of their integer constants."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}  # the instructions by computation and name
        self.callers: dict[str, list[Instruction]] = collections.defaultdict(list)  # the calls of each computation
        self.roots: dict[str, str] = {}  # the name of the instruction that each computation returns
        self.entry = ""
        header = re.search(r"^HloModule.*", text, re.MULTILINE)
        self.header = header[0] if header else ""
        self.num_devices = math.prod(
            integers("".join(re.findall(r"\b(?:num_partitions|replica_count)=\d+", self.header)))
        )
        self.is_scheduled = "is_scheduled=true" in self.header  # whether its order is that of execution
        self.has_tiles = ":T(" in text  # whether its arrays are in tiles, as by XLA:TPU
        self._trips: dict[tuple[str, str], int | None] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._tables: dict[str, dict[str, str]] = collections.defaultdict(dict)  # of stack frames, before computations
        computation = table = ""
        for line in _lines(text):
            if line.startswith(" "):
                if match := _INSTRUCTION.match(line):
                    instruction = Instruction(match[2], match[4], match[3], line, match.end(), computation)
                    self.computations[computation][instruction.name] = instruction
                    if match[1]:
                        self.roots[computation] = instruction.name
                    if calls(instruction.opcode):
                        for called in instruction.called.values():
                            self.callers[called].append(instruction)
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

    def drives(self, computation: str, part: str) -> bool:
        """Whether a part, `Start` or `Done`, of an asynchronous collective of XLA:TPU is in a computation."""
        inside = self.computations[computation].values()
        return any(f'"AsyncCollective{part}"' in instruction.line for instruction in inside)

    def source(self, line: str) -> str:
        """The 'file:line' that an instruction's metadata names, directly or through the module's stack frame tables."""
        if match := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', line):
            first, *others = match[1].split(",")  # with their lines, where XLA combined several operations
            return first if others else f"{first}:{match[2] or 0}"
        ids = {"stack_frame_id": ""} | dict(re.findall(r"(stack_frame_id)=(\d+)", line))
        for table, key in (("StackFrames", "stack_frame_id"), ("FileLocations", "file_location_id")):
            ids |= dict(re.findall(r"(\w+)=(\d+)", self._tables[table].get(ids.get(key, ""), "")))
        file_name = self._tables["FileNames"].get(ids.get("file_name_id", ""), "").strip('"')
        return f"{file_name}:{ids['line']}" if file_name and "line" in ids else ""

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.values()

    def parameters(self, computation: str) -> list[Instruction]:
        """The parameters of a computation, by their number."""
        inside = self.computations.get(computation, {}).values()
        return sorted((x for x in inside if x.opcode == "parameter"), key=lambda x: int(x.operands[0]))

    def users(self, computation: str) -> dict[str, list[Instruction]]:
        """The instructions that read each value of a computation."""
        if computation not in self._users:
            instructions = self.computations.get(computation, {})
            users = self._users[computation] = {name: [] for name in instructions}
            for user in instructions.values():
                for name in user.operands if user.opcode not in ("parameter", "constant") else ():
                    users.get(name, []).append(user)
        return self._users[computation]

    def root(self, computation: str) -> Instruction | None:
        """The instruction that a computation returns; None for no computation."""
        return self.computations.get(computation, {}).get(self.roots.get(computation, ""))

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """An operand of an instruction; None where there is none in the text."""
        names = instruction.operands[number : number + 1]
        return self.computations[instruction.computation].get(names[0]) if names else None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction that are in the text."""
        inside = self.computations[instruction.computation]
        return [inside[name] for name in instruction.operands if name in inside]

    def num_trips(self, loop: Instruction, unknown_trip_count: int | None) -> int:
        """The number of times that a loop's body runs: as XLA noted it, else from its start, step and condition.

        `unknown_trip_count` is that of a loop of which the program does not tell it; None raises `ValueError` then.
        """
        if loop.key not in self._trips:
            self._trips[loop.key] = self._count_trips(loop)
        trips = unknown_trip_count if self._trips[loop.key] is None else self._trips[loop.key]
        if trips is None:
            raise ValueError(
                f"the loop {loop.name!r} of {loop.computation!r} takes time or sends, and the program does not tell "
                "its trip count: pass unknown_trip_count"
            )
        return trips

    def literal(self, instruction: Instruction) -> str | None:
        """The constant that a value is, or of which it is a row, wherever passed on from; None if left out."""
        value = self._value(instruction, (), self._passed_by_callers(instruction.computation))
        return value if isinstance(value, str) else None

    def _count_trips(self, loop: Instruction) -> int | None:
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(match[1])
        body, condition, initial = loop.called["body"], loop.called["condition"], self.operand(loop, 0)
        varying: set[tuple] = set()  # the paths of what the body changes in the state and the condition reads

        def at_start(path: tuple) -> Any:
            return self._value(initial, path, self._passed_by_callers(loop.computation))

        def state(known: dict[tuple, int]) -> Callable[[int, tuple], Any]:
            def argument(_: int, path: tuple) -> Any:
                if path in known or not self._keeps(body, path):
                    varying.add(path)
                    return known.get(path)
                return at_start(path)

            return argument

        # The condition has to read one counter alone, which the body changes by the same step each time.
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

        # A comparison with a bound holds up to some trip and never after it: 40 evaluations find that.
        max_trips = 2**40
        trips = bisect.bisect_left(range(max_trips), True, key=lambda trips: not goes_on(trips))
        return trips if goes_on(0) is not None and trips < max_trips else None

    def _value(self, instruction: Instruction | None, path: tuple, argument: Callable[[int, tuple], Any]) -> Any:
        """The integer at a path of tuple indices, the text of an array, or what `argument` yields; None if unknown."""
        if instruction is None:
            return None
        opcode, line, operands = instruction.opcode, instruction.line, instruction.operands

        def value(number: int, path: tuple = ()) -> Any:
            return self._value(self.computations[instruction.computation].get(operands[number]), path, argument)

        if opcode == "constant":
            if match := _LITERAL.search(line):
                return match[1]
            return int(operands[0]) if operands and re.fullmatch(r"-?\d+", operands[0]) else None
        if opcode == "parameter":
            return argument(int(operands[0]), path)
        if opcode == "get-tuple-element" and (match := re.search(r"\bindex=(\d+)", line)):
            return value(0, (int(match[1]), *path))
        if opcode == "tuple" and path:
            return value(path[0], path[1:])
        if instruction.base in _PASS_THROUGH or (opcode == "while" and self._keeps(instruction.called["body"], path)):
            return value(0, path)
        if opcode == "broadcast" and isinstance(scalar := value(0), int):
            return f"{{{scalar}}}"
        if opcode == "dynamic-slice" and self._slices_rows(instruction):
            rows = value(0)  # the text of all of them: which one it is depends on the device
            return rows if isinstance(rows, str) else None
        if opcode in ("fusion", "call"):
            return self._result(instruction.first_called, path, value)
        match = re.search(r"\bdirection=(\w+)", line) if opcode == "compare" else None
        function = _COMPARE.get(match[1]) if match else _ARITHMETIC.get(opcode)
        values = [*map(value, range(len(operands)))] if function else []
        return function(*values) if function and all(isinstance(value, int) for value in values) else None

    def _slices_rows(self, instruction: Instruction) -> bool:
        """Whether a dynamic-slice leaves all dims but the first as they are."""
        operand = self.operand(instruction, 0)
        sizes = re.search(r"dynamic_slice_sizes=\{([\d,]*)\}", instruction.line)
        dims = re.search(r"\[([\d,]*)\]", operand.shape) if operand else None
        return sizes is not None and dims is not None and integers(sizes[1])[1:] == integers(dims[1])[1:]

    def _result(self, computation: str, path: tuple, argument: Callable[[int, tuple], Any]) -> Any:
        return self._value(self.root(computation), path, argument)

    def _keeps(self, body: str, path: tuple) -> bool:
        """Whether a loop's body hands this part of its state on as it came."""
        mark = object()  # comes out only where no operation has a part in the result
        return self._result(body, path, lambda _, asked: mark if asked == path else None) is mark

    def _passed_by_callers(self, computation: str) -> Callable[[int, tuple], Any]:
        """The arguments of a computation, where its callers agree on them."""

        def argument(number: int, path: tuple) -> Any:
            values = set()
            for call in self.callers[computation]:
                changes = call.opcode == "while" and not self._keeps(call.called["body"], path)
                if changes or call.opcode == "conditional":  # whose operands are the arguments of several branches
                    return None
                passed = self._passed_by_callers(call.computation)
                values.add(self._value(self.operand(call, number), path, passed))
            return values.pop() if len(values) == 1 else None

        return argument


def parse(compiled: Any) -> Program:
    """Returns a `Program` of itself, a text, or what has a `program` or `as_text()`, as `jax.stages.Compiled`."""
    if isinstance(compiled, Program):
        return compiled
    if isinstance(program := getattr(compiled, "program", None), Program):
        return program
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if not text:
        raise ValueError(f"{type(compiled).__name__} has no text: pass what `.lower(...).compile()` returns")
    return Program(text)


def _lines(text: str) -> Iterator[str]:
    """Yields the lines of a module, each instruction as one: the metadata of a Pallas kernel has line breaks."""
    parts: list[str] = []
    for line in text.split("\n"):  # not `splitlines`, which cuts at other characters in metadata, too
        if parts and not line.startswith(" ") and not _END.match(line):
            parts.append(line)
            continue
        if parts:
            yield "".join(parts)
        parts = [line] if line.startswith(" ") else []
        if not parts:
            yield line
    if parts:
        yield "".join(parts)


def integers(text: str) -> list[int]:
    """Returns the runs of digits in a text."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def read_aliases(text: str) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Reads which part of a result is written over which part of which operand: {0}: (1, {2}), must-alias, ..."""
    return [(tuple(integers(out)), int(number), tuple(integers(path))) for out, number, path in _ALIAS.findall(text)]


def _merged(op_name: str) -> list[str]:
    """Returns the name stacks that one was merged of, `a/b` and `a/c` of `a/(b:c)`.

    XLA puts what they have in common, up to a `/`, before the bracket: the rest of each may close brackets of that.
    """
    for start in re.finditer(r"(?:^|/)\(", op_name if op_name.endswith(")") else ""):
        before = op_name[: start.end() - 1]
        parts, depth, end = [""], 0, before.count(")") - before.count("(")
        for character in op_name[start.end() : -1]:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == ":" and depth == end:
                parts, depth = [*parts, ""], 0
            elif depth < end:
                break  # the bracket is one of a name
            else:
                parts[-1] += character
        else:
            if depth == end and len(parts) > 1:
                return [before + part for part in parts]
    return [op_name]
