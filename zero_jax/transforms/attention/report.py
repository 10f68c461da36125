"""What was done with the attention cores of a function."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """An attention core.

    Attributes:
      where: the line of the model.
      what: sizes and mask, if it is computed by the kernel.
      times: how often it runs in a forward pass.
      reason: why it is left as it is, or ''.
    """

    where: str
    what: str
    times: int
    reason: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether the kernel computes it."""
        return not self.reason

    def __str__(self) -> str:
        action = f"fused: {self.what}" if self.is_fused else f"left as it is: {self.reason}"
        return f"{self.times} x {self.where}: {action}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """The attention cores of a function, those that a fused kernel computes and the others; prints a line for each."""

    rows: tuple[AttentionRow, ...]

    @property
    def num_fused(self) -> int:
        """How many attentions of a forward pass the kernel computes."""
        return sum(row.times for row in self.rows if row.is_fused)

    @property
    def num_left(self) -> int:
        """How many are left as they are."""
        return sum(row.times for row in self.rows if not row.is_fused)

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as plain data."""
        rows = [{**dataclasses.asdict(row), "is_fused": row.is_fused} for row in self.rows]
        return {"num_fused": self.num_fused, "num_left": self.num_left, "rows": rows}

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no attention found"


def merged(rows: list[AttentionRow]) -> tuple[AttentionRow, ...]:
    """Returns rows with those that are alike counted together."""
    times: dict[AttentionRow, int] = {}
    for row in rows:
        key = dataclasses.replace(row, times=0)
        times[key] = times.get(key, 0) + row.times
    return tuple(dataclasses.replace(row, times=count) for row, count in times.items())
