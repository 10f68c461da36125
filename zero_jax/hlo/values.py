"""Live ranges of the values that a scheduled XLA program writes to memory, and which of them share a buffer.

A scheduled program lists its instructions in the order of execution. A loop's state, a dynamic-update-slice and a
donated argument are updated in place, so several values are one buffer, which is free between the lives of its values.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zero_jax.hlo.layout import Array, Shape, arrays, parse_shape
from zero_jax.hlo.opcodes import ELEMENTWISE, FORWARDS, IN_PLACE, UPDATES
from zero_jax.hlo.program import Instruction, Program, integers, read_aliases

Tree = int | tuple["Tree", ...]

_ALIASING_LISTS = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{[^}]*\},?)*)\]')
_OUTPUT_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\)\s*)\}(?:,|$)")
_HEADER_ALIASING = re.compile(r"input_output_alias=\{(.*?\)\s*)\}")


@dataclasses.dataclass(kw_only=True, slots=True)
class HloValue:
    """An array that an instruction writes; alive from `start` to `end`, in steps of the schedule, ends included."""

    array: Array
    instruction: Instruction
    start: int
    end: int
    place: tuple[int, int] = (0, 1)  # its number among the arrays of a tuple, and how many these are

    @property
    def op_name(self) -> str:
        """The JAX name stack of the operation that it is the result of, or ''."""
        number, count = self.place
        return self.instruction.op_names(count)[number]


class LiveRanges:
    """The values of a scheduled program: when each is alive, and which of them share a buffer.

    `items` has the values, in the order in which they are written; arguments, outputs and constants are numbers of
    these. `steps` has the instruction of each step of the schedule.
    """

    def __init__(self, program: Program):
        self.program = program
        self.items: list[HloValue] = []
        self.steps: list[Instruction] = []
        self.constants: list[int] = []
        self._parents: list[int] = []
        self._maybe_shared: list[tuple[int, int]] = []
        entry = program.computations[program.entry]
        parameters = {_number(value): value for value in entry.values() if value.opcode == "parameter"}
        trees = {n: self._new(parse_shape(value.shape), value) for n, value in parameters.items()}
        self.arguments = [value for number in sorted(trees) for value in leaves(trees[number])]
        root = self._visit(program.entry, trees)
        self._use(root, len(self.steps))  # to the end, one step after the last instruction
        self.outputs = list(leaves(root))
        donated = _HEADER_ALIASING.search(program.header)
        for out_path, number, path in read_aliases(donated[1] if donated else ""):
            self._unite(_at(root, out_path), _at(trees[number], path))
        self._share()

    def buffer_of(self, value: int) -> int:
        """Returns the number of the first of the values that share a buffer with this value."""
        while self._parents[value] != value:  # a union-find forest, whose paths are halved on the way
            self._parents[value] = self._parents[self._parents[value]]
            value = self._parents[value]
        return value

    def buffers(self) -> dict[int, list[HloValue]]:
        """The values by buffer."""
        buffers: dict[int, list[HloValue]] = {}
        for number, value in enumerate(self.items):
            buffers.setdefault(self.buffer_of(number), []).append(value)
        return buffers

    def _new(
        self,
        shape: Shape,
        instruction: Instruction,
        *,
        forwarded: tuple[int, Tree] | None = None,
        at: tuple[int, int] | None = None,
    ) -> Tree:
        """Makes a value of each array of a shape, but for a part that is something else passed on."""
        if not isinstance(shape, Array):
            place, operand = forwarded or (-1, ())
            # The shape of a `-start` is of operands and results: a number in it is no number of a result.
            are_results = at is not None or instruction.part != "start"
            return tuple(
                operand
                if number == place
                else self._new(part, instruction, at=(number, len(shape)) if are_results else (0, 1))
                for number, part in enumerate(shape)
            )
        now = max(len(self.steps) - 1, 0)  # the step of the instruction, which is noted already
        self.items.append(HloValue(array=shape, instruction=instruction, start=now, end=now, place=at or (0, 1)))
        self._parents.append(len(self.items) - 1)
        return len(self.items) - 1

    def _use(self, tree: Tree, now: int) -> None:
        for value in leaves(tree):
            self.items[value].end = max(self.items[value].end, now)

    def _unite(self, tree: Tree, other: Tree) -> None:
        for a, b in zip(leaves(tree), leaves(other), strict=True):
            # The smaller number is the root: `buffer_of` returns that of the first value.
            first, second = sorted((self.buffer_of(a), self.buffer_of(b)))
            self._parents[second] = first

    def _visit(self, computation: str, arguments: dict[int, Tree]) -> Tree:
        """Goes through a computation in order; returns the values of its root."""
        trees: dict[str, Tree] = {}
        root: Tree = ()
        for instruction in self.program.computations[computation].values():
            opcode = instruction.opcode
            operands = [trees[name] for name in instruction.operands if name in trees]
            if opcode == "parameter":
                tree = arguments[_number(instruction)]
            elif opcode == "tuple":
                tree = tuple(operands)
            elif opcode == "get-tuple-element":
                tree = _at(operands[0], [int(re.findall(r"\bindex=(\d+)", instruction.line)[-1])])
            elif opcode in FORWARDS:
                tree = operands[0]
            else:
                tree = self._execute(instruction, operands)
            trees[instruction.name] = tree
            if instruction.name == self.program.roots.get(computation):  # which need not be the last to run
                root = tree
        return root

    def _execute(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        """Lets an instruction read its operands and write its results."""
        opcode = instruction.opcode
        self._step(instruction, operands)
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode == "call":
            return self._visit(instruction.first_called, dict(enumerate(operands)))
        if instruction.part in ("done", "update"):
            return _finished(opcode, instruction, operands[0])
        forwarded = _forwarded(opcode, parse_shape(instruction.shape), operands)
        result = self._new(parse_shape(instruction.shape), instruction, forwarded=forwarded)
        if opcode == "constant":
            self.constants += leaves(result)
        self._alias(instruction, operands, result)
        return result

    def _step(self, instruction: Instruction, operands: list[Tree]) -> None:
        for operand in operands:
            self._use(operand, len(self.steps))
        self.steps.append(instruction)

    def _loop(self, instruction: Instruction, operand: Tree) -> Tree:
        """A loop's state stays in place: its operand, the body's parameter and root, and its result are one buffer."""
        state = self._new(parse_shape(instruction.shape), instruction)
        self._unite(state, operand)
        self._visit(instruction.called["condition"], {0: state})
        root = self._visit(instruction.called["body"], {0: state})
        self._step(instruction, [root])  # a second step of the loop, at its end, to which the state is alive
        result = self._new(parse_shape(instruction.shape), instruction)
        self._unite(root, state)
        self._unite(result, state)
        return result

    def _branches(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        """The branches of a conditional write their results to one buffer, and only one of them runs."""
        called = instruction.called
        is_named = "true_computation" in called
        roles = ["true_computation", "false_computation"] if is_named else sorted(called, key=int)
        roots = [self._visit(called[role], {0: operand}) for role, operand in zip(roles, operands[1:], strict=True)]
        # The branches are one after the other in the steps, and any of them may be the one that runs.
        for operand in operands[1:]:
            self._use(operand, len(self.steps))
        self._step(instruction, roots)
        result = self._new(parse_shape(instruction.shape), instruction)
        for root in roots:
            self._unite(root, result)
        return result

    def _alias(self, instruction: Instruction, operands: list[Tree], result: Tree) -> None:
        """Notes which operands the results are written over."""
        line = instruction.line
        if (number := _updated_in_place(self.program, instruction)) is not None:
            self._unite(_at(result, [1]), operands[number])
        if aliasing := _OUTPUT_ALIASING.search(line):
            for out_path, number, path in read_aliases(aliasing[1]):
                self._unite(_at(result, out_path), _at(operands[number], path))
        if lists := _ALIASING_LISTS.search(line):
            # XLA:TPU numbers the operands, and goes on with the results.
            numbered: list[Tree] = [*operands, *leaves(result)]
            for pair in re.findall(r"\[([^\]]*)\]", lists[1]):
                shared = [numbered[number] for number in integers(pair) if number < len(numbered)]
                shared = [value for value in shared if isinstance(value, int)]
                for other in shared[1:]:
                    self._unite(other, shared[0])
            return
        reusable = self._reusable(instruction, len(operands))
        for value in leaves(result):
            for number in reusable:
                self._maybe_shared += [(value, operand) for operand in leaves(operands[number])]

    def _reusable(self, instruction: Instruction, num_operands: int) -> list[int]:
        """The operands that the results may be written over, if nobody needs them any more."""
        if instruction.opcode in IN_PLACE:
            return [0] if instruction.opcode in UPDATES else list(range(num_operands))
        if instruction.opcode == "fusion":
            numbers = _reused_in_fusion(self.program, instruction.first_called)
            return [number for number in numbers if number < num_operands]
        return list(range(num_operands)) if instruction.opcode in ELEMENTWISE else []

    def _share(self) -> None:
        """Writes a result over an operand of its size, where no value of the operand's buffer is needed later."""
        groups = {number: [number] for number in range(len(self.items))}
        for number in range(len(self.items)):
            if (first := self.buffer_of(number)) != number:
                groups[first] += groups.pop(number)
        # Arguments and constants are written by nothing, a donated argument by its output alone.
        fixed = {self.buffer_of(number) for number in (*self.arguments, *self.constants)}
        placed: set[int] = set()  # results that are written over an operand: over one alone
        for value, operand in self._maybe_shared:
            mine, theirs = self.buffer_of(value), self.buffer_of(operand)
            array, other = self.items[value].array, self.items[operand].array
            fits = array.num_bytes == other.num_bytes and array.space == other.space
            if mine == theirs or value in placed or not fits or {mine, theirs} & fixed:
                continue
            pairs = ((self.items[a], self.items[b]) for a in groups[mine] for b in groups[theirs])
            # The instruction reads the operand as it writes the result.
            if all(a.start >= b.end or b.start > a.end for a, b in pairs):
                self._unite(value, operand)
                groups[self.buffer_of(value)] = groups.pop(mine) + groups.pop(theirs)
                placed.add(value)


