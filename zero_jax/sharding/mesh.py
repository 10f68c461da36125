"""The device mesh: `replica` x `data` x `model`, where `data` may be several mesh axes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.device_put import platform_of
from zero_jax.core.tree import shown
from zero_jax.sharding.spec import STAGED_FROM_NUM_CHIPS
from zero_jax.sharding.topology import devices as topology_devices

GPUS = frozenset({"gpu", "cuda", "rocm"})  # what JAX calls their platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """The roles of a mesh's axes: ZeRO shards over `data`; `replica` holds full copies; `model` is tensor parallelism.

    Any other axis of a mesh is the user's own. `secondary` are the axes of `data` that params are sharded over, where
    these are not all (hpZ).
    """

    data: tuple[str, ...]
    replica: tuple[str, ...]
    model: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that a batch is sharded over, major first."""
        return self.replica + self.data

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes of the batch that params are not sharded over at any stage: each device along them has a copy."""
        return self.replica + tuple(axis for axis in self.data if self.secondary and axis not in self.secondary)

    def size_beside_batch(self, mesh: Mesh) -> int:
        """Returns the number of devices with the same examples: along the axes that a batch is not sharded over."""
        return mesh.size // axis_size(mesh, self.batch)

    def of_params(self, *, with_copies: bool = True) -> Axes:
        """Returns the roles as they are for the use of params: `data` is what they are gathered over."""
        return Axes(data=self.secondary or self.data, replica=self.copies if with_copies else (), model=self.model)


def axes_of(
    mesh: Mesh,
    *,
    data: Sequence[str] | None = None,
    replica: Sequence[str] | None = None,
    model: Sequence[str] | None = None,
) -> Axes:
    """Returns the roles of a mesh's axes: those of the arguments, the others by their names.

    Args:
      mesh: any mesh; `data` and `data_*` have the data role, `replica` the replica role, `model` and `model_*` the
        model role; `data_0`, `data_1` and so on in the order of their numbers, others in the mesh's.
      data: the axes of the data role, major first.
      replica: the axes of the replica role.
      model: the axes of the model role, major first.

    Raises:
      ValueError: an axis that the mesh does not have, or no axis that carries `data`.
    """
    if not hasattr(mesh, "axis_names"):
        raise ValueError(f"mesh={shown(mesh)} is no mesh: make one with zero.make_mesh(data=...) or jax.sharding.Mesh")
    names = tuple(mesh.axis_names)
    by_role = {"data": data, "replica": replica, "model": model}
    by_role = {role: (axes,) if isinstance(axes, str) else axes for role, axes in by_role.items()}
    assigned = [axis for axes in by_role.values() if axes is not None for axis in axes]
    twice = next((axis for axis in assigned if assigned.count(axis) > 1), None)
    if twice is not None:
        raise ValueError(f"the mesh axis {twice!r} is given more than one role in {by_role}: give each axis one")
    free = tuple(name for name in names if name not in assigned)
    by_name = {
        role: tuple(n for n in free if n == role or (role != "replica" and str(n).startswith(f"{role}_")))
        for role in by_role
    }
    if all(str(name)[len("data_") :].isdecimal() for name in by_name["data"]):  # as make_mesh numbers them
        by_name["data"] = tuple(sorted(by_name["data"], key=lambda name: int(name[len("data_") :])))
    data, replica, model = (by_name[role] if axes is None else axes for role, axes in by_role.items())
    for name in (*data, *replica, *model):
        if name not in names:
            hint = did_you_mean(name, names, "; did you mean {!r}?")
            raise ValueError(f"the mesh has axes {names} and none called {name!r}{hint}")
        if mesh.axis_types[names.index(name)] != AxisType.Auto:
            raise ValueError(
                f"the mesh axis {name!r} is of type {mesh.axis_types[names.index(name)]}, which is the default of "
                "jax.make_mesh and of newer AbstractMeshes: make the mesh with zero.make_mesh, or with "
                "axis_types=(jax.sharding.AxisType.Auto, ...)"
            )
    if not data:
        raise ValueError(
            f"the mesh has axes {names} and none of them carries `data`: "
            "name one `data`, or say which with ZeroConfig(data_axes=(...,))"
        )
    return Axes(data=tuple(data), replica=tuple(replica), model=tuple(model))


def secondary_axes(mesh: Mesh, axes: Axes, secondary: bool | Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of `data` that params are sharded over with a secondary shard; empty without one.

    Args:
      mesh: the mesh.
      axes: the roles of its axes.
      secondary: True for the axes of `data` inside a slice or host, which the devices show, or their names.

    Raises:
      ValueError: no such axes, or all of `data`.
    """
    if secondary is False or (secondary is not True and not secondary):
        return ()
    sizes = {axis: mesh.shape[axis] for axis in axes.data}
    if secondary is True:
        slow = slow_axes(mesh)
        fast = tuple(axis for axis in axes.data if axis not in slow)
        split = "lay `data` out as an axis inside and one across, as make_mesh does, and name it: secondary=('data_0',)"
        if axis_size(mesh, axes.data) == axis_size(mesh, fast):
            raise ValueError(
                f"secondary=True: the mesh {dict(mesh.shape)} has no axis of `data` across slices or hosts: the "
                f"shards of params are inside one already; leave secondary out, or {split}"
            )
        if axis_size(mesh, fast) == 1:
            raise ValueError(
                f"secondary=True: no axis of `data` {sizes} is inside one slice or host, so that there is no fast "
                f"network to shard params over: leave secondary out, or {split}"
            )
    else:
        fast = (secondary,) if isinstance(secondary, str) else tuple(secondary)
        unknown = [axis for axis in fast if axis not in sizes]
        if unknown:
            raise ValueError(
                f"secondary={fast}: {unknown[0]!r} is no axis of `data`, which has {sizes}: name some of it"
            )
        if axis_size(mesh, fast) in (1, axis_size(mesh, axes.data)):
            raise ValueError(
                f"secondary={fast}: it has {axis_size(mesh, fast)} of the {axis_size(mesh, axes.data)} devices of "
                f"`data` {sizes}: name the axes inside a slice or host, not all and not none, or leave it out"
            )
        fast = tuple(axis for axis in axes.data if axis in fast)
    if axes.data[: len(fast)] != fast:
        first = (*fast, *(axis for axis in axes.data if axis not in fast))
        raise ValueError(
            f"secondary={fast}: the axes inside a slice or host have to come first among those of `data` {axes.data}, "
            f"or a device's own shard is no part of its secondary shard: give ZeroConfig(data_axes={first})"
        )
    return fast


