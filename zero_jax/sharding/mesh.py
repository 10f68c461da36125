"""The device mesh: `replica` x `data` x `pipe` x `model`, where `data` may be several mesh axes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.device_put import platform_of
from zero_jax.core.tree import shown
from zero_jax.sharding.device_order import GPUS, domains_of, order_devices
from zero_jax.sharding.topology import devices as topology_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """The roles of a mesh's axes: ZeRO shards over `data`; `replica` holds full copies; `model` is tensor parallelism.

    Any other axis of a mesh is the user's own. `secondary` are the axes of `data` that params are sharded over, where
    these are not all (hpZ). `pipe` are the axes of `data`, its last ones, along which devices have layers of their own,
    as stages of a pipeline: outside of the layers a batch, and ZeRO's shards, are over them as over the others.
    """

    data: tuple[str, ...]
    replica: tuple[str, ...]
    model: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()
    pipe: tuple[str, ...] = ()

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that a batch is sharded over, major first."""
        return self.replica + self.data

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes of the batch that params are not sharded over at any stage: each device along them has a copy."""
        return self.replica + tuple(axis for axis in self.data if self.secondary and axis not in self.secondary)

    @property
    def data_of_stage(self) -> tuple[str, ...]:
        """The axes of `data` within a stage of a pipeline: those that are not `pipe`."""
        return tuple(axis for axis in self.data if axis not in self.pipe)

    @property
    def of_stage(self) -> Axes:
        """The roles as they are within a stage of a pipeline, where no array is sharded over `pipe`."""
        return dataclasses.replace(self, data=self.data_of_stage, pipe=())

    @property
    def of_device(self) -> Axes:
        """The roles as they are for the examples of one device, or of one row of stages."""
        return dataclasses.replace(self, replica=(), data=self.pipe)

    def num_stages(self, mesh: Mesh) -> int:
        """Returns the number of stages of a pipeline; 1 without one."""
        return axis_size(mesh, self.pipe)

    def size_beside_batch(self, mesh: Mesh) -> int:
        """Returns the number of devices with the same examples: along the axes that a batch is not sharded over."""
        return mesh.size // axis_size(mesh, self.batch)

    def of_params(self, *, with_copies: bool = True) -> Axes:
        """Returns the roles as they are for the use of params: `data` is what they are gathered over."""
        data, replica = self.secondary or self.data, self.copies if with_copies else ()
        return Axes(data=data, replica=replica, model=self.model, pipe=self.pipe)


def axes_of(
    mesh: Mesh,
    *,
    data: Sequence[str] | None = None,
    replica: Sequence[str] | None = None,
    model: Sequence[str] | None = None,
    pipe: Sequence[str] | None = None,
) -> Axes:
    """Returns the roles of a mesh's axes: those of the arguments, the others by their names.

    Args:
      mesh: any mesh; `data` and `data_*` have the data role, `replica` the replica role, `model` and `model_*` the
        model role, `pipe` and `pipe_*` the pipe role; `data_0`, `data_1` and so on in the order of their numbers,
        others in the mesh's.
      data: the axes of the data role, major first; those of the pipe role are added to them.
      replica: the axes of the replica role.
      model: the axes of the model role, major first.
      pipe: the axes of the pipe role, major first.

    Raises:
      ValueError: an axis that the mesh does not have, or no axis that carries `data`.
    """
    if not hasattr(mesh, "axis_names"):
        raise ValueError(f"mesh={shown(mesh)} is no mesh: make one with zero.make_mesh(data=...) or jax.sharding.Mesh")
    names = tuple(mesh.axis_names)
    if mesh.empty:
        raise ValueError("the mesh has no devices: make one with zero.make_mesh(data=...) or jax.sharding.Mesh")
    # XLA ends the process at these.
    odd = [name for name in names if isinstance(name, str) and ("\\" in name or not name.isascii())]
    if odd:
        raise ValueError(f"the mesh axis {odd[0]!r} has a name that XLA does not take: give it one of ASCII letters")
    by_role = {"data": data, "replica": replica, "model": model, "pipe": pipe}
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
    data, replica, model, pipe = (by_name[role] if axes is None else axes for role, axes in by_role.items())
    for name in (*data, *replica, *model, *pipe):
        _check_axis(mesh, name)
    if not data:
        raise ValueError(
            f"the mesh has axes {names} and none of them carries `data`: "
            "name one `data`, or say which with ZeroConfig(data_axes=(...,))"
        )
    return Axes(data=(*data, *pipe), replica=tuple(replica), model=tuple(model), pipe=tuple(pipe))


def _check_axis(mesh: Mesh, name: str) -> None:
    """Raises `ValueError` for an axis that the mesh does not have, or whose type is not Auto."""
    names = tuple(mesh.axis_names)
    if name not in names:
        hint = did_you_mean(name, names, "; did you mean {!r}?")
        raise ValueError(f"the mesh has axes {names} and none called {name!r}{hint}")
    if (axis_type := mesh.axis_types[names.index(name)]) != AxisType.Auto:
        why = "as jax.shard_map makes it within its function: call this outside of that, and"
        if axis_type == AxisType.Explicit:
            why = "which is the default of jax.make_mesh and of newer AbstractMeshes:"
        raise ValueError(
            f"the mesh axis {name!r} is of type {axis_type}, {why} make the mesh with zero.make_mesh, or with "
            "axis_types=(jax.sharding.AxisType.Auto, ...)"
        )


def are_names(axes: Any) -> bool:
    """Tells whether a value may be the name of a mesh axis, or the names of some."""
    names = [axes] if isinstance(axes, str) else axes
    return isinstance(names, Sequence) and bool(names) and all(isinstance(x, str) and x for x in names)


def secondary_axes(mesh: Mesh, axes: Axes, secondary: bool | Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of `data` that params are sharded over with a secondary shard; empty without one.

    `secondary` is True for those inside a slice or host, which the devices show, or their names.

    Raises:
      ValueError: no such axes, or all of `data`.
    """
    if secondary is False or (secondary is not True and not secondary):
        return ()
    sizes = {axis: mesh.shape[axis] for axis in axes.data}
    if secondary is True:
        fast = tuple(axis for axis in axes.data if axis not in slow_axes(mesh))
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
    domains = np.array(domains_of(list(mesh.devices.flat))).reshape(mesh.devices.shape)
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
    """Returns the sharding of a batch: its leading dim over `replica` and `data`.

    Example:
      >>> zero.batch_sharding(mesh).spec
      P(('replica', 'data'),)
    """
    if axes is not None and not isinstance(axes, Axes):
        raise ValueError(f"axes={shown(axes)}: leave it out, or give what `axes_of(mesh)` returns")
    return NamedSharding(mesh, PartitionSpec((axes or axes_of(mesh)).batch))


