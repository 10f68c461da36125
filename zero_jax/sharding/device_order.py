"""Orders devices for a mesh: `data` along the dims of a torus, and across slices or hosts last.

A domain is a fast network: a TPU slice, or a GPU host.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from zero_jax.sharding.spec import STAGED_FROM_NUM_CHIPS

GPUS = frozenset({"gpu", "cuda", "rocm"})  # what JAX calls their platform


def order_devices(
    devices: list[Any], sizes: Mapping[str, int], data_layout: Sequence[int] | None
) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the sizes of the mesh axes of `data`, and the grid of devices `[replica, *data, pipe, model]`.

    `data_layout` are those sizes; None chooses them by the hardware.
    """
    if data_layout is not None:
        is_sizes = isinstance(data_layout, Sequence) and all(isinstance(size, int | np.integer) for size in data_layout)
        if not is_sizes or min(data_layout, default=0) < 1:
            raise ValueError(f"make_mesh: data_layout={data_layout!r}: give sizes of mesh axes, such as (2, 4)")
        if math.prod(data_layout) != sizes["data"]:
            raise ValueError(
                f"make_mesh: data_layout={tuple(data_layout)} multiplies to {math.prod(data_layout)}, "
                f"not to data={sizes['data']}: give sizes whose product is that"
            )
    stages = _stages(devices, sizes.get("pipe", 1))
    layout, first = _over_domains(stages[0], sizes, data_layout) or _in_one_domain(stages[0], sizes, data_layout)
    if not layout:  # of a torus whose dims the other axes take
        layout, first = (1,), np.expand_dims(first, 1)
    # Stages of the same form are laid out alike, so that what a device sends goes to a neighbour.
    numbers = {device: i for i, device in enumerate(stages[0])}
    order = [numbers[device] for device in first.flat]
    grids = [np.array([stage[i] for i in order], dtype=object).reshape(first.shape) for stage in stages]
    return layout, np.stack(grids, axis=-2)


