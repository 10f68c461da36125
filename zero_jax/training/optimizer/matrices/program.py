"""An update as a program whose matrix computations are on whole matrices: found once, evaluated or counted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zero_jax.dims import FACTORIZATIONS, dim_map
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.evaluation import flattened, once_each, trace_flat, values_of
from zero_jax.program.jaxprs import bind, inner_jaxprs, is_literal, open_jaxpr, variables
from zero_jax.program.subcalls import CALLS, subcall
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, carries, dims_of
from zero_jax.training.optimizer.matrices.dealing import Dealing
from zero_jax.training.optimizer.matrices.regions import MadeOf, Region, constants, find_regions, is_barrier, is_large

# The primitives that an update of matrices has some of: products, and factorizations of a matrix.
OF_MATRICES = FACTORIZATIONS | {"dot_general"}


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixProgram:
    """An update's jaxpr without nested calls, and its computations on matrices."""

    closed: Any  # the jaxpr that it was made of
    jaxpr: Any  # the open jaxpr
    consts: Sequence[Any]  # its constants
    dealings: tuple[Dealing, ...]  # the groups of regions, those that are left to XLA included
    sums: Mapping[Any, tuple[Any, Any]]  # inner products of flattened arrays, with the arrays before that
    # The programs of the branches of `cond`s, by the ids of their equations
    branches: Mapping[int, tuple[MatrixProgram, ...]]

    @classmethod
    def of(
        cls,
        closed: Any,
        dims: Sequence[Dims],
        *,
        mesh: Mesh,
        axes: Axes,
        sources: Sequence[frozenset[int]] | None = None,
    ) -> MatrixProgram:
        """Finds the matrix computations of an update, whose inputs are sharded as `dims` says.

        `sources` are the marks of the inputs, for `Dealing.sources`; None marks each with its number.
        """
        data = tuple(axis for axis in axes.data if mesh.shape[axis] > 1)
        flat = flattened(_Factorized().rewritten(closed))
        jaxpr, consts = open_jaxpr(_with_shared_values(flat))
        sources = [frozenset([i]) for i in range(len(dims))] if sources is None else sources
        # For each variable how it is sharded, and which inputs it is made of.
        placement, origin = _Placed(mesh), MadeOf()
        placed: dict[Any, Dims] = {}
        placement.run(jaxpr, dims, placed)
        made_of: dict[Any, frozenset[int]] = {}
        origin.run(jaxpr, sources, made_of)
        groups: dict[Any, list[Region]] = {}  # of regions that compute the same function
        for region in find_regions(jaxpr) if data else ():
            if any(carries(placed[var], data) for var in region.inputs):
                apart = placed[region.inputs[0]][:1] if region.stacks else ()  # along the matrices: they stay there
                groups.setdefault((region.key(), apart), []).append(region)
        dealings: list[Dealing] = []
        for group in groups.values():
            sharded_alike: dict[Any, list[Region]] = {}
            for region in group:
                sharded_alike.setdefault(tuple(placed[var] for var in region.inputs), []).append(region)
            parts = sorted(sharded_alike.values(), key=len, reverse=True)
            # All together, or those alone that are sharded alike: they need not be resharded to be one stack.
            splits = [[[region for part in parts for region in part]], parts]
            choices = [[Dealing(tuple(regions), placed, mesh, data, made_of) for regions in x] for x in splits]
            dealings += min(choices, key=lambda dealings: sum(dealing.cost(dealing.over) for dealing in dealings))
        branches: dict[int, tuple[MatrixProgram, ...]] = {}
        # Of an update that is skipped or is one of several (`cond`), its regions are in the branches.
        for eqn in jaxpr.eqns if data else ():
            sub = subcall(eqn)
            if sub is not None and sub.kind == "cond" and is_barrier(eqn):
                taken = placement.of_atoms(eqn.invars[1:], placed)
                marks = origin.of_atoms(eqn.invars[1:], made_of)
                inner = functools.partial(cls.of, dims=taken, mesh=mesh, axes=axes, sources=marks)
                branches[id(eqn)] = tuple(inner(branch) for branch in sub.branches)
        return cls(closed, jaxpr, consts, tuple(dealings), _inner_products(jaxpr) if data else {}, branches)

    @functools.cached_property
    def is_changed(self) -> bool:
        """Whether anything is evaluated otherwise than by the jaxpr that it was made of."""
        inner = (program for programs in self.branches.values() for program in programs)
        dealt = any(dealing.over is not None for dealing in self.dealings)
        return dealt or bool(self.sums) or any(program.is_changed for program in inner)

    @property
    def all_dealings(self) -> list[Dealing]:
        """The groups of regions, with those of the branch of each `cond` that moves most."""
        dealings = list(self.dealings)
        sent = lambda each: sum(move.sent_bytes for x in each for move in x.moves(x.over))  # noqa: E731
        for programs in self.branches.values():
            dealings += max((program.all_dealings for program in programs), key=sent)
        return dealings

    def rewritten(self) -> Any:
        """Returns a closed jaxpr of the same function, with its matrix computations on whole matrices."""
        if not self.is_changed:
            return self.closed
        return trace_flat(self.evaluate, [var.aval for var in self.jaxpr.invars])

    def evaluate(self, *arrays: Any) -> list[Any]:
        """Evaluates the jaxpr, each equation once its inputs are there, a group of regions once those of all are."""
        jaxpr = self.jaxpr
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self.consts, *arrays), strict=True))
        groups = [dealing for dealing in self.dealings if dealing.over is not None]
        inside = {id(eqn) for group in groups for region in group.regions for eqn in region.eqns}
        waiting = [eqn for eqn in jaxpr.eqns if id(eqn) not in inside]
        while waiting or groups:
            later = []
            for eqn in waiting:
                if all(var in env for var in variables(eqn)):
                    env.update(zip(eqn.outvars, self.equation(eqn, env), strict=True))
                else:
                    later.append(eqn)
            ready = [group for group in groups if group.reads <= env.keys()]
            for group in ready:
                env.update(group.evaluate(env))
            groups = [group for group in groups if group not in ready]
            if not ready and len(later) == len(waiting):  # a region reads what another one of its group makes
                now = {region for group in groups for region in group.regions if region.reads <= env.keys()}
                assert now
                parts = [part for group in groups for part in group.parts(now)]
                groups = [part for part in parts if part.over is not None]
                # Fewer matrices may not be worth dealing out: their equations are as any others.
                later += [eqn for part in parts if part.over is None for x in part.regions for eqn in x.eqns]
            waiting = later
        return values_of(jaxpr.outvars, env)

    def equation(self, eqn: Any, env: Mapping[Any, Any]) -> list[Any]:
        """Evaluates an equation that is in no region."""
        if eqn.outvars and eqn.outvars[0] in self.sums:
            (var,) = eqn.outvars
            x, y = (env[factor].astype(wide(var.aval.dtype)) for factor in self.sums[var])
            return [(x * y).sum().astype(var.aval.dtype)]
        programs = self.branches.get(id(eqn), ())
        if any(program.is_changed for program in programs):
            eqn = eqn.replace(params={**eqn.params, "branches": tuple(program.rewritten() for program in programs)})
        return bind(eqn, values_of(eqn.invars, env))


