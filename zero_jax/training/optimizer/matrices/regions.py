"""The regions of an update that need whole matrices: which equations, what they read, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from zero_jax.dims import CUMULATIVE, ELEMENTWISE, FACTORIZATIONS, REDUCTIONS, SHAPES, dim_map
from zero_jax.program.dataflow import Dataflow, Dependence
from zero_jax.program.jaxprs import draws_alike, inner_jaxprs, is_literal, open_jaxpr, variables
from zero_jax.program.subcalls import CALLS, equations_of, subcall

# Parameters that hold the shape of a result, and their primitives.
SIZES = {"new_sizes": "reshape", "shape": "broadcast_in_dim", "limit_indices": "slice"}
# Operations that are known on stacks of any number of matrices.
_RESIZED = ELEMENTWISE | REDUCTIONS | CUMULATIVE | FACTORIZATIONS | SHAPES | {*SIZES.values(), "dot_general", "gather"}
_RESIZED |= {"lu_pivots_to_permutation"}
# Kinds of `Subcall` that are traced again for the stacks of a device.
_ON_OWN = {"call", "remat", "custom_jvp", "custom_vjp", "scan", "while", "cond"}
# Smaller results of products (of vectors, of norms) are sent for next to nothing where they are.
_MIN_SIZE = 1024
# Factorizations are iterations of products on TPUs. Of a matrix cut 16 ways XLA's `svd` sends 63 times its bytes.
_PRODUCTS_OF_FACTORIZATION = 20


@dataclasses.dataclass(frozen=True)
class ProductCost:
    """What the products of matrices cost: the bytes that are sent for them where matrices are cut, and operations."""

    sent_bytes: float = 0.0  # bytes that a device sends for products of cut matrices
    cut_flops: float = 0.0  # operations of which each device has a share where matrices are cut
    whole_flops: float = 0.0  # operations that each device computes alike then

    def __add__(self, other: ProductCost) -> ProductCost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return ProductCost(*(x + y for x, y in pairs))

    def times(self, factor: float) -> ProductCost:
        """Returns the cost of as many."""
        return ProductCost(*(factor * x for x in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations of an update that need whole matrices."""

    eqns: tuple[Any, ...]  # the equations, in their order
    inputs: tuple[Any, ...]  # the variables that they read and that are matrices, or stacks of them
    others: tuple[Any, ...]  # the other variables that they read: scalars, coefficients, constants
    outputs: tuple[Any, ...]  # the variables that are read after them
    # For each variable in them the dim along which they are a map, None for a variable without one; empty where that is
    # not known
    stacks: dict[Any, Any]

    def num_matrices(self) -> int:
        """Returns the matrices in a stack; 1 where the region is mapped as a whole."""
        return self.inputs[0].aval.shape[self.stacks[self.inputs[0]]] if self.stacks else 1

    @functools.cached_property
    def has_maps(self) -> bool:
        """Whether matrices of the stacks go through a loop one after another, whichever device has them."""
        return bool(self.stacks) and any(is_map(inner) for eqn in self.eqns for inner in equations_of(eqn))

    @functools.cached_property
    def factorizes(self) -> bool:
        """Whether matrices are factorized, by equations that a device can run on its own (`jax.shard_map`).

        XLA:TPU gathers all of a stack for `lu` and `eigh`, however it is sharded.
        """
        inner = [each for eqn in self.eqns for each in equations_of(eqn)]
        kinds = [getattr(subcall(each), "kind", None) for each in inner if inner_jaxprs(each)]
        names = {each.primitive.name for each in inner}
        return bool(names & FACTORIZATIONS) and "sharding_constraint" not in names and _ON_OWN.issuperset(kinds)

    @functools.cached_property
    def cost(self) -> ProductCost:
        """The cost of the products for one matrix."""
        return _cost(self.eqns).times(1 / self.num_matrices())

    @property
    def reads(self) -> set[Any]:
        """The variables that it reads."""
        return {*self.inputs, *self.others}

    def is_of_each(self, other: Any) -> bool:
        """Tells whether another region may have a value of its own in place of one of `others`.

        Regions that run together are one `jax.vmap`. Of a branch that is chosen by a number of each it would compute
        both, and keys of each draw other numbers in it, but those of Threefry.
        """
        return not self.stacks and (jnp.issubdtype(other.aval.dtype, jnp.inexact) or self.is_mapped_alike)

    @functools.cached_property
    def is_mapped_alike(self) -> bool:
        """Whether a `jax.vmap` with keys and integers of each matrix computes what is computed for each alone."""
        inner = [each for eqn in self.eqns for each in equations_of(eqn)]
        return draws_alike(inner) and all(each.primitive.name != "cond" for each in inner)

    def key(self) -> Any:
        """Returns what the region computes, whatever the number of matrices: equal where it is the same."""
        numbers: dict[Any, int] = {}

        def described(atom: Any) -> Any:
            if is_literal(atom):
                return str(atom)
            if atom in self.others and not self.is_of_each(atom):
                return atom
            at, shape = self.stacks.get(atom), getattr(atom.aval, "shape", ())
            shape = shape if at is None else (*shape[:at], None, *shape[at + 1 :])
            return numbers.setdefault(atom, len(numbers)), shape, str(atom.aval.dtype), at

        def params(eqn: Any) -> Any:  # the text of a jaxpr does not show its constants
            consts = [id(x) for inner in inner_jaxprs(eqn) for x in open_jaxpr(inner)[1]]
            return str({name: x for name, x in eqn.params.items() if name not in SIZES}), tuple(consts)

        descriptions = lambda atoms: tuple(map(described, atoms))  # noqa: E731
        rows = [
            (eqn.primitive.name, descriptions(eqn.invars), params(eqn), descriptions(eqn.outvars)) for eqn in self.eqns
        ]
        return descriptions(self.inputs), tuple(rows), descriptions(self.outputs)


