"""What was done with the attention cores of a function."""

from __future__ import annotations

import collections
import dataclasses

from zero_jax.core.text_tables import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """An attention core."""

    where: str  # the line of the model
    what: str  # sizes and mask, if it is the function of the kernels
    times: int  # how often it runs in a forward pass
    reason: str = ""  # why it is left as it is, or ''
    kernel: str = ""  # what computes it on the devices: `splash`, `cudnn` or `xla`; '' if it is left as it is
    fallback: str = ""  # why it is `xla`, or ''

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel computes it."""
        return self.kernel not in ("", "xla")

    def __str__(self) -> str:
        action = f"fused by {self.kernel}: {self.what}"
        if self.reason:
            action = f"left as it is: {self.reason}"
        elif not self.is_fused:
            action = f"no kernel, XLA computes it: {self.fallback} ({self.what})"
        return f"{self.times} x {self.where}: {action}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionReport(Report):
    """The attention cores of a function, those that a fused kernel computes and the others; prints a line for each.

    Example:
      >>> zero.attention_report(loss_fn, state.params, batch, mesh=mesh)
      no attention found
    """

    rows: tuple[AttentionRow, ...]

    @property
    def num_fused(self) -> int:
        """How many attentions of a forward pass a fused kernel computes."""
        return sum(row.times for row in self.rows if row.is_fused)

    @property
    def num_by_xla(self) -> int:
        """How many a kernel could compute, but not on these devices, or not of this size: XLA does."""
        return sum(row.times for row in self.rows if not row.is_fused and not row.reason)

    @property
    def num_left(self) -> int:
        """How many are left as they are."""
        return sum(row.times for row in self.rows if row.reason)

    def left(self, reason: str) -> AttentionReport:
        """Returns the report where all of them are left as they are, for a reason."""
        how = {"kernel": "", "fallback": ""}
        rows = (dataclasses.replace(row, reason=row.reason or reason, **how) for row in self.rows)
        return AttentionReport(rows=tuple(rows))

    def summary(self) -> str:
        """Returns the numbers as a line."""
        if not self.rows:
            return "none to replace (zero.dot_product_attention takes the kernel by itself)"
        kernels = " and ".join(sorted({row.kernel for row in self.rows if row.is_fused}))
        by_xla = f", {self.num_by_xla} by XLA" if self.num_by_xla else ""
        return f"{self.num_fused} fused{f' ({kernels})' if kernels else ''}{by_xla}, {self.num_left} left as they are"

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no attention found"


def merged(rows: list[AttentionRow]) -> tuple[AttentionRow, ...]:
    """Returns rows with those that are alike counted together."""
    times = collections.Counter[AttentionRow]()
    for row in rows:
        times[dataclasses.replace(row, times=0)] += row.times
    return tuple(dataclasses.replace(row, times=count) for row, count in times.items())
