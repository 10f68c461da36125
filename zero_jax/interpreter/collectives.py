"""Collectives: what devices exchange is moved along the first dim of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zero_jax.hlo import groups_of, integers
from zero_jax.interpreter.values import NotInterpretable, every_device

Reduce = Callable[[np.ndarray], np.ndarray]  # [members, devices of a group, *dims] -> [devices of a group, *dims]


class Exchange:
    """A collective's `[devices, size]` members of each device's group, in order, and the device's own place in it."""

    def __init__(self, line: str, num_devices: int):
        groups = groups_of(line, num_devices)
        sizes = {len(group) for group in groups}
        if len(sizes) != 1 or sorted(sum(groups, ())) != list(range(num_devices)):
            raise NotInterpretable(f"a collective between groups {groups} of {num_devices} devices")
        self.members = np.empty((num_devices, sizes.pop()), int)
        self.place = np.empty(num_devices, int)
        for group in groups:
            for place, device in enumerate(group):
                self.members[device], self.place[device] = group, place

    @property
    def size(self) -> int:
        """The devices of a group."""
        return self.members.shape[1]

    def received(self, x: np.ndarray) -> np.ndarray:
        """Returns what each member of a device's group has: `[size, devices, *dims]`."""
        return every_device(x, len(self.place))[self.members.T]

    def gathered(self, x: np.ndarray, dim: int) -> np.ndarray:
        """All-gather: the members' arrays one after the other along a dim."""
        return np.concatenate(list(self.received(x)), axis=1 + dim)

    def scattered(self, x: np.ndarray, dim: int, reduce: Reduce) -> np.ndarray:
        """Reduce-scatter: each device's part along a dim of the reduced array."""
        parts = np.split(reduce(self.received(x)), self.size, axis=1 + dim)
        return self.own(np.stack(parts))

    def exchanged(self, x: np.ndarray, dim: int) -> np.ndarray:
        """All-to-all along a dim: part i of a device goes to member i; what is received is concatenated."""
        parts = np.split(every_device(x, len(self.place)), self.size, axis=1 + dim)
        return np.concatenate(self.swapped(parts), axis=1 + dim)

    def swapped(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All-to-all of one array for each member: the result has what each member has for this device."""
        stacked = np.stack([every_device(part, len(self.place)) for part in parts])  # [for member, of device]
        return [stacked[self.place, self.members[:, sender]] for sender in range(self.size)]

    def own(self, parts: np.ndarray) -> np.ndarray:
        """Returns each device's part of `[size, devices, *dims]`."""
        return parts[self.place, np.arange(len(self.place))]


def permuted(x: np.ndarray, attributes: Mapping[str, str], num_devices: int) -> np.ndarray:
    """Collective-permute: each target has what its source had, the others zeros."""
    x = every_device(x, num_devices)
    result = np.zeros_like(x)
    pairs = integers(attributes["source_target_pairs"])
    result[pairs[1::2]] = x[pairs[::2]]
    return result