def find_regions(jaxpr: Any) -> list[Region]:
    """Returns the regions of an open jaxpr without nested calls.

    A region ends at an equation that `is_barrier`: what is before it and what is after it are regions of their own.
    """
    eqns = list(jaxpr.eqns)
    barriers = [is_barrier(eqn) for eqn in eqns]
    levels = _levels(eqns, barriers)
    heavy = [i for i, eqn in enumerate(eqns) if _is_matrix_operation(eqn) and not barriers[i]]
    groups: list[set[int]] = []
    for i in heavy:  # operations on one matrix, one after the other, belong together
        alike = {j for j in heavy if levels[j] == levels[i]}
        groups = _joined(groups, {i} | (_reached(eqns, [i], large=True) & alike))
    # With all that is computed between them, scalars too: no region may wait for what is made of a part of it. Groups
    # may overlap then and are one, which has more between them.
    while True:
        hulls: list[set[int]] = []
        for group in groups:
            between = _reached(eqns, group) & _reached(eqns, group, back=True)
            hulls = _joined(hulls, group | between)
        if hulls == groups:
            break
        groups = hulls
    fixed = constants(jaxpr)
    regions = (_region(jaxpr, [eqns[i] for i in sorted(group)], fixed) for group in groups)
    return [region for region in regions if region is not None]


def is_barrier(eqn: Any) -> bool:
    """Tells whether an equation is a branch or a loop of several matrices at once, as one of a whole update is.

    As a part of a region it would bring all of these to each device.
    """
    sub = subcall(eqn)
    if sub is None or sub.kind not in ("cond", "scan", "while") or not _is_matrix_operation(eqn):
        return False
    marks = [frozenset([i] if is_large(atom) else []) for i, atom in enumerate(eqn.invars)]
    results = zip(eqn.outvars, MadeOf().equation(eqn, marks), strict=True)
    independent: list[set[int]] = []  # operands whose matrices have no result in common
    for group in (set(sources) for var, sources in results if is_large(var) and sources):
        independent = _joined(independent, group)
    return len(independent) > 1


def is_map(eqn: Any) -> bool:
    """Tells whether an equation is a loop without a carry: `jax.lax.map`, by which matrices go one after another."""
    sub = subcall(eqn)
    return sub is not None and sub.kind == "scan" and not sub.num_carry


def is_large(atom: Any) -> bool:
    """Tells whether an atom is a matrix, or a stack of them, and not a small one."""
    shape = getattr(atom.aval, "shape", ())
    return len(shape) > 1 and math.prod(shape) >= _MIN_SIZE


class MadeOf(Dependence):
    """Which marked inputs each value is made of, but by norms and other small values."""

    enters = CALLS | {"scan", "while", "cond"}

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        """Returns the inputs of all operands, for each large result."""
        return [frozenset().union(*operands) if is_large(var) else frozenset() for var in eqn.outvars]


def constants(jaxpr: Any) -> set[Any]:
    """Returns the variables of an open jaxpr that are made of no input."""
    constant = set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        if constant.issuperset(variables(eqn)) and not eqn.effects:
            constant.update(eqn.outvars)
    return constant


def _levels(eqns: Sequence[Any], barriers: Sequence[bool]) -> list[int]:
    """Returns for each equation how many barriers are before it, one after the other."""
    after: dict[Any, int] = {}
    levels = []
    for eqn, barrier in zip(eqns, barriers, strict=True):
        levels.append(max((after.get(var, 0) for var in variables(eqn)), default=0))
        after.update(dict.fromkeys(eqn.outvars, levels[-1] + barrier))
    return levels


