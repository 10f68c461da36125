"""Estimates the time of a train step from its compiled program: the compiler's cycles, and the links of the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zero_jax import hlo
from zero_jax.hlo import Collective, Instruction, Program, Timeline, play
from zero_jax.sharding.topology import Hardware, Topology

# What a collective takes however little it sends: a hop of a ring, and the start of a kernel.
HOP_SECONDS = 1e-6
KERNEL_SECONDS = 3e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """How long a step takes, as far as a compiled program shows; an estimate, never a measurement.

    Attributes:
      step_seconds: a step, computing and waiting.
      compute_seconds: computation alone.
      exposed_seconds: collectives that nothing hides.
      collective_seconds: all collectives, hidden or not.
      tokens_per_second: over all devices; examples where the batch has no tokens.
      unit: `tokens` or `examples`.
      mfu: model FLOPs utilization, forward and backward pass without what is computed again, over the peak.
      model_flops: operations of those, over all devices.
      assumptions: what the figures rest on.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    collective_seconds: float
    tokens_per_second: float
    unit: str
    mfu: float
    model_flops: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        share = self.exposed_seconds / self.step_seconds if self.step_seconds else 0
        return (
            f"{_shown(self.step_seconds)} a step ({_shown(self.exposed_seconds)} or {share:.0%} waiting for "
            "collectives), "
            f"{self.tokens_per_second:,.0f} {self.unit}/s, MFU {self.mfu:.1%}"
        )


def _shown(seconds: float) -> str:
    """Returns a time in seconds, in smaller units where that would be nothing."""
    if seconds >= 0.1 or not seconds:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def estimate_time(
    program: Program,
    *,
    mesh: Mesh,
    topology: Topology,
    forward_flops: float,
    num_tokens: int,
    unit: str = "tokens",
) -> TimeEstimate:
    """Estimates the time of a step by playing its schedule.

    Args:
      program: the compiled program.
      mesh: the mesh that it was compiled for.
      topology: the hardware.
      forward_flops: operations of the forward pass, over all devices.
      num_tokens: tokens (or examples) of a step, over all devices.
      unit: what those are.
    """
    hardware = topology.hardware
    unknown: list[str] = []

    def seconds_of(program: Program, computation: str, instruction: Instruction) -> float:
        cycles = hlo.cycles(instruction) if hardware.clock_hz else None
        if cycles is not None and hardware.clock_hz:
            return cycles / hardware.clock_hz
        work = hlo.roofline(program, computation, instruction)
        if not work.is_known:
            unknown.append(instruction.name)
        busy = max(work.flops / hardware.flops_per_second, work.bytes / hardware.memory_bytes_per_second)
        return busy + (KERNEL_SECONDS if busy and hardware.platform == "cuda" else 0)

    links = _Links(mesh, topology)
    timeline = play(program, hlo.collectives(program), seconds_of=seconds_of, link_seconds=links.seconds)
    return _estimate(timeline, hardware, mesh.size, forward_flops, num_tokens, unit, unknown)


def _estimate(
    timeline: Timeline,
    hardware: Hardware,
    num_devices: int,
    forward_flops: float,
    num_tokens: int,
    unit: str,
    unknown: Sequence[str],
) -> TimeEstimate:
    step = max(timeline.total_seconds, 1e-12)
    model_flops = 3 * forward_flops
    return TimeEstimate(
        step_seconds=timeline.total_seconds,
        compute_seconds=timeline.compute_seconds,
        exposed_seconds=timeline.exposed_seconds,
        collective_seconds=timeline.collective_seconds,
        tokens_per_second=num_tokens / step,
        unit=unit,
        mfu=model_flops / (step * num_devices * hardware.flops_per_second),
        model_flops=model_flops,
        assumptions=_assumptions(hardware, unknown),
    )


