"""How arrays are moved: chains of shardings, their primitive, steps that XLA has, and their names in programs.

XLA:TPU has native reduce-scatters over an entire torus only in steps (`spec.scatter_steps`), which need one mesh axis
for each of its dims. A user's axis that spans all of them is split here, only for the steps: a mesh of the same devices
in the same order, with more axes.

By name scopes around the gathers of params a compiled program's collectives are identified. XLA keeps the name stack of
what an operation was made from in its `op_name`: `zero_jax.hlo.gathered_path` reads the path of a leaf, which
`gather_scope` puts there, off the all-gather and the reduce-scatter of its gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax.program.jaxprs import define_tangents, new_primitive
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import (
    STAGED_FROM_NUM_CHIPS,
    Dims,
    carries,
    device_kind,
    gather_steps,
    goes_at_once,
    named,
    num_shards,
    places_of,
    scatter_steps,
    steps_by_dim,
)

# `reshard` is linear: it moves an array through a chain of shardings, and its transpose moves the cotangent through
# another chain. A primitive, not a `custom_vjp`, because forward mode must work too, and because a remat policy has to
# be able to tell a gathered param from everything else.


@dataclasses.dataclass(frozen=True)
class Chain:
    """Shardings that an array is moved through, in order, in the dtype given (None: its own).

    They are of the array with its last two dims swapped, if `swapped`. With a `coding`, what is moved is
    `coding.encode(x)`, arrays of as many dims that divide alike, and `coding.decode(arrays, dtype)` is the result.
    """

    shardings: tuple[NamedSharding, ...] = ()
    dtype: Any = None
    barrier: bool = False
    swapped: bool = False
    coding: Any = None


def reshard(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    """Moves `x` through the forward chain; its cotangent goes through the backward chain."""
    if not forward.shardings and not backward.shardings:
        return x
    return reshard_p.bind(x, forward=forward, backward=backward)


def _apply_chain(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    del backward
    dtype = x.dtype  # of the result again: a chain changes what moves, not what it is
    if forward.dtype is not None and jax.numpy.issubdtype(dtype, np.floating):  # complex ones keep theirs
        x = x.astype(forward.dtype)
    parts = [x] if forward.coding is None else forward.coding.encode(x)
    if forward.barrier:
        # Without it XLA:GPU moves a gather above the cast before it, and gathers the wider type.
        parts = lax.optimization_barrier(parts)
    parts = [jax.numpy.swapaxes(part, -1, -2) for part in parts] if forward.swapped else parts
    for sharding in forward.shardings:
        parts = [lax.with_sharding_constraint(part, sharding) for part in parts]
    parts = [jax.numpy.swapaxes(part, -1, -2) for part in parts] if forward.swapped else parts
    return parts[0].astype(dtype) if forward.coding is None else forward.coding.decode(parts, dtype)


def _result(x: jax.Array, *, forward: Chain, backward: Chain) -> jax.Array:
    # Where only the cotangent moves, the value needs no equation, which a remat policy would see.
    return x if forward == Chain() else reshard_p.bind(x, forward=forward, backward=backward)


def _tangent(dot: Any, *, forward: Chain, backward: Chain) -> Any:
    if forward.coding is not None:  # codes are steps, without a slope: straight through
        forward = dataclasses.replace(forward, coding=None)
    return dot if isinstance(dot, ad.Zero) else reshard_p.bind(dot, forward=forward, backward=backward)


def _transpose(cotangent: Any, x: Any, *, forward: Chain, backward: Chain) -> list[Any]:
    del x
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [reshard_p.bind(cotangent, forward=backward, backward=forward)]


def lifted(chain: Chain) -> Chain:
    """Returns the chain for an array with one more dim in front."""
    # As XLA has it: the mapped dim may be one of devices, or of examples.
    specs = [(s.mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, *s.spec)) for s in chain.shardings]
    return dataclasses.replace(chain, shardings=tuple(NamedSharding(*each) for each in specs))


def _batch(args: Any, dims: Any, *, forward: Chain, backward: Chain) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    return reshard_p.bind(jax.numpy.moveaxis(x, dim, 0), forward=lifted(forward), backward=lifted(backward)), 0


reshard_p = new_primitive("zero_reshard", _apply_chain)
define_tangents(reshard_p, _result, _tangent)
ad.primitive_transposes[reshard_p] = _transpose
batching.primitive_batchers[reshard_p] = _batch


def scattered(x: jax.Array, *, dim: int) -> jax.Array:
    """Marks an array whose cotangents are summed across devices already, to shards of a dim over all of `data`.

    The value is the array itself; where it is a param, its gradient needs no reduce-scatter, but an all-to-all.
    """
    return scattered_p.bind(x, dim=dim)


scattered_p = new_primitive("zero_scattered")
ad.deflinear2(scattered_p, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[scattered_p] = lambda args, dims, **_: (args[0], dims[0])  # each has cotangents of its own


# XLA:TPU divides rows whose lanes are a multiple of the first over the rings of a torus, and lanes into shards of a
# multiple of the second (docs/gather_on_use.md).
_LANES_OF_ROWS, _LANES_OF_SHARDS = 512, 256
# TPU7x reduce-scatters to shards of at least so many rows at once; else it is an all-reduce.
_ROWS_AT_ONCE = 8
# Rows of more tiles of lanes than `_MOST_TILES` XLA:TPU cuts into equal pieces, at most `_MOST_PIECES` of them; on TPUs
# whose TensorCores reduce-scatter only if a piece has no more tiles than here (docs/gather_on_use.md).
_TILE_LANES, _MOST_TILES, _MOST_PIECES = 128, 256, 16
_TILES_OF_PIECE = {"TPU v4": 126, "TPU v5 lite": 131}


def scattering(mesh: Mesh, dims: Dims, axes: Sequence[str], *, shape: Sequence[int] = (), dtype: Any = None) -> Chain:
    """Returns the constraints that reduce-scatter a gradient over `axes` to `dims`.

    If its last dim is the sharded one, the gradient is reduce-scattered with its last two dims swapped: over a torus,
    XLA:TPU has native reduce-scatters of rows, and of lanes of some sizes only. So it is if both are sharded and its
    `shape` is native only then, as that of a head, `[4096, 50304]`. Rows whose lanes are not native, as the 151,936 of
    Qwen's table, are reduce-scattered along these, and an all-to-all makes shards of rows of them.
    """
    *before, last = dims or ((),)
    swapped = False
    if before and carries((last,), axes) and places_of(mesh) is not None:
        num_lanes = _LANES_OF_SHARDS * math.prod(mesh.shape[axis] for axis in before[-1])
        is_odd = bool(shape) and shape[-1] % _LANES_OF_ROWS != 0 and shape[-2] % num_lanes == 0
        swapped = is_odd or not carries(tuple(before), axes)
    order = (*before[:-1], last, before[-1]) if swapped else dims
    num_rows, num_lanes = shape[-2:] if before and shape else (0, 0)  # as they are moved: rows, and lanes of each
    num_rows, num_lanes = (num_lanes, num_rows) if swapped else (num_rows, num_lanes)
    if before and shape and places_of(mesh) is not None and not order[-1] and {*order[-2]} == {*axes}:
        if _is_all_reduced(num_lanes, mesh) and num_lanes % math.prod(mesh.shape[axis] for axis in axes) == 0:
            # The other way round, so that lanes are the rows that are scattered; the last step is the all-to-all.
            steps = scatter_shardings(mesh, order, axes, num_rows)
            return Chain((*steps, named(mesh, (*order[:-2], (), order[-2]))), dtype=dtype, swapped=not swapped)
    num_rows = 0 if num_lanes % _LANES_OF_ROWS else num_rows  # such steps are no better than all at once
    return Chain(scatter_shardings(mesh, order, axes, num_rows), dtype=dtype, swapped=swapped)


def _is_all_reduced(num_lanes: int, mesh: Mesh) -> bool:
    """Tells whether XLA:TPU all-reduces rows for their shards, as it cannot cut them into few equal pieces."""
    tiles, rest = divmod(num_lanes, _TILE_LANES)
    pieces = [tiles // n for n in range(2, _MOST_PIECES + 1) if tiles % n == 0]
    return (
        not rest
        and tiles > _MOST_TILES
        and min(pieces, default=math.inf) > _TILES_OF_PIECE.get(device_kind(mesh), tiles)
    )


def gather_shardings(mesh: Mesh, dims: Dims, axes: Sequence[str]) -> tuple[NamedSharding, ...]:
    """Returns the shardings of a gather from `dims` over `axes`, in native steps."""
    places = places_of(mesh)
    if places is None or len(np.unique(places[:, :3], axis=0)) < STAGED_FROM_NUM_CHIPS:
        return tuple(named(mesh, step) for step in gather_steps(dims, axes, mesh))
    fine, fine_dims, fine_axes = _split(mesh, dims, axes)
    return tuple(named(fine, step) for step in gather_steps(fine_dims, fine_axes, fine))


def moving(mesh: Mesh, dims: Dims, dim: int, axes: Sequence[str]) -> Chain:
    """Returns the constraints that bring a gradient from shards of `dim` over `axes` to `dims`, by all-to-alls."""
    steps = [dims, *steps_by_dim(dims, dim, axes)]
    return Chain(tuple(named(mesh, step) for step in reversed(steps)))


def scatter_shardings(mesh: Mesh, dims: Dims, axes: Sequence[str], num_rows: int = 0) -> tuple[NamedSharding, ...]:
    """Returns the shardings of a reduce-scatter over `axes` to `dims`, in native steps.

    On TPU7x all axes go at once; but minor ones, which would leave too few of the `num_rows` of the last dim but one
    (0: not known), go last.
    """
    fine, fine_dims, fine_axes = _split(mesh, dims, axes)
    if goes_at_once(mesh):
        # From the shards back to what has most of them and enough rows in each: that first, then the shards.
        states = [fine_dims, *gather_steps(fine_dims, fine_axes)][:-1]
        native = [x for x in states if num_rows >= _ROWS_AT_ONCE * num_shards(fine, x[-2:-1])]
        return (*(named(fine, x) for x in native[:1] if fine_dims not in native), named(mesh, dims))
    steps = scatter_steps(fine_dims, fine_axes, fine)
    # The last on the mesh itself: what reads the result has its shardings there.
    return (*(named(fine, step) for step in steps[:-1]), named(mesh, dims))


def copies_of_rows(x: jax.Array, mesh: Mesh, axes: Axes) -> jax.Array:
    """Returns `[devices, rows, ...]` copies of an array whose rows are sharded over the batch, one for each device.

    They are gathered in native steps; the transpose, a sum of what each device has, is reduce-scattered in these. Where
    what is summed is not a product, XLA:TPU all-reduces over a whole torus; over some of its dims only matrices are
    reduce-scattered, so that the dims of the stack that are left are merged with the rows.
    """
    batch, shape = [axis for axis in axes.batch if mesh.shape[axis] > 1], x.shape
    dims = (tuple(batch), *[()] * (x.ndim - 1))
    fine, fine_dims, fine_axes = _split(mesh, dims, batch)
    steps = [fine_dims] if goes_at_once(mesh) else scatter_steps(fine_dims, fine_axes, fine)
    ends = [step[0] for step in steps]
    over_rows = lambda axes, *before: named(fine, (*before, tuple(axes), *[()] * (len(shape) - 1)))  # noqa: E731
    x, copied = lax.with_sharding_constraint(x, named(mesh, dims)), ()
    for cut, whole in itertools.pairwise([*ends[::-1], ()]):
        over = cut[len(whole) :]
        x = lax.with_sharding_constraint(x, over_rows((*copied, *cut)))
        x = lax.with_sharding_constraint(x, over_rows((*copied, *whole)))
        x = lax.broadcast_in_dim(x, (axis_size(fine, over), *x.shape), tuple(range(1, x.ndim + 1)))
        x = lax.with_sharding_constraint(x, over_rows((*copied, *whole), over))
        x, copied = x.reshape(-1, *shape[1:]), (*over, *copied)
    return lax.with_sharding_constraint(x.reshape(-1, *shape), named(mesh, (tuple(batch), *[()] * len(shape))))


def _split(mesh: Mesh, dims: Dims, axes: Sequence[str]) -> tuple[Mesh, Dims, list[str]]:
    if places_of(mesh) is None:
        return mesh, dims, list(axes)
    fine, parts = split_axes(mesh, tuple(axes))
    fine_dims = tuple(tuple(part for axis in dim for part in parts.get(axis, (axis,))) for dim in dims)
    return fine, fine_dims, [part for axis in axes for part in parts[axis]]


@functools.lru_cache(maxsize=256)
def split_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[Mesh, Mapping[str, tuple[str, ...]]]:
    """Splits mesh axes that span several torus dims; returns the mesh (itself if none does), and the parts of each."""
    sizes = {axis: torus_sizes(mesh, axis) for axis in axes}
    parts = {
        axis: (axis,) if len(of_axis) == 1 else tuple(f"{axis}.{i}" for i in range(len(of_axis)))
        for axis, of_axis in sizes.items()
    }
    if all(len(names) == 1 for names in parts.values()):
        return mesh, parts
    names = [part for axis in mesh.axis_names for part in parts.get(axis, (axis,))]
    shape = [size for axis in mesh.axis_names for size in sizes.get(axis, (mesh.shape[axis],))]
    types = (AxisType.Auto,) * len(names)
    return Mesh(mesh.devices.reshape(shape), tuple(names), axis_types=types), parts


@functools.lru_cache(maxsize=256)
def cut_axes(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[Mesh, tuple[str, ...], tuple[str, ...]] | None:
    """Cuts mesh axes in major ones of `size` devices and minor ones, in the mesh that is returned; None if it cannot.

    An axis that is cut is two axes there.
    """
    for i, axis in enumerate(axes):
        own = mesh.shape[axis]
        if size % own == 0:
            size //= own
            continue
        if own % size:
            return None
        if size == 1:
            return mesh, axes[:i], axes[i:]
        at, halves = mesh.axis_names.index(axis), (f"{axis}.major", f"{axis}.minor")
        names = (*mesh.axis_names[:at], *halves, *mesh.axis_names[at + 1 :])
        shape = (*mesh.devices.shape[:at], size, own // size, *mesh.devices.shape[at + 1 :])
        fine = Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
        return fine, (*axes[:i], halves[0]), (halves[1], *axes[i + 1 :])
    return mesh, axes, ()


def torus_sizes(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Returns the sizes, major first, of the torus dims that a mesh axis spans.

    They are `(size,)` for an axis along one dim, for devices without a torus, and for an order that follows no dims,
    such as a ring through a plane.
    """
    size, places = mesh.shape[axis], places_of(mesh)
    if places is None or size == 1:
        return (size,)
    along = np.moveaxis(places.reshape(*mesh.devices.shape, -1), mesh.axis_names.index(axis), 0)
    line = along.reshape(size, -1, places.shape[-1])[:, 0]  # [size, coords] of the first devices along the axis
    sizes: list[int] = []
    # From the minor dim on: one coordinate moves from one device to the next, for as long as the others stay.
    while (stride := math.prod(sizes)) < size:
        (moved,) = np.nonzero(line[stride] != line[0])
        still = np.delete(line[::stride], moved, axis=1) == np.delete(line[0], moved)
        run = len(still) if still.all() else int(np.argmin(still.all(axis=1)))
        if len(moved) != 1 or size % (stride * run):
            return (size,)
        sizes.insert(0, run)
    # All lines of devices along the axis have to be like the first: each of the dims moves one coordinate.
    grid = along.reshape(*sizes, -1, places.shape[-1])
    moves = [(np.ptp(grid, axis=i) > 0).any(axis=tuple(range(grid.ndim - 2))) for i in range(len(sizes))]
    return tuple(sizes) if all(move.sum() == 1 for move in moves) else (size,)


# The scope of what is moved for the update, which the instructions around it do not say: `zero_jax.hlo` reads it.
UPDATE = "of_update"
# The scope of activations that are sent to the shards of params, and of what comes home.
SENT = "sent_to_shards"
# The scope of examples that move because a device reads those of others, or adds to them.
OF_ALL = "examples_of_all"
# A path that begins so continues that of the scope `params_scope` around it.
RELATIVE = "~~"


def params_scope(path: str) -> AbstractContextManager[Any]:
    """Returns the scope of a region whose params all have paths that begin with this one; none for an empty path.

    Within it their paths are relative, so that the regions of equal layers are equal, and JAX traces one of them.
    """
    return jax.named_scope(f"params={escaped(path)}") if path else contextlib.nullcontext()


def gather_scope(path: str) -> AbstractContextManager[Any]:
    """Returns the scope in which the param of a path is gathered."""
    return jax.named_scope(f"gather={escaped(path)}")


def escaped(path: str) -> str:
    """Returns a leaf's path `a/b/c` as it stands in a scope, `a.b.c`.

    A `/` separates scopes, a `(` transforms, and a `:` the names that XLA merges.
    """
    return re.sub(r"[^\w.~+ -]", ".", path)
