"""Bytes of the groups of a train step on one device, leaf by leaf: those of the state, and the gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.rules import to_shardings
from zero_jax.training import Placement, TrainState, ZeroConfig, make_placement, state_shardings

_FIELDS = dataclasses.fields(TrainState)
_SHOWN_LEAVES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A reason why a group is not what the formula says."""

    group: str  # the group
    device_bytes: float  # bytes on each device more than by the formula, negative if less
    reason: str  # why


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatedLeaf:
    """The bytes of a leaf; `counted` if the formula has it, `narrow_bytes` its bytes in the formula.

    `device_bytes` are those of a device's part, which may be in host memory (`on_host`).
    """

    group: str
    path: str
    num_bytes: int
    narrow_bytes: int
    device_bytes: int
    counted: bool = True
    on_host: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The leaves of a group and the number of shards that each is meant to have."""

    leaves: tuple[EstimatedLeaf, ...]
    ways: int
    skipped: tuple[EstimatedLeaf, ...] = ()  # gradients that are not taken

    @property
    def counted(self) -> list[EstimatedLeaf]:
        """The leaves that the formula has."""
        return [leaf for leaf in self.leaves if leaf.counted]

    @property
    def even_bytes(self) -> float:
        """The bytes per device of these if all of them were fully sharded."""
        return sum(leaf.num_bytes for leaf in self.counted) / self.ways

    def device_bytes(self, *, on_host: bool = False) -> float:
        """Returns the bytes per device, in the memory of the device or of the host."""
        return sum(leaf.device_bytes for leaf in self.leaves if leaf.on_host is on_host)


def data_and_model_sizes(placement: Placement) -> tuple[int, int]:
    """Returns the devices of the `data` axes, and those of the model's own."""
    mesh, axes = placement.mesh, placement.axes
    return axis_size(mesh, axes.data), axes.size_beside_batch(mesh)


