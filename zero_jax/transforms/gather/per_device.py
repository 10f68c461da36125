"""Gradients of each device's own, and their sum across devices: a stack of them goes from devices to shards.

`copy_per_device` makes a copy of a param for each device, so that gradients add up there and are summed once. For a
function that is mapped over devices by `jax.vmap`, `summed_use` marks where a param is used: the gradients of all
devices are summed there, in blocks of few bits if so asked.

XLA resolves a gradient that is partial on each device where it arises: in every iteration of a loop, or as an
all-reduce of a scatter-add. Copies are a leading dim sharded over the batch axes. Making them moves nothing, and their
gradients go from devices to shards by one all-to-all for each mesh axis and are summed where they land: the bytes of a
reduce-scatter, and one quantization for each axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import Mesh, NamedSharding

from zero_jax.dims import CASTS, COPIES, SHAPES, dim_map, narrows
from zero_jax.program.jaxprs import bind_mapped, new_primitive
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import promoted, summed_dtype
from zero_jax.sharding.quantized import Blocks, spread_over
from zero_jax.sharding.spec import Dims, carries, named, named_along, without
from zero_jax.transforms.facts import param_uses


def used_whole(jaxpr: Any, param: Any) -> bool:
    """Tells whether a loop body uses a param as a whole, rather than slices of it that differ by iteration."""
    uses, _ = param_uses(jaxpr, param, forms=SHAPES | CASTS, enters=frozenset({"call", "remat", "scan"}))
    return not all(narrows(eqn) for eqn, _ in uses)


# What gives a copy of the result from a copy of the param, and leaves it a factor of the product that follows.
SAME_PARAM = SHAPES | CASTS | COPIES | {"concatenate"}


def copy_per_device(x: jax.Array, dims: Dims, *, mesh: Mesh, axes: Axes, dtype: Any = None) -> jax.Array:
    """Returns `[devices of the batch axes, ...]` copies of an array whose cotangent goes to the shards `dims`.

    The array is unsharded over the batch axes; what `dims` shards over other axes stays so. The cotangent moves and is
    summed in `dtype` (None: the array's own).
    """
    own_dtype = x.dtype
    x = x.astype(summed_dtype(own_dtype, dtype))
    data = [axis for axis in axes.data if mesh.shape[axis] > 1]
    shape, lead = x.shape, [axis for axis in axes.replica if mesh.shape[axis] > 1]

    def placed(data: list[str]) -> Dims:  # axes of the model stay where they are
        return tuple(tuple(axis for axis in dim if axis in data or axis not in axes.batch) for dim in dims)

    def copy(x: jax.Array, at: int, axis: str, lead: list[str], before: Dims, after: Dims) -> jax.Array:
        """Adds a leading dim over `axis`; cotangents go from stacks sharded as `before` to shards `after` of them."""
        x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], mesh.shape[axis], *x.shape[at:]))
        stacked = tuple((name,) for name in lead)
        moved = tuple(() if i == at else entry for i, entry in enumerate(stacked))
        backward = [named(mesh, (*stacked, *before))]
        if after != before:
            backward.append(named(mesh, (*moved, *after)))
        unsharded = named(mesh, (*stacked, *placed([])))
        return reshard(x, forward=Chain((unsharded,)), backward=Chain(tuple(backward)))

    for i, axis in enumerate(lead):
        x = copy(x, i, axis, lead[: i + 1], placed(data), placed(data))
    num_replicas = len(lead)
    for i in reversed(range(len(data))):  # the first axis is copied last, and so summed first
        lead.insert(num_replicas, data[i])
        x = copy(x, num_replicas, data[i], lead, placed(data[:i]), placed(data[: i + 1]))
    return x.reshape(axis_size(mesh, lead), *shape).astype(own_dtype)


def split_dim(x: jax.Array, dim: int, num_blocks: int) -> jax.Array:
    """Splits a dim into blocks: `[..., size, ...]` to `[..., num_blocks, size // num_blocks, ...]`."""
    return x.reshape(*x.shape[:dim], num_blocks, x.shape[dim] // num_blocks, *x.shape[dim + 1 :])


ExampleDims = Callable[[Any, int], tuple[int, int] | None]


def only_multiplied(jaxpr: Any, param: Any, dims_of_examples: ExampleDims) -> bool:
    """Tells whether a loop body does nothing with a param but multiply examples with it.

    `dims_of_examples(eqn, operand)` is `example_dims` of a product with a param.
    """
    uses, is_returned = param_uses(jaxpr, param, forms=SAME_PARAM, enters=frozenset({"call", "remat"}))
    return not is_returned and all(
        eqn.primitive.name == "dot_general" and len(places) == 1 and dims_of_examples(eqn, places[0]) is not None
        for eqn, places in uses
    )


def example_dims(
    eqn: Any, param: int, num_blocks: int, *, batch_sizes: frozenset[int], state: Any
) -> tuple[int, int] | None:
    """Returns the dim of examples in the other factor of a `dot_general` and in its result, or None.

    `state` is the dim in the other factor where it is known; else it is one of the batch's sizes.
    """
    known, shape = dim_map(eqn), eqn.invars[1 - param].aval.shape
    # Dims of the other factor alone: a batch dim of the product is one of both.
    free = [(dims[0][1], out) for out, dims in enumerate(known.kept) if len(dims) == 1 and dims[0][0] != param]
    of_examples = [at for at in free if (at[0] == state if isinstance(state, int) else shape[at[0]] in batch_sizes)]
    return next((at for at in of_examples if shape[at[0]] % num_blocks == 0), None)


def by_device(
    eqn: Any,
    values: Sequence[jax.Array],
    copies: Collection[int],
    rows: Mapping[int, int],
    out_dim: int,
    *,
    mesh: Mesh,
    axes: Axes,
) -> jax.Array:
    """Evaluates an operation on examples and copies, each device's examples with its own copies.

    `copies` are the numbers of the operands that are such; `rows` has the dim of examples of those that have one, and
    `out_dim` is that of the result.
    """
    operands = [*values]
    for i, dim in rows.items():
        x = split_dim(values[i], dim, axis_size(mesh, axes.batch))
        operands[i] = lax.with_sharding_constraint(x, named_along(mesh, x.ndim, {dim: axes.batch}))
    in_axes = [rows.get(i, 0 if i in copies else None) for i in range(len(values))]
    return bind_mapped(eqn, operands, in_axes, out_dim).reshape(eqn.outvars[0].aval.shape)


@dataclasses.dataclass(frozen=True)
class SumStep:
    """A step of a sum of the gradients that devices have: over which mesh axes, and where what they send lands.

    It is scattered; or, in codes, in parts that are summed and gathered; or all that is left is all-reduced.
    """

    kind: Literal["scatter", "parts", "all"]
    axes: tuple[str, ...]
    left: tuple[str, ...]  # the axes whose devices have gradients of their own before it
    before: Dims  # how each of these gradients is sharded
    after: Dims
    is_coded: bool

    @property
    def place(self) -> int:
        """The dim of the stack that is summed."""
        return self.left.index(self.axes[0])

    def stacked(self, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
        """Returns how the stack of gradients is sharded before and after it moves."""
        after = (*(() if axis in self.axes else (axis,) for axis in self.left), *self.after)
        return named(mesh, (*((axis,) for axis in self.left), *self.before)), named(mesh, after)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSum:
    """How the gradients that devices have of a param are summed."""

    mesh: Mesh  # the mesh
    axes: Axes  # the roles of its axes
    over: tuple[str, ...]  # the mesh axes whose devices have gradients of their own, major first
    dims: Dims  # how the sum is sharded
    dtype: Any = None  # the dtype in which gradients move between devices; None for float32
    coding: Blocks | None = None  # the blocks that they move in instead, or None. Their sum is made in float32.
    coded: tuple[str, ...] = ()  # the mesh axes over which they move in these
    refusal: str = ""  # what is wrong if there is more than one gradient to sum; empty where they are summed

    def __call__(self, stack: jax.Array) -> jax.Array:
        """Sums a stack `[devices of over, ...]` to the shards `dims`, one mesh axis at a time, in float32 or wider.

        Each all-to-all moves what a reduce-scatter would, and the sum is made locally.
        """
        return self.with_error(stack, None)[0]

    def error_dims(self, shape: Sequence[int]) -> Dims | None:
        """Returns how the error of a quantized sum is sharded, `[devices that send, ...]`; None if it is not quantized.

        `shape` is that of the sum.
        """
        coded = next((step for step in self.steps(shape) if step.is_coded), None)
        return coded and (coded.left, *without(self.dims, coded.left))

    def steps(self, shape: Sequence[int]) -> Iterator[SumStep]:
        """Yields the steps of a sum of a shape."""
        left, placed = self.over, without(self.dims, self.over)
        waiting = [axis for axis in self.axes.data if axis in left and carries(self.dims, (axis,))]
        majors = {axis: set(dim[:i]) for dim in self.dims for i, axis in enumerate(dim)}
        while waiting:  # of a dim the major axes first
            axis = next(axis for axis in waiting if majors[axis].isdisjoint(waiting))
            # Behind what shards the dim already, so that gradients move to the device that has their place: were it in
            # front, as `dims` may have it, each device's own would move again. Their sum does, at the end.
            scattered = tuple((*now, axis) if axis in end else now for now, end in zip(placed, self.dims, strict=True))
            yield SumStep("scatter", (axis,), left, placed, scattered, self._codes(axis))
            left, placed = tuple(other for other in left if other != axis), scattered
            waiting.remove(axis)
        for axis in left:
            coding = self.coding if self._codes(axis) else None
            now = without(self.dims, left)
            if (spread := spread_over(coding, shape, now, axis, mesh=self.mesh)) is not None:
                yield SumStep("parts", (axis,), left, now, spread, is_coded=True)
                left = tuple(other for other in left if other != axis)
        if left:  # replicas, and axes that this leaf is not sharded over
            yield SumStep("all", left, left, placed, placed, is_coded=False)

    def _codes(self, axis: str) -> bool:
        return self.coding is not None and axis in self.coded and self.mesh.shape[axis] > 1

    def with_error(self, stack: jax.Array, error: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Sums a stack with error feedback, over one axis in codes: error feedback of 1-bit Adam (arXiv:2102.02888).

        The error is what codes did not have of the last sum, sharded as `error_dims`, which is added; None for nothing.
        The result's are what its codes do not have: those of all devices add up to that of the sum.
        """
        mesh, placed = self.mesh, without(self.dims, self.over)
        wide = promoted(stack.dtype, jnp.float32)
        moved = summed_dtype(wide, self.dtype)
        # Without it XLA may shard what the gradients are made of as it shards their sum.
        stack = lax.with_sharding_constraint(stack, named(mesh, (self.over, *placed)))
        steps = self.steps(stack.shape[1:])
        stack = stack.reshape(*(mesh.shape[axis] for axis in self.over), *stack.shape[1:])
        for step in steps:
            here, there = step.stacked(mesh)
            if step.kind == "all":
                stack = lax.with_sharding_constraint(stack.astype(moved), here)
                # Not `jnp.sum`, which would make float32 of what is narrower before it moves.
                stack = lax.reduce(stack, jnp.zeros((), stack.dtype), lax.add, tuple(range(len(step.left))))
                stack = lax.with_sharding_constraint(stack, named(mesh, placed))
                continue
            if step.is_coded:
                stack, error = self._send(stack.astype(wide), here, there, error)
            else:
                # Pinned on both sides, or XLA moves it in the dtype from before the cast.
                stack = lax.with_sharding_constraint(stack.astype(moved), here)
                stack = lax.with_sharding_constraint(stack, there)
            stack = stack.astype(wide).sum(step.place)
            if step.kind == "parts":
                stack, error = self._gather_parts(stack, step, error)
            else:
                placed = step.after
        if placed != self.dims:  # axes of a dim are in another order
            stack = lax.with_sharding_constraint(stack, named(mesh, self.dims))
        return stack.astype(wide), error

    def _send(
        self, x: jax.Array, here: NamedSharding, there: NamedSharding, error: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Sends a quantized array with the error that is added to it; returns what arrives, and the new error."""
        assert self.coding is not None
        x = lax.with_sharding_constraint(x, here)
        if error is None:
            return reshard(x, forward=Chain((here, there), barrier=True, coding=self.coding), backward=Chain()), None
        x += error.reshape(x.shape)
        codes = lax.optimization_barrier(self.coding.encode(x))  # the error is that of what is sent
        codes = [lax.with_sharding_constraint(part, here) for part in codes]
        sent = [lax.with_sharding_constraint(part, there) for part in codes]
        error = (x - self.coding.decode(codes, x.dtype)).reshape(error.shape).astype(error.dtype)
        return self.coding.decode(sent, x.dtype), error

    def _gather_parts(
        self, stack: jax.Array, step: SumStep, error: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Gathers the parts of a sum over an axis that does not shard it: each device has summed one."""
        mesh, (axis,), left, spread, place = self.mesh, step.axes, step.left, step.after, step.place
        rest = [(other,) for other in left if other != axis]
        parts, gathered = named(mesh, (*rest, *spread)), named(mesh, (*rest, *step.before))
        total, lost = self._send(stack, parts, gathered, None if error is None else jnp.zeros_like(stack))
        if error is None or lost is None:
            return total, None

        def add_to_part(error: jax.Array, lost: jax.Array) -> jax.Array:
            """Adds what a device's part has lost, `[..., part, ...]`, to its error, at the place of this part."""
            lost = jnp.expand_dims(lost, place)
            is_part = [False] * len(left) + [axis in dim for dim in spread]
            starts = [lax.axis_index(axis) * (size * flag) for size, flag in zip(lost.shape, is_part, strict=True)]
            part = lax.dynamic_slice(error, starts, lost.shape) + lost.astype(error.dtype)
            return lax.dynamic_update_slice(error, part, starts)

        # What is lost of a part of the sum is added to the error of the device that sent it: nothing moves.
        of_devices = step.stacked(mesh)[0].spec
        specs = {"in_specs": (of_devices, parts.spec), "out_specs": of_devices}
        added = jax.shard_map(add_to_part, mesh=mesh, **specs, check_vma=False)(
            error.reshape(*(mesh.shape[a] for a in left), *lost.shape[len(rest) :]), lost
        )
        return total, added.reshape(error.shape)


# `summed_use` is the identity. Its transpose, `device_sum`, is the identity too, of a value that is the same for all
# devices; `jax.vmap` over devices makes a sum of it, whose result is again the same for all. A gradient is summed at
# one place: at the param itself, `refusal` stands for what no use has summed.

summed_use_p, device_sum_p = new_primitive("zero_summed_use"), new_primitive("zero_device_sum")


def summed_use(x: jax.Array, how: DeviceSum) -> jax.Array:
    """Returns `x`; where `jax.vmap` maps over devices, their cotangents of it are summed."""
    return summed_use_p.bind(x, how=how)


def _is_other(axis_data: Any, dim: int | None, how: DeviceSum) -> bool:
    """Tells whether an array is not mapped, or mapped over other devices than those whose gradients are summed."""
    return dim is None or axis_data.spmd_name != how.over


def _no_map(axis_data: Any, args: Any, dims: Any, *, how: DeviceSum) -> Any:
    if _is_other(axis_data, dims[0], how):
        return summed_use_p.bind(*args, how=how), dims[0]
    raise NotImplementedError(how.refusal or "params differ between devices")


def _sum_map(axis_data: Any, args: Any, dims: Any, *, how: DeviceSum) -> tuple[Any, Any]:
    (stack,), (dim,) = args, dims
    if _is_other(axis_data, dim, how):
        return device_sum_p.bind(stack, how=how), dim
    if how.refusal:
        raise NotImplementedError(how.refusal)
    return how(jnp.moveaxis(stack, dim, 0)).astype(stack.dtype), None  # not mapped


ad.deflinear2(summed_use_p, lambda cotangent, _, *, how: [device_sum_p.bind(cotangent, how=how)])
ad.deflinear2(device_sum_p, lambda cotangent, _, *, how: [summed_use_p.bind(cotangent, how=how)])
batching.fancy_primitive_batchers[summed_use_p] = _no_map
batching.fancy_primitive_batchers[device_sum_p] = _sum_map