def _joined(groups: Sequence[set[int]], group: set[int]) -> list[set[int]]:
    """Returns groups with one more, which is one with those that it overlaps."""
    apart = [other for other in groups if other.isdisjoint(group)]
    return [*apart, group.union(*(other for other in groups if not other.isdisjoint(group)))]


def _reached(eqns: Sequence[Any], start: Iterable[int], *, back: bool = False, large: bool = False) -> set[int]:
    """Returns the equations whose inputs are made of the results of some, or `back` those that make their inputs."""
    order = range(len(eqns))
    ends = lambda eqn: variables(eqn) if back else eqn.outvars  # noqa: E731
    starts = lambda eqn: eqn.outvars if back else variables(eqn)  # noqa: E731
    known = {var for i in start for var in ends(eqns[i])}
    reached: set[int] = set()
    for i in reversed(order) if back else order:
        if any(var in known and (not large or is_large(var)) for var in starts(eqns[i])):
            reached.add(i)
            known.update(ends(eqns[i]))
    return reached


def _region(jaxpr: Any, eqns: Sequence[Any], fixed: set[Any]) -> Region | None:
    """Returns equations as a region; None if they are no function of matrices to values of matrices.

    What is made of no input (`fixed`), such as an identity matrix, is the same for all matrices.
    """
    own, inside = {var for eqn in eqns for var in eqn.outvars}, {id(eqn) for eqn in eqns}
    reads = list(dict.fromkeys(var for eqn in eqns for var in variables(eqn) if var not in own))
    inputs = [x for x in reads if is_large(x) and x not in fixed]
    others = [x for x in reads if not is_large(x) or x in fixed]
    later = {var for eqn in jaxpr.eqns if id(eqn) not in inside for var in variables(eqn)}
    later |= {var for var in jaxpr.outvars if not is_literal(var)}
    outputs = [var for eqn in eqns for var in eqn.outvars if var in later]
    inner = [each for eqn in eqns for each in equations_of(eqn)]
    if not inputs or any(each.effects or each.params.get("vmap_method", "") is None for each in inner):
        return None  # the host is called for one matrix, and JAX does not know how for several
    stacks = _stacks(eqns, inputs, others)
    inputs += [var for var in others if stacks.get(var) is not None]
    others = [var for var in others if stacks.get(var) is None]
    return Region(tuple(eqns), tuple(inputs), tuple(others), tuple(outputs), stacks)


def _stacks(eqns: Sequence[Any], inputs: Sequence[Any], others: Sequence[Any]) -> dict[Any, Any]:
    """Returns `Region.stacks`, the first dims of the inputs being stacks; empty if they may be none.

    Small values that are read beside them belong to all matrices alike, or have a part for each of them.
    """
    sizes = {var.aval.shape[0] for var in inputs}
    if len(sizes) > 1 or any(var.aval.ndim < 3 for var in inputs):
        return {}
    (size,) = sizes
    of_each = [var for var in others if getattr(var.aval, "shape", ())[:1] == (size,)]
    # First taken for values of all matrices alike, then for a part of each: one of the two may be a map.
    for stacked in ([], of_each) if of_each else ([],):
        env = dict.fromkeys(inputs, 0) | dict.fromkeys(others) | dict.fromkeys(stacked, 0)
        if known := _stacks_of(eqns, env, size):
            return known
    return {}


def _stacks_of(eqns: Sequence[Any], env: dict[Any, Any], size: int) -> dict[Any, Any]:
    inner: dict[Any, Any] = {}
    for eqn in eqns:
        stacks = _Stacks(size)
        env.update(zip(eqn.outvars, stacks.visit(eqn, env), strict=True))
        if any(inner.get(var, at) != at for var, at in stacks.inner.items()):  # loops share a body, and differ in it
            return {}
        inner |= stacks.inner
    return {} if _MIXED in env.values() or _MIXED in inner.values() else env | inner


def _is_matrix_operation(eqn: Any) -> bool:
    """Tells whether an equation, or one in it, multiplies or factorizes matrices."""
    return any(map(_is_product, equations_of(eqn)))


def _is_product(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in FACTORIZATIONS
    free = [x.aval.ndim - len(a) - len(b) for x, a, b in zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)]
    return all(free) and math.prod(eqn.outvars[0].aval.shape) >= _MIN_SIZE


