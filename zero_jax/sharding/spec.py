"""`PartitionSpec`s as plain tuples: for each dim of an array, the mesh axes that shard it, major first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Dims = tuple[tuple[str, ...], ...]

# From this many chips on, XLA:TPU turns a gather over all dims of a torus at once into an all-reduce of the entire
# array: twice the bytes (docs/gather_on_use.md).
STAGED_FROM_NUM_CHIPS = 64
# TPUs whose compiler gathers and reduce-scatters over both dims of a 2-D torus at once, with the options of
# `training/xla_options.py`: over the links of both.
_PLANAR_KINDS = frozenset({"TPU v6 lite"})
# TPUs of two devices a chip whose compiler does so over all of a slice at once.
_WHOLE_KINDS = frozenset({"TPU7x"})


def dims_of(spec: Any, num_dims: int) -> Dims:
    """Converts a `PartitionSpec`, a `NamedSharding` or None (replicated) to the axes of each dim.

    Raises:
      ValueError: the spec names more dims than the array has.
      TypeError: any other type.
    """
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(f"expected a PartitionSpec, a NamedSharding or None, got {spec!r}")
    entries: tuple[Any, ...] = () if spec is None else tuple(spec)
    if len(entries) > num_dims:
        raise ValueError(f"{spec} has {len(entries)} entries, but the array has {num_dims} dims")
    entries = tuple(() if entry in (None, PartitionSpec.UNCONSTRAINED) else entry for entry in entries)
    dims = tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)
    return dims + ((),) * (num_dims - len(dims))


def checked_dims(what: str, spec: Any, shape: Sequence[int], mesh: Mesh) -> Dims:
    """Converts a spec like `dims_of`, for an array of a shape on a mesh; `what` names the array in errors.

    Axes of one device are left out: XLA:TPU does not make native collectives of gathers over others beside them.

    Raises:
      ValueError: the spec does not fit the shape, or names an axis that the mesh does not have.
    """
    try:
        dims = dims_of(spec, len(shape))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} of shape {tuple(shape)}: {error}; give it a spec that fits") from error
    unknown = [axis for axes in dims for axis in axes if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{what}: spec {spec} names the axis {unknown[0]!r}, but the mesh has {mesh.axis_names}: "
            "name one of them, or None to leave the dim unsharded"
        )
    return without(dims, [axis for axis, size in mesh.shape.items() if size == 1])


def partition_spec(dims: Dims) -> PartitionSpec:
    """Returns the `PartitionSpec` of `dims`, without trailing Nones."""
    entries: list[Any] = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def named(mesh: Mesh, dims: Dims) -> NamedSharding:
    """Returns the `NamedSharding` of `dims` on a mesh."""
    return NamedSharding(mesh, partition_spec(dims))


def named_along(mesh: Mesh | AbstractMesh, num_dims: int, axes: Mapping[int, Sequence[str]]) -> NamedSharding:
    """Returns the sharding of some dims over their axes, of which there may be none; other dims are as XLA has them."""
    entries = [tuple(axes[i]) or None if i in axes else PartitionSpec.UNCONSTRAINED for i in range(num_dims)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def carries(dims: Dims, axes: Sequence[str]) -> bool:
    """Returns whether any dim is sharded over any of the axes."""
    return any(axis in axes for dim in dims for axis in dim)


def without(dims: Dims, axes: Sequence[str]) -> Dims:
    """Returns `dims` without the axes."""
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in dims)


def num_shards(mesh: Mesh, dims: Dims) -> int:
    """Returns the number of different shards of an array."""
    return math.prod(mesh.shape[axis] for dim in dims for axis in dim)


def gather_steps(dims: Dims, axes: Sequence[str], mesh: Mesh | None = None) -> list[Dims]:
    """Returns the specs of a gather over `axes`, step by step: one axis at a time, the last of `axes` first.

    The last two axes, which move the most, go at once if they shard the same dim and are two dims of a 3-D torus, or
    those of a 2-D torus of TPU v6e: XLA:TPU has a native gather over two, which uses the links of both. The mesh's
    devices decide. On TPU7x all axes go at once.
    """
    if goes_at_once(mesh):
        return [without(dims, axes)] if carries(dims, axes) else []
    steps, start = [], dims
    # Only the minor axis of a dim can be gathered: its shards are next to each other in the array.
    while minor := [(axes.index(dim[-1]), i) for i, dim in enumerate(dims) if dim and dim[-1] in axes]:
        _, i = max(minor)
        dims = (*dims[:i], dims[i][:-1], *dims[i + 1 :])
        steps.append(dims)
    unsharded = without(dims, axes)  # the remaining axes are followed by the model's
    return _joined(start, steps, mesh) if unsharded == dims else [*steps, unsharded]


def _joined(start: Dims, steps: list[Dims], mesh: Mesh | None) -> list[Dims]:
    """Makes one of the last two steps of a gather, if that is native."""
    if len(steps) < 2:
        return steps
    before, after = [start, *steps][-3], steps[-1]
    taken = [old[len(new) :] for old, new in zip(before, after, strict=True) if old != new]  # the axes of each dim
    return [*steps[:-2], after] if len(taken) == 1 and _is_plane(mesh, taken[0]) else steps


def _is_plane(mesh: Mesh | None, axes: Sequence[str]) -> bool:
    """Returns whether mesh axes are two dims of a torus that XLA:TPU gathers over at once."""
    places = places_of(mesh)
    if mesh is None or places is None or np.ptp(places[:, 3]):  # several devices a chip
        return False
    if not (np.ptp(places[:, :3], axis=0).all() or _is_planar(mesh)):  # neither a 3-D torus nor TPU v6e
        return False
    grid = places[:, :3].reshape(*mesh.devices.shape, 3)
    moved = [np.flatnonzero(np.ptp(grid, axis=mesh.axis_names.index(axis)).reshape(-1, 3).any(axis=0)) for axis in axes]
    return all(len(dims) == 1 for dims in moved) and len({int(dims[0]) for dims in moved}) == len(axes) < 3


def goes_at_once(mesh: Mesh | None) -> bool:
    """Returns whether XLA:TPU has collectives over all axes of a mesh at once: it has several devices of one TPU7x."""
    places = places_of(mesh) if mesh is not None and device_kind(mesh) in _WHOLE_KINDS else None
    return places is not None and bool(np.ptp(places[:, 3]))


def _is_planar(mesh: Mesh) -> bool:
    """Returns whether XLA:TPU has collectives over both dims of a 2-D torus for the devices of a mesh."""
    return device_kind(mesh) in _PLANAR_KINDS


def device_kind(mesh: Mesh) -> str:
    """Returns what JAX calls the devices of a mesh, as `TPU v5 lite`; empty where they have no such name."""
    return getattr(next(mesh.devices.flat, None), "device_kind", "")


def scatter_steps(dims: Dims, axes: Sequence[str], mesh: Mesh | None = None) -> list[Dims]:
    """Returns the specs of a reduce-scatter over `axes`, step by step: major first, on a 3-D torus two at a time.

    XLA:TPU has native reduce-scatters over a part of a torus, of one dim of the array. Over all of a 3-D torus it has
    one over two dims and one over the third; three at once, or one after the other, become all-reduces. Over all of a
    2-D torus it is the other way round: one after the other is native, both at once is an all-reduce, but on TPU v6e
    (docs/gather_on_use.md). Three axes or more are a 3-D torus; for two, which may have left a dim to the model, the
    mesh's devices decide.
    """
    states = [dims, *gather_steps(dims, axes)]
    places = places_of(mesh)
    num_scattered = 1 if mesh is None else math.prod(mesh.shape[axis] for dim in dims for axis in dim if axis in axes)
    if places is not None and num_scattered < len(np.unique(places, axis=0)):
        # The dim of the array that each step of the gather makes larger: a scatter stops where that changes.
        grown = [[a != b for a, b in zip(*each, strict=True)].index(True) for each in itertools.pairwise(states)]
        ends = [states[i + 1] for i, (dim, following) in enumerate(itertools.pairwise(grown)) if dim != following]
        return [*ends[::-1], dims]
    num_torus_dims = 0 if places is None else int((np.ptp(places[:, :3], axis=0) > 0).sum())
    takes_two = num_torus_dims > 2 or (mesh is not None and _is_planar(mesh))
    stride = 2 if len(states) > 3 or (len(states) == 3 and takes_two) else 1
    # The states of the gather in reverse, from the one behind the first step on: it ends with `dims`.
    return [states[i] for i in range(len(states) - 1 - stride, 0, -stride)] + [dims]


def places_of(mesh: Mesh | None) -> np.ndarray | None:
    """Returns the torus coordinates of a mesh's devices, `[devices, dims]`, or None without a torus.

    The last dim is the core of a chip.
    """
    devices: list[Any] = [] if mesh is None else list(mesh.devices.flat)
    if not devices or any(getattr(device, "coords", None) is None for device in devices):
        return None
    return np.array([(*device.coords, getattr(device, "core_on_chip", 0)) for device in devices])


def move_steps(dims: Dims, to: int, axes: Sequence[str]) -> list[Dims]:
    """Returns the specs of an all-to-all that moves `axes` to the dim `to`, step by step, one axis at a time."""
    steps = []
    while minor := [(axes.index(dim[-1]), i) for i, dim in enumerate(dims) if i != to and dim and dim[-1] in axes]:
        _, i = max(minor)
        axis = dims[i][-1]
        dims = tuple(dim[:-1] if j == i else (*dim, axis) if j == to else dim for j, dim in enumerate(dims))
        steps.append(dims)
    return steps


def steps_by_dim(dims: Dims, to: int, axes: Sequence[str]) -> list[Dims]:
    """Returns the specs of all-to-alls that move `axes`, the minor ones of their dims, to the dim `to`.

    Those of a dim move at once. XLA:TPU makes an all-reduce of the entire array of a move from several dims.
    """
    steps = []
    for i in reversed([i for i in range(len(dims)) if i != to]):
        moved = tuple(axis for axis in dims[i] if axis in axes)
        if moved:
            dims = tuple((*dim, *moved) if j == to else dim for j, dim in enumerate(without(dims, moved)))
            steps.append(dims)
    return steps
