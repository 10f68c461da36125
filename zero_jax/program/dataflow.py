"""Dataflow analysis of jaxprs: what is known of each value, derived from what is known of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from zero_jax.program.jaxprs import Literal, open_jaxpr, source_line, variables
from zero_jax.program.subcalls import CALLS, KINDS, Subcall, subcall

V = TypeVar("V")


class Dataflow(Generic[V]):
    """A dataflow analysis: runs jaxprs on what is known of their values (`V`) in place of arrays.

    A subclass says what is known of constants, of the results of operations, and of a value that is one of two.

    Attributes:
      enters: the kinds of `Subcall` whose jaxprs are run; all others count as operations.
      notes: side results of `operation`. For a loop, those of the last fixed-point iteration, which hold for all.
    """

    enters: frozenset[str] = frozenset()

    def __init__(self):
        self.notes: dict[Any, Any] = {}

    def constant(self, atom: Any) -> V:
        """Returns what is known of a literal, or of the variable of a constant."""
        raise NotImplementedError

    def operation(self, eqn: Any, operands: list[V]) -> Sequence[V]:
        """Returns what is known of the results of an equation."""
        raise NotImplementedError

    def join(self, first: V, second: V) -> V:
        """Returns what is known of a value that is either of two. Repeated joins must come to an end."""
        raise NotImplementedError

    def slice_of(self, operand: V) -> V:
        """Returns what is known of the slice of an operand that an iteration of a scan takes."""
        return operand

    def stack_of(self, result: V) -> V:
        """Returns what is known of the stack of what the iterations of a scan return."""
        return result

    def run(self, jaxpr: Any, inputs: Sequence[V], env: dict[Any, V] | None = None) -> list[V]:
        """Returns what is known of the results of a jaxpr, open or closed; adds all of its variables to `env`."""
        opened, _ = open_jaxpr(jaxpr)
        env = {} if env is None else env
        env.update((var, self.constant(var)) for var in opened.constvars)
        env.update(zip(opened.invars, inputs, strict=True))
        for eqn in opened.eqns:
            env.update(zip(eqn.outvars, self.visit(eqn, env), strict=True))
        return self.of_atoms(opened.outvars, env)

    def of_atoms(self, atoms: Sequence[Any], env: dict[Any, V]) -> list[V]:
        """Returns what is known of operands or results."""
        return [self.constant(atom) if type(atom) is Literal else env[atom] for atom in atoms]

    def visit(self, eqn: Any, env: dict[Any, V]) -> Sequence[V]:
        """Returns what is known of an equation's results; a subclass may first change what is known of its inputs."""
        return self.equation(eqn, self.of_atoms(eqn.invars, env))

    def equation(self, eqn: Any, operands: list[V]) -> Sequence[V]:
        """Returns what is known of the results of an equation: of the jaxprs in it, if it enters them."""
        if eqn.primitive.name in KINDS and (sub := subcall(eqn)) is not None and sub.kind in self.enters:
            return self.of_jaxprs(eqn, sub, operands)
        return self.operation(eqn, operands)

    def of_jaxprs(self, eqn: Any, sub: Subcall, operands: list[V]) -> Sequence[V]:
        """Returns what is known of the results of an equation from the jaxprs in it."""
        if sub.kind == "cond":
            branches = [self.run(branch, operands[1:]) for branch in sub.branches]
            # Which branch a result is of depends on the index, `operands[0]`: what is known of that is joined, too.
            return [functools.reduce(self.join, results, operands[0]) for results in zip(*branches, strict=True)]
        return self.loop(sub, operands) if sub.kind in ("scan", "while") else self.run(sub.jaxpr, operands)

    def loop(self, sub: Subcall, operands: list[V]) -> list[V]:
        """Returns what is known of the results of a loop, whatever the number of its iterations."""
        consts, carry, slices = sub.split(operands)
        slices, before = [self.slice_of(x) for x in slices], self.notes

        def body(carry: list[V]) -> list[V]:
            self.notes = dict(before)  # an earlier iteration noted what need not hold of this one's carries
            return self.run(sub.jaxpr, [*consts, *carry, *slices])

        carry, results = fixed_point(body, carry, self.join)
        return [*carry, *map(self.stack_of, results[sub.num_carry :])]


class Flags(Dataflow[bool]):
    """Which values are of some kind, as no constant is, and a value that is either of two if one of them is."""

    def constant(self, atom: Any) -> bool:
        """Returns that a constant is not of the kind."""
        return False

    def join(self, first: bool, second: bool) -> bool:
        """Returns whether one of two is of the kind."""
        return first or second


class Dependence(Dataflow[frozenset[int]]):
    """Which inputs each value is made of, by the numbers that these are marked with."""

    def constant(self, atom: Any) -> frozenset[int]:
        """Returns that a constant is made of no input."""
        return frozenset()

    def join(self, first: frozenset[int], second: frozenset[int]) -> frozenset[int]:
        """Returns the inputs of both."""
        return first | second

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        """Returns the inputs of all operands, for each result."""
        return [frozenset().union(*operands)] * len(eqn.outvars)


class Makers(Dataflow[int | str]):
    """For each value the number of the input that it is, or the line that made it."""

    enters = (CALLS - {"custom_jvp", "custom_vjp"}) | {"scan"}

    def constant(self, atom: Any) -> int | str:
        """Returns that a constant is made at no line."""
        return ""

    def join(self, first: int | str, second: int | str) -> int | str:
        """Returns what both are, or the line that made one of them."""
        return first if first == second else next((x for x in (first, second) if isinstance(x, str)), "")

    def operation(self, eqn: Any, operands: list[int | str]) -> list[int | str]:
        """Returns the line, for each result."""
        return [source_line(eqn)] * len(eqn.outvars)


def made_of(given: Iterable[Any], eqns: Iterable[Any]) -> set[Any]:
    """Returns some variables, and those that equations make of any of them."""
    found = {*given}
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn)):
            found.update(eqn.outvars)
    return found


def read_for(results: Iterable[Any], eqns: Sequence[Any]) -> set[Any]:
    """Returns some variables, and those that equations read for them."""
    needed = {*results}
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn))
    return needed


def fixed_point(
    body: Callable[[list[V]], list[V]], carry: list[V], join: Callable[[V, V], V]
) -> tuple[list[V], list[V]]:
    """Runs the body of a loop until what is known of its carries holds in every iteration.

    `body` takes what is known of the carries, and returns what is known of the results, carries first.

    Returns:
      What is known of the carries, and of all results of an iteration.
    """
    while True:
        results = body(carry)
        after = [join(x, y) for x, y in zip(carry, results, strict=False)]  # of the results, the carries alone
        if after == carry:
            return carry, results
        carry = after
