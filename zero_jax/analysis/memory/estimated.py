"""Estimates the memory of a train step by formula: the bytes of each device, group by group, leaf by leaf.

Nothing is compiled. The bytes of params, master params and optimizer state are exact, because shapes, dtypes and
placements are those of the state itself; the paper's formula is reported with them, and what makes the difference.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero_jax.analysis.leaves import STATE_GROUPS
from zero_jax.analysis.memory.residuals import TransformerResiduals
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.dims import is_float
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import wide
from zero_jax.sharding.rules import to_shardings
from zero_jax.training import (
    LossTrace,
    Placement,
    TrainState,
    ZeroConfig,
    check_is_state,
    make_placement,
    state_shardings,
    used_by_optimizer,
)

_SHOWN_LEAVES = 5
_ORDER = ("params", "master", "grads", "opt_state", "model_state", "grad_errors", "other", "residuals")
_ON_HOST = "in host memory"
_BY_TRACE = "by the trace of the loss: what is saved besides the blocks' inputs, such as logits, and how it is sharded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A reason why a group is not what the formula says."""

    group: str  # the group
    device_bytes: float  # bytes on each device more than by the formula, negative if less
    reason: str  # why


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatedLeaf:
    """The bytes of a leaf, of a device's part of it, and in the formula (`narrow_bytes`), if that counts it."""

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


def formula_ways(placement: Placement, *, is_sharded: bool) -> int:
    """Returns the devices that a group is sharded over by the formula: the model's own, and those of `data`."""
    mesh, axes = placement.mesh, placement.axes
    return axes.size_beside_batch(mesh) * (axis_size(mesh, axes.data) if is_sharded else 1)


def state_groups(state: TrainState, *, mesh: Mesh, config: ZeroConfig) -> dict[str, Group]:
    """Returns the groups of a state; what is neither variables nor optimizer state is `other`."""
    placement = make_placement(state.variables, mesh=mesh, config=config)
    shardings = state_shardings(state, mesh=mesh, config=config)
    names = [field.name for field in dataclasses.fields(state)]
    trees = {name: (getattr(state, name), getattr(shardings, name)) for name in names}
    groups = {name: trees.pop(name) for name in STATE_GROUPS}
    groups["other"] = ({name: x for name, (x, _) in trees.items()}, {name: s for name, (_, s) in trees.items()})
    # K counts what grows with the model: neither an optimizer's scalars, nor arrays without gradients.
    counts = {"opt_state": lambda x: x.ndim > 0, "other": lambda _: False}
    model = placement.axes.size_beside_batch(mesh)
    # Each device has its own quantization error, of the part of the gradient that it sends.
    over = lambda name: placement.axes.batch if name == "grad_errors" else placement.axes_of_group(name)  # noqa: E731
    return {
        name: Group(
            leaves=_leaves(name, tree, placed, counted=counts.get(name, is_float)),
            ways=axis_size(mesh, over(name)) * (1 if name == "other" else model),
        )
        for name, (tree, placed) in groups.items()
    }


