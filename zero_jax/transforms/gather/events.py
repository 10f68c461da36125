"""What a walk notes: gathers, and params that are computed with in a wider dtype than their own."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax.numpy as jnp

from zero_jax.core.text_tables import Report, format_bytes
from zero_jax.program.jaxprs import line_within
from zero_jax.transforms.gather.deferred import Lazy
from zero_jax.transforms.gather.sent import SentProduct


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherEvent:
    """One gather of a param: where, why there, and how many bytes it makes whole."""

    path: str
    where: str
    reason: str
    early: bool
    gathered_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideUse:
    """A use of a param that computes in a wider dtype than the param has, which is that of the precision policy."""

    path: str  # the param
    where: str  # `file:line (function)`
    operation: str  # what it is used in
    dtype: str  # what it is computed in
    param_dtype: str  # what the param is in


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherReport(Report):
    """What gather-on-use did with a function; prints as a table with the early gathers first, wide uses last.

    Attributes:
      events: the gathers.
      wide: the uses that compute wider than the params are.

    Example:
      >>> specs = zero.state_shardings(state, mesh=mesh, config=config).params
      >>> [event.path for event in zero.gather_report(loss_fn, specs, state.params, batch, mesh=mesh).events]
      ['up', 'down']
    """

    events: tuple[GatherEvent, ...]
    wide: tuple[WideUse, ...] = ()

    @property
    def early(self) -> tuple[GatherEvent, ...]:
        """The gathers made before the param's use, because the walk could not see through what uses it."""
        return tuple(event for event in self.events if event.early)

    def __str__(self) -> str:
        rows = [f"{len(self.events)} gathers, {len(self.early)} of them early; {len(self.wide)} uses in a wider dtype"]
        for event in sorted(self.events, key=lambda event: not event.early):
            mark = "EARLY" if event.early else "     "
            rows.append(
                f"{mark} {format_bytes(event.gathered_bytes):>12}  {event.path}: {event.reason} at {event.where}"
            )
        for use in self.wide:
            rows.append(f"WIDE  {use.path}: {use.operation} in {use.dtype}, param in {use.param_dtype}, at {use.where}")
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class Notes:
    """Where a walk notes its events, if anywhere; `gathers` says whether the params are sharded at all."""

    events: list[GatherEvent | WideUse] | None
    gathers: bool

    def gather(self, value: Lazy, eqn: Any, reason: str, *, early: bool, sent: SentProduct | None = None) -> None:
        """Notes a gather, or that activations are sent to the shards of a param."""
        is_here = (value.is_shard and not value.is_gathered) or (early and value.dims is None)
        if self.events is not None and self.gathers and is_here:
            num_bytes = value.aval.size * value.aval.dtype.itemsize
            if sent is not None:
                num_bytes = sent.gathered_bytes(value)
                reason = f"{reason}, activations sent to its {sent.num_shards} shards"
            where = line_within(eqn)
            event = GatherEvent(path=value.path, where=where, reason=reason, early=early, gathered_bytes=num_bytes)
            self.events.append(event)

    def wide(self, value: Lazy, eqn: Any) -> None:
        """Notes a use if it computes in a wider dtype than the param's."""
        if self.events is None:
            return
        itemsize = operator.attrgetter("itemsize")
        dtypes = [atom.aval.dtype for atom in eqn.invars if hasattr(atom.aval, "dtype")]
        used = max((d for d in dtypes if jnp.issubdtype(d, jnp.floating)), key=itemsize, default=None)
        roots = [root.dtype for root in value.roots if jnp.issubdtype(root.dtype, jnp.floating)]  # no masks
        own = min(roots, key=itemsize, default=value.aval.dtype)
        if used is not None and used.itemsize > own.itemsize:
            operation, where = eqn.primitive.name, line_within(eqn)
            use = WideUse(path=value.path, where=where, operation=operation, dtype=str(used), param_dtype=str(own))
            self.events.append(use)
