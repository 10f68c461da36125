"""Arrays in host memory as rows that XLA:TPU can fetch and replace one by one.

XLA:TPU copies slices between the memories along one dim only. It must not be the dim in the lanes of the layout, and
the number of sublanes must divide a tile or be a multiple of it. So an array is viewed in the order of its layout, in
which the dims that pad least are last, with the first dims merged: that moves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# Rows of a tile of XLA:TPU's layouts.
_TILE = 8
# Larger arrays are cut into some chunks at least: the first fetch and the last write of a loop overlap with nothing.
_NUM_CHUNKS, _SMALL_BYTES = 16, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedRows:
    """Rows of an array from `start` on that are cut into chunks of `size` rows."""

    start: int
    size: int
    num_chunks: int

    def offset(self, i: Any) -> Any:
        """Returns the first row of a chunk."""
        return self.start + i * self.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """An array as rows."""

    order: tuple[int, ...]  # the dims in the order of memory, the minor one last
    physical: tuple[int, ...]  # the shape in that order
    shape: tuple[int, ...]  # `[rows, ...]`, of the same elements in the same order
    tile: int  # the number of rows of a chunk is a multiple of it; 0 if the array cannot be cut

    @classmethod
    def of(cls, shape: Sequence[int], layouts: Sequence[Sequence[int]]) -> Rows:
        """Returns the rows of arrays of one shape, by the order of dims of each one's layout."""
        order = tuple(layouts[0])
        physical = tuple(shape[i] for i in order)
        rows, tile = physical, 0
        if len(shape) > 1 and math.prod(shape) and all(tuple(layout) == order for layout in layouts):
            num_slabs = math.prod(physical[:-2])
            if physical[-2] % _TILE == 0 or num_slabs == 1:  # slabs follow one another without padding
                rows, tile = (num_slabs * physical[-2], physical[-1]), _TILE
            else:
                rows, tile = (num_slabs, *physical[-2:]), 1
        return cls(order=order, physical=physical, shape=rows, tile=tile)

    def view(self, x: Any) -> Any:
        """Returns an array as rows."""
        return x.transpose(self.order).reshape(self.shape)

    def unview(self, rows: Any) -> Any:
        """Returns rows as the array."""
        return rows.reshape(self.physical).transpose(tuple(int(i) for i in np.argsort(self.order)))

    def index(self, dim: int, start: Any, shape: tuple[int, ...]) -> Any:
        """Returns for each element of the rows from `start` on its index along a dim of the array, `uint32[shape]`."""
        # The first dims in memory are merged to rows; the others are dims of a row.
        at, num_merged = self.order.index(dim), len(self.physical) - len(self.shape) + 1
        if at >= num_merged:
            return lax.broadcasted_iota(jnp.uint32, shape, at - num_merged + 1)
        row = lax.broadcasted_iota(jnp.uint32, shape, 0) + jnp.asarray(start, jnp.uint32)
        return row // math.prod(self.physical[at + 1 : num_merged]) % self.physical[at]

    def pieces(self, itemsizes: Sequence[int], window_bytes: int) -> list[ChunkedRows]:
        """Cuts all rows into chunks of a number of bytes at most, or of a tile, of arrays of these itemsizes."""
        num_rows, row_bytes = self.shape[0], sum(itemsizes) * math.prod(self.shape[1:])
        most_bytes = min(window_bytes, max(num_rows * row_bytes // _NUM_CHUNKS, _SMALL_BYTES))
        remaining, strips = num_rows % self.tile if self.tile else 0, []
        for size in (4, 2, 1):  # sublanes are packed: two of 16 bits, four of 8
            if remaining >= size and size * min(itemsizes) >= 4:
                strips.append(ChunkedRows(start=num_rows - remaining, size=size, num_chunks=1))
                remaining -= size
        if not self.tile or remaining or num_rows * row_bytes <= most_bytes:
            return [ChunkedRows(start=0, size=num_rows, num_chunks=1)]
        return [*_chunks(num_rows - num_rows % self.tile, self.tile, most_bytes // row_bytes), *strips]


def _chunks(num_rows: int, tile: int, most: int) -> list[ChunkedRows]:
    """Cuts rows into chunks of a multiple of a tile, in equal ones where that makes less than twice as many."""
    most = max(most // tile, 1) * tile
    # A last chunk of another size is a loop of its own, whose first fetch overlaps with nothing.
    dividing = [n for n in range(tile, most + 1, tile) if num_rows % n == 0]
    size = dividing[-1] if dividing and 2 * dividing[-1] > most else most
    num_chunks, remaining = divmod(num_rows, size)
    pieces = [ChunkedRows(start=0, size=size, num_chunks=num_chunks)] if num_chunks else []
    return pieces + ([ChunkedRows(start=num_chunks * size, size=remaining, num_chunks=1)] if remaining else [])
