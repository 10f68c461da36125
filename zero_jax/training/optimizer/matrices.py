"""Matrix computations of an optimizer's update, on whole matrices that are dealt out to the devices.

Muon, Shampoo and their like multiply and factorize matrices. On sharded matrices XLA sends partial products in every
iteration, and computes the rest on all devices alike. Here the equations between the first and the last such operation
on a leaf are one region. Regions that compute the same function of matrices of one shape run together, on a stack of
all their matrices: an all-to-all brings each device some of them whole, and one brings the results back to the shards.
Where there are too few matrices for all devices, they are dealt out along some mesh axes, and stay cut over the others.

A region is a function of matrices, mapped over them by `jax.vmap`; where its inputs are stacks, and `dim_map` knows of
each operation that it is a map along them, the stacks of all leaves are joined, and cut by matrices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.dims import CUMULATIVE, ELEMENTWISE, FACTORIZATIONS, REDUCTIONS, SHAPES, dim_map
from zero_jax.program.evaluation import flattened, trace_flat
from zero_jax.program.jaxprs import bind, inner_jaxprs, is_literal, open_jaxpr, variables
from zero_jax.program.passes import Pass
from zero_jax.program.subcalls import CALLS, Subcall, equations, equations_of
from zero_jax.program.walk import Walk
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, carries, named

# Parameters that hold the shape of a result, and their primitives.
_SIZES = {"new_sizes": "reshape", "shape": "broadcast_in_dim"}
# Operations that are known on stacks of any number of matrices.
_RESIZED = ELEMENTWISE | REDUCTIONS | CUMULATIVE | FACTORIZATIONS | SHAPES | {"dot_general", "broadcast_in_dim"}
_CONSIDERED = FACTORIZATIONS | {"dot_general"}
# Matrices are dealt out where at least this share of the devices' work is on matrices that are not padding.
_MIN_SHARE = 1 / 3
# Smaller results of products (of vectors, of norms) are sent for next to nothing where they are.
_MIN_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Region:
    """Equations of an update that need whole matrices.

    Attributes:
      eqns: the equations, in their order.
      inputs: the variables that they read and that are matrices, or stacks of them.
      others: the other variables that they read: scalars, coefficients.
      outputs: the variables that are read after them.
      stacks: for each variable in them the dim along which they are a map, None for a variable without one; empty where
        that is not known.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    others: tuple[Any, ...]
    outputs: tuple[Any, ...]
    stacks: dict[Any, Any]

    def num_matrices(self) -> int:
        """Returns the matrices in a stack; 1 where the region is mapped as a whole."""
        return self.inputs[0].aval.shape[self.stacks[self.inputs[0]]] if self.stacks else 1

    def key(self) -> Any:
        """Returns what the region computes, whatever the number of matrices: equal where it is the same."""
        numbers: dict[Any, int] = {}

        def described(atom: Any) -> Any:
            if is_literal(atom):
                return str(atom)
            if atom in self.others:
                return atom
            at, shape = self.stacks.get(atom), getattr(atom.aval, "shape", ())
            shape = shape if at is None else (*shape[:at], None, *shape[at + 1 :])
            return numbers.setdefault(atom, len(numbers)), shape, str(atom.aval.dtype), at

        def params(eqn: Any) -> Any:  # the text of a jaxpr does not show its constants
            consts = [id(x) for inner in inner_jaxprs(eqn) for x in open_jaxpr(inner)[1]]
            return str({name: x for name, x in eqn.params.items() if name not in _SIZES}), tuple(consts)

        atoms = lambda some: tuple(map(described, some))  # noqa: E731
        rows = [(eqn.primitive.name, atoms(eqn.invars), params(eqn), atoms(eqn.outvars)) for eqn in self.eqns]
        return atoms(self.inputs), tuple(rows), atoms(self.outputs)


def multiplies(closed: Any) -> bool:
    """Tells whether an update has a product, or a factorization of a matrix."""
    return any(eqn.primitive.name in _CONSIDERED for eqn in equations(closed))