def secondary_bytes(groups: dict[str, Group], state: TrainState, *, mesh: Mesh, config: ZeroConfig) -> float:
    """Returns the bytes per device that a secondary shard of params and model state costs; 0 without one."""
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
    """Returns the gradients, or the sums of microbatches, that are alive at the end of the backward pass."""
    summed, compute = config.num_microbatches > 1, placement.precision.compute
    # With one microbatch each gradient is reduced to the optimizer's shard as soon as it is computed.
    is_sharded = "grads" in placement.groups or (not summed and "master" in placement.groups)
    over = placement.axes.data if is_sharded else ()
    shardings = to_shardings(placement.params, mesh=placement.mesh, axes=placement.axes, over=over)
    params = zip(leaf_names(state.params), jax.tree.leaves(state.params), jax.tree.leaves(shardings), strict=True)
    leaves = []
    for path, x, sharding in params:
        if not is_float(x):
            continue
        # The dtype in which the loss sees the param.
        narrow = jnp.dtype(compute if compute is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
        leaves.append(_leaf("grads", path, x, sharding, dtype=wide(narrow) if summed else narrow, narrow=narrow))
    flagged = list(zip(leaves, needed, strict=True))
    return Group(
        leaves=tuple(leaf for leaf, is_needed in flagged if is_needed),
        skipped=tuple(leaf for leaf, is_needed in flagged if not is_needed),
        ways=formula_ways(placement, is_sharded=is_sharded),
    )


def _of_uneven(group: Group) -> Iterator[tuple[str, float]]:
    """Explains a group by the leaves that are not fully sharded, and by those that the formula does not count."""
    extra = [(x.path, x.device_bytes - x.num_bytes / group.ways) for x in group.counted]
    extra = sorted(extra, key=lambda item: -abs(item[1]))
    larger, smaller = [x for x in extra if x[1] > 0], [x for x in extra if x[1] < 0]
    few, many = f"unsharded, or not cut {group.ways} ways", f"cut more than {group.ways} ways, as layers over pipe"
    for how, leaves in ((few, larger), (many, smaller)):
        more = f" and {len(leaves) - _SHOWN_LEAVES} more" if len(leaves) > _SHOWN_LEAVES else ""
        shown = ", ".join(path for path, _ in leaves[:_SHOWN_LEAVES])
        yield f"{len(leaves)} leaves {how}: {shown}{more}", sum(x for _, x in leaves)
    uncounted = sum(x.device_bytes for x in group.leaves if not x.counted)
    yield "counters, keys and other leaves that are no parameters or moments of them", uncounted


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEstimate:
    """One group on one device."""

    # `params`, `master`, `grads`, `opt_state`, `model_state` and `grad_errors` (where there are any), `other`
    # (counters, keys, the loss scale) or `residuals`.
    name: str
    device_bytes: float  # bytes by the leaves of the state
    # Bytes by the paper's formula; of model state, which it does not have, by the rule for params, and of the errors of
    # quantized gradients 4 bytes a param, sharded as the gradients that are sent.
    formula_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Report):
    """Bytes per device of a train step, by formula; prints as a table.

    Attributes:
      groups: the groups, as the state holds them.
      differences: what makes each group differ from the formula; their sum is the difference of the totals.
      whole: leaves of sharded groups that are not fully sharded, largest first.
      num_params: parameters that gradients are taken for (psi).
      num_devices: devices of the `data` axes (N_d).
      model: devices of the axes that are neither `data` nor `replica`.
      sharded: the groups that the stage shards.
      param_bytes: bytes a parameter of the params that the loss sees.
      grad_bytes: bytes a parameter of their gradients.
      optimizer_bytes: bytes a parameter of master params and optimizer state (the paper's K), from the state.
      host_bytes: bytes in host memory for each device.
      secondary_bytes: bytes per device that the secondary shard costs, of params and model state; 0 without one.

    Example:
      >>> [group.name for group in zero.memory.estimate(state, mesh=mesh, config=config).groups]
      ['params', 'master', 'grads', 'opt_state', 'other']
    """

    groups: tuple[GroupEstimate, ...]
    differences: tuple[Difference, ...]
    whole: tuple[EstimatedLeaf, ...]
    num_params: int
    num_devices: int
    model: int
    sharded: tuple[str, ...]
    param_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    host_bytes: float
    secondary_bytes: float = 0.0

    @property
    def by_group(self) -> dict[str, float]:
        """Bytes per device by the name of the group."""
        return {group.name: group.device_bytes for group in self.groups}

    @property
    def total_bytes(self) -> float:
        """Bytes per device of all groups; other temporaries, such as gathered params and logits, are not among them."""
        return sum(group.device_bytes for group in self.groups)

    @property
    def state_bytes(self) -> float:
        """Bytes per device of the train state, which stay from step to step."""
        return sum(self.by_group.get(name, 0) for name in (*STATE_GROUPS, "other"))

    @property
    def formula_bytes(self) -> float:
        """Bytes per device of all groups by the paper's formula."""
        return sum(group.formula_bytes for group in self.groups)

    def __str__(self) -> str:
        over = f" over {self.num_devices} devices" + (f" x {self.model} of the model" if self.model > 1 else "")
        lines = [
            f"{self.num_params:,} params of {self.param_bytes:.4g} bytes, gradients of {self.grad_bytes:.4g}, "
            f"K = {self.optimizer_bytes:.4g} (master params and optimizer state)",
            f"sharded{over}: {', '.join(self.sharded) or 'nothing'}",
        ]
        table: list[tuple[str, ...]] = [("bytes per device", "estimate", "formula", "difference")]
        total = GroupEstimate(name="total", device_bytes=self.total_bytes, formula_bytes=self.formula_bytes)
        for group in (*self.groups, total):
            sizes = map(format_bytes, (group.device_bytes, group.formula_bytes))
            table.append((group.name, *sizes, _signed(group.device_bytes - group.formula_bytes)))
        lines.append(f"{aligned(table, right=(1, 2, 3))}  without gathered params and other temporaries of a program")
        for difference in self.differences:
            if abs(difference.device_bytes) >= total.device_bytes / 1e5:  # less is a counter
                lines.append(f"  {difference.group}: {_signed(difference.device_bytes)}: {difference.reason}")
        if self.secondary_bytes:
            lines.append(f"of it for the secondary shard: {format_bytes(self.secondary_bytes)}")
        if self.host_bytes:
            lines.append(f"in host memory: {format_bytes(self.host_bytes)}")
        if 2 * sum(leaf.device_bytes for leaf in self.whole if leaf.group != "grads") > self.state_bytes:
            lines.append(
                "warning: unsharded leaves take more than half of the state; see zero.sharding_report for the reasons"
            )
        return "\n".join(lines)


