"""Operations that move elements: slices, pads, gathers and scatters, on arrays with the devices in front."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zero_jax.hlo import integers
from zero_jax.interpreter.values import NotInterpretable, spread

Combine = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]


def pad(x: np.ndarray, value: np.ndarray, padding: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Pads by (low, high, interior) in each dim; negative amounts cut."""
    x, value = spread([x, value])
    dims = x.shape[1:]
    sizes = [low + high + max(n + (n - 1) * gap, 0) for n, (low, high, gap) in zip(dims, padding, strict=True)]
    result = np.empty((len(x), *(max(size, 0) for size in sizes)), x.dtype)
    result[...] = value.reshape(-1, *(1,) * (x.ndim - 1))
    source, target = [slice(None)], [slice(None)]
    for size, new_size, (low, _, gap) in zip(dims, result.shape[1:], padding, strict=True):
        step = gap + 1
        # Of the operand's elements, i at low + i * step of the result, those that are in the result: with negative
        # padding not the first or the last ones.
        first = max(-(low // step), 0)
        last = min(size, -((low - new_size) // step))
        source.append(slice(first, max(last, first)))
        target.append(slice(low + first * step, low + max(last, first) * step, step) if last > first else slice(0, 0))
    result[tuple(target)] = x[tuple(source)]
    return result


def clamped_starts(starts: Sequence[np.ndarray], dims: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Returns the starts of a slice `[devices, dims]`, moved so that the slice is inside."""
    stacked = np.stack(spread([start.astype(np.int64) for start in starts]), 1)
    places = np.clip(stacked, 0, np.array(dims) - np.array(sizes))
    return places[:1] if (places == places[0]).all() else places  # one for all devices: their slice is a view


def dynamic_slice(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """Returns a slice, which may begin elsewhere on each device."""
    if not starts:
        return x
    places = clamped_starts(starts, x.shape[1:], sizes)
    if len(places) == 1:
        return _every_window(x, sizes)[(slice(None), *places[0])]
    x, places = spread([x, places])
    return _every_window(x, sizes)[(np.arange(len(x)), *places.T)]


def dynamic_update_slice(x: np.ndarray, update: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a copy with a slice replaced, which may be another one on each device."""
    if not starts:
        return update
    x, update, places = spread([x, update, clamped_starts(starts, x.shape[1:], update.shape[1:])])
    result = np.array(x)
    _every_window(result, update.shape[1:])[(np.arange(len(x)), *places.T)] = update
    return result


def _every_window(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Returns a view of the windows of some sizes, by where they start: `[devices, *starts, *sizes]`."""
    dims = tuple(range(1, x.ndim))
    return np.lib.stride_tricks.sliding_window_view(x, tuple(sizes), axis=dims, writeable=x.flags.writeable)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of an operand that a gather reads, or a scatter updates, by the attributes of XLA's gather."""

    offset: list[int]  # the dims of the windows in the gather's result, or the scatter's updates
    collapsed: list[int]  # the operand's dims of size 1 in a window, which result and updates do not have
    batching: list[int]  # the operand's dims that go along dims of the indices
    indices_batching: list[int]  # these dims of the indices
    index_map: list[int]  # the operand's dim of each part of an index
    vector_dim: int  # the dim of the indices that has the parts
    sizes: list[int]  # the sizes of a window in the operand's dims

    def kept(self) -> list[int]:
        """Returns the operand's dims that result and updates have."""
        return [dim for dim in range(len(self.sizes)) if dim not in self.collapsed + self.batching]

    def starts(self, indices: np.ndarray, rank: int) -> np.ndarray:
        """Returns where each window starts, `[devices, *batch dims, operand dims]`."""
        indices = indices.astype(np.int64)
        if self.vector_dim == indices.ndim - 1:  # behind the last dim: each index is a scalar
            indices = indices[..., None]
        indices = np.moveaxis(indices, self.vector_dim + 1, -1)
        starts = np.zeros((*indices.shape[:-1], rank), np.int64)
        for part, dim in enumerate(self.index_map):
            starts[..., dim] = indices[..., part]
        for dim, along in zip(self.batching, self.indices_batching, strict=True):
            axis = (along if along < self.vector_dim else along - 1) + 1
            shape = [1] * (starts.ndim - 1)
            shape[axis] = starts.shape[axis]
            starts[..., dim] = np.arange(starts.shape[axis]).reshape(shape)
        return starts

    def read(self, x: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns the windows of an operand that start there, `[devices, *batch dims, *dims of windows]`."""
        devices = np.arange(len(x)).reshape(-1, *(1,) * (starts.ndim - 2))
        windows = _every_window(x, self.sizes)[(devices, *np.moveaxis(starts, -1, 0))]
        return windows[(..., *(slice(None) if dim in self.kept() else 0 for dim in range(len(self.sizes))))]

    def order(self, rank: int) -> list[int]:
        """Returns where each dim of a result `[devices, *dims]` is among the batch dims and those of windows."""
        batch = [dim for dim in range(rank) if dim not in self.offset]
        places = {dim: 1 + place for place, dim in enumerate(batch)}
        places |= {dim: 1 + len(batch) + place for place, dim in enumerate(self.offset)}
        return [0, *(places[dim] for dim in range(rank))]


def gather(x: np.ndarray, indices: np.ndarray, windows: Windows, rank: int) -> np.ndarray:
    """Returns the windows of an operand; a start outside is moved inside."""
    x, indices = spread([x, indices])
    starts = windows.starts(indices, x.ndim - 1)
    starts = np.clip(starts, 0, np.array(x.shape[1:]) - np.array(windows.sizes))
    return windows.read(x, starts).transpose(windows.order(rank))


def scatter(
    xs: Sequence[np.ndarray],
    indices: np.ndarray,
    updates: Sequence[np.ndarray],
    windows: Windows,
    combine: Combine,
    add: np.ufunc | None,
) -> list[np.ndarray]:
    """Combines updates into windows inside of operands, in order unless a NumPy function `add` makes that unneeded."""
    first, indices, *updates = spread([xs[0], indices, *updates])
    xs = [np.array(np.broadcast_to(x, (len(first), *x.shape[1:]))) for x in xs]
    starts = windows.starts(indices, first.ndim - 1)
    last = np.array(first.shape[1:]) - np.array(windows.sizes)
    inside = np.asarray(((starts >= 0) & (starts <= last)).all(-1))  # a window that is outside in part is left out
    # For each element of each window its place in the flat operand, of all devices one after the other.
    flat = windows.read(np.arange(first.size).reshape(first.shape), np.where(inside[..., None], starts, 0))
    order = np.argsort(windows.order(updates[0].ndim - 1))
    flat, *new = (x[inside].reshape(-1) for x in (flat, *(update.transpose(order) for update in updates)))
    if add is not None and len(xs) == 1:
        # In float32 for the dtypes of ml_dtypes, and rounded once, as all sums here.
        result = (xs[0].astype(np.float32) if xs[0].dtype.kind == "V" else xs[0]).reshape(-1)
        add.at(result, flat, new[0].astype(result.dtype))
        return [result.reshape(first.shape).astype(first.dtype)]
    results = [x.reshape(-1) for x in xs]
    update_in_order(results, flat, new, combine)
    return [x.reshape(first.shape) for x in results]


def update_in_order(xs: Sequence[np.ndarray], flat: np.ndarray, new: Sequence[np.ndarray], combine: Combine) -> None:
    """Combines updates into places of arrays of one dim, those of one place one after the other."""
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    count = np.arange(len(flat)) - np.searchsorted(ordered, ordered)  # how many before it have its place
    for number in range(count.max(initial=-1) + 1):  # the first update of each place, then the second
        chosen = order[count == number]
        combined = combine([x[flat[chosen]] for x in xs], [update[chosen] for update in new])
        for x, value in zip(xs, combined, strict=True):
            x[flat[chosen]] = value


def gather_windows(attributes: Mapping[str, str]) -> Windows:
    """Reads the attributes of a gather."""
    names = "offset_dims", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims"
    return _windows(attributes, (*names, "start_index_map"), integers(attributes["slice_sizes"]))


def scatter_windows(attributes: Mapping[str, str], operand: Sequence[int], update: Sequence[int]) -> Windows:
    """Reads the attributes of a scatter, with the dims of its operand and its updates."""
    names = "update_window_dims", "inserted_window_dims", "input_batching_dims", "scatter_indices_batching_dims"
    windows = _windows(attributes, (*names, "scatter_dims_to_operand_dims"), [1] * len(operand))
    sizes = dict(zip(windows.kept(), (update[dim] for dim in windows.offset), strict=True))
    if 0 in sizes.values():
        raise NotInterpretable("a scatter of windows without elements")
    return dataclasses.replace(windows, sizes=[sizes.get(dim, 1) for dim in range(len(operand))])


def _windows(attributes: Mapping[str, str], names: Sequence[str], sizes: list[int]) -> Windows:
    offset, collapsed, batching, indices_batching, index_map = names
    return Windows(
        offset=integers(attributes[offset]),
        collapsed=integers(attributes.get(collapsed, "")),
        batching=integers(attributes.get(batching, "")),
        indices_batching=integers(attributes.get(indices_batching, "")),
        index_map=integers(attributes[index_map]),
        vector_dim=int(attributes["index_vector_dim"]),
        sizes=sizes,
    )