class _Factorized(Rewriting):
    """Makes `jnp.linalg.solve`, in branches and loops too, what it is made of, as no one derives it."""

    entered = Rewriting.entered | {"while", "custom_jvp", "custom_vjp"}

    def __init__(self):
        super().__init__()
        self.handlers |= dict.fromkeys(("custom_jvp", "custom_vjp"), self.call)

    def changes(self, eqn: Any) -> bool:
        return eqn.primitive.name == "custom_linear_solve"

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        # Operands: the constants of matvec, vecmat, solve and transpose_solve, then the right-hand sides.
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first, end = lengths.matvec + lengths.vecmat, sum(lengths)
        return self.run(solve, [*values[first : first + lengths.solve], *values[end:]], None)


def _with_shared_values(flat: Any) -> Any:
    """Returns a jaxpr in which equal small values and constants are one variable, as a coefficient of all leaves is.

    Regions that read them are then the same function.
    """
    fixed = constants(open_jaxpr(flat)[0])

    def is_shared(eqn: Any) -> bool:
        is_small = not any(is_large(atom) for atom in (*eqn.invars, *eqn.outvars))
        return (is_small or fixed.issuperset(eqn.outvars)) and not inner_jaxprs(eqn)

    return once_each(flat, is_shared)


def _inner_products(jaxpr: Any) -> dict[Any, tuple[Any, Any]]:
    """Returns inner products of flattened arrays, as `jnp.vdot` makes them, with the arrays before that.

    XLA gathers an array to flatten it, where a shard is not one run of it. A sum of products of elements gathers none.
    """
    flat = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "reshape"}
    factors_of = {}
    for eqn in jaxpr.eqns:
        is_number = not eqn.outvars[0].aval.shape and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if eqn.primitive.name == "dot_general" and is_number and eqn.invars[0].aval.ndim == 1:
            factors = tuple(flat[x] for x in eqn.invars if not is_literal(x) and x in flat)
            if len(factors) == 2 and factors[0].aval.shape == factors[1].aval.shape:
                factors_of[eqn.outvars[0]] = factors
    return factors_of


class _Placed(Dataflow[Any]):
    """How each value of an update is sharded, by the shards that its inputs are in."""

    enters = CALLS

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh

    def constant(self, atom: Any) -> Dims:
        return ((),) * len(getattr(atom.aval, "shape", ()))

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding):
            results = [dims_of(eqn.params["sharding"], len(eqn.outvars[0].aval.shape))]
        else:
            results = [dim_map(eqn, i).carry(operands) for i in range(len(eqn.outvars))]
        return [self.fitting(dims, var.aval) for dims, var in zip(results, eqn.outvars, strict=True)]

    def fitting(self, dims: Dims, aval: Any) -> Dims:
        """Returns dims with each axis on the first of them alone, a product of two shards having it on both.

        None is on a dim that does not divide over it, as that of a matrix's blocks, which are fewer than its rows.
        """
        fitting: Dims = ()
        for dim, size in zip(dims, getattr(aval, "shape", ()), strict=True):
            axes: tuple[str, ...] = ()
            for axis in dim:
                if not carries(fitting, (axis,)) and size % axis_size(self.mesh, (*axes, axis)) == 0:
                    axes = (*axes, axis)
            fitting = (*fitting, axes)
        return fitting