def _cost(eqns: Iterable[Any]) -> ProductCost:
    """Returns the cost of the products among equations, and in them; a loop of unknown length counts once."""
    total = ProductCost()
    for eqn in eqns:
        if _is_product(eqn):
            total += _cost_of_product(eqn)
            continue
        sub = subcall(eqn)
        branches = [_cost(open_jaxpr(inner)[0].eqns) for inner in inner_jaxprs(eqn)]
        if sub is not None and sub.kind == "cond":
            total += max(branches, key=dataclasses.astuple)
        elif sub is not None:
            total = sum((cost.times(sub.length) for cost in branches), total)
    return total


def _cost_of_product(eqn: Any) -> ProductCost:
    sizes, (out, *_) = [math.prod(x.aval.shape) for x in eqn.invars], eqn.outvars
    item_bytes = out.aval.dtype.itemsize
    if eqn.primitive.name != "dot_general":
        # One product of the matrix with itself, all-reduced, as often as a factorization has iterations.
        sent, flops = 2 * item_bytes * sizes[0], 2.0 * sizes[0] * min(eqn.invars[0].aval.shape[-2:])
        return ProductCost(sent, 0.0, flops).times(_PRODUCTS_OF_FACTORIZATION)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    size = math.prod(out.aval.shape)
    # Partial sums are all-reduced, or else the smaller factor is gathered.
    sent = item_bytes * min(2 * size, *sizes)
    return ProductCost(sent, 2.0 * size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted), 0.0)


_MIXED, _ANY = "mixed", "any"


class _Stacks(Dataflow[Any]):
    """The dim of each value along which the equations so far are a map; None for what has none of it, or mixed."""

    enters = (CALLS - {"sharded_call"}) | {"scan", "while", "cond"}

    def __init__(self, size: int):
        super().__init__()
        self.size, self.inner = size, dict[Any, Any]()

    def run(self, jaxpr: Any, inputs: Sequence[Any], env: dict[Any, Any] | None = None) -> list[Any]:
        env = {} if env is None else env
        results = super().run(jaxpr, inputs, env)
        self.inner.update(env)  # of a loop, what holds in all iterations: the last that is run
        return results

    def constant(self, atom: Any) -> None:
        return None

    def join(self, first: Any, second: Any) -> Any:
        return second if first in (second, _ANY) else _MIXED

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        sub = subcall(eqn)
        if sub is not None and is_map(eqn):
            consts, _, stacks = sub.split(operands)
            if set(stacks) == {0} and all(place is None for place in consts):
                return [0] * len(eqn.outvars)
        if sub is not None and sub.kind == "while":  # one end for all matrices, or one for each
            results = self.loop(sub, operands)
            (goes_on,) = self.run(sub.test, [*operands[: sub.num_test_consts], *results])
            return results if goes_on is None or {goes_on, *results} == {0} else [_MIXED] * len(results)
        if eqn.primitive.name == "cond":  # the index of a branch is no map along a stack: it is one for all matrices
            operands = [_ANY if operands[0] is None else _MIXED, *operands[1:]]
        return super().equation(eqn, operands)

    def slice_of(self, operand: Any) -> Any:
        return operand - 1 if isinstance(operand, int) and operand > 0 else _MIXED if operand == 0 else operand

    def stack_of(self, result: Any) -> Any:
        return result + 1 if isinstance(result, int) else result

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        return [self.result(eqn, operands, i) for i in range(len(eqn.outvars))]

    def result(self, eqn: Any, operands: list[Any], number: int) -> Any:
        """Returns the dim of a result."""
        if _MIXED in operands:
            return _MIXED
        stacked = [(i, at) for i, at in enumerate(operands) if at is not None]
        if eqn.primitive.name == "gather":  # what it takes of each matrix, by its own indices, or by those of all
            at, sizes = operands[0], eqn.params["slice_sizes"]
            is_all = at is not None and operands[1] is None and sizes[at] == eqn.invars[0].aval.shape[at]
            if at not in (None, *eqn.params["dimension_numbers"].operand_batching_dims) and not is_all:
                return _MIXED
        known, shape = dim_map(eqn, number), eqn.outvars[number].aval.shape
        if not stacked:  # copies of a value, one for each matrix
            new_dims = [i for i, dims in enumerate(known.kept) if not dims and shape[i] == self.size > 1]
            return new_dims[0] if new_dims and eqn.primitive.name == "broadcast_in_dim" else None
        if eqn.primitive.name not in _RESIZED:
            return _MIXED
        places = {known.to(place) for place in stacked}
        if len(places) > 1 or None in places:
            return _MIXED
        (at,) = places
        # An operand that all matrices share may have no dim along them: its elements would belong to one each.
        alike = [(i, eqn.invars[i].aval.shape) for i, place in enumerate(operands) if place is None]
        parts = [(i, dim) for i, shape in alike for dim, size in enumerate(shape) if size > 1]
        return _MIXED if any(known.to(part) == at for part in parts) else at