def estimate(
    state: TrainState,
    *,
    mesh: Mesh,
    config: ZeroConfig,
    residuals: TransformerResiduals | None = None,
    traced: LossTrace | None = None,
    tx: optax.GradientTransformation | None = None,
) -> MemoryEstimate:
    """Estimates the bytes that each device holds in a train step.

    Gathered params, logits and other temporaries are not counted; `zero.memory.measure` has them.

    Args:
      state: the state, or its shapes from `zero.abstract_state`.
      mesh: the mesh.
      config: the config that the state was made with.
      residuals: what the model keeps for the backward pass, by the paper's formula.
      traced: the same from a trace of the loss function (`zero.trace_loss`), for any model. Without either the group is
        left out.
      tx: the optimizer; with it, params that it freezes count without gradients.

    Raises:
      ValueError: something else than a `TrainState`.

    Example:
      >>> zero.memory.estimate(state, mesh=mesh, config=config).by_group["params"]
      4096
    """
    check_is_state(state, who="memory.estimate")
    check_arguments(residuals=residuals, traced=traced, **({} if tx is None else {"tx": tx}))
    placement = make_placement(state.params, mesh=mesh, config=config)
    groups = state_groups(state, mesh=mesh, config=config)
    needed, _ = used_by_optimizer(tx, state, mesh=mesh, config=config)
    groups["grads"] = grad_group(state, placement, config, needed)
    totals = _totals(groups, state, placement)
    formula = _formula(totals, groups, placement)
    actual, on_host = ({name: x.device_bytes(on_host=where) for name, x in groups.items()} for where in (False, True))
    differences = [*_differences(groups, formula, placement), *((x, _ON_HOST, -size) for x, size in on_host.items())]
    if saved := traced.residuals if traced else residuals:
        actual["residuals"] = saved.device_bytes
        formula["residuals"] = (residuals or saved).device_bytes
        differences.append(("residuals", _BY_TRACE, actual["residuals"] - formula["residuals"]))
    order = [name for name in _ORDER if name in formula or name == "other"]
    num_params = sum(x.size for x in jax.tree.leaves(state.params) if is_float(x))
    partly = [x for group in groups.values() for x in group.counted if x.device_bytes * group.ways > x.num_bytes]
    return MemoryEstimate(
        groups=tuple(GroupEstimate(name=x, device_bytes=actual[x], formula_bytes=formula.get(x, 0)) for x in order),
        differences=tuple(
            Difference(group=group, device_bytes=size, reason=reason) for group, reason, size in differences if size
        ),
        whole=tuple(sorted(partly, key=lambda leaf: -leaf.device_bytes)),
        num_params=num_params,
        num_devices=axis_size(mesh, placement.axes.data),
        model=placement.axes.size_beside_batch(mesh),
        sharded=tuple(name for name in order if name in placement.groups),
        **_per_param(totals, num_params),
        host_bytes=sum(on_host.values()) + (0 if saved is None else saved.host_bytes),
        secondary_bytes=secondary_bytes(groups, state, mesh=mesh, config=config),
    )


