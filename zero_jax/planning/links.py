"""The links of a mesh (torus, NVLink, network of slices or hosts): the time of collectives, and sizes that are fast."""

import collections
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zero_jax.hlo import Collective, NetworkTransfer, own_links
from zero_jax.planning.search import divisors
from zero_jax.sharding.chains import gather_shardings, split_axes
from zero_jax.sharding.device_order import slice_of
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import dims_of
from zero_jax.sharding.topology import Hardware, Topology, parse

# The latency of a hop of a ring, and of an exchange between hosts over the network.
_HOP_SECONDS = 1e-6
_NETWORK_LATENCY_SECONDS = 2e-5
_MAX_MODEL = 16


class Links:
    """The seconds of a program's collectives on the links of its mesh; of TPU slices each has its own program."""

    def __init__(self, mesh: Mesh, topology: Topology, *, num_devices: int | None = None):
        devices = list(mesh.devices.flat)
        if num_devices is not None and num_devices < len(devices):
            first = _domain(devices[0], topology.hardware)
            devices = [device for device in devices if _domain(device, topology.hardware) == first]
        self.mesh, self.devices, self.topology = mesh, devices, topology

    def seconds(self, collective: Collective) -> float:
        """Returns the time of one execution with its links to itself."""
        if collective.sent_bytes == 0:
            return 0.0
        group = max(collective.replica_groups, key=len)
        bandwidth, hops = self.bandwidth(group, kind=collective.kind)
        factor = self.crossings(hops) if collective.kind in ("all-to-all", "ragged-all-to-all") else 1.0
        return collective.sent_bytes * factor / bandwidth + hops * _HOP_SECONDS

    def crossings(self, hops: int) -> float:
        """Returns how many links a byte of an all-to-all crosses: on a ring most bytes pass through other devices."""
        return max(1.0, hops / 4) if self.topology.hardware.platform == "tpu" else 1.0

    def taken(self, collective: Collective) -> frozenset[Hashable]:
        """Returns the links that a collective takes: all of the torus dims that its groups are spread over.

        Inside a chip, without a torus, or between slices, those of the same groups share links; of permutes, those of
        the same pairs, since a ring has two directions.
        """
        group = max(collective.replica_groups, key=len, default=())
        dims = self.torus_dims(group) if group and not collective.source_target_pairs else ()
        return frozenset(("torus dim", dim) for dim in dims) or own_links(collective)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - bounded
    def torus_dims(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the torus dims that a group is spread over; none where it is not in one torus."""
        devices = [self.devices[i] for i in group]
        if self.topology.hardware.platform != "tpu" or len({_domain(d, self.topology.hardware) for d in devices}) > 1:
            return ()
        return tuple(np.flatnonzero(np.ptp(np.array([device.coords for device in devices]), axis=0)).tolist())

    def network_seconds(self, transfer: NetworkTransfer) -> float:
        """Returns the time of one exchange with other slices, with the network to itself."""
        hardware = self.topology.hardware
        return transfer.sent_bytes / hardware.network_bytes_per_second + _NETWORK_LATENCY_SECONDS

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def bandwidth(self, group: tuple[int, ...], *, kind: str) -> tuple[float, int]:
        """Returns the bytes a second at which a device of a group sends, and the hops of its longest ring."""
        hardware = self.topology.hardware
        devices = [self.devices[i] for i in group]
        domains = collections.Counter(_domain(device, hardware) for device in devices)
        if len(domains) > 1:
            # A ring crosses the network once a host, and each of a host's devices can carry one. In an all-to-all or a
            # permute each device sends all bytes for other hosts through its own share of the network.
            num_rings = min(domains.values()) if kind in ("all-gather", "all-reduce", "reduce-scatter") else 1
            return min(num_rings * hardware.network_bytes_per_second, hardware.link_bytes_per_second), len(devices)
        if hardware.platform == "cuda":
            return hardware.link_bytes_per_second, 2
        coords = np.array([device.coords for device in devices])
        extents = coords.max(axis=0) - coords.min(axis=0) + 1
        varying = [dim for dim, extent in enumerate(extents) if extent > 1]
        if not varying:  # the cores of one chip
            return 4 * hardware.link_bytes_per_second, 1
        if kind == "collective-permute":  # one neighbour, one direction
            return hardware.link_bytes_per_second, 1
        num_directions = sum(2 if self.is_ring(dim, int(extents[dim])) else 1 for dim in varying)
        return num_directions * hardware.link_bytes_per_second, int(max(extents))

    def is_ring(self, dim: int, extent: int) -> bool:
        """Returns whether a torus dim closes on itself."""
        shape, rule = self.topology.shape, self.topology.hardware.wraps_at
        if dim >= len(shape) or extent != shape[dim]:
            return False
        if rule == "cubes":
            return math.prod(shape) >= 64 and all(size % 4 == 0 for size in shape)
        return extent == rule

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _rate(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[float, int]:
        """Returns the bytes a second at which a device sends over some axes together, and the hops of their ring."""
        dims = [mesh.axis_names.index(axis) for axis in axes]
        indices = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), dims, range(len(dims)))
        group = indices.reshape(axis_size(mesh, axes), -1)[:, 0]
        return self.bandwidth(tuple(map(int, group)), kind="all-gather")

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _steps(self, axes: tuple[str, ...]) -> list[tuple[Mesh, tuple[str, ...]]]:
        """Returns the mesh and the axes of each step of a gather over some axes, the last one first."""
        shardings = gather_shardings(self.mesh, (axes,), axes)
        mesh = self.mesh
        if shardings and shardings[0].mesh.axis_names != mesh.axis_names:
            # An axis over several dims of the torus is gathered along each.
            mesh, parts = split_axes(mesh, axes)
            axes = tuple(part for axis in axes for part in parts[axis])
        remaining = [axes, *(dims_of(sharding, 1)[0] for sharding in shardings)]
        return [(mesh, before[len(after) :]) for before, after in itertools.pairwise(remaining)][::-1]

    def gather_seconds(self, num_bytes: float, axes: Sequence[str], *, exchanges: bool = False) -> float:
        """Returns the seconds of a staged gather to `num_bytes`, or of its reverse (`exchanges`: by all-to-alls)."""
        seconds = 0.0
        for mesh, together in self._steps(tuple(axes)):
            size = axis_size(mesh, together)
            bytes_per_second, hops = self._rate(mesh, together)
            crossings = self.crossings(hops) if exchanges else 1.0
            seconds += crossings * num_bytes * (1 - 1 / size) / bytes_per_second if size > 1 else 0.0
            num_bytes /= size
        return seconds

    def send_seconds(self, num_bytes: float, axes: tuple[str, ...]) -> float:
        """Returns the seconds of a collective over some axes in which a device sends so many bytes."""
        bytes_per_second, hops = self._rate(self.mesh, axes)
        return num_bytes / bytes_per_second + hops * _HOP_SECONDS


def model_sizes(name: str) -> tuple[int, ...]:
    """Returns the sizes of `model` on a topology that use fast links only: of a host's GPUs, or along torus dims."""
    parsed = parse(name)
    if parsed.hardware.platform != "tpu":
        return tuple(divisors(parsed.shape[0]))
    shape = [size for size in parsed.shape if size > 1]
    sizes = {1} | {size for extent in shape for size in divisors(extent)}
    sizes |= {math.prod(pair) for pair in itertools.combinations(shape, 2)}
    return tuple(sorted(size for size in sizes if size <= _MAX_MODEL))


def _domain(device: Any, hardware: Hardware) -> int:
    """Returns the number of a device's fast network: its slice, or its GPU host."""
    return int(device.process_index) if hardware.platform == "cuda" else slice_of(device)