def slow_axes(mesh: Mesh) -> frozenset[str]:
    """Returns the mesh axes along which devices are in different TPU slices, or on different GPU hosts."""
    domains = np.array(_domains(list(mesh.devices.flat))).reshape(mesh.devices.shape)
    return frozenset(str(name) for i, name in enumerate(mesh.axis_names) if (np.ptp(domains, axis=i) > 0).any())


def networks(mesh: Mesh) -> dict[str, str]:
    """Returns the network of each mesh axis: `dcn` across TPU slices or GPU hosts, else `ici`, `nvlink` or `host`."""
    platform, slow = platform_of(mesh), slow_axes(mesh)
    fast = "nvlink" if platform in GPUS else "ici" if platform == "tpu" else "host"
    return {str(axis): "dcn" if axis in slow else fast for axis in mesh.axis_names}


def axis_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices along the given mesh axes together."""
    return math.prod(mesh.shape[name] for name in axes)


def batch_sharding(mesh: Mesh, axes: Axes | None = None) -> NamedSharding:
    """Returns the sharding of a batch: its leading dim over `replica` and `data`."""
    if axes is not None and not isinstance(axes, Axes):
        raise ValueError(f"axes={shown(axes)}: leave it out, or give what `axes_of(mesh)` returns")
    return NamedSharding(mesh, PartitionSpec((axes or axes_of(mesh)).batch))


@contextlib.contextmanager
def on_mesh(mesh: Any) -> Iterator[None]:
    """Makes a mesh that of `jax.set_mesh` for what is called inside, if the user has set one, which may be another.

    Raises:
      ValueError: within a function that is traced for another mesh whose axes are Explicit: its arrays are typed so.
    """
    current = jax.sharding.get_abstract_mesh()
    context = contextlib.nullcontext() if current.empty else _set_mesh(mesh)
    if context is None and AxisType.Explicit in current.axis_types and current != mesh.abstract_mesh:
        raise ValueError(
            f"jax.set_mesh has set the mesh {_typed(current)}, and this is for {_typed(mesh)}: "
            "set that mesh, as in jax.set_mesh(mesh), or none, around the function that this is called in"
        )
    with context or contextlib.nullcontext():
        yield


def _set_mesh(mesh: Any) -> contextlib.AbstractContextManager[None] | None:
    """Sets a mesh until the end of the context returned; returns None within a traced function, where JAX cannot."""
    try:
        return jax.set_mesh(mesh)
    except ValueError:
        return None


def _typed(mesh: Any) -> str:
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for (name, size), kind in axes)


def make_mesh(
    *,
    data: int | None = None,
    replica: int = 1,
    model: int = 1,
    devices: Iterable[Any] | None = None,
    topology: str | None = None,
    data_layout: Sequence[int] | None = None,
) -> Mesh:
    """Makes the mesh `replica` x `data` x `model`, in an order for the hardware; all axes have the Auto type.

    On a large torus, on several TPU slices and on a cluster of multi-GPU hosts, `data` is several mesh axes (`data_0`,
    `data_1`, ...), one per torus dim or level of the network, so that gathers and reduce-scatters go axis by axis.
    Otherwise it is the single axis `data`. The last of them is the one across slices or hosts. In the order of the
    devices it comes first: XLA:TPU has native reduce-scatters inside slices whose devices are next to each other.

    Args:
      data: devices that ZeRO shards over; None takes what `replica` and `model` leave.
      replica: copies of the sharded state (HSDP); 1 for plain ZeRO.
      model: size of the tensor-parallel axis.
      devices: the devices; None takes all of `jax.devices()`.
      topology: name of hardware to compile for without having it, as in `v5p:2x2x4` or `h100:2x8`; excludes `devices`.
      data_layout: sizes of the mesh axes of `data`, major first; overrides the choice by the hardware. The last is the
        one across slices or hosts, where a copy of the state covers several.

    Raises:
      ValueError: sizes that do not multiply up to the devices, an unknown topology, or copies that straddle slices.
    """
    if topology is not None:
        if devices is not None:
            raise ValueError("make_mesh takes `devices` or `topology`, not both: leave one out")
        devices = topology_devices(topology)
    chosen = jax.devices() if devices is None else devices
    devices = list(chosen) if isinstance(chosen, Iterable) else []
    if not devices or not all(hasattr(device, "platform") for device in devices):
        raise ValueError(f"make_mesh: devices={shown(chosen)} is no list of devices: give some of jax.devices()")
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        raise ValueError(f"make_mesh: devices has {twice} {devices.count(twice)} times: give each device once")
    sizes = _sizes(data=data, replica=replica, model=model, num_devices=len(devices))
    layout, grid = _layout(devices, sizes, data_layout)
    data_names = ("data",) if len(layout) == 1 else tuple(f"data_{i}" for i in range(len(layout)))
    names = ("replica", *data_names, "model")
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    slow = [name for name in data_names if name in slow_axes(mesh) and len(data_names) > 1]
    order = ["replica", *slow, *(name for name in names[1:] if name not in slow)]
    return Mesh(grid.transpose([names.index(name) for name in order]), order, axis_types=mesh.axis_types)


def _sizes(*, data: int | None, replica: int, model: int, num_devices: int) -> dict[str, int]:
    for name, size in (("replica", replica), ("model", model), ("data", 1 if data is None else data)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(f"make_mesh: {name}={size!r} must be a positive integer")
    if data is None:
        if num_devices % (replica * model):
            raise ValueError(
                f"make_mesh: replica={replica} x model={model} does not divide the {num_devices} devices: "
                "change one of them, or pass `devices=` with the devices to use"
            )
        data = num_devices // (replica * model)
    if replica * data * model != num_devices:
        raise ValueError(
            f"make_mesh: replica={replica} x data={data} x model={model} is {replica * data * model} devices, but "
            f"there are {num_devices}: leave out `data` to use them all, or pass "
            f"`devices=jax.devices()[:{replica * data * model}]`"
        )
    return {"replica": replica, "data": data, "model": model}


def _layout(
    devices: list[Any], sizes: Mapping[str, int], data_layout: Sequence[int] | None
) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the sizes of the axes of `data` and the grid of devices, replica first, model last."""
    replica, data, model = sizes["replica"], sizes["data"], sizes["model"]
    if data_layout is not None:
        is_sizes = isinstance(data_layout, Sequence) and all(isinstance(size, int | np.integer) for size in data_layout)
        if not is_sizes or min(data_layout, default=0) < 1:
            raise ValueError(f"make_mesh: data_layout={data_layout!r}: give sizes of mesh axes, such as (2, 4)")
        if math.prod(data_layout) != data:
            raise ValueError(
                f"make_mesh: data_layout={tuple(data_layout)} multiplies to {math.prod(data_layout)}, "
                f"not to data={data}: give sizes whose product is that"
            )
    levels = _network_levels(devices, sizes, data_layout)
    if levels is not None:
        return levels
    layout = _torus_layout(devices, sizes) if data_layout is None else tuple(data_layout)
    return layout, _torus_grid(replica, layout, model, devices)


