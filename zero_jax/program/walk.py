"""Evaluation of jaxprs on arrays, and on deferred values: what is made of arrays only where an equation uses it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.program.evaluation import evaluate, with_equations, with_some
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.subcalls import MANUAL, Subcall, equations_of, subcall

F = TypeVar("F")


class Deferred:
    """A value of a walk that is more than an array: one still to be made, or one of which something is known.

    It is a dataclass: of one `array`, or one that says of which arrays it is made.
    """

    array: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that it is made of."""
        return (self.array,)

    def with_arrays(self, arrays: Sequence[Any]) -> Self:
        """Returns the value made of other arrays."""
        return dataclasses.replace(self, array=arrays[0])  # type: ignore[type-var]

    @property
    def key(self) -> Hashable:
        """What is done with the value, whatever its arrays: equal where that is the same."""
        raise NotImplementedError


def arrays_of(value: Any) -> tuple[Any, ...]:
    """Returns the arrays that a value of a walk is made of."""
    return value.arrays if isinstance(value, Deferred) else (value,)


def made_of_arrays(value: Any, arrays: Sequence[Any]) -> Any:
    """Returns a value of a walk made of other arrays (`arrays_of`)."""
    return value.with_arrays(arrays) if isinstance(value, Deferred) else arrays[0]


def as_it_is(array: Any) -> Any:
    """Makes a value that is an array as it is used, in the place of functions that make others."""
    return array