def _assumptions(hardware: Hardware, unknown: Sequence[str]) -> tuple[str, ...]:
    memory = f"{hardware.memory_bytes_per_second / 1e9:,.0f} GB/s of memory"
    peak = f"{hardware.flops_per_second / 1e12:,.0f} TFLOP/s"
    if hardware.clock_hz:
        compute = (
            f"computation: the compiler's own cycles at {hardware.clock_hz / 1e9:.2f} GHz; where it gives none, {peak} "
            f"or {memory}, whichever takes longer"
        )
        link = f"links: {hardware.link_bytes_per_second / 1e9:.0f} GB/s a direction, both directions of a closed ring, "
        link += "all torus dims of a group at once"
    else:
        compute = f"computation: {peak} or {memory}, whichever takes longer, and 3 us a kernel: an optimistic bound"
        link = f"links: {hardware.link_bytes_per_second / 1e9:.0f} GB/s a device inside a host"
    assumptions = [
        compute,
        f"{link}, {hardware.network_bytes_per_second / 1e9:.1f} GB/s a device between slices or hosts, 1 us a hop",
        "collectives overlap with computation where, and only where, the compiled program schedules them so",
        f"MFU: 3 x the forward pass's matrix products over {peak} a device; no input, no host, no stragglers",
    ]
    if unknown:
        names = ", ".join(sorted(set(unknown))[:3])
        assumptions.append(f"{len(set(unknown))} custom calls of unknown cost count as memory traffic only: {names}")
    return tuple(assumptions)


class _Links:
    """The time of collectives on the links between the devices of a mesh."""

    def __init__(self, mesh: Mesh, topology: Topology):
        self.devices, self.topology = list(mesh.devices.flat), topology

    def seconds(self, collective: Collective) -> float:
        """Returns the time of one execution with its links to itself."""
        if collective.sent_bytes == 0:
            return 0.0
        group = max(collective.replica_groups, key=len)
        bandwidth, hops = self.bandwidth(group, kind=collective.kind)
        factor = 1.0
        if collective.kind in ("all-to-all", "ragged-all-to-all") and self.topology.hardware.platform == "tpu":
            factor = max(1.0, hops / 4)  # on a ring most of it passes through others
        return collective.sent_bytes * factor / bandwidth + hops * HOP_SECONDS

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as one estimate
    def bandwidth(self, group: tuple[int, ...], *, kind: str) -> tuple[float, int]:
        """Returns the bytes a second at which a device of a group sends, and the hops of its longest ring."""
        hardware = self.topology.hardware
        devices = [self.devices[i] for i in group]
        if len({_domain(device, hardware) for device in devices}) > 1:
            return hardware.network_bytes_per_second, len(devices)
        if hardware.platform == "cuda":
            return hardware.link_bytes_per_second, 2
        coords = np.array([device.coords for device in devices])
        extents = coords.max(axis=0) - coords.min(axis=0) + 1
        varying = [dim for dim, extent in enumerate(extents) if extent > 1]
        if not varying:  # the cores of one chip
            return 4 * hardware.link_bytes_per_second, 1
        if kind == "collective-permute":  # one neighbour, one direction
            return hardware.link_bytes_per_second, 1
        ways = sum(2 if self.is_ring(dim, int(extents[dim])) else 1 for dim in varying)
        return ways * hardware.link_bytes_per_second, int(max(extents))

    def is_ring(self, dim: int, extent: int) -> bool:
        """Returns whether a torus dim closes on itself."""
        shape, rule = self.topology.shape, self.topology.hardware.wraps_at
        if dim >= len(shape) or extent != shape[dim]:
            return False
        if rule == "cubes":
            return math.prod(shape) >= 64 and all(size % 4 == 0 for size in shape)
        return extent == rule


def _domain(device: Any, hardware: Hardware) -> int:
    """Returns the number of a device's fast network: its slice, or its GPU host."""
    if hardware.platform == "cuda":
        return int(device.process_index)
    return int(getattr(device, "slice_index", None) or 0)


def link_rate(mesh: Mesh, topology: Topology, axes: Sequence[str], *, kind: str = "all-gather") -> float:
    """Returns the bytes a second at which a device sends in collectives over some axes of a mesh."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    numbers = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), places, range(len(places)))
    group = numbers.reshape(math.prod(mesh.shape[axis] for axis in axes), -1)[:, 0]
    return _Links(mesh, topology).bandwidth(tuple(map(int, group)), kind=kind)[0]