def leaves(tree: Tree) -> Iterator[int]:
    """Yields the numbers of a tree of values in order."""
    if isinstance(tree, int):
        yield tree
    else:
        for part in tree:
            yield from leaves(part)


def _number(instruction: Instruction) -> int:
    return int(instruction.operands[0])


def _at(tree: Tree, path: Sequence[int]) -> Tree:
    for place in path:
        assert not isinstance(tree, int)
        tree = tree[place]
    return tree


def _forwarded(opcode: str, shape: Shape, operands: list[Tree]) -> tuple[int, Tree] | None:
    """The part of the result of a `-start` that is its operands as they are; the others are written, or contexts."""
    if not opcode.endswith("-start") or isinstance(shape, Array) or _has_results_alone(opcode, shape):
        return None
    if opcode == "copy-start":
        return 1, operands[0]
    operand = operands[0] if isinstance(shape[0], Array) else tuple(operands)
    return (0, operand) if len(list(leaves(operand))) == len(list(arrays(shape[0]))) else None


def _has_results_alone(opcode: str, parts: Sequence[Any]) -> bool:
    """Tells whether these are the results of an `all-reduce-start`; newer XLA gives its operands before them."""
    return opcode in ("all-reduce-start", "all-reduce-done") and not isinstance(parts[0], tuple)