def _formula(totals: dict[str, int], groups: dict[str, Group], placement: Placement) -> dict[str, float]:
    """Returns the bytes of the paper's groups on a device, and of those that it has not as if all were sharded."""
    paper = {x: size / formula_ways(placement, is_sharded=x in placement.groups) for x, size in totals.items()}
    even = {name: groups[name].even_bytes for name in ("model_state", "grad_errors") if groups[name].leaves}
    return paper | even


def _per_param(totals: dict[str, int], num_params: int) -> dict[str, float]:
    """Returns the bytes of a param in the paper's groups, by the fields of the estimate."""
    sizes = {"param": totals["params"], "grad": totals["grads"], "optimizer": totals["master"] + totals["opt_state"]}
    return {f"{name}_bytes": size / max(num_params, 1) for name, size in sizes.items()}


def _totals(groups: dict[str, Group], state: TrainState, placement: Placement) -> dict[str, int]:
    """Returns the bytes of the paper's groups, unsharded: low-precision params count also where none are stored."""
    totals = {name: sum(x.num_bytes for x in groups[name].counted) for name in ("params", "master", "opt_state")}
    totals["grads"] = sum(x.narrow_bytes for x in (*groups["grads"].leaves, *groups["grads"].skipped))
    if placement.precision.has_master and not placement.keeps_copy:
        low = placement.precision.param or placement.precision.compute
        dtype_of = lambda x: jnp.dtype(low if low and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)  # noqa: E731
        params = [x for x in jax.tree.leaves(state.params) if is_float(x)]
        totals |= {"params": sum(x.size * dtype_of(x).itemsize for x in params), "master": totals["params"]}
    return totals


def _differences(
    groups: dict[str, Group], formula: dict[str, float], placement: Placement
) -> Iterator[tuple[str, str, float]]:
    """Explains what the groups have over the formula, in whatever memory they are: group, reason and bytes."""
    grads, ways = groups["grads"], formula_ways(placement, is_sharded="grads" in placement.groups)
    narrow, wide = (sum(getattr(x, f"{name}_bytes") for x in grads.leaves) for name in ("narrow", "num"))
    frozen, early = sum(x.narrow_bytes for x in grads.skipped), narrow / grads.ways - narrow / ways
    yield "grads", "the optimizer freezes these params, so their gradients are not taken", -frozen / ways
    yield "grads", "with one microbatch, each gradient is reduced to a shard as soon as it is made", early
    yield "grads", "several microbatches are summed in float32", (wide - narrow) / grads.ways
    if placement.precision.has_master and not placement.keeps_copy:  # it is cast at each use, before the gather
        yield "params", "no low-precision copy is stored between steps", -formula["params"]
        yield "params", "the params are the master params", formula["master"]
        yield "master", "stored as the params", -formula["master"]
    if placement.axes.secondary:  # the formula shards over all of `data`
        sizes = [axis_size(placement.mesh, axes) for axes in (placement.axes.secondary, placement.axes.data)]
        reason = "the secondary shard: over the {} devices of a slice or host, not over {}".format(*sizes)
        yield "params", reason, groups["params"].even_bytes - formula["params"]
    for name, group in groups.items():
        yield from ((name, *difference) for difference in _of_uneven(group))


def _signed(num_bytes: float) -> str:
    return ("+" if num_bytes > 0 else "") + format_bytes(num_bytes)