def _network_levels(
    devices: list[Any], sizes: Mapping[str, int], data_layout: Sequence[int] | None
) -> tuple[tuple[int, ...], np.ndarray] | None:
    """Orders `data` over hosts or slices: fast links major, network minor, so that the network moves small shards."""
    groups: dict[int, list[Any]] = {}
    for device, domain in zip(devices, _domains(devices), strict=True):
        groups.setdefault(domain, []).append(device)
    num_groups, replica, model = len(groups), sizes["replica"], sizes["model"]
    group_sizes = {len(group) for group in groups.values()}
    if num_groups == 1 or len(group_sizes) != 1:
        return None
    if replica % num_groups and num_groups % replica:
        raise ValueError(
            f"make_mesh: replica={replica} on {num_groups} slices or hosts: a copy would straddle two, and gather "
            f"params across the network: give a divisor or a multiple of {num_groups}, as replica={num_groups}"
        )
    inside = group_sizes.pop()
    copies_per_group, groups_per_copy = max(replica // num_groups, 1), max(num_groups // replica, 1)
    if inside == 1 or inside % (copies_per_group * model):
        return None
    inner_sizes = {"replica": copies_per_group, "data": inside // (copies_per_group * model), "model": model}
    if data_layout is None:
        inner = _torus_layout(next(iter(groups.values())), inner_sizes) if inner_sizes["data"] > 1 else ()
    else:
        inner = tuple(data_layout if groups_per_copy == 1 else data_layout[:-1])
        if math.prod(inner) != inner_sizes["data"]:
            raise ValueError(
                f"make_mesh: data_layout={tuple(data_layout)} on {num_groups} slices or hosts: the last axis of `data` "
                f"is the one across them: give sizes that end in {groups_per_copy}, such as "
                f"{(inner_sizes['data'], groups_per_copy)}, or leave data_layout out"
            )
    grids = [_torus_grid(copies_per_group, inner, model, groups[key]) for key in sorted(groups)]
    per_copy = [np.stack(grids[i : i + groups_per_copy], axis=-2) for i in range(0, num_groups, groups_per_copy)]
    layout = (*inner, groups_per_copy) if groups_per_copy > 1 or not inner else inner
    return layout, np.concatenate(per_copy).reshape(replica, *layout, model)


def slice_of(device: Any) -> int:
    """Returns the number of a device's TPU slice; 0 where there are none."""
    return int(getattr(device, "slice_index", None) or 0)


def _domains(devices: list[Any]) -> list[int]:
    """Returns for each device the number of its fast network: its TPU slice, or its GPU host."""
    slices = list(map(slice_of, devices))
    if len(set(slices)) > 1 or devices[0].platform not in GPUS:
        return slices if devices[0].platform != "cpu" else [0] * len(devices)
    processes = [device.process_index for device in devices]
    one_device_each = len(set(processes)) == len(devices)  # a process per GPU says nothing of hosts
    return slices if one_device_each else processes


def _torus_layout(devices: list[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns one axis per torus dim that `data` covers, where that is what compiles to native collectives."""
    data, dims = sizes["data"], _torus_dims(devices)
    num_chips = len({tuple(device.coords) for device in devices}) if dims else 0
    if num_chips < STAGED_FROM_NUM_CHIPS or len(dims) < 2:
        return (data,)
    for taken in range(1 << len(dims)):  # the dims that `replica` and `model` cover; the others are left for `data`
        left = tuple(extent for i, extent in enumerate(dims) if not taken >> i & 1)
        if math.prod(left) == data:
            return left
    return (data,)


def _torus_dims(devices: list[Any]) -> tuple[int, ...]:
    """Returns the extents of a torus that devices fill, and the cores of a chip last; none for other devices."""
    coords = [getattr(device, "coords", None) for device in devices]
    if any(c is None for c in coords):
        return ()
    array = np.asarray(coords)
    extents = [int(extent) for extent in np.ptp(array, axis=0) + 1]
    dims = tuple(extent for extent in (*extents, len(devices) // math.prod(extents)) if extent > 1)
    return dims if math.prod(dims) == len(devices) else ()


def _torus_grid(replica: int, layout: tuple[int, ...], model: int, devices: list[Any]) -> np.ndarray:
    """Returns the grid of devices; a single axis over all of a torus goes dim by dim, not along a ring."""
    dims = _torus_dims(devices) if layout == (len(devices),) else ()
    return _device_grid((replica, *(dims or layout), model), devices).reshape(replica, *layout, model)


def _device_grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(set(_domains(devices))) == 1:
        for split in (False, True):
            try:
                return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
            except (NotImplementedError, ValueError, AssertionError):
                continue  # an odd shape: the order of the devices is all that is left
    return np.asarray(devices).reshape(shape)