def whole_matrices(closed: Any, dims: Sequence[Dims], *, mesh: Mesh, axes: Axes) -> Any:
    """Returns a jaxpr of the same function, with its matrix computations on whole matrices.

    Args:
      closed: the closed jaxpr of an update that `multiplies`.
      dims: how its inputs are sharded.
      mesh: the mesh.
      axes: the roles of its axes; matrices are dealt out over those of `data`.
    """
    data = tuple(axis for axis in axes.data if mesh.shape[axis] > 1)
    if not data:
        return closed
    jaxpr, consts = open_jaxpr(flattened(*open_jaxpr(closed)))
    placed: dict[Any, Dims] = {}
    _Placed().run(jaxpr, dims, placed)
    groups: dict[Any, list[Region]] = {}
    for region in find_regions(jaxpr):
        if any(carries(placed[var], data) for var in region.inputs):
            groups.setdefault(region.key(), []).append(region)
    dealt = [_Dealt(tuple(group), placed, mesh, data) for group in groups.values()]
    dealt, sums = [group for group in dealt if group.over], _inner_products(jaxpr)
    if not dealt and not sums:
        return closed
    run = lambda *arrays: _evaluate(jaxpr, consts, arrays, dealt, sums)  # noqa: E731
    return trace_flat(run, [var.aval for var in jaxpr.invars])


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], groups: Sequence[_Dealt], sums: Mapping[Any, Any]
) -> list[Any]:
    """Evaluates a jaxpr, each equation once its inputs are there, and a group of regions once those of all are."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
    inside = {id(eqn) for group in groups for region in group.regions for eqn in region.eqns}
    waiting, groups = [eqn for eqn in jaxpr.eqns if id(eqn) not in inside], list(groups)
    read = lambda atom: atom.val if is_literal(atom) else env[atom]  # noqa: E731
    while waiting or groups:
        later = []
        for eqn in waiting:
            if not all(var in env for var in variables(eqn)):
                later.append(eqn)
            elif eqn.outvars and eqn.outvars[0] in sums:
                (var,) = eqn.outvars
                x, y = (env[factor].astype(wide(var.aval.dtype)) for factor in sums[var])
                env[var] = (x * y).sum().astype(var.aval.dtype)
            else:
                env.update(zip(eqn.outvars, bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        ready = [group for group in groups if group.reads <= env.keys()]
        for group in ready:
            env.update(group.evaluate(env))
        if not ready and len(later) == len(waiting):  # a region reads what another one of its group makes
            alone = [dataclasses.replace(group, regions=(x,)) for group in groups for x in group.regions]
            assert len(alone) > len(groups)
            groups = alone
        groups, waiting = [group for group in groups if group not in ready], later
    return [read(atom) for atom in jaxpr.outvars]


@dataclasses.dataclass(frozen=True, eq=False)
class _Dealt:
    """Regions that compute the same function, whose matrices are dealt out together.

    Attributes:
      regions: the regions.
      dims: how each variable of the update is sharded.
      mesh: the mesh.
      data: the axes that shards are on.
    """

    regions: tuple[Region, ...]
    dims: Mapping[Any, Dims]
    mesh: Mesh
    data: tuple[str, ...]

    @functools.cached_property
    def over(self) -> tuple[str, ...]:
        """The axes that the matrices are dealt out over; none if they are too few, or if stacks are cut so already.

        They are the minor ones of the dims that they are moved from: only these move by an all-to-all.
        """
        first = self.regions[0]
        at, dims = first.stacks.get(first.inputs[0], 0), self.stacked_dims(first, first.inputs[0])
        if carries((dims[at],), self.data):
            return ()
        placed = [axis for dim in dims for axis in dim if axis in self.data]
        order = [*reversed(placed), *(axis for axis in self.data if axis not in placed)]
        total, chosen = sum(region.num_matrices() for region in self.regions), ()
        for i in range(1, len(order) + 1):
            num_devices = axis_size(self.mesh, order[:i])
            if total / (num_devices * -(-total // num_devices)) >= _MIN_SHARE:
                chosen = tuple(order[:i])
        return chosen

    @property
    def reads(self) -> set[Any]:
        """The variables that the regions read."""
        return {var for region in self.regions for var in (*region.inputs, *region.others)}

    def evaluate(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the values of the outputs of all regions."""
        first, counts = self.regions[0], [region.num_matrices() for region in self.regions]
        padding = -sum(counts) % axis_size(self.mesh, self.over)
        stacks = []
        for i, var in enumerate(first.inputs):
            at = first.stacks.get(var, 0)
            arrays = [env[region.inputs[i]] for region in self.regions]
            arrays = arrays if first.stacks else [x[None] for x in arrays]
            # Copies, not zeros: a loop that runs until all matrices converge has to end.
            arrays += [lax.slice_in_dim(arrays[0], 0, 1, axis=at)] * padding
            stack = lax.concatenate(arrays, at) if len(arrays) > 1 else arrays[0]
            stacks.append(self.moved(stack, self.stacked_dims(first, var), at))
        run, others = functools.partial(_run, first), [env[var] for var in first.others]
        results = run(stacks, others) if first.stacks else jax.vmap(run, in_axes=(0, None))(stacks, others)
        values = {}
        for i, (var, stack) in enumerate(zip(first.outputs, results, strict=True)):
            at, start = first.stacks.get(var, 0), 0
            if at is None:  # it is made of the others alone
                values |= {region.outputs[i]: stack for region in self.regions}
                continue
            stack = self.moved(stack, self.dims_like(first, var), at, back=True)
            for region, count in zip(self.regions, counts, strict=True):
                part = lax.slice_in_dim(stack, start, start + count, axis=at)
                values[region.outputs[i]] = part if first.stacks else part[0]
                start += count
        return values

    def stacked_dims(self, region: Region, var: Any) -> Dims:
        """Returns how a stack of an input is sharded before it moves."""
        return self.dims[var] if region.stacks else ((), *self.dims[var])

    def dims_like(self, region: Region, output: Any) -> Dims | None:
        """Returns how a stack of an input of an output's shape is sharded; None if there is none."""
        like = (var for var in region.inputs if var.aval.shape == output.aval.shape)
        return next((self.stacked_dims(region, var) for var in like), None)

    def moved(self, x: jax.Array, dims: Dims | None, at: int, *, back: bool = False) -> jax.Array:
        """Moves a stack from shards `dims` to whole matrices, cut at `at`, or back: an all-to-all for each axis."""
        now = ((),) * x.ndim if dims is None else dims
        steps = [] if dims is None else [dims]
        for axis in reversed([axis for dim in now for axis in dim if axis in self.over]):
            now = tuple(tuple(other for other in dim if other != axis) for dim in now)
            now = tuple((*dim, axis) if i == at else dim for i, dim in enumerate(now))
            steps.append(now)
        missing = tuple(axis for axis in self.over if not carries(now, (axis,)))
        if missing or not steps:  # how the stack is sharded is not known, or not over all axes
            steps.append(tuple((*dim, *missing) if i == at else dim for i, dim in enumerate(now)))
        for step in reversed(steps) if back else steps:
            x = lax.with_sharding_constraint(x, named(self.mesh, step))
        return x