def _stages(devices: list[Any], num_stages: int) -> list[list[Any]]:
    """Returns the devices of each stage of a pipeline, all in the same order.

    Stages are in domains of their own where these are enough: what they exchange is little. Within a domain they are
    next to each other along the last dim of the torus.
    """
    if num_stages == 1:
        return [devices]
    groups = _by_domain(devices)
    num_domains, is_even = len(groups), len({len(group) for group in groups}) == 1
    if is_even and num_domains % num_stages == 0:
        each = num_domains // num_stages
        return [[*itertools.chain(*groups[i : i + each])] for i in range(0, num_domains, each)]
    if is_even and num_stages % num_domains == 0:
        return [part for group in groups for part in _slabs(group, num_stages // num_domains)]
    return _slabs(devices, num_stages)


def _slabs(devices: list[Any], num_parts: int) -> list[list[Any]]:
    """Splits devices into equal parts, along the last dim of a torus that divides."""
    size, coords = len(devices) // num_parts, [getattr(device, "coords", None) for device in devices]
    if num_parts == 1:
        return [devices]
    places = np.zeros((len(devices), 0), int) if None in coords else np.asarray(coords)
    for dim in reversed(range(places.shape[1])):
        extent, start = int(np.ptp(places[:, dim])) + 1, places[:, dim].min()
        if extent % num_parts:
            continue
        slab = (places[:, dim] - start) // (extent // num_parts)
        order = np.lexsort((np.arange(len(devices)), slab))  # by slab, within one as they were
        if (np.bincount(slab) == size).all():  # not so where the devices do not fill the torus
            return [[devices[i] for i in order[j : j + size]] for j in range(0, len(devices), size)]
    return [devices[i : i + size] for i in range(0, len(devices), size)]


def _over_domains(
    devices: list[Any], sizes: Mapping[str, int], data_layout: Sequence[int] | None
) -> tuple[tuple[int, ...], np.ndarray] | None:
    """Orders `data` over domains: fast links major, network minor, so that the network moves small shards."""
    domains, replica, model = _by_domain(devices), sizes["replica"], sizes["model"]
    num_domains, domain_sizes = len(domains), {len(domain) for domain in domains}
    if num_domains == 1 or len(domain_sizes) != 1:
        return None
    if replica % num_domains and num_domains % replica:
        raise ValueError(
            f"make_mesh: replica={replica} on {num_domains} slices or hosts: a copy would straddle two, and gather "
            f"params across the network: give a divisor or a multiple of {num_domains}, as replica={num_domains}"
        )
    (domain_size,) = domain_sizes
    # Several copies in a domain, or several domains in a copy.
    copies_each, domains_each = max(replica // num_domains, 1), max(num_domains // replica, 1)
    if domain_size == 1 or domain_size % (copies_each * model):
        return None
    inner_sizes = {"replica": copies_each, "data": domain_size // (copies_each * model), "model": model}
    inner: tuple[int, ...] | None = None
    if data_layout is not None:
        inner = tuple(data_layout if domains_each == 1 else data_layout[:-1])
        if math.prod(inner) != inner_sizes["data"]:
            raise ValueError(
                f"make_mesh: data_layout={tuple(data_layout)} on {num_domains} slices or hosts: the last axis of "
                f"`data` is the one across them: give sizes that end in {domains_each}, such as "
                f"{(inner_sizes['data'], domains_each)}, or leave data_layout out"
            )
    elif inner_sizes["data"] == 1:
        inner = ()
    grids = []
    for domain in domains:  # all in the layout of the first
        inner, grid = _in_one_domain(domain, inner_sizes, inner)
        grids.append(grid)
    # [copies, *data, domains of a copy, model]
    per_copy = [np.stack(grids[i : i + domains_each], axis=-2) for i in range(0, num_domains, domains_each)]
    layout = (*(inner or ()), domains_each) if domains_each > 1 or not inner else inner
    return layout, np.concatenate(per_copy).reshape(replica, *layout, model)


def slice_of(device: Any) -> int:
    """Returns the number of a device's TPU slice; 0 where there are none."""
    return int(getattr(device, "slice_index", None) or 0)


def domains_of(devices: list[Any]) -> list[int]:
    """Returns the number of each device's domain."""
    slices = list(map(slice_of, devices))
    if len(set(slices)) > 1 or devices[0].platform not in GPUS:
        return slices if devices[0].platform != "cpu" else [0] * len(devices)
    processes = [device.process_index for device in devices]
    one_device_each = len(set(processes)) == len(devices)  # a process per GPU says nothing of hosts
    return slices if one_device_each else processes


def _by_domain(devices: list[Any]) -> list[list[Any]]:
    """Returns the devices of each domain, in the order of the domains' numbers."""
    domains: dict[int, list[Any]] = {}
    for device, domain in zip(devices, domains_of(devices), strict=True):
        domains.setdefault(domain, []).append(device)
    return [domains[number] for number in sorted(domains)]


def _in_one_domain(
    devices: list[Any], sizes: Mapping[str, int], data_layout: Sequence[int] | None
) -> tuple[tuple[int, ...], np.ndarray]:
    """Orders `data` along the dims of a torus, without regard to domains."""
    replica, model, dims = sizes["replica"], sizes["model"], _torus_dims(devices)
    layout = _axes_of_data(devices, sizes["data"], dims) if data_layout is None else tuple(data_layout)
    # A single axis over all of a torus goes dim by dim, not along a ring.
    shape = dims if dims and layout == (len(devices),) else layout
    return layout, _device_grid((replica, *shape, model), devices).reshape(replica, *layout, model)


def _axes_of_data(devices: list[Any], data: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns one axis per torus dim that `data` covers, where that is what compiles to native collectives.

    Chips of several devices (TPU7x) have them over one axis: of steps along four dims XLA:TPU makes all-reduces.
    """
    num_chips = len({tuple(device.coords) for device in devices}) if dims else 0
    if num_chips < STAGED_FROM_NUM_CHIPS or len(dims) < 2 or num_chips < len(devices):
        return (data,)
    for taken in range(1 << len(dims)):  # the dims that `replica` and `model` cover; the others are left for `data`
        left = tuple(extent for i, extent in enumerate(dims) if not taken >> i & 1)
        if math.prod(left) == data:
            return left
    return (data,)


def _torus_dims(devices: list[Any]) -> tuple[int, ...]:
    """Returns the extents of a torus that devices fill, and the cores of a chip last; none for other devices."""
    coords = [getattr(device, "coords", None) for device in devices]
    if any(c is None for c in coords):
        return ()
    extents = [int(extent) for extent in np.ptp(np.asarray(coords), axis=0) + 1]
    dims = tuple(extent for extent in (*extents, len(devices) // math.prod(extents)) if extent > 1)
    return dims if math.prod(dims) == len(devices) else ()


def _device_grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(set(domains_of(devices))) == 1:
        for split in (False, True):
            with contextlib.suppress(NotImplementedError, ValueError, AssertionError):
                return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    # Or of an odd shape, of which the order of the devices is all that is left
    return np.asarray(devices).reshape(shape)
