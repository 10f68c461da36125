"""Compares the memory of a device, measured on a program or on live arrays, with an estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.analysis.memory.arrays import ArraysReport
from zero_jax.analysis.memory.measured import MemoryReport
from zero_jax.core.text_tables import Report, aligned, format_bytes, plain

_FLOATS = ("f", "bf", "c")


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
        """Formats the rows as a table."""
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
    for group in dict.fromkeys([*estimate, *sizes]):
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
