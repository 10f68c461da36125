"""Replica groups of collectives: which devices communicate, from the ways that XLA writes it."""

import functools
import itertools
import math
import re

import numpy as np

from zero_jax.hlo.program import integers

Groups = tuple[tuple[int, ...], ...]
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d, ]*\},? ?)*\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?|@?mesh[^{]*\{[^}]*\})"
)


def groups_of(line: str, num_devices: int) -> Groups:
    """The groups of a collective's line; all devices in one where it says nothing."""
    match = _GROUPS.search(line)
    if not match and "replica_groups=" in line:
        raise ValueError("no replica_groups of a known form")
    return replica_groups(match[1] if match else "{}", num_devices)


@functools.lru_cache(maxsize=4096)
def replica_groups(text: str, num_devices: int) -> Groups:
    """The groups of {{0,1},{2,3}}, {} (all), [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4], device_ids=(0,2,..) {'b'}."""
    if text == "{}":
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return tuple(tuple(integers(group)) for group in text.split("},"))
    if text.startswith("["):
        shape, _, ids = text.partition("<=")
        groups = _device_ids(ids).reshape(integers(shape))
    else:
        groups = _mesh_groups(text)
    return tuple(map(tuple, groups.tolist()))


def _device_ids(text: str) -> np.ndarray:
    """The ids of [4,2]T(1,0), which is a range reshaped and transposed, or of a plain list."""
    if not text.startswith("["):
        return np.array(integers(text))
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    return ids.transpose(integers(order)) if order else ids


def _mesh_groups(text: str) -> np.ndarray:
    """The groups along axes of a mesh, or parts of axes: 'a':(2)4 is the factor 4 of 'a' after a major factor 2."""
    mesh, _, named = text.partition("{")
    mesh, _, ids = mesh.partition("device_ids=(")
    cuts = {axis: {1, int(size)} for axis, size in re.findall(r"'?([^'\[<,= ]+)'?=(\d+)", mesh)}
    wanted = []
    for axis, major, size in re.findall(r"'?([^',:{} ]+)'?(?::\((\d+)\)(\d+))?", named):
        first = int(major or 1)
        last = first * int(size) if size else max(cuts[axis])
        cuts[axis] |= {first, last}
        wanted.append((axis, first, last))
    parts = [(axis, low, high) for axis, marks in cuts.items() for low, high in itertools.pairwise(sorted(marks))]
    dims = [high // low for _, low, high in parts]
    inner = []
    for axis, first, last in wanted:
        inner += [i for i, (name, low, _) in enumerate(parts) if name == axis and first <= low < last]
    outer = [i for i in range(len(parts)) if i not in inner]
    devices = _device_ids(ids) if ids else np.arange(math.prod(dims))
    return devices.reshape(dims).transpose(outer + inner).reshape(-1, math.prod(dims[i] for i in inner))


@functools.lru_cache(maxsize=4096)
def rings(text: str) -> tuple[Groups, Groups]:
    """A permute's pairs, and the groups of devices that they link."""
    pairs = tuple(zip(*[iter(integers(text))] * 2, strict=True))
    group_of: dict[int, list[int]] = {}
    for source, target in pairs:
        group, other = (group_of.setdefault(device, [device]) for device in (source, target))
        if group is not other:
            group += other
            group_of.update(dict.fromkeys(other, group))
    return pairs, tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