def is_inexact(x: Any) -> bool:
    """Returns whether an array is of a dtype that gradients are taken for."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def state_groups(state: TrainState, *, mesh: Mesh, config: ZeroConfig) -> dict[str, Group]:
    """Returns the groups of a state; what is neither variables nor optimizer state is `other`."""
    placement = make_placement(state.variables, mesh=mesh, config=config)
    shardings = state_shardings(state, mesh=mesh, config=config)
    trees = {field.name: (getattr(state, field.name), getattr(shardings, field.name)) for field in _FIELDS}
    groups = {name: trees.pop(name) for name in ("params", "master", "opt_state", "model_state", "grad_errors")}
    groups["other"] = ({name: x for name, (x, _) in trees.items()}, {name: s for name, (_, s) in trees.items()})
    # K counts what grows with the model: neither an optimizer's scalars, nor arrays without gradients.
    counts = {"opt_state": lambda x: x.ndim > 0, "other": lambda _: False}
    _, model = data_and_model_sizes(placement)
    # Each device has its own quantization error, of the part of the gradient that it sends.
    over = lambda name: placement.axes.batch if name == "grad_errors" else placement.axes_of_group(name)  # noqa: E731
    return {
        name: Group(
            leaves=_leaves(name, tree, placed, counted=counts.get(name, is_inexact)),
            ways=axis_size(mesh, over(name)) * (1 if name == "other" else model),
        )
        for name, (tree, placed) in groups.items()
    }


def secondary_bytes(groups: dict[str, Group], state: TrainState, *, mesh: Mesh, config: ZeroConfig) -> float:
    """Returns the bytes per device that a secondary shard of params and model state costs; 0 without one.

    Without it, params beside master params would not be stored, and other params would be sharded over all of `data`.
    """
    if not config.secondary:
        return 0.0
    without = state_groups(state, mesh=mesh, config=dataclasses.replace(config, secondary=False))
    copied = ("model_state",) if state.master is not None else ("params", "model_state")
    size_of = lambda groups, names: sum(x.device_bytes for name in names for x in groups[name].leaves)  # noqa: E731
    return float(size_of(groups, ("params", "model_state")) - size_of(without, copied))


def _leaves(
    group: str, tree: PyTree, shardings: PyTree, *, counted: Callable[[Any], bool]
) -> tuple[EstimatedLeaf, ...]:
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return tuple(
        _leaf(group, path, x, sharding, counted=counted(x), on_host=sharding.memory_kind == "pinned_host")
        for path, x, sharding in leaves
    )


def _leaf(
    group: str, path: str, x: Any, sharding: Any, *, dtype: Any = None, narrow: Any = None, **flags: bool
) -> EstimatedLeaf:
    """Returns the bytes of a leaf in a dtype and in the narrower one of the formula; the default is its own dtype."""
    item_bytes, narrow_item_bytes = ((leaf_dtype or x.dtype).itemsize for leaf_dtype in (dtype, narrow))
    return EstimatedLeaf(
        group=group,
        path=path,
        num_bytes=x.size * item_bytes,
        narrow_bytes=x.size * narrow_item_bytes,
        device_bytes=math.prod(sharding.shard_shape(x.shape)) * item_bytes,
        **flags,
    )


def grad_group(state: TrainState, placement: Placement, config: ZeroConfig, needed: list[bool]) -> Group:
    """Returns the gradients that are alive at the end of the backward pass.

    Several microbatches are summed in float32, sharded over `data` where gradients are, else unsharded on each
    of its devices.
    """
    num_devices, model = data_and_model_sizes(placement)
    summed, compute = config.num_microbatches > 1, placement.precision.compute
    # With one microbatch each gradient is reduced to the optimizer's shard as soon as it is computed.
    is_sharded = "grads" in placement.groups or (not summed and "master" in placement.groups)
    over = placement.axes.data if is_sharded else ()
    shardings = to_shardings(placement.params, mesh=placement.mesh, axes=placement.axes, over=over)
    params = zip(leaf_names(state.params), jax.tree.leaves(state.params), jax.tree.leaves(shardings), strict=True)
    leaves = []
    for path, x, sharding in params:
        if not is_inexact(x):
            continue
        # The dtype in which the loss sees the param.
        narrow = jnp.dtype(compute if compute is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
        leaves.append(_leaf("grads", path, x, sharding, dtype=wide(narrow) if summed else narrow, narrow=narrow))
    flagged = list(zip(leaves, needed, strict=True))
    return Group(
        leaves=tuple(leaf for leaf, is_needed in flagged if is_needed),
        skipped=tuple(leaf for leaf, is_needed in flagged if not is_needed),
        ways=model * (num_devices if is_sharded else 1),
    )


def grad_differences(grads: Group, placement: Placement) -> list[Difference]:
    """Explains gradients that differ from the formula."""
    num_devices, model = data_and_model_sizes(placement)
    ways = model * (num_devices if "grads" in placement.groups else 1)
    narrow = sum(x.narrow_bytes for x in grads.leaves)
    wide = sum(x.num_bytes for x in grads.leaves)
    frozen = sum(x.narrow_bytes for x in grads.skipped)
    early = narrow / grads.ways - narrow / ways
    reasons = {
        "the optimizer freezes these params, so their gradients are not taken": -frozen / ways,
        "with one microbatch, each gradient is reduced to a shard as soon as it is made": early,
        "several microbatches are summed in float32": (wide - narrow) / grads.ways,
    }
    return [Difference(group="grads", device_bytes=size, reason=reason) for reason, size in reasons.items()]


def uneven_differences(name: str, group: Group) -> list[Difference]:
    """Explains a group by the leaves that are not fully sharded, and by those that the formula does not count."""
    extra = [(x.path, x.device_bytes - x.num_bytes / group.ways) for x in group.counted]
    extra = sorted(extra, key=lambda item: -abs(item[1]))
    larger, smaller = [x for x in extra if x[1] > 0], [x for x in extra if x[1] < 0]
    uncounted = sum(x.device_bytes for x in group.leaves if not x.counted)
    reasons = {
        f"{len(larger)} leaves unsharded, or not cut {group.ways} ways: {_paths(larger)}": sum(x for _, x in larger),
        f"{len(smaller)} leaves cut more than {group.ways} ways, as layers over pipe: {_paths(smaller)}": sum(
            x for _, x in smaller
        ),
        "counters, keys and other leaves that are no parameters or moments of them": uncounted,
    }
    return [Difference(group=name, device_bytes=size, reason=reason) for reason, size in reasons.items()]


def _paths(leaves: Sequence[tuple[str, float]]) -> str:
    """Returns the paths of the first of some leaves, and how many others there are."""
    more = f" and {len(leaves) - _SHOWN_LEAVES} more" if len(leaves) > _SHOWN_LEAVES else ""
    return ", ".join(path for path, _ in leaves[:_SHOWN_LEAVES]) + more


def whole_leaves(groups: dict[str, Group]) -> tuple[EstimatedLeaf, ...]:
    """Returns the leaves of sharded groups that are not fully sharded, largest first."""
    leaves = [x for group in groups.values() for x in group.counted if x.device_bytes * group.ways > x.num_bytes]
    return tuple(sorted(leaves, key=lambda leaf: -leaf.device_bytes))