@contextlib.contextmanager
def on_mesh(mesh: Any, *, in_shard_map: bool = True) -> Iterator[None]:
    """Makes a mesh that of `jax.set_mesh` for what is called inside, if the user has set one, which may be another.

    Raises:
      ValueError: within a function that is traced for another mesh whose axes are Explicit: its arrays are typed so.
        Or within a `jax.shard_map`, where a device has arrays of its own, if that is not allowed (`in_shard_map`).
    """
    current = jax.sharding.get_abstract_mesh()
    if current.manual_axes and not in_shard_map:
        raise ValueError(
            "called within a jax.shard_map, where each device has a part of the batch, and what is called shards the "
            "whole by itself: call it outside, with the whole batch"
        )
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
    pipe: int = 1,
    devices: Iterable[Any] | None = None,
    topology: str | None = None,
    data_layout: Sequence[int] | None = None,
) -> Mesh:
    """Makes the mesh `replica` x `data` x `pipe` x `model`, in an order for the hardware; all axes have the Auto type.

    On a large torus, on several TPU slices and on a cluster of multi-GPU hosts, `data` is several mesh axes (`data_0`,
    `data_1`, ...), one per torus dim or level of the network, so that gathers and reduce-scatters go axis by axis.
    Otherwise it is the single axis `data`. The last of them is the one across slices or hosts. In the order of the
    devices it comes first, and so does such a `pipe`: XLA:TPU has native reduce-scatters inside slices whose devices
    are next to each other.

    Args:
      data: devices that ZeRO shards over, in each stage of a pipeline; None takes what the other axes leave.
      replica: copies of the sharded state (HSDP); 1 for plain ZeRO.
      model: size of the tensor-parallel axis.
      pipe: stages of the pipeline (docs/pipeline.md). They are in slices or hosts of their own where there are enough
        of these, else next to each other along the last dim of a torus. With 1 there is no axis `pipe`.
      devices: the devices; None takes all of `jax.devices()`.
      topology: name of hardware to compile for without having it, as in `v5p:2x2x4` or `h100:2x8`; excludes `devices`.
      data_layout: sizes of the mesh axes of `data`, major first; overrides the choice by the hardware. The last is the
        one across slices or hosts, where a copy of the state covers several.

    Raises:
      ValueError: sizes that do not multiply up to the devices, an unknown topology, or copies that straddle slices.

    Example:
      >>> dict(zero.make_mesh(data=4, model=2).shape)
      {'replica': 1, 'data': 4, 'model': 2}
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
    sizes = _sizes(
        data=data, replica=replica, model=model, pipe=pipe, num_devices=len(devices), is_planned=topology is not None
    )
    layout, grid = order_devices(devices, sizes, data_layout)
    data_names = ("data",) if len(layout) == 1 else tuple(f"data_{i}" for i in range(len(layout)))
    names = ("replica", *data_names, "pipe", "model")
    if pipe == 1:
        names, grid = ("replica", *data_names, "model"), grid.squeeze(-2)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    slow = slow_axes(mesh)
    # Across slices or hosts first: devices of one are then next to each other in the order of the mesh.
    order = [name for name in ("pipe", "replica", *data_names) if name in slow or name == "replica"]
    order += [name for name in names if name not in order]
    return Mesh(grid.transpose([names.index(name) for name in order]), order, axis_types=mesh.axis_types)


def _sizes(*, data: int | None, num_devices: int, is_planned: bool, **others: int) -> dict[str, int]:
    for name, size in (*others.items(), ("data", 1 if data is None else data)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(f"make_mesh: {name}={size!r} must be a positive integer")
    replica, model, pipe = (others[name] for name in ("replica", "model", "pipe"))
    stages = f" x pipe={pipe}" if pipe > 1 else ""
    if data is None:
        if num_devices % (replica * model * pipe):
            raise ValueError(
                f"make_mesh: replica={replica} x model={model}{stages} does not divide the {num_devices} devices: "
                f"change one of them, or {'the topology' if is_planned else 'pass `devices=` with the devices to use'}"
            )
        data = num_devices // (replica * model * pipe)
    num_used = replica * data * model * pipe
    if num_used != num_devices:
        remedy = f"pass `devices=jax.devices()[:{num_used}]`"
        if is_planned:
            remedy = "change the topology"
        elif num_used > num_devices:
            remedy = f"simulate more to try it (JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={num_used})"
        raise ValueError(
            f"make_mesh: replica={replica} x data={data} x model={model}{stages} is {num_used} devices, but "
            f"there are {num_devices}: leave out `data` to use them all, or {remedy}"
        )
    return {"replica": replica, "data": data, "model": model, "pipe": pipe}
