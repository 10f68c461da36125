"""Products of matrices, convolutions and windows of reductions, on arrays with the devices in front."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from zero_jax.hlo import Window, integers, read_windows
from zero_jax.interpreter.indexing import Combine, pad, update_in_order
from zero_jax.interpreter.values import NotInterpretable, convert, spread, widened


def dot(a: np.ndarray, b: np.ndarray, attributes: Mapping[str, str], dtype: np.dtype) -> np.ndarray:
    """Multiplies arrays over their contracting dims; sums are in float32 at least."""
    a, b = spread([widened(a), widened(b)])
    batch, contracting = (
        [[dim + 1 for dim in integers(attributes.get(f"{side}_{kind}_dims", ""))] for side in ("lhs", "rhs")]
        for kind in ("batch", "contracting")
    )
    free = [
        [dim for dim in range(1, x.ndim) if dim not in batch[side] + contracting[side]] for side, x in enumerate((a, b))
    ]
    sizes = [[x.shape[dim] for dim in free[side]] for side, x in enumerate((a, b))]
    lead = (len(a), *(a.shape[dim] for dim in batch[0]))
    count = math.prod(a.shape[dim] for dim in contracting[0])
    # [devices, batch, free, contracted] and [devices, batch, contracted, free].
    left = a.transpose(0, *batch[0], *free[0], *contracting[0]).reshape(*lead, math.prod(sizes[0]), count)
    right = b.transpose(0, *batch[1], *contracting[1], *free[1]).reshape(*lead, count, math.prod(sizes[1]))
    return convert((left @ right).reshape(*lead, *sizes[0], *sizes[1]), dtype)


def convolution(
    a: np.ndarray, b: np.ndarray, attributes: Mapping[str, str], out_dims: Sequence[int], dtype: np.dtype
) -> np.ndarray:
    """Convolves, with any dim labels, windows and groups: a sum of one product for each element of the window."""
    a, b = spread([widened(a), widened(b)])
    labels = attributes["dim_labels"]  # 0b1f_0o1i->01bf: a letter or number for each dim of operands and result
    if "?" in labels:
        raise NotInterpretable(f"a convolution with dims {labels!r}")
    left, right, out = re.split(r"_|->", labels)
    spatial = sorted(set(left) - {"b", "f"})
    a = a.transpose(0, *(1 + left.index(label) for label in ("b", "f", *spatial)))
    b = b.transpose(0, *(1 + right.index(label) for label in ("i", "o", *spatial)))
    sizes = {label: out_dims[place] for place, label in enumerate(out)}
    windows = read_windows(attributes.get("window"), len(spatial))
    feature_groups = int(attributes.get("feature_group_count", 1))
    batch_groups = int(attributes.get("batch_group_count", 1))
    groups = feature_groups * batch_groups
    outputs = [sizes[label] for label in spatial]
    result = np.zeros((len(a), groups, sizes["b"], sizes["f"] // groups, *outputs), np.result_type(a, b))
    # Groups first: [devices, groups, batch, features, ...] and [devices, groups, in, out, ...].
    if batch_groups > 1:
        a = a.reshape(len(a), batch_groups, a.shape[1] // batch_groups, *a.shape[2:])
    else:
        a = a.reshape(len(a), a.shape[1], feature_groups, -1, *a.shape[3:]).swapaxes(1, 2)
    b = b.reshape(len(b), b.shape[1], groups, -1, *b.shape[3:]).swapaxes(1, 2)
    inputs = [window.inputs(*sizes) for window, *sizes in zip(windows, a.shape[4:], outputs, strict=True)]
    for offsets in itertools.product(*(range(window.size) for window in windows)):
        pairs = [  # the outputs that an element of the window contributes to, and the inputs that it then meets
            (np.flatnonzero(inside[:, k]), at[inside[:, k], k]) for k, (at, inside) in zip(offsets, inputs, strict=True)
        ]
        if any(len(into) == 0 for into, _ in pairs):
            continue
        part = a[(..., *np.ix_(*(places for _, places in pairs)))]
        kernel = b[(..., *(w.size - 1 - k if w.is_reversed else k for w, k in zip(windows, offsets, strict=True)))]
        features_last = np.moveaxis(part, 3, -1)  # [devices, groups, batch, *outputs, features]
        product = features_last.reshape(*features_last.shape[:2], -1, features_last.shape[-1]) @ kernel
        product = np.moveaxis(product.reshape(*features_last.shape[:-1], -1), -1, 3)
        result[(..., *np.ix_(*(into for into, _ in pairs)))] += product
    result = np.moveaxis(result, 1, 2)  # [devices, batch, groups, features, ...]
    result = result.reshape(len(a), sizes["b"], -1, *outputs)
    order = ["b", "f", *spatial]
    return convert(result.transpose(0, *(1 + order.index(label) for label in out)), dtype)


def placed_windows(
    x: np.ndarray, value: np.ndarray, windows: Sequence[Window], out_dims: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yields, for each element of a window, what it has at each output; `value` in the padding."""
    padded = pad(x, value, [(w.low, w.high, w.base - 1) for w in windows])
    for offsets in itertools.product(*(range(w.size) for w in windows)):
        slices = [
            slice(k * w.dilation, k * w.dilation + (size - 1) * w.stride + 1, w.stride)
            for k, w, size in zip(offsets, windows, out_dims, strict=True)
        ]
        yield padded[(slice(None), *slices)]


def select_and_scatter(
    x: np.ndarray,
    source: np.ndarray,
    init: np.ndarray,
    windows: Sequence[Window],
    select: Combine,
    combine: Combine,
) -> np.ndarray:
    """Adds each output's value to the element of its window that is selected, as max-pooling's gradient does."""
    x, source, init = spread([x, source, init])
    out_dims = source.shape[1:]
    indices = np.broadcast_to(np.arange(math.prod(x.shape[1:])).reshape(x.shape[1:]), x.shape)
    values = placed_windows(x, np.zeros((1,), x.dtype), windows, out_dims)
    views = zip(values, placed_windows(indices, np.full((1,), -1), windows, out_dims), strict=True)
    best, chosen = next(views)  # -1 for none, in the padding
    for value, index in views:  # the first of equal ones is kept, as `select` (>=) says
        keeps = (chosen >= 0) & select([best], [value])[0]
        takes = (index >= 0) & ~keeps  # never the padding, whatever its value
        best, chosen = np.where(takes, value, best), np.where(takes, index, chosen)
    result = np.array(np.broadcast_to(init.reshape(-1, *(1,) * (x.ndim - 1)), x.shape)).reshape(-1)
    first = np.arange(len(x)).reshape(-1, *(1,) * len(out_dims)) * math.prod(x.shape[1:])  # of each device
    update_in_order([result], (first + chosen)[chosen >= 0], [source[chosen >= 0]], combine)
    return result.reshape(x.shape)
