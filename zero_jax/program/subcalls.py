"""Equations that run other jaxprs: calls, loops, branches and derivatives, of every supported JAX release.

This is the one list of them. Whatever else holds a jaxpr (`reduce`, `scatter`, `pallas_call`, `composite`) is an
operation of its own; `equations` looks into those, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

from zero_jax.program.jaxprs import has_explicit_shardings, inner_jaxprs, open_jaxpr, scan_counts

T = TypeVar("T")

# By the name of the primitive; `pjit`, `core_call` and `checkpoint` are none since JAX 0.10.
KINDS = {
    "jit": "call",
    "closed_call": "call",  # made by `jax.lax` for remat policies in loops; JAX 0.12 calls it `eval_jaxpr`
    "eval_jaxpr": "call",
    "remat2": "remat",  # `jax.checkpoint`
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
    "custom_vmap_call": "custom_vmap",
    "shard_map": "shard_map",
    "scan": "scan",
    "while": "while",
    "cond": "cond",
}
# The primitives whose jaxpr is on each device's own values: XLA partitions nothing in it.
MANUAL = frozenset({"shard_map"})
# The kinds whose jaxpr makes the values of the results, whatever else they do.
CALLS = frozenset({"call", "sharded_call", "remat", "custom_jvp", "custom_vjp"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subcall:
    """The jaxprs that an equation runs, and what each of them takes."""

    # "call", "remat", "custom_jvp", "custom_vjp", "custom_vmap", "shard_map": `jaxpr` takes all operands. So does that
    # of a "sharded_call", a `jit` that also fixes the sharding of an operand or a result. "scan": it takes constants,
    # carries, and a slice of each other operand; it returns carries and slices. "while": it takes constants and
    # carries, and `test` takes its own constants and the carries. "cond": each of `branches` takes all operands but the
    # first, which is the index of the branch that runs.
    kind: str
    jaxpr: Any = None  # the jaxpr of a call, or the body of a loop; open or closed
    branches: tuple[Any, ...] = ()  # the jaxprs of a `cond`, in the order of the index
    test: Any = None  # the jaxpr that says whether a `while` goes on
    num_test_consts: int = 0  # operands of a `while` before those of its body: they are constants of the test
    num_consts: int = 0  # operands that each iteration of a loop takes as they are
    num_carry: int = 0  # operands of a loop that an iteration takes from the one before
    length: int = 1  # iterations; 1 where that is not known
    reverse: bool = False  # whether a scan begins with the last slice
    unroll: int = 1  # how many iterations of a scan are one of the compiled loop

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits the operands of a loop into the constants of its body, carries, and what is taken in slices."""
        operands = operands[self.num_test_consts :]
        first = self.num_consts + self.num_carry
        return list(operands[: self.num_consts]), list(operands[self.num_consts : first]), list(operands[first:])


def kind_of(eqn: Any) -> str | None:
    """Returns the kind of an equation as a `Subcall`; None for an operation, whatever it holds."""
    kind = KINDS.get(eqn.primitive.name)
    return "sharded_call" if kind == "call" and has_explicit_shardings(eqn) else kind


def subcall(eqn: Any) -> Subcall | None:
    """Returns the jaxprs that an equation runs; None for an operation, whatever it holds."""
    params = eqn.params
    if eqn.primitive.name not in KINDS or (kind := kind_of(eqn)) is None:
        return None
    if kind == "scan":
        return scan_of(eqn)
    if kind == "while":
        skipped, num_consts = params["cond_nconsts"], params["body_nconsts"]
        return Subcall(
            kind="while",
            jaxpr=params["body_jaxpr"],
            test=params["cond_jaxpr"],
            num_test_consts=skipped,
            num_consts=num_consts,
            num_carry=len(eqn.invars) - skipped - num_consts,
        )
    if kind == "cond":
        return Subcall(kind="cond", branches=tuple(params["branches"]))
    (jaxpr,) = inner_jaxprs(eqn)
    return Subcall(kind=kind, jaxpr=jaxpr)


def scan_of(eqn: Any) -> Subcall:
    """Returns the body of a `scan` equation, and what it takes."""
    num_consts, num_carry = scan_counts(eqn)
    options = {name: eqn.params[name] for name in ("jaxpr", "length", "reverse", "unroll")}
    return Subcall(kind="scan", num_consts=num_consts, num_carry=num_carry, **options)


def equations(jaxpr: Any, *, skip: Collection[str] = ()) -> Iterator[Any]:
    """Yields the equations of a jaxpr, open or closed, each followed by those of the jaxprs in it.

    Equations of the primitives `skip` are left out, with all that is in them.
    """
    return _with_inner(open_jaxpr(jaxpr)[0].eqns, skip)


def equations_of(eqn: Any, *, skip: Collection[str] = ()) -> Iterator[Any]:
    """Yields an equation and those of the jaxprs in it, as `equations` does."""
    return _with_inner([eqn], skip)


def primitives_in(jaxpr: Any, *, skip: Collection[str] = ()) -> frozenset[str]:
    """Returns the names of the primitives of `equations`."""
    names, jaxprs, seen = set[str](), [jaxpr], set[int]()
    for each in jaxprs:  # with those that are found on the way; equal layers run one jaxpr
        if id(each) not in seen:
            seen.add(id(each))
            eqns = [eqn for eqn in open_jaxpr(each)[0].eqns if eqn.primitive.name not in skip]
            names |= {eqn.primitive.name for eqn in eqns}
            jaxprs += [inner for eqn in eqns if eqn.params for inner in inner_jaxprs(eqn)]
    return frozenset(names)


def _with_inner(eqns: Sequence[Any], skip: Collection[str]) -> Iterator[Any]:
    for eqn in eqns:
        if eqn.primitive.name not in skip:
            yield eqn
            for inner in inner_jaxprs(eqn):
                yield from _with_inner(open_jaxpr(inner)[0].eqns, skip)
