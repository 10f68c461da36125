"""What rematerialization did with a function, and what it keeps between the passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zero_jax.core.device_put import is_on_host
from zero_jax.core.text_tables import Report
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import trace_flat
from zero_jax.sharding.spec import num_shards
from zero_jax.transforms.remat.choice import ValueChoice
from zero_jax.transforms.remat.policies import Remat
from zero_jax.transforms.remat.regions import RematRegion


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualBytes:
    """What is kept for a backward pass, params aside: bytes of one device, in its own memory and in host memory."""

    device_bytes: float
    host_bytes: float


_NOTHING = ResidualBytes(device_bytes=0, host_bytes=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionRow:
    """A region that is recomputed."""

    where: str  # the line of the model
    kind: str  # what it is
    times: int  # how often it runs in a forward pass
    without: ResidualBytes = _NOTHING  # what one run of it keeps if nothing is recomputed
    kept: ResidualBytes = _NOTHING  # what one run of it keeps


@dataclasses.dataclass(frozen=True)
class Left:
    """Something that was left as it is: where, what, and why."""

    where: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematReport(Report):
    """The regions of a function and what they keep; prints as a table, with what was left alone below.

    Attributes:
      remat: the policy; of `auto` the values that it chose.
      regions: the regions.
      left: what was left as it is.
      choice: with the policy `auto`, the values that blocks could keep, what each costs, and where it is kept.

    Example:
      >>> def layers(params, batch):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].mean()
      >>> report = zero.remat_report(layers, jnp.ones((4, 64, 64)), batch, remat="full", mesh=mesh)
      >>> len(report.regions)
      1
    """

    remat: Remat
    regions: tuple[RegionRow, ...]
    left: tuple[Left, ...]
    choice: ValueChoice | None = None

    @property
    def kept(self) -> ResidualBytes:
        """The bytes that all regions together keep."""
        return _total([(row.times, row.kept) for row in self.regions])

    @property
    def without(self) -> ResidualBytes:
        """The bytes that they would keep if nothing were recomputed."""
        return _total([(row.times, row.without) for row in self.regions])

    def __str__(self) -> str:
        lines = [str(self.remat), f"{'times':>5}  {'all MB':>10}  {'kept MB':>10}  {'on host MB':>10}  where"]
        for row in self.regions:
            sizes = (row.without.device_bytes, row.kept.device_bytes, row.kept.host_bytes)
            cells = "  ".join(f"{row.times * size / 1e6:10.3f}" for size in sizes)
            lines.append(f"{row.times:5d}  {cells}  {row.kind} at {row.where}")
        if not self.regions:
            lines.append("no blocks: no scan over stacked or shared params, no repeated block, no jax.checkpoint")
        lines += [str(self.choice)] if self.choice else []
        return "\n".join([*lines, *(f"left alone: {item}" for item in self.left)])


def _total(rows: list[tuple[int, ResidualBytes]]) -> ResidualBytes:
    return ResidualBytes(
        device_bytes=sum(times * kept.device_bytes for times, kept in rows),
        host_bytes=sum(times * kept.host_bytes for times, kept in rows),
    )


def residuals_of(function: Callable[..., list[Any]], region: RematRegion) -> ResidualBytes:
    """Measures what a function of a region's inputs keeps, from the trace of its linearization."""
    setting = region.setting
    linearized = lambda *xs: jax.tree.leaves(jax.vjp(function, *xs)[1])  # noqa: E731
    jaxpr, _ = jaxprs.open_jaxpr(trace_flat(linearized, [var.aval for var in region.jaxpr.invars]))
    known = setting.marked(jaxpr, region.marks)
    bytes_at = {"device": 0, "host": 0}
    for var in dict.fromkeys(atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)):
        mark = known.marks[var]
        if mark.kind != "value" or mark.stays_alive or not hasattr(var.aval.dtype, "itemsize"):
            continue
        has_batch = any(size in setting.batch_sizes for size in var.aval.shape)
        shards = num_shards(setting.mesh, (setting.axes.batch if has_batch else (), *(mark.dims or ())))
        place = "host" if is_on_host(var.aval) else "device"
        bytes_at[place] += var.aval.size * var.aval.dtype.itemsize // shards
    return ResidualBytes(device_bytes=bytes_at["device"], host_bytes=bytes_at["host"])
