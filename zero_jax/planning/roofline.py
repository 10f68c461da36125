"""Estimates the seconds of a step before it is compiled: a roofline over the kernels of the traced loss, and links."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import Mesh

from zero_jax.analysis import LossTrace
from zero_jax.planning.links import HOP_SECONDS, Links
from zero_jax.planning.step_time import HOST_BYTES_PER_SECOND, KERNEL_SECONDS, KERNEL_SHARES
from zero_jax.sharding.topology import Topology
from zero_jax.transforms import Kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What the compiler's own figures reach of a hardware's nominal ones.

    Attributes:
      products: share of the peak FLOPs that large matrix products reach.
      memory: share of the memory bandwidth that fused elementwise work reaches.
      vector: the peak of elementwise operations, as a share of the peak FLOPs.
      hidden: share of the collectives over `data` that computation hides, without the options of `overlap` and with.
    """

    products: float
    memory: float
    vector: float
    hidden: tuple[float, float]


def _tpu(products: float, memory: float, hidden: float = 0.0) -> Efficiency:
    return Efficiency(products=products, memory=memory, vector=1 / 32, hidden=(0.0, hidden))


# By hardware: fitted to XLA:TPU's cycles of large products and of attention by XLA (docs/planning.md has the figures;
# above 1 where it fuses more than is assumed, or keeps values in VMEM). The times of GPU programs are rooflines at the
# nominal figures.
_EFFICIENCIES = {
    "v3": _tpu(0.9, 0.8),
    "v4": _tpu(0.93, 0.85),
    "v5e": _tpu(0.93, 0.9),
    "v5p": _tpu(0.88, 0.5, hidden=0.85),
    "v6e": _tpu(0.75, 1.6, hidden=0.85),
    "tpu7x": _tpu(0.81, 1.0),
}
_GPU = Efficiency(products=1.0, memory=1.0, vector=1 / 15, hidden=(0.4, 0.7))
# The kernels of attention by platform, as the times of compiled programs have them.
_ATTENTION = {
    "tpu": {"attention": "pallas", "attention backward": "pallas", "pallas": "pallas"},
    "cuda": {"attention": "cudnn attention", "attention backward": "cudnn attention backward"},
}


class Roofline:
    """Estimates seconds of the parts of a step on a kind of hardware.

    Args:
      topology: the hardware.
      overlaps: whether the step is compiled with options that let collectives run beside computation.
    """

    def __init__(self, topology: Topology, *, overlaps: bool):
        self.topology, self.hardware = topology, topology.hardware
        self.efficiency = _EFFICIENCIES.get(self.hardware.name, _GPU)
        self.hidden = self.efficiency.hidden[overlaps]

    def flops_per_second(self, engine: str) -> float:
        """Returns the FLOPs a second of matrix products, by the engine of their kernel."""
        kernel = _ATTENTION[self.hardware.platform].get(engine, "")
        return self.hardware.flops_per_second * KERNEL_SHARES.get(kernel, self.efficiency.products)

    @property
    def memory_bytes_per_second(self) -> float:
        """The memory bandwidth that elementwise work reaches."""
        return self.hardware.memory_bytes_per_second * self.efficiency.memory

    def compute_seconds(self, kernels: Iterable[Kernel], num_parts: float) -> float:
        """Returns the seconds of kernels of all examples, on the share of one of `num_parts` parts of the batch."""
        vector_per_second = self.hardware.flops_per_second * self.efficiency.vector
        launch = KERNEL_SECONDS if self.hardware.platform == "cuda" else 0.0
        total = 0.0
        for kernel in kernels:
            parts = num_parts if kernel.is_split else 1
            moved = (kernel.split_bytes / num_parts + kernel.other_bytes) / self.memory_bytes_per_second
            products = kernel.flops / parts / self.flops_per_second(kernel.engine)
            busy = max(products, kernel.vector_ops / parts / vector_per_second, moved)
            # A kernel that is written by hand has layouts of its own: what it takes and makes is copied.
            total += kernel.times * (busy + launch + (2 * moved if kernel.engine else 0.0))
        return total

    def moved_seconds(self, num_bytes: float) -> float:
        """Returns the seconds of reading and writing memory."""
        return num_bytes / self.memory_bytes_per_second

    def host_seconds(self, traced: LossTrace, num_parts: float) -> float:
        """Returns the seconds of moving residuals to the host and back."""
        return 2 * traced.residuals.host_bytes / num_parts / HOST_BYTES_PER_SECOND

    def exposed_seconds(self, comms: float, compute: float) -> float:
        """Returns the seconds that computation waits for collectives over `data`."""
        return max(comms - self.hidden * compute, comms * (1 - self.hidden))


class MeshLinks:
    """Seconds of collectives over the axes of a mesh.

    Args:
      mesh: the mesh.
      topology: its hardware.
    """

    def __init__(self, mesh: Mesh, topology: Topology):
        self.mesh, self.links = mesh, Links(mesh, topology)
        self.rate = functools.cache(self._rate)

    def _rate(self, axes: tuple[str, ...]) -> tuple[float, int]:
        """Returns the bytes a second at which a device sends over some axes together, and the hops of their ring."""
        places = [self.mesh.axis_names.index(axis) for axis in axes]
        numbers = np.moveaxis(np.arange(self.mesh.size).reshape(self.mesh.devices.shape), places, range(len(places)))
        group = numbers.reshape(math.prod(self.mesh.shape[axis] for axis in axes), -1)[:, 0]
        return self.links.bandwidth(tuple(map(int, group)), kind="all-gather")

    def gather_seconds(self, num_bytes: float, axes: Sequence[str]) -> float:
        """Returns the seconds of a staged gather to `num_bytes`, or of the reduce-scatter that reverses it."""
        seconds = 0.0
        for axis in axes:
            size = self.mesh.shape[axis]
            seconds += num_bytes * (1 - 1 / size) / self.rate((axis,))[0] if size > 1 else 0.0
            num_bytes /= size
        return seconds

    def send_seconds(self, num_bytes: float, axes: tuple[str, ...]) -> float:
        """Returns the seconds of a collective over some axes in which a device sends so many bytes."""
        bytes_per_second, hops = self.rate(axes)
        return num_bytes / bytes_per_second + hops * HOP_SECONDS
