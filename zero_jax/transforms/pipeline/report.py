"""The report of a pipeline: the layers of each stage, what moves between stages, and how long they wait."""

from __future__ import annotations

import dataclasses
from typing import Any

from zero_jax.core.text_tables import Report, format_bytes
from zero_jax.dims import Relation, is_float
from zero_jax.program.jaxprs import open_jaxpr
from zero_jax.sharding.precision import wide
from zero_jax.transforms.pipeline.cut import FoundLoop, LayerLoop
from zero_jax.transforms.pipeline.place import Schedule, resolve_schedule
from zero_jax.transforms.pipeline.ring import num_moved


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedLayers:
    """A scan over layers that is the stages of a pipeline.

    Attributes:
      where: its line.
      num_layers: its layers.
      travelling: what a microbatch takes from stage to stage, each as dtype and shape on a microbatch.
      bytes_per_tick: bytes of it that a device sends to the next stage in a tick of the forward pass.
      sent: what a device sends to other stages in a step, each as phase (``forward`` or ``backward``), dtype and bytes.
      num_kept: the microbatches whose activations a stage keeps at most: with 1F1B more of a chain before its own.
      recomputed: whether a stage is recomputed in the backward pass, and keeps its input alone.
      stacked: whether the layers are of a Python loop, whose params are stacked in each step.
      waiting: with 1F1B, what waits outside of the loop in each stage, for the whole batch, each as dtype and shape.
      waiting_bytes: bytes that a device has of it, and of its gradients.
    """

    where: str
    num_layers: int
    travelling: tuple[str, ...]
    bytes_per_tick: int
    sent: tuple[tuple[str, str, int], ...]
    num_kept: int
    recomputed: bool
    stacked: bool = False
    waiting: tuple[str, ...] = ()
    waiting_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineReport(Report):
    """The stages of a pipeline; prints as a table.

    Attributes:
      num_stages: the stages.
      num_microbatches: the microbatches of a batch.
      loops: the scans over layers that are cut into stages.
      left: the scans over stacked params that are not, each with its line and the reason: they run on the whole batch.
      why_none: why there are no stages at all, and what to do; empty if there are some.
      schedule: ``gpipe``, ``circular:N``, ``1f1b`` or ``1f1b:N`` (`ZeroConfig.pipeline`).
      warning: what to change in the mesh; empty if there is nothing.
      unfused: why attention is not fused, though the config asks for it; empty if that is not for the stages.

    Example:
      >>> staged, config = zero.make_mesh(data=2, pipe=4), zero.ZeroConfig(stage=1, num_microbatches=4)
      >>> report = zero.pipeline_report(loss_fn, state.params, batch, mesh=staged, config=config)
      >>> report.why_none[:48]
      'pipe=4: loss_fn has no jax.lax.scan over stacked'
    """

    num_stages: int
    num_microbatches: int
    loops: tuple[StagedLayers, ...] = ()
    left: tuple[str, ...] = ()
    why_none: str = ""
    schedule: str = "gpipe"
    warning: str = ""
    unfused: str = ""

    @property
    def num_kept(self) -> int:
        """The microbatches whose activations a stage keeps at most, as the inputs of the stage where it recomputes."""
        return self._schedule.num_kept(self.num_stages, self.num_microbatches)

    @property
    def num_ticks(self) -> int:
        """The ticks of a forward pass, in each of which a stage runs a group of its layers on one microbatch."""
        return self._schedule.num_ticks(self.num_stages, self.num_microbatches)

    @property
    def _schedule(self) -> Schedule:
        return resolve_schedule(self.schedule)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage has no microbatch or no layer."""
        return 1 - self.num_microbatches / self.num_runs(self.num_microbatches) if self.loops else 0.0

    def num_runs(self, num_microbatches: int) -> float:
        """Returns how often a stage runs as many layers as it has on average, those that it waits in counted."""
        layers = [loop.num_layers for loop in self.loops]
        return sum(x * self._schedule.num_runs(self.num_stages, num_microbatches, x) for x in layers) / sum(layers)

    def __str__(self) -> str:
        if self.why_none:
            return f"no pipeline: {self.why_none}"
        lines = [
            f"{self.num_stages} stages, {self.num_microbatches} microbatches: {self.num_ticks} ticks, of which a stage "
            f"waits {self.bubble:.1%}; it keeps at most {self.num_kept} ({self.schedule})"
        ]
        for loop in self.loops:
            num_groups = self.num_stages * self._schedule.num_groups
            size = self._schedule.num_places(self.num_stages, loop.num_layers) // num_groups
            ends = ((i, min(i + size, loop.num_layers) - 1) for i in range(0, num_groups * size, size))
            names = [str(first) if first == last else f"{first}-{last}" * (first < last) for first, last in ends]
            of_stages = (" and ".join(filter(None, names[i :: self.num_stages])) for i in range(self.num_stages))
            stages = ", ".join(x or "none" for x in of_stages)
            again = "; a stage is recomputed in the backward pass" if loop.recomputed else ""
            again += "; their params are stacked in each step" if loop.stacked else ""
            lines.append(f"{loop.num_layers} layers at {loop.where}, by stage: {stages}{again}")
            num_bytes = format_bytes(loop.bytes_per_tick)
            lines.append(f"  from stage to stage: {', '.join(loop.travelling)}: {num_bytes} a device and tick")
            if loop.waiting:
                num_bytes = f"{format_bytes(loop.waiting_bytes)} a device, with gradients"
                lines.append(f"  outside of the loop, in each stage: {', '.join(loop.waiting)}: {num_bytes}")
        lines += [f"left as it is: {item}" for item in self.left]
        ends = ("attention is not fused", self.unfused), ("warning", self.warning)
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in ends if why)])


def staged_layers(entry: FoundLoop, num_parts: int = 1) -> StagedLayers:
    """Returns what a report shows of a loop that is cut into stages, for one of so many parts of a batch."""
    loop = entry.loop
    assert isinstance(loop, LayerLoop)
    schedule, travelling, num_bytes = loop.schedule, [], 0
    jaxpr, num_carry = open_jaxpr(loop.layer)[0], len(loop.carry)
    if not schedule.is_interleaved:
        pairs = zip((*loop.consts, *loop.carry), (x.aval for x in jaxpr.invars[1:]), strict=False)
        # What is shared by all microbatches does not move.
        moved = [(role, x) for i, (role, x) in enumerate(pairs) if i >= len(loop.consts) or role.is_rows]
    else:  # stages make the constants again, and what is stacked goes through all of them
        avals = [x.aval for x in jaxpr.outvars]
        stacked = (x.update(shape=(loop.num_layers, *x.shape)) for x in avals[num_carry:])
        moved = [*zip((*loop.carry, *loop.ys), (*avals[:num_carry], *stacked), strict=True)]
    sent: list[tuple[str, str, int]] = []
    num_consts = 0 if schedule.is_interleaved else len(moved) - num_carry
    for i, (role, aval) in enumerate(moved):
        travelling.append(_shown(aval, role.dim if role.is_rows else None, num_parts))
        own_bytes = aval.size * aval.dtype.itemsize // (loop.place.num_shards if role.is_rows else 1)
        num_bytes += own_bytes
        times = _times(loop, role, aval.shape, is_carry=i >= num_consts)
        phases = ("forward", "backward") if is_float(aval) and i >= num_consts else ("forward",)
        sent += [(phase, str(aval.dtype), round(own_bytes * times)) for phase in phases]
    return StagedLayers(
        where=entry.line,
        num_layers=loop.num_layers,
        travelling=tuple(travelling),
        bytes_per_tick=num_bytes,
        sent=tuple(sent),
        num_kept=schedule.num_kept(loop.num_stages, loop.num_microbatches),
        recomputed=loop.recompute and loop.policy is None,
        stacked=entry.is_rolled,
        waiting=tuple(_shown(x, 0, num_parts) for x in entry.waiting),
        waiting_bytes=sum(x.size * (x.dtype.itemsize + wide(x.dtype).itemsize) for x in entry.waiting)
        // loop.place.num_shards,
    )


def _shown(aval: Any, dim: int | None, num_parts: int) -> str:
    """Returns the dtype and shape of so many parts, whose examples are in a dim."""
    shape = (n * num_parts if i == dim else n for i, n in enumerate(aval.shape))
    return f"{aval.dtype}[{','.join(map(str, shape))}]"


def _times(loop: LayerLoop, role: Relation, shape: tuple[int, ...], *, is_carry: bool) -> float:
    """Returns how often a device sends what goes from stage to stage, of a microbatch, in a pass.

    It is a mean over devices: the last stage has none to send to, but those that leave it.
    """
    s = loop.num_stages
    to_others = 1 - 1 / s
    passed = loop.num_ticks * (to_others if loop.num_groups == 1 else 1)
    if loop.schedule.is_interleaved or not role.is_rows:
        return passed
    # All homes but one send to the first stage, and receive from the last one.
    return passed + (1 + is_carry) * to_others / s * num_moved(loop, shape, role.dim)
