"""Where an attention runs: the mesh that it is traced for, and the roles of the mesh's axes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zero_jax.sharding.chains import split_axes
from zero_jax.sharding.mesh import Axes, axes_of, axis_size

# The dim of heads by the number of dims: of `[B, T, N, H]` and `[B, N, T]`; segments and lengths have none.
_HEADS = {4: 2, 3: 1}

# A part of the keys of JAX's own caches: a jitted function within a loss is traced again for another mesh.
_context = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def mesh_context(mesh: Mesh, axes: Axes | None = None) -> Iterator[None]:
    """Makes a mesh that of the attention in what is traced inside; `axes` are its roles, if not by their names."""
    with _context((mesh, axes)):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPlacement:
    """The devices of an attention."""

    platform: str  # of the devices, as JAX calls it: `cpu`, `gpu`, `cuda`, `tpu`
    mesh: Mesh | None = None  # the mesh; None for a single device
    batch: tuple[str, ...] = ()  # the mesh axes that the batch may be sharded over, major first
    heads: tuple[str, ...] = ()  # the mesh axes that heads may be sharded over
    unknown: str = ""  # why the sharding of an attention over these devices is not known; empty if it is
    compute_capability: str = ""  # of NVIDIA GPUs, such as `9.0`; empty where it is not known

    @property
    def num_head_shards(self) -> int:
        """The number of devices that heads are sharded over."""
        return 1 if self.mesh is None else axis_size(self.mesh, self.heads)

    def mapped_over(self, axes: tuple[str, ...]) -> KernelPlacement:
        """Returns the devices of a batch whose major part is a dim that `jax.vmap` has sharded over these mesh axes."""
        rest = lambda own: tuple(axis for axis in own if axis not in axes)  # noqa: E731
        return dataclasses.replace(self, batch=(*axes, *rest(self.batch)), heads=rest(self.heads))

    def axes_of(self, batch_size: int, num_heads: Sequence[int], free: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes of the batch and of the heads, of those that are `free` and divide."""
        assert self.mesh is not None
        batch: tuple[str, ...] = ()
        for axis in self.batch:
            if axis in free and batch_size % (axis_size(self.mesh, batch) * self.mesh.shape[axis]) == 0:
                batch = (*batch, axis)
        heads = tuple(axis for axis in self.heads if axis in free)
        divide = all(n % axis_size(self.mesh, heads) == 0 for n in num_heads)
        return {"batch": batch, "heads": heads if divide else ()}


def current_placement(mesh: Mesh | None = None) -> KernelPlacement:
    """Returns the placement on `mesh`, else of `mesh_context`, else on the mesh of `jax.set_mesh`, else one device."""
    axes = None
    if mesh is None and _context.value is not None:
        mesh, axes = _context.value
    if mesh is None:
        internals = importlib.import_module("jax._src.mesh")
        current = internals.get_concrete_mesh()  # `jax.sharding.get_mesh`, but in a trace
        mesh = None if current is None or current.empty else current
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    if mesh is None:
        platform = jax.default_backend()
        is_clear = jax.device_count() == 1 or platform == "cpu"  # what Pallas interprets XLA may shard
        unknown = "" if is_clear else "there are several devices and no mesh: give mesh=, or jax.set_mesh"
        return KernelPlacement(platform=platform, unknown=unknown, compute_capability=capability)
    alone = KernelPlacement(platform=device.platform, compute_capability=capability)
    if mesh.size == 1:
        return alone
    try:
        axes = axes or axes_of(mesh)
    except ValueError as error:
        return dataclasses.replace(alone, mesh=mesh, unknown=str(error))
    return dataclasses.replace(alone, mesh=mesh, batch=axes.batch, heads=axes.model)


def on_shards(
    function: Callable[..., Any], placement: KernelPlacement, manual: frozenset[str], *operands: jax.Array
) -> list[jax.Array]:
    """Calls a function of `[B, T, N, H]` and `[B, S, K, H]` on every device, on its examples and heads.

    The leading dim of its results is the batch, and those of 3 and 4 dims have heads (`_HEADS`). `manual` are the mesh
    axes of outer `shard_map`s, over which the operands are shards already.
    """
    mesh = placement.mesh
    if mesh is None or manual >= set(mesh.axis_names):
        return list(function(*operands))
    query, key, *_ = operands
    axes = placement.axes_of(query.shape[0], [query.shape[2], key.shape[2]], frozenset(mesh.axis_names) - manual)
    if manual:  # the mesh of an outer `shard_map` may have axes split along the torus
        _, parts = split_axes(mesh, mesh.axis_names)
        mesh = jax.sharding.get_abstract_mesh()
        names = {axis: (axis,) if axis in mesh.axis_names else parts[axis] for axis in parts}
        axes = {role: tuple(name for axis in own for name in names[axis]) for role, own in axes.items()}

    def spec(x: Any) -> PartitionSpec:
        roles = {0: axes["batch"], _HEADS.get(x.ndim): axes["heads"]}
        return PartitionSpec(*(roles.get(dim) for dim in range(x.ndim)))

    results = jax.eval_shape(function, *operands)
    mapped = jax.shard_map(
        lambda *xs: list(function(*xs)),
        mesh=mesh,
        in_specs=tuple(map(spec, operands)),
        out_specs=[*map(spec, results)],
        axis_names=frozenset(mesh.axis_names) - manual,
        check_vma=False,
    )
    return mapped(*operands)
