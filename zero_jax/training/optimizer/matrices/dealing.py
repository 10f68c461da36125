"""How the matrices of a group of regions are dealt out to the devices, and what moves for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zero_jax.dims import Move
from zero_jax.program.evaluation import evaluate, evaluate_equations
from zero_jax.program.jaxprs import bind, is_literal, open_jaxpr
from zero_jax.program.subcalls import Subcall, subcall
from zero_jax.program.walk import Walk
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import Dims, carries, named, num_shards, steps_by_dim, without
from zero_jax.training.optimizer.matrices.regions import SIZES, Region, is_map

# Operations that a device computes while it sends a byte: v5p 2,300 (bf16), v5e 2,000, H100 2,200 by NVLink.
_FLOPS_OF_A_BYTE = 2000


@dataclasses.dataclass(frozen=True, eq=False)
class Dealing:
    """Regions that compute the same function, whose matrices are dealt out together."""

    regions: tuple[Region, ...]
    dims: Mapping[Any, Dims]  # how each variable of the update is sharded
    mesh: Mesh
    data: tuple[str, ...]  # the axes that shards are on
    made_of: Mapping[Any, frozenset[int]]  # which inputs of the update each variable is made of

    @functools.cached_property
    def num_matrices(self) -> int:
        """The matrices of all regions."""
        return sum(region.num_matrices() for region in self.regions)

    @property
    def sources(self) -> frozenset[int]:
        """The inputs of the update that the matrices are made of."""
        return frozenset().union(*(self.made_of[var] for region in self.regions for var in region.inputs))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a matrix: of the largest value that the regions read of each."""
        region = self.regions[0]
        var = max(region.inputs, key=lambda var: math.prod(var.aval.shape))
        at = region.stacks.get(var)
        return tuple(size for i, size in enumerate(var.aval.shape) if i != at)

    @functools.cached_property
    def apart(self) -> tuple[str, ...]:
        """The axes that stacks are sharded over along the matrices already: devices along them have other matrices."""
        first = self.regions[0]
        return self.stacked_dims(first, first.inputs[0])[first.stacks.get(first.inputs[0], 0)]

    @property
    def num_apart(self) -> int:
        """The matrices that the devices of all other axes have together."""
        return self.num_matrices // axis_size(self.mesh, self.apart)

    @functools.cached_property
    def cut(self) -> frozenset[str]:
        """The axes that matrices are cut over."""
        stacks = [
            (region.stacks.get(var, 0), self.stacked_dims(region, var))
            for region in self.regions
            for var in region.inputs
        ]
        return frozenset(axis for at, dims in stacks for dim in (*dims[:at], *dims[at + 1 :]) for axis in dim)

    @property
    def is_whole(self) -> bool:
        """Whether each device has whole matrices as they are sharded."""
        return carries((self.apart,), self.data) and self.cut.isdisjoint(self.data)

    @functools.cached_property
    def over(self) -> tuple[str, ...] | None:
        """The axes that whole matrices are dealt out over: what costs least; None where the update is not changed.

        They are the minor ones of the dims that they are moved from: only these move by an all-to-all. Where there are
        fewer matrices than devices, some compute copies, or matrices stay cut over the other axes.
        """
        if self.is_whole:
            return () if self.regions[0].has_maps or self.regions[0].factorizes else None
        first = self.regions[0]
        dims = without(self.stacked_dims(first, first.inputs[0]), self.apart)
        placed = [axis for dim in dims for axis in dim if axis in self.data]
        # From the minor one on, then those that nothing is sharded over.
        order = [*reversed(placed), *(axis for axis in self.data if axis not in (*placed, *self.apart))]
        choices = [None, *(tuple(order[:i]) for i in range(1, len(order) + 1))]
        return min(choices, key=self.cost)

    def cost(self, over: tuple[str, ...] | None) -> float:
        """Returns the cost of a choice, in bytes that a device sends or could send in the time of its operations."""
        still_cut = self.cut.difference(over or ())
        num_pieces = axis_size(self.mesh, [axis for axis in self.mesh.axis_names if axis in still_cut])
        # Of the device that has most of the matrices.
        cost = self.regions[0].cost.times(-(-self.num_apart // axis_size(self.mesh, over or ())))
        sent = sum(move.sent_bytes for move in self.moves(over)) + (cost.sent_bytes if num_pieces > 1 else 0)
        return sent + (cost.cut_flops / num_pieces + cost.whole_flops) / _FLOPS_OF_A_BYTE

    @property
    def is_copied(self) -> bool:
        """Whether there is one matrix, which all devices of the axes have: it is gathered, and nothing moves back."""
        return self.num_apart == 1

    def num_added(self, over: tuple[str, ...]) -> int:
        """Returns the copies of matrices that make as many for each device, on each device of `apart`."""
        return 0 if self.is_copied else -self.num_apart % axis_size(self.mesh, over)

    @property
    def reason(self) -> str:
        """What is done with the matrices, and why."""
        what = f"{self.num_matrices} of {list(self.shape)}"
        if self.is_whole:
            return f"{what}: whole on a device as they are sharded, nothing moves"
        if self.over is None:
            return f"{what}: left to XLA, to move them costs more than products of cut ones"
        axes = "+".join(self.over)
        if self.is_copied:
            return f"{what}: gathered over {axes}, and computed on each of its devices alike"
        each = -(-self.num_apart // axis_size(self.mesh, self.over))
        return f"{what}: dealt out over {axes}, {each} to a device, by an all-to-all in and one out"

    def moves(self, over: tuple[str, ...] | None) -> list[Move]:
        """Returns what one device sends so that matrices are whole over some axes, and their results are shards."""
        first, moves = self.regions[0], []
        stacks = [
            (i, var, back) for back in (False, True) for i, var in enumerate(first.outputs if back else first.inputs)
        ]
        for i, var, back in stacks:
            at = first.stacks.get(var, 0)
            dims = self.dims_like(first, var) if back else self.stacked_dims(first, var)
            if over is None or at is None or dims is None:  # XLA's, made of the others alone, or of no known sharding
                continue
            steps = self.steps(dims, at, over)
            shape = var.aval.shape if first.stacks else (1, *var.aval.shape)
            count = self.num_matrices + self.num_added(over) * axis_size(self.mesh, self.apart)
            dtype, size = str(var.aval.dtype), math.prod(shape) // shape[at] * var.aval.dtype.itemsize
            for before, after in itertools.pairwise(reversed(steps) if back else steps):
                moves += _moved(before, after, size=size * count, dtype=dtype, mesh=self.mesh)
            for region in self.regions:  # stacks that are sharded otherwise than the first come to its shards before
                own = (region.outputs if back else region.inputs)[i]
                own_dims = self.dims_like(region, own) if back else self.stacked_dims(region, own)
                if own_dims is not None:
                    ways = (dims, own_dims) if back else (own_dims, dims)
                    moves += _moved(*ways, size=size * region.num_matrices(), dtype=dtype, mesh=self.mesh)
        return moves

    def steps(self, dims: Dims | None, at: int, over: tuple[str, ...], *, ndim: int = 0) -> list[Dims]:
        """Returns the shardings of a stack on the way from shards `dims` to whole matrices, cut at `at`."""
        now = ((),) * ndim if dims is None else dims
        steps = [] if dims is None else [dims]
        if self.is_copied:
            return [*steps, without(now, over)]
        for axes in (self.apart, over):  # in this order: the axes of `apart` are the major ones
            steps += steps_by_dim(now, at, axes)
            now = steps[-1] if steps else now
        missing = tuple(axis for axis in (*self.apart, *over) if not carries(now, (axis,)))
        if missing or not steps:  # how the stack is sharded is not known, or not over all axes
            steps.append(tuple((*dim, *missing) if i == at else dim for i, dim in enumerate(now)))
        return steps

    def stacked_dims(self, region: Region, var: Any) -> Dims:
        """Returns how a stack of an input is sharded before it moves."""
        return self.dims[var] if region.stacks else ((), *self.dims[var])

    def dims_like(self, region: Region, output: Any) -> Dims | None:
        """Returns how a stack of an input of an output's shape is sharded; None if there is none."""
        like = (var for var in region.inputs if var.aval.shape == output.aval.shape)
        return next((self.stacked_dims(region, var) for var in like), None)

    @property
    def reads(self) -> set[Any]:
        """The variables that the regions read."""
        return set[Any]().union(*(region.reads for region in self.regions))

    def parts(self, first: Collection[Region]) -> list[Dealing]:
        """Returns the regions among `first`, and the others, as groups of their own."""
        parts = [tuple(region for region in self.regions if (region in first) == among) for among in (True, False)]
        return [dataclasses.replace(self, regions=part) for part in parts if part]

    @functools.cached_property
    def others_of_each(self) -> list[list[Any]]:
        """For each of `Region.others` the variables of all regions; none where they read the same one."""
        by_place = [list(variables) for variables in zip(*(region.others for region in self.regions), strict=True)]
        return [variables if len(set(variables)) > 1 else [] for variables in by_place]

    def evaluate(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the values of the outputs of all regions."""
        first = self.regions[0]
        assert self.over is not None
        num_parts, stacks = axis_size(self.mesh, self.apart), []
        # Inputs: one stack of the matrices of all regions. Where stacks are sharded along the matrices already, these
        # are put together part by part, so that none moves to another device of `apart`.
        for i, var in enumerate(first.inputs):
            at = first.stacks.get(var, 0)
            arrays = [env[region.inputs[i]] for region in self.regions]
            arrays = [_split(x, at, num_parts) if first.stacks else x[None, None] for x in arrays]
            # Copies, not zeros: a loop that runs until all matrices converge has to end.
            arrays += [lax.slice_in_dim(arrays[0], 0, 1, axis=at + 1)] * self.num_added(self.over)
            stack = lax.concatenate(arrays, at + 1) if len(arrays) > 1 else arrays[0]
            stacks.append(self.moved(lax.collapse(stack, at, at + 2), self.stacked_dims(first, var), at))
        run, others = functools.partial(_run, first), []
        for var, of_each in zip(first.others, self.others_of_each, strict=True):
            arrays = [env[x] for x in (*of_each, *of_each[:1] * self.num_added(self.over))]
            others.append(self.moved(jnp.stack(arrays), None, 0) if of_each else env[var])
        in_axes = [0 if of_each else None for of_each in self.others_of_each]
        run = self.on_own(run if first.stacks else jax.vmap(run, in_axes=(0, in_axes)))
        results = run(stacks, others)
        # Outputs: back to the shards of each region's own.
        values = {}
        for i, (var, stack) in enumerate(zip(first.outputs, results, strict=True)):
            at, start = first.stacks.get(var, 0), 0
            if at is None:  # it is made of the others alone
                values |= {region.outputs[i]: stack for region in self.regions}
                continue
            stack = _split(self.moved(stack, self.dims_like(first, var), at, back=True), at, num_parts)
            for region in self.regions:
                count = region.num_matrices() // num_parts
                part = lax.slice_in_dim(stack, start, start + count, axis=at + 1)
                part = lax.collapse(part, at, at + 2)
                dims = self.dims_like(region, region.outputs[i])
                if dims is not None:
                    part = lax.with_sharding_constraint(part, named(self.mesh, dims))
                values[region.outputs[i]] = part if first.stacks else part[0]
                start += count
        return values

    def on_own(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Returns the function of stacks, where they are factorized by each device on its own matrices."""
        first, axes = self.regions[0], (*self.apart, *(self.over or ()))
        if self.is_copied or not first.factorizes:
            return run

        def specs(variables: Sequence[Any]) -> list[PartitionSpec]:
            places = (first.stacks.get(var, 0) for var in variables)
            return [PartitionSpec() if at is None else PartitionSpec(*(None,) * at, axes) for at in places]

        of_others = [PartitionSpec(axes) if of_each else PartitionSpec() for of_each in self.others_of_each]
        in_specs = (specs(first.inputs), of_others)
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=specs(first.outputs), check_vma=False)

    def moved(self, x: jax.Array, dims: Dims | None, at: int, *, back: bool = False) -> jax.Array:
        """Moves a stack from shards `dims` to whole matrices, cut at `at`, or back: an all-to-all for each dim."""
        assert self.over is not None
        steps = self.steps(dims, at, self.over, ndim=x.ndim)
        for step in reversed(steps) if back else steps:
            x = lax.with_sharding_constraint(x, named(self.mesh, step))
        return x


def _split(x: jax.Array, at: int, num_parts: int) -> jax.Array:
    """Splits a dim into a dim of parts and one of what is in each."""
    return x.reshape((*x.shape[:at], num_parts, x.shape[at] // num_parts, *x.shape[at + 1 :]))


def _moved(before: Dims, after: Dims, *, size: int, dtype: str, mesh: Mesh) -> list[Move]:
    """Returns what one device sends of an array of `size` bytes, from one sharding to another."""
    local_bytes = size / num_shards(mesh, before)
    dim_before, dim_after = ({axis: i for i, dim in enumerate(dims) for axis in dim} for dims in (before, after))
    gathered = tuple(axis for axis in dim_before if axis not in dim_after)
    changed = tuple(axis for axis in dim_before if axis in dim_after and dim_before[axis] != dim_after[axis])
    sent = {
        ("all-to-all", changed): local_bytes * (1 - 1 / axis_size(mesh, changed)),
        ("all-gather", gathered): local_bytes * (axis_size(mesh, gathered) - 1),
    }
    fields: dict[str, Any] = {"dtype": dtype, "phase": "update"}
    return [Move(kind=kind, axes=axes, sent_bytes=x, **fields) for (kind, axes), x in sent.items() if axes]


def _run(region: Region, stacks: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Evaluates the equations of a region, on stacks of any number of matrices."""
    env = dict(zip((*region.inputs, *region.others), (*stacks, *others), strict=True))
    walk = _Resized(region.stacks, len(stacks[0]) if region.stacks else 0)
    evaluate_equations(region.eqns, env, lambda eqn, values: walk.equation(eqn, values, None))
    return [env[var] for var in region.outputs]


class _Resized(Walk[None]):
    """Evaluates equations on stacks of another number of matrices, `size`, than they were traced for."""

    def __init__(self, stacks: dict[Any, Any], size: int):
        super().__init__()
        self.handlers |= dict.fromkeys(("custom_jvp", "custom_vjp"), self.call)  # no one derives an update
        self.stacks, self.size = stacks, size

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        """Enters all loops and branches, but those that are a map over stacks."""
        return not self.maps(eqn)

    def maps(self, eqn: Any) -> bool:
        """Tells whether an equation is a loop over the matrices."""
        return is_map(eqn) and self.stacks.get(eqn.outvars[0]) == 0 and self.stacks.get(eqn.invars[-1]) == 0

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        """Evaluates an equation, with the number of matrices in place of the one in its parameters.

        A loop over matrices is one `jax.vmap` of its body: XLA runs an iteration of a loop on all devices.
        """
        sub = subcall(eqn)
        if sub is not None and self.maps(eqn):
            body, consts = open_jaxpr(sub.jaxpr)
            in_axes = [None if i < sub.num_consts else 0 for i in range(len(values))]
            return jax.vmap(lambda *args: evaluate(body, consts, args), in_axes)(*values)
        name = next((name for name, primitive in SIZES.items() if eqn.primitive.name == primitive), None)
        at, params = self.stacks.get(eqn.outvars[0]), dict(eqn.params)
        if name is not None and at is not None:
            params[name] = _with_size(params[name], at, self.size)
        if eqn.primitive.name == "gather":
            at = self.stacks.get(eqn.invars[0]) if not is_literal(eqn.invars[0]) else None
            if at not in (None, *params["dimension_numbers"].operand_batching_dims):
                params["slice_sizes"] = _with_size(params["slice_sizes"], at, self.size)
        if eqn.primitive.name != "sharding_constraint" and "sharding" in params:
            params["sharding"] = None  # `zeros_like` has that of what it is like, of a mesh that is another on a device
        return bind(eqn.replace(params=params), values)


def _with_size(sizes: Sequence[int], at: int, size: int) -> tuple[int, ...]:
    return (*sizes[:at], size, *sizes[at + 1 :])
