"""Executes a program's computations: calls, loops, branches, reductions, and collectives between its devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zero_jax.hlo import KINDS, Instruction, Program, read_aliases, read_windows
from zero_jax.interpreter import indexing
from zero_jax.interpreter.collectives import Exchange, permuted
from zero_jax.interpreter.elementwise import ELEMENTWISE, OF_BOOLEANS
from zero_jax.interpreter.operations import Context, Rule, rule_of
from zero_jax.interpreter.products import placed_windows, select_and_scatter
from zero_jax.interpreter.values import (
    NotInterpretable,
    Value,
    array_shape,
    convert,
    every_device,
    is_small_float,
    spread,
)

_COLLECTIVE = re.compile(rf"({KINDS})(-start|-done)?")
_COMMUTATIVE = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction ready to be executed: its rule, and the names of its operands."""

    context: Context
    operands: tuple[str, ...]
    rule: Rule

    @property
    def line(self) -> str:
        """The instruction's text."""
        return self.context.instruction.line.strip()

    def __call__(self, operands: list[Value]) -> Value:
        """Returns the instruction's value, in the dtype that the text says; errors of its rule name the instruction."""
        try:
            result = self.rule(self.context, operands)
            if self.context.is_tuple or isinstance(result, tuple):
                return result
            assert result.shape[1:] == self.context.shape.dims, (result.shape, self.line)
            return convert(result, self.context.dtype)
        except NotInterpretable as error:
            raise NotInterpretable(f"{error}: {self.line[:400]}") from error
        except (IndexError, TypeError, ValueError) as error:
            raise RuntimeError(f"{type(error).__name__} ({error}) in {self.line[:600]}") from error


@dataclasses.dataclass(frozen=True)
class Computation:
    """The steps of a computation; `parameters` are their names by number."""

    steps: tuple[Step, ...]
    parameters: tuple[str, ...]
    root: str