def _finished(opcode: str, instruction: Instruction, started: Tree) -> Tree:
    """The results of a `-done`: the part of its `-start` that was written."""
    if isinstance(started, int) or opcode == "send-done" or opcode.endswith("-update"):
        return started
    if _has_results_alone(opcode, started):
        return started
    if opcode == "recv-done":
        return (started[0], started[-1])
    result = started[0 if opcode == "copy-done" else 1]
    return result if len(list(leaves(result))) == len(instruction.arrays) else started


def _updated_in_place(program: Program, start: Instruction) -> int | None:
    """The operand that a `-start` updates in place: in XLA:GPU's fusions the array that its root updates."""
    if start.opcode != "fusion-start":
        return 0 if start.opcode == "dynamic-update-slice-start" else None
    root = program.root(start.first_called)
    updated = program.operand(root, 0) if root and root.opcode == "dynamic-update-slice" else None
    return _number(updated) if updated and updated.opcode == "parameter" else None


def _reused_in_fusion(program: Program, computation: str) -> tuple[int, ...]:
    """The operands that a fusion may write over: targets of updates in place, and those mapped element by element."""
    users = program.users(computation)

    @functools.cache
    def maps(name: str) -> bool:
        updates = {user.name for user in users[name] if user.opcode in UPDATES and user.operands[0] == name}
        in_place = all(user.opcode in ELEMENTWISE or user.name in updates for user in users[name])
        return in_place and all(maps(user.name) for user in users[name])

    return tuple(_number(parameter) for parameter in program.parameters(computation) if maps(parameter.name))