class Packed:
    """Values as `arrays`, each array once, and back: so they enter a function that JAX traces, as its arguments."""

    def __init__(self, values: Iterable[Any]):
        self.values = list(values)
        numbers: dict[int, int] = {}  # of each array among the arguments, by its id
        of_each = [arrays_of(value) for value in self.values]
        self.places = [[numbers.setdefault(id(array), len(numbers)) for array in arrays] for arrays in of_each]
        # Dicts keep their order: the arrays are in that of `numbers`.
        self.arrays = list({id(array): array for arrays in of_each for array in arrays}.values())

    def without_arrays(self) -> Packed:
        """Returns it for a function that is kept: tracers in one of those would outlive the trace that they are of."""
        bare = copy.copy(self)
        bare.arrays = []
        bare.values = [x.with_arrays([None] * len(x.arrays)) if isinstance(x, Deferred) else None for x in self.values]
        return bare

    def values_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the values made of other arrays."""
        pairs = zip(self.values, ([arrays[i] for i in at] for at in self.places), strict=True)
        return [made_of_arrays(value, own) for value, own in pairs]

    @property
    def key(self) -> Hashable:
        """What the values are, whatever their arrays: equal where the same is done with them."""
        known = [value.key if isinstance(value, Deferred) else None for value in self.values]
        return tuple((*places, key) for places, key in zip(self.places, known, strict=True))

    def spread(self, flags: bool | Sequence[bool]) -> bool | tuple[bool, ...]:
        """Returns flags of the values as flags of the arrays: an array of several values has it if one of them does."""
        if isinstance(flags, bool):
            return flags
        flagged = {i for places, flag in zip(self.places, flags, strict=True) if flag for i in places}
        return tuple(i in flagged for i in range(len(self.arrays)))


class Walk(Generic[F]):
    """Evaluates jaxprs on arrays and deferred values.

    A subclass says which equations it enters, what operations do, and how an array is made of a deferred value. How
    equations that run other jaxprs are evaluated is here, once. Deferred values enter regions (`jax.checkpoint`, `cond`
    and loops) as their arrays, and are deferred again inside; what leaves a region is an array.

    `F` is what a subclass has to know of the region that is being walked, the frame.
    """

    def __init__(self):
        self.handlers: dict[str, Callable[[Any, Subcall, list[Any], F], Sequence[Any]]] = {
            "call": self.call,
            "remat": self.remat,
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
        }

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> bool:
        """Tells whether an equation is evaluated by the jaxprs in it; else it counts as an operation."""
        raise NotImplementedError

    def operation(self, eqn: Any, values: list[Any], frame: F) -> Sequence[Any]:
        """Returns the results of an equation."""
        return bind(eqn, values)

    def materialize(self, value: Any, eqn: Any, frame: F) -> Any:
        """Returns the array of a value that an equation cannot take deferred, as a loop what it carries."""
        return value

    def array(self, value: Any, eqn: Any, frame: F) -> Any:
        """Returns the array of a value that a region returns, or that a `cond` chooses by."""
        return self.materialize(value, eqn, frame)

    def inner_frame(self, eqn: Any, sub: Subcall, frame: F) -> F:
        """Returns the frame of what is in a region."""
        return frame

    def results(self, eqn: Any, values: list[Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the values of what leaves a region, from the values of the operands of its equation."""
        return arrays

    def stack(self, value: Any, aval: Any, eqn: Any, frame: F) -> Any:
        """Returns a value as its slices are in an iteration of a scan, made of the stacks of what these are made of.

        `aval` is that of a slice.
        """
        return value

    def loop_constants(self, eqn: Any, sub: Subcall, consts: list[Any], frame: F) -> list[Any]:
        """Returns the values that each iteration of a scan takes as they are."""
        return consts

    def carried(self, eqn: Any, carry: list[Any]) -> list[Any]:
        """Returns what a loop carries as an iteration takes it."""
        return carry

    def run(self, jaxpr: Any, values: Sequence[Any], frame: F) -> list[Any]:
        """Evaluates a jaxpr, open (of no constants) or closed, and returns its results, deferred ones among them."""
        opened, consts = open_jaxpr(jaxpr)
        equation = lambda eqn, operands: self.equation(eqn, operands, frame)  # noqa: E731
        return evaluate(opened, consts, values, equation)

    def equation(self, eqn: Any, values: list[Any], frame: F) -> Sequence[Any]:
        """Returns the values of the results of an equation."""
        sub = subcall(eqn)
        if sub is None or sub.kind not in self.handlers or not self.enters(eqn, sub, values, frame):
            return self.operation(eqn, values, frame)
        return self.handlers[sub.kind](eqn, sub, values, frame)

    def inner(self, eqn: Any, jaxpr: Any, values: Sequence[Any], frame: F) -> list[Any]:
        """Evaluates the jaxpr of a region, and returns arrays."""
        return [self.array(value, eqn, frame) for value in self.run(jaxpr, values, frame)]

    def region(self, eqn: Any, jaxpr: Any, packed: Packed, frame: F) -> Callable[..., list[Any]]:
        """Returns the jaxpr of a region as a function from the arrays of its inputs to those of its results."""
        return lambda *arrays: self.inner(eqn, jaxpr, packed.values_of(arrays), frame)

    def call(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> list[Any]:
        """Evaluates a call in place."""
        with source_context(eqn):
            return self.run(sub.jaxpr, values, frame)

    def remat(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> Sequence[Any]:
        """Evaluates a `jax.checkpoint`: deferred values are made inside it, and its policy holds."""
        packed = Packed(values)
        region = self.region(eqn, sub.jaxpr, packed, self.inner_frame(eqn, sub, frame))
        prevent_cse, policy = packed.spread(eqn.params["prevent_cse"]), eqn.params["policy"]
        with source_context(eqn):
            recomputed = jax.checkpoint(region, prevent_cse=prevent_cse, policy=policy)  # type: ignore[arg-type]
            return self.results(eqn, values, recomputed(*packed.arrays))

    def cond(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> Sequence[Any]:
        """Evaluates a `cond`: deferred values are made inside the branch that uses them."""
        index, packed = self.array(values[0], eqn, frame), Packed(values[1:])
        within = self.inner_frame(eqn, sub, frame)
        branches = [self.region(eqn, branch, packed, within) for branch in sub.branches]
        with source_context(eqn):
            return self.results(eqn, values, lax.switch(index, branches, *packed.arrays))

    def scan(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> Sequence[Any]:
        """Evaluates a scan: elements of deferred stacks enter its body deferred, and so do its constants."""
        (consts, carry, stacks), slices = sub.split(values), sub.split(open_jaxpr(sub.jaxpr)[0].invars)[2]
        carry = [self.materialize(value, eqn, frame) for value in carry]
        stacks = [self.stack(value, var.aval, eqn, frame) for value, var in zip(stacks, slices, strict=True)]
        consts = self.loop_constants(eqn, sub, consts, frame)
        within = self.inner_frame(eqn, sub, frame)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            elements = map(made_of_arrays, stacks, xs)  # `xs` has a tuple of slices for each stack
            outs = self.inner(eqn, sub.jaxpr, [*consts, *self.carried(eqn, carry), *elements], within)
            return outs[: sub.num_carry], outs[sub.num_carry :]

        options = {"length": sub.length, "reverse": sub.reverse, "unroll": sub.unroll}
        with source_context(eqn):
            carry, ys = lax.scan(body, carry, [*map(arrays_of, stacks)], **options)
        return self.results(eqn, values, [*carry, *ys])

    def while_loop(self, eqn: Any, sub: Subcall, values: list[Any], frame: F) -> Sequence[Any]:
        """Evaluates a `while`, of which nothing is deferred."""
        values, within = [self.materialize(value, eqn, frame) for value in values], self.inner_frame(eqn, sub, frame)
        consts, carry, _ = sub.split(values)
        test_consts = values[: sub.num_test_consts]
        # A loop within a `jax.vmap` has a test for each element of the mapped dims, which are leading in what it
        # carries. `lax.while_loop` refuses that: so it goes on while any does, and keeps what the others carried.
        is_mapped = bool(open_jaxpr(sub.test)[0].outvars[0].aval.shape)

        def goes_on(carry: list[Any]) -> Any:
            return self.inner(eqn, sub.test, [*test_consts, *carry], within)[0]

        def body(carry: list[Any]) -> list[Any]:
            new = self.inner(eqn, sub.jaxpr, [*consts, *self.carried(eqn, carry)], within)
            if not is_mapped:
                return new
            on = goes_on(carry)
            masks = [on.reshape((*on.shape, *(1,) * (jnp.ndim(x) - on.ndim))) for x in new]
            return [jnp.where(mask, x, old) for mask, x, old in zip(masks, new, carry, strict=True)]

        with source_context(eqn):
            end = lax.while_loop((lambda carry: goes_on(carry).any()) if is_mapped else goes_on, body, carry)
        return self.results(eqn, values, end)


class Rewriting(Walk[None]):
    """A walk on arrays that changes some equations, and enters those that hold one.

    What is in a `jax.shard_map` stays as it is.
    """

    entered: frozenset[str] = frozenset({"call", "remat", "scan", "cond"})
    # Whether all equations are traced again, because what is made at one may be used at another
    traces_all: bool = False

    def changes(self, eqn: Any) -> bool:
        """Tells whether an equation is one to change."""
        raise NotImplementedError

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        """Returns the results of an equation to change that is not entered."""
        raise NotImplementedError

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        """Returns the results of an equation, changed or as it is."""
        return self.changed(eqn, values) if self.changes(eqn) else bind(eqn, values)

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        """Tells whether there is an equation to change in another."""
        return sub.kind in self.entered and self.holds(eqn)

    def holds(self, eqn: Any) -> bool:
        """Tells whether an equation is one to change, or has one in it."""
        return any(map(self.changes, equations_of(eqn, skip=MANUAL)))

    def rewritten(self, closed: Any) -> Any:
        """Returns a closed jaxpr with its equations changed; itself if there are none to change."""
        which = {id(eqn) for eqn in open_jaxpr(closed)[0].eqns if self.holds(eqn)}
        if not which:
            return closed
        changed = lambda eqn, values: self.equation(eqn, values, None)  # noqa: E731
        return with_equations(closed, changed) if self.traces_all else with_some(closed, which, changed)