def _run(region: Region, stacks: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Evaluates the equations of a region, on stacks of any number of matrices."""
    env = dict(zip((*region.inputs, *region.others), (*stacks, *others), strict=True))
    walk = _Resized(region.stacks)
    for eqn in region.eqns:
        values = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        env.update(zip(eqn.outvars, walk.equation(eqn, values, None), strict=True))
    return [env[var] for var in region.outputs]


class _Resized(Walk[None]):
    """Evaluates equations on stacks of another number of matrices than they were traced for."""

    def __init__(self, stacks: dict[Any, Any]):
        super().__init__()
        self.stacks = stacks

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        """Enters all loops and branches of stacks."""
        return bool(self.stacks)

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        """Evaluates an equation, with the size of its operands in place of the one in its parameters."""
        name = next((name for name, primitive in _SIZES.items() if eqn.primitive.name == primitive), None)
        at = self.stacks.get(eqn.outvars[0])
        if name is None or at is None:
            return bind(eqn, values)
        source = next(i for i, atom in enumerate(eqn.invars) if not is_literal(atom) and self.stacks[atom] is not None)
        size, shape = values[source].shape[self.stacks[eqn.invars[source]]], eqn.params[name]
        return bind(eqn.replace(params={**eqn.params, name: (*shape[:at], size, *shape[at + 1 :])}), values)


# --- what an update needs whole --------------------------------------------------------------------------------------


def find_regions(jaxpr: Any) -> list[Region]:
    """Returns the regions of an open jaxpr without nested calls."""
    eqns = list(jaxpr.eqns)
    heavy = [i for i, eqn in enumerate(eqns) if _is_matrix_operation(eqn)]
    groups: list[set[int]] = []
    for i in heavy:  # operations on one matrix, one after the other, belong together
        group = {i} | (_reached(eqns, [i], large=True) & set(heavy))
        groups = _joined(groups, group)
    while True:
        hulls: list[set[int]] = []
        for group in groups:  # with all that lies between them, scalars too
            between = _reached(eqns, group) & _reached(eqns, group, back=True)
            hulls = _joined(hulls, group | between)
        if hulls == groups:
            break
        groups = hulls
    regions = (_region(jaxpr, [eqns[i] for i in sorted(group)]) for group in groups)
    return [region for region in regions if region is not None]


def _joined(groups: Sequence[set[int]], group: set[int]) -> list[set[int]]:
    """Returns groups with one more, which is one with those that it overlaps."""
    apart = [other for other in groups if other.isdisjoint(group)]
    return [*apart, group.union(*(other for other in groups if not other.isdisjoint(group)))]


def _reached(eqns: Sequence[Any], start: Iterable[int], *, back: bool = False, large: bool = False) -> set[int]:
    """Returns the equations whose inputs are made of the results of some, or `back` those that make their inputs."""
    reached, order = set(start), range(len(eqns))
    ends = lambda eqn: variables(eqn) if back else eqn.outvars  # noqa: E731
    starts = lambda eqn: eqn.outvars if back else variables(eqn)  # noqa: E731
    known = {var for i in reached for var in ends(eqns[i])}
    found: set[int] = set()
    for i in reversed(order) if back else order:
        if any(var in known and (not large or _is_large(var)) for var in starts(eqns[i])):
            found.add(i)
            known.update(ends(eqns[i]))
    return found


def _region(jaxpr: Any, eqns: Sequence[Any]) -> Region | None:
    """Returns equations as a region; None if they are no function of matrices to values of matrices."""
    made, inside = {var for eqn in eqns for var in eqn.outvars}, {id(eqn) for eqn in eqns}
    reads = list(dict.fromkeys(var for eqn in eqns for var in variables(eqn) if var not in made))
    inputs, others = [x for x in reads if _is_large(x)], [x for x in reads if not _is_large(x)]
    later = {var for eqn in jaxpr.eqns if id(eqn) not in inside for var in variables(eqn)}
    later |= {var for var in jaxpr.outvars if not is_literal(var)}
    outputs = [var for eqn in eqns for var in eqn.outvars if var in later]
    if not inputs or any(eqn.effects or eqn.primitive.name == "cond" for eqn in eqns):  # a cond may be all of an update
        return None
    return Region(tuple(eqns), tuple(inputs), tuple(others), tuple(outputs), _stacks(eqns, inputs, others))


def _stacks(eqns: Sequence[Any], inputs: Sequence[Any], others: Sequence[Any]) -> dict[Any, Any]:
    """Returns `Region.stacks`, the first dims of the inputs being stacks; empty if they may be none."""
    env: dict[Any, Any] = dict.fromkeys(inputs, 0) | dict.fromkeys(others)
    inner: dict[Any, Any] = {}
    for eqn in eqns:
        stacks = _Stacks()
        env.update(zip(eqn.outvars, stacks.visit(eqn, env), strict=True))
        if any(inner.get(var, at) != at for var, at in stacks.inner.items()):  # loops share a body, and differ in it
            return {}
        inner |= stacks.inner
    sizes = {var.aval.shape[0] for var in inputs}
    known = len(sizes) == 1 and _MIXED not in env.values() and _MIXED not in inner.values()
    return env | inner if known and all(var.aval.ndim > 2 for var in inputs) else {}


def _inner_products(jaxpr: Any) -> dict[Any, tuple[Any, Any]]:
    """Returns inner products of flattened arrays, as `jnp.vdot` makes them, with the arrays before that.

    XLA gathers an array to flatten it, where a shard is not one run of it. A sum of products of elements gathers none.
    """
    flat = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "reshape"}
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_number(eqn.outvars[0]):
            factors = tuple(flat[x] for x in eqn.invars if not is_literal(x) and x in flat)
            if len(factors) == 2 and factors[0].aval.shape == factors[1].aval.shape:
                found[eqn.outvars[0]] = factors
    return found


def _is_number(var: Any) -> bool:
    return not var.aval.shape and jnp.issubdtype(var.aval.dtype, jnp.floating)


def _is_matrix_operation(eqn: Any) -> bool:
    """Tells whether an equation, or one in it, multiplies or factorizes matrices."""
    return _is_product(eqn) or any(map(_is_product, equations_of(eqn)))


def _is_product(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in FACTORIZATIONS
    free = [x.aval.ndim - len(a) - len(b) for x, a, b in zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)]
    return all(free) and math.prod(eqn.outvars[0].aval.shape) >= _MIN_SIZE


def _is_large(var: Any) -> bool:
    shape = getattr(var.aval, "shape", ())
    return len(shape) > 1 and math.prod(shape) >= _MIN_SIZE


_MIXED = "mixed"


class _Stacks(Pass[Any]):
    """The dim of each value along which the equations so far are a map; None for what has none of it, or mixed."""

    enters = CALLS | {"scan", "while", "cond"}

    def __init__(self):
        super().__init__()
        self.inner: dict[Any, Any] = {}

    def run(self, jaxpr: Any, inputs: Sequence[Any], env: dict[Any, Any] | None = None) -> list[Any]:
        env = {} if env is None else env
        results = super().run(jaxpr, inputs, env)
        self.inner.update(env)  # of a loop, what holds in all iterations: the last that is run
        return results

    def constant(self, atom: Any) -> None:
        return None

    def join(self, first: Any, second: Any) -> Any:
        return first if first == second else _MIXED

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
        if not stacked:
            return None
        if eqn.primitive.name not in _RESIZED:
            return _MIXED
        known = dim_map(eqn, number)
        places = {known.to(place) for place in stacked}
        return places.pop() if len(places) == 1 and None not in places else _MIXED


class _Placed(Pass[Any]):
    """How each value of an update is sharded, by the shards that its inputs are in."""

    enters = CALLS

    def constant(self, atom: Any) -> Dims:
        return ((),) * len(getattr(atom.aval, "shape", ()))

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        return [dim_map(eqn, i).carry(operands) for i in range(len(eqn.outvars))]