class Interpreter:
    """Runs a compiled program, of the text with all constants, on the host, all devices in lockstep.

    What devices do by themselves is NumPy's arithmetic: elementwise operations, and products with sums in float32.
    Memory that a program has not written to is NaN. A collective that not all devices of its group reach is an error.
    """

    def __init__(self, program: Program):
        self.program = program
        self.num_devices = max(program.num_devices, 1)
        self._computations: dict[str, Computation] = {}
        self._active: np.ndarray | None = None  # the devices that execute; None for all

    def run(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the program on arrays `[devices, *dims of a shard]`; `NotInterpretable` names a line it cannot run."""
        parameters = self._computation(self.program.entry).parameters
        instructions = self.program.computations[self.program.entry]
        if len(arguments) != len(parameters):
            raise ValueError(f"{len(arguments)} arguments for a program of {len(parameters)} parameters")
        for name, argument in zip(parameters, arguments, strict=True):
            if argument.shape[1:] != array_shape(instructions[name].shape).dims:
                raise ValueError(f"{name} is {instructions[name].shape}, the argument {argument.shape}")
        with np.errstate(all="ignore"):  # overflow and 0 / 0 are values, as on a device
            result = self._call(self.program.entry, list(arguments))
        results = list(result) if isinstance(result, tuple) else [result]
        return [np.array(every_device(x, self.num_devices)) for x in results]

    def _computation(self, name: str) -> Computation:
        if name not in self._computations:
            instructions = self.program.computations[name]
            parameters = {i.operands[0]: i.name for i in instructions.values() if i.opcode == "parameter"}
            self._computations[name] = Computation(
                steps=tuple(self._step(i, name) for i in instructions.values() if i.opcode != "parameter"),
                parameters=tuple(parameters[str(number)] for number in range(len(parameters))),
                root=self.program.roots[name],
            )
        return self._computations[name]

    def _step(self, instruction: Instruction, computation: str) -> Step:
        # What a constant has in its brackets is its value.
        names = () if instruction.opcode in ("constant", "iota", "partition-id") else tuple(instruction.operands)
        instructions = self.program.computations[computation]
        operands = [instructions[name] for name in names]
        if "AsyncCollectiveStart" in instruction.line and operands:  # whose first result is what the collective sends
            names += tuple(operands[0].operands)
        return Step(Context(instruction, operands, self.num_devices), names, self._rule(instruction))

    def _rule(self, instruction: Instruction) -> Rule:
        if match := _COLLECTIVE.fullmatch(instruction.opcode):
            return functools.partial(self._collective, match[1], match[2] or "")
        if control := _CONTROL.get(instruction.opcode):
            return functools.partial(control, self)
        return rule_of(instruction)

    def _call(self, name: str, arguments: Sequence[Value]) -> Value:
        computation = self._computation(name)
        values = dict(zip(computation.parameters, arguments, strict=True))
        for step in computation.steps:
            values[step.context.instruction.name] = step([values[operand] for operand in step.operands])
        return values[computation.root]

    # Calls and fusions

    def _calling(self, context: Context, operands: list[Value]) -> Value:
        (name,) = context.called.values()
        written = collections.defaultdict(list)  # by operand and path in it the results that are written over it
        for output, *place in read_aliases(context.attributes.get("output_to_operand_aliasing", "")):
            written[*place].append(output)
        result = self._call(name, operands)
        for (number, path), outputs in written.items():
            if len(outputs) > 1:  # results that are written into one operand in place are one buffer
                operand = functools.reduce(operator.getitem, path, operands[number])
                result = _in_place(result, [place for place, *_ in outputs], operand)
        return result

    def _async_start(self, context: Context, operands: list[Value]) -> Value:
        """Returns operands, the result, and a function of the operands for those that come later (`_async_update`)."""
        name = next(iter(context.called.values()))
        count = len(self._computation(name).parameters)

        def start(operands: Sequence[Value]) -> Value:
            result = self._calling(context, list(operands[:count])) if len(operands) >= count else None
            return tuple(operands), result, start

        return start(operands)

    def _async_update(self, _: Context, operands: list[Value]) -> Value:
        """What is between start and end of an asynchronous call: it may give the call operands that come later."""
        (before, result, start), *more = operands
        return operands[0] if result is not None else start((*before, *more))

    # Loops and branches

    def _while(self, context: Context, operands: list[Value]) -> Value:
        body, condition = context.called["body"], context.called["condition"]
        (state,) = operands
        # Until no device goes on: those that have ended keep their state.
        while True:
            goes_on = self._call(condition, [state])
            if self._active is not None:
                goes_on = goes_on & self._active
            if not goes_on.any():
                return state
            with self._only(goes_on) as are_some:
                new = self._call(body, [state])
            state = _chosen(goes_on, new, state) if are_some else new

    def _conditional(self, context: Context, operands: list[Value]) -> Value:
        called = context.called
        index, *arguments = operands
        names = [*called.values()]
        if "true_computation" in called:  # whose argument comes first
            names, arguments = [called["false_computation"], called["true_computation"]], arguments[::-1]
        index = index.astype(int)
        index = np.where((index < 0) | (index >= len(names)), len(names) - 1, index)  # as XLA defines it
        result = None
        for number in np.unique(index):
            takes = index == number  # [devices]
            with self._only(takes):
                new = self._call(names[number], [arguments[number]])
            result = new if result is None else _chosen(takes, new, result)
        return result

    @contextlib.contextmanager
    def _only(self, devices: np.ndarray) -> Iterator[bool]:
        """Lets some devices execute; yields whether they are not all of those that do."""
        before = self._active
        are_some = not devices.all()
        if are_some:
            devices = every_device(devices, self.num_devices)
            self._active = devices if before is None else devices & before
        try:
            yield are_some
        finally:
            self._active = before

    # Collectives

    def _collective(self, kind: str, phase: str, context: Context, operands: list[Value]) -> Value:
        if phase == "-done":
            return operands[0][1] if kind != "all-reduce" else operands[0]
        if kind == "collective-permute" and len(context.operands) > 1:
            raise NotInterpretable("a permute into part of a buffer")
        if self._active is not None:  # in a loop or branch of some: a device would wait for the others for ever
            raise ValueError(f"not all devices reach {context.instruction.line.strip()[:200]}")
        if kind == "all-to-all" and not context.dimensions:  # of a tuple, an array for each member
            result: Value = tuple(Exchange(context.instruction.line, self.num_devices).swapped(operands))
        else:
            result = tuple(self._moved(kind, context, x) for x in operands)
            result = result if (context.is_tuple and not phase) or len(operands) > 1 else result[0]
        sources = operands[0] if len(operands) == 1 else tuple(operands)
        # A `-start` yields what it was given, too; that of an all-reduce its result alone.
        return (sources, result) if phase and kind != "all-reduce" else result

    def _moved(self, kind: str, context: Context, x: np.ndarray) -> np.ndarray:
        if kind == "collective-permute":
            return permuted(x, context.attributes, self.num_devices)
        exchange = Exchange(context.instruction.line, self.num_devices)
        reduce = lambda x: self._reduce_first(context.called["to_apply"], [x])[0]  # noqa: E731
        match kind:
            case "all-gather":
                return exchange.gathered(x, context.dimensions[0])
            case "all-reduce":
                return reduce(exchange.received(x))
            case "reduce-scatter":
                return exchange.scattered(x, context.dimensions[0], reduce)
            case "all-to-all":
                return exchange.exchanged(x, context.dimensions[0])
            case "collective-broadcast":
                return exchange.received(x)[0]  # what the first member has
        raise NotInterpretable(f"the collective {kind!r}")

    # Reductions

    def _ufunc(self, name: str, dtype: np.dtype) -> Any:
        """Returns the NumPy function that a computation of two scalars is, whatever it converts on the way, or None."""
        instructions = self.program.computations[name]

        def source(name: str) -> Instruction:
            while instructions[name].opcode in ("convert", "bitcast", "copy"):
                name = instructions[name].operands[0]
            return instructions[name]

        root = source(self.program.roots[name])
        if root.opcode not in _COMMUTATIVE:
            return None
        sources = {(each.opcode, *each.operands) for each in map(source, root.operands)}
        if sources != {("parameter", "0"), ("parameter", "1")}:
            return None
        return (OF_BOOLEANS if dtype.kind == "b" else {}).get(root.opcode, ELEMENTWISE[root.opcode])

    def _reduce_first(self, name: str, xs: list[np.ndarray], inits: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Reduces arrays `[n, devices, *dims]` over their first dim by a computation; sums are in float32 at least."""
        dtype = xs[0].dtype
        ufunc = self._ufunc(name, dtype) if len(xs) == 1 else None
        if ufunc is not None:
            wide = xs[0].astype(np.float32) if is_small_float(dtype) else xs[0]
            totals = [ufunc.reduce(wide, axis=0)] if len(wide) else []
            starts = [] if inits is None else [np.broadcast_to(convert(inits[0], wide.dtype), wide.shape[1:])]
            return [convert(functools.reduce(ufunc, totals + starts), dtype)]
        parts = [[x[number] for x in xs] for number in range(len(xs[0]))]
        if inits is not None:
            parts.insert(0, [np.broadcast_to(init, x.shape[1:]) for init, x in zip(inits, xs, strict=True)])
        return functools.reduce(lambda a, b: self._combine(name, a, b), parts)

    def _combine(self, name: str, first: list[np.ndarray], second: list[np.ndarray]) -> list[np.ndarray]:
        """Applies a computation of scalars to arrays, elementwise; constants in it are broadcast."""
        shape = np.broadcast_shapes(*(x.shape for x in (*first, *second)))
        # Elements take the place of devices: the computation is of scalars, `[devices]`.
        flat = [np.broadcast_to(x, shape).reshape(-1) for x in (*first, *second)]
        result = self._call(name, flat)
        parts = list(result) if isinstance(result, tuple) else [result]
        return [np.broadcast_to(x, flat[0].shape).reshape(shape) for x in parts]

    def _reduce(self, context: Context, operands: list[Value]) -> Value:
        dims = [1 + dim for dim in context.dimensions]
        xs, inits = spread(operands[: len(operands) // 2]), operands[len(operands) // 2 :]
        kept = [dim for dim in range(xs[0].ndim) if dim not in dims]
        shape = [xs[0].shape[dim] for dim in kept]
        count = math.prod(xs[0].shape[dim] for dim in dims)
        moved = [x.transpose(*dims, *kept).reshape(count, *shape) for x in xs]  # [reduced elements, devices, *kept]
        starts = [init.reshape(-1, *(1,) * (len(shape) - 1)) for init in inits]
        return context.result(self._reduce_first(context.called["to_apply"], moved, starts))

    def _reduce_window(self, context: Context, operands: list[Value]) -> Value:
        dims = context.instruction.arrays[0].dims
        windows = read_windows(context.attributes.get("window"), len(dims))
        xs, inits = operands[: len(operands) // 2], operands[len(operands) // 2 :]
        views = [np.stack([*placed_windows(x, init, windows, dims)]) for x, init in zip(xs, inits, strict=True)]
        starts = [init.reshape(-1, *(1,) * len(dims)) for init in inits]
        return context.result(self._reduce_first(context.called["to_apply"], views, starts))

    def _select_and_scatter(self, context: Context, operands: list[Value]) -> Value:
        windows = read_windows(context.attributes.get("window"), len(context.shape.dims))
        names = (context.attributes[role].strip("%") for role in ("select", "scatter"))
        select, combine = (functools.partial(self._combine, name) for name in names)
        x, source, init = operands
        return select_and_scatter(x, source, init, windows, select, combine)

    def _scatter(self, context: Context, operands: list[Value]) -> Value:
        count = len(context.operands) // 2
        windows = indexing.scatter_windows(
            context.attributes, context.operand_shape().dims, context.operand_shape(count + 1).dims
        )
        ufunc = self._ufunc(context.called["to_apply"], operands[0].dtype) if count == 1 else None
        xs, indices, updates = operands[:count], operands[count], operands[count + 1 :]
        updates = [convert(update, x.dtype) for x, update in zip(xs, updates, strict=True)]
        combine = functools.partial(self._combine, context.called["to_apply"])
        return context.result(indexing.scatter(xs, indices, updates, windows, combine, ufunc))

    def _map(self, context: Context, operands: list[Value]) -> Value:
        operands = spread(operands)
        result = self._call(context.called["to_apply"], [x.reshape(-1) for x in operands])
        return np.broadcast_to(result, operands[0].size).reshape(operands[0].shape)

    def _sort(self, context: Context, operands: list[Value]) -> Value:
        axis = 1 + context.dimensions[0]
        xs = [np.array(np.moveaxis(x, axis, 0)) for x in spread(operands)]
        self._sorted(context.called["to_apply"], xs)
        return context.result([np.moveaxis(x, 0, axis) for x in xs])

    def _sorted(self, name: str, xs: list[np.ndarray]) -> None:
        """Sorts arrays along their first dim in place, by neighbours that are exchanged: stable, whatever compares."""
        length = len(xs[0])
        # Even and odd pairs in turn (odd-even transposition sort), which takes as many turns as there are elements.
        for turn in range(length):
            low = np.arange(turn % 2, length - 1, 2)
            if not len(low):
                continue
            # The second first: only where it has to come before the first are they exchanged, so that equals stay.
            pairs = [part for x in xs for part in (x[low + 1], x[low])]
            swaps = self._call(name, [part.reshape(-1) for part in pairs])
            swaps = np.broadcast_to(swaps, pairs[0].size).reshape(pairs[0].shape)
            for x in xs:
                first, second = np.where(swaps, x[low + 1], x[low]), np.where(swaps, x[low], x[low + 1])
                x[low], x[low + 1] = first, second


_CONTROL: dict[str, Callable[[Interpreter, Context, list[Value]], Value]] = {
    **dict.fromkeys(("fusion", "call"), Interpreter._calling),
    **dict.fromkeys(("async-start", "call-start", "fusion-start"), Interpreter._async_start),
    **dict.fromkeys(("async-update", "call-update", "fusion-update"), Interpreter._async_update),
    **dict.fromkeys(("async-done", "call-done", "fusion-done"), lambda _, context, operands: operands[0][1]),
    "while": Interpreter._while,
    "conditional": Interpreter._conditional,
    "reduce": Interpreter._reduce,
    "reduce-window": Interpreter._reduce_window,
    "scatter": Interpreter._scatter,
    "select-and-scatter": Interpreter._select_and_scatter,
    "sort": Interpreter._sort,
    "map": Interpreter._map,
}


def _chosen(which: np.ndarray, yes: Value, no: Value) -> Value:
    """Returns each device's choice of two values."""
    if isinstance(yes, tuple):
        return tuple(_chosen(which, a, b) for a, b in zip(yes, no, strict=True))
    return np.where(which.reshape(-1, *(1,) * (yes.ndim - 1)), yes, no)


def _in_place(result: tuple[Value, ...], outputs: Sequence[int], operand: np.ndarray) -> tuple[Value, ...]:
    """Returns a fusion's results with those that are written into one operand in place all that was written there."""
    written = operand
    for number in outputs:
        new = result[number].reshape(-1, *operand.shape[1:])
        changed = ~((new == operand) | ((new != new) & (operand != operand)))  # NaN is what NaN was
        written = np.where(changed, new, written)
    return tuple(written.reshape(-1, *x.shape[1:]) if n in outputs else x for n, x in enumerate(result))
