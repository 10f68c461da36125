"""Measures the memory of live arrays, by device and group of the train state, and compares measured with estimated."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.analysis.leaves import (
    GROUPS,
    ArgumentLeaf,
    group_of,
    host_memory_kind,
    sum_by_group,
    unsharded_leaves,
    unsharded_warning,
)
from zero_jax.analysis.memory.measured import MemoryReport
from zero_jax.core.text_tables import Report, aligned, format_bytes, plain
from zero_jax.core.tree import PyTree, key_numbers, path_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraysReport(Report):
    """Bytes of live arrays per device; prints as a table. It knows the devices of this process alone.

    Attributes:
      groups: Bytes by group, on the device that holds most of the group.
      per_device: Bytes by device and group.
      host: Bytes in host memory by group, on the device that has most of them there.
      leaves: The leaves, with the most bytes that a device holds of each.
      left_whole: Unsharded leaves of groups of the state that are otherwise sharded.
      warnings: What should be looked at.

    Example:
      >>> sorted(zero.memory.measure_arrays(state).groups)
      ['opt_state', 'other', 'params']
    """

    groups: Mapping[str, int]
    per_device: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]
    leaves: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    left_whole: tuple[ArgumentLeaf, ...] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """The bytes on the device that holds most."""
        return max((sum(groups.values()) for groups in self.per_device.values()), default=0)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("bytes per device", "most", "least", "host", "")]
        for group in GROUPS:
            sizes = [groups.get(group, 0) for groups in self.per_device.values()]
            if any(sizes) or group in self.host:
                figures = (max(sizes, default=0), min(sizes, default=0), self.host.get(group, 0))
                rows.append((f"  {group}", *map(format_bytes, figures), ""))
        totals = [sum(groups.values()) for groups in self.per_device.values()]
        figures = (max(totals, default=0), min(totals, default=0), sum(self.host.values()))
        rows.append(("total", *map(format_bytes, figures), f"on {len(totals)} devices"))
        lines = [aligned(rows, right=(1, 2, 3))]
        if self.left_whole:
            unsharded_bytes = sum(leaf.num_bytes for leaf in self.left_whole)
            lines.append(f"{len(self.left_whole)} unsharded leaves, {format_bytes(unsharded_bytes)}")
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])


def measure_arrays(tree: PyTree) -> ArraysReport:
    """Adds up what each device of this process holds of the arrays of a tree.

    Args:
      tree: A `TrainState` or any pytree; leaves that are no `jax.Array` take no memory of a device. The group of a leaf
        is the first component of its path that is `params`, `master`, `opt_state`, `model_state`, `grad_errors` or
        `batch`.

    Raises:
      ValueError: An array that was donated and is gone.

    Example:
      >>> zero.memory.measure_arrays(state).groups["params"]  # of 32,768 bytes, on each of 8 devices
      4096
    """
    per_device: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array):
            continue
        name = path_name(path)
        if leaf.is_deleted():
            raise ValueError(f"{name} was donated to a step and is gone: measure the state that the step returned")
        data = key_numbers(leaf)  # a PRNG key has no bytes by itself
        group = group_of(name)
        on_host = host_memory_kind(data.sharding) is not None
        by_device: collections.Counter = collections.Counter()
        for shard in data.addressable_shards:
            by_device[str(shard.device)] += shard.data.nbytes
            per_device[str(shard.device)][group] += 0 if on_host else shard.data.nbytes
        most = max(by_device.values(), default=0)
        leaves.append(
            ArgumentLeaf(
                path=name,
                group=group,
                dtype=str(leaf.dtype),
                dims=tuple(data.sharding.shard_shape(data.shape)),
                num_bytes=most,
                unpadded_bytes=most,
                # On a single device nothing can be sharded, so that an unsharded leaf is worth no warning.
                whole_dims=tuple(data.shape) if len(data.sharding.device_set) > 1 else None,
                on_host=on_host,
            )
        )
    on_devices = [leaf for leaf in leaves if not leaf.on_host]
    unsharded = unsharded_leaves(on_devices)
    warning = unsharded_warning(on_devices, unsharded)
    return ArraysReport(
        groups=sum_by_group(on_devices),
        # `+` leaves out the groups of 0 bytes, which are on the host.
        per_device={device: dict(+groups) for device, groups in sorted(per_device.items())},
        host=sum_by_group(leaf for leaf in leaves if leaf.on_host),
        leaves=tuple(leaves),
        left_whole=unsharded,
        warnings=(warning,) if warning else (),
    )


_FLOATS = ("f", "bf", "c")  # what the dtypes begin with that a formula in parameters counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A group as estimated and as measured; a missing figure is None.

    Example:
      >>> row = zero.memory.ComparisonRow(group="params", estimated_bytes=1e6, measured_bytes=1.1e6, explanation="")
      >>> row.difference_bytes
      100000.0
    """

    group: str
    estimated_bytes: float | None
    measured_bytes: int | None
    explanation: str

    @property
    def difference_bytes(self) -> float | None:
        """Measured less estimated."""
        if self.estimated_bytes is None or self.measured_bytes is None:
            return None
        return self.measured_bytes - self.estimated_bytes

    @property
    def difference(self) -> float | None:
        """The difference as a part of the estimate."""
        if self.difference_bytes is None or not self.estimated_bytes:
            return None
        return self.difference_bytes / self.estimated_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryComparison(Report):
    """Estimate and measurement side by side, in bytes per device; prints as a table.

    Example:
      >>> estimated = zero.memory.estimate(state, mesh=mesh, config=config)
      >>> compared = zero.memory.compare(estimated.by_group, zero.memory.measure_arrays(state))
      >>> compared.rows[0].group
      'params'
    """

    rows: tuple[ComparisonRow, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the rows as plain values."""
        return plain(self.rows)

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("bytes per device", "estimate", "measured", "difference", "", "of which")]
        for row in self.rows:
            figures = (row.estimated_bytes, row.measured_bytes, row.difference_bytes)
            share = "" if row.difference is None else f"{100 * row.difference:+.1f}%"
            cells = ("-" if figure is None else format_bytes(figure) for figure in figures)
            table.append((row.group, *cells, share, row.explanation))
        return aligned(table, right=range(1, 5))


def compare(estimate: Mapping[str, float], measured: MemoryReport | ArraysReport) -> MemoryComparison:
    """Compares an estimate with what was measured, group by group, and explains the differences.

    Args:
      estimate: Bytes per device by group: `params`, `master`, `opt_state`, `grads`, `residuals` and so on.
      measured: What `measure` or `measure_arrays` returned.

    Example:
      >>> estimated = zero.memory.estimate(state, mesh=mesh, config=config)
      >>> compared = zero.memory.compare(estimated.by_group, zero.memory.measure_arrays(state))
      >>> next(row.difference_bytes for row in compared.rows if row.group == "params")
      0
    """
    is_program = isinstance(measured, MemoryReport)
    sizes = {**measured.arguments, **measured.temporaries} if is_program else measured.groups
    rows = []
    for group in dict.fromkeys([*estimate, *sizes]):  # those of the estimate first, each once
        both = {"estimated_bytes": estimate.get(group), "measured_bytes": sizes.get(group)}
        rows.append(ComparisonRow(group=group, explanation=_explanation(group, measured), **both))
    return MemoryComparison(rows=tuple(rows))


def _explanation(group: str, measured: MemoryReport | ArraysReport) -> str:
    """Returns what a group has that a formula in parameters leaves out."""
    leaves = [leaf for leaf in measured.leaves if leaf.group == group and not leaf.on_host]
    numbers = [leaf for leaf in leaves if group != "batch" and not leaf.dtype.startswith(_FLOATS)]
    padding = sum(leaf.num_bytes - leaf.unpadded_bytes for leaf in leaves)
    unsharded = sum(leaf.num_bytes for leaf in measured.left_whole if leaf.group == group)
    parts = [
        (padding, "padding to tiles"),
        (unsharded, "unsharded leaves"),
        (sum(leaf.unpadded_bytes for leaf in numbers), "integers, counters and keys"),
    ]
    reasons = [f"{format_bytes(num_bytes)} {reason}" for num_bytes, reason in parts if num_bytes]
    if isinstance(measured, MemoryReport) and group in measured.temporaries:
        reasons.append(f"alive at the peak, in the {measured.peak_phase} pass")
    return ", ".join(reasons)
