"""Parses the shapes in the text of an XLA program: dims, layout, memory space and size in memory of each array."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/")
_TOKEN = re.compile(r"[()]|([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?|(token|opaque)(?:\[\])?(?:\{[^}]*\})?")
_TILES = re.compile(r"T((?:\([^)]*\))+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class Array(NamedTuple):
    """The dtype, dims and layout of an array; `space` is the memory space of its layout, 0 for the device's memory."""

    dtype: str
    dims: tuple[int, ...]
    layout: str
    space: int
    num_bytes: int

    def __str__(self) -> str:
        """The shape without its layout, such as bf16[8,128]."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def unpadded_bytes(self) -> int:
        """The bytes of its elements alone."""
        return -(-self.num_elements * _stored_bits(self.dtype, self.layout) // 8)

    @property
    def packed_bytes(self) -> int:
        """The bytes of its elements without the bits that fill up s4 and the like, as they are sent."""
        return -(-self.num_elements * _bits(self.dtype) // 8)

    @property
    def num_elements(self) -> int:
        """The number of its elements, without padding."""
        return math.prod(self.dims)


Shape = Array | tuple["Shape", ...]


@functools.lru_cache(maxsize=16384)
def parse_shape(text: str) -> Shape:
    """Reads a shape: an array, or a tuple of shapes."""
    stack: list[list[Shape]] = [[]]  # the tuples that are open, the innermost last
    for match in _TOKEN.finditer(_COMMENT.sub("", text)):
        if match[0] == "(":
            stack.append([])
        elif match[0] == ")":
            parts = tuple(stack.pop())
            stack[-1].append(parts)
        else:
            stack[-1].append(_array(match[1] or match[4], match[2] or "", match[3] or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"unreadable shape in the HLO, please report it: {text!r}")
    return stack[0][0]


def arrays(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from arrays(part)


def _array(dtype: str, dims: str, layout: str) -> Array:
    # A dynamic dim is printed as <=8, and takes the memory of 8.
    sizes = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip())
    space = re.search(r"(?<![A-Z])S\((\d+)\)", layout)
    elements = padded_elements(sizes, layout)
    num_bytes = -(-elements * _stored_bits(dtype, layout) // 8)
    return Array(dtype=dtype, dims=sizes, layout=layout, space=int(space[1]) if space else 0, num_bytes=num_bytes)


def padded_elements(dims: Sequence[int], layout: str) -> int:
    """Counts the elements that an array has room for: `dims` cut into tiles, the last of which may be part empty.

    The layout `1,0:T(8,128)(2,1)` names the dims from the minor one on, cuts the two minor ones into tiles of 8 x 128,
    and each tile into tiles of 2 x 1; every cut rounds up. An array of lower rank than its tile gets dims of 1.
    """
    physical = [dims[dim] for dim in reversed(minor_to_major(layout, len(dims)))]
    for tile in tile_sizes(layout):
        physical = [1] * (len(tile) - len(physical)) + physical
        merged, blocks = 1, list[int]()
        for size in reversed(tile):
            merged *= physical.pop()
            if size:  # a * joins its dim to the next major one before that is cut
                blocks.insert(0, -(-merged // size))
                merged = 1
        physical += [merged, *blocks, *filter(None, tile)]
    return math.prod(physical)


def minor_to_major(layout: str, rank: int) -> tuple[int, ...]:
    """The dims of a layout from the minor one on; row-major where it says nothing."""
    order = tuple(int(digits) for digits in re.findall(r"\d+", layout.partition(":")[0]))
    return order if len(order) == rank else tuple(reversed(range(rank)))


def tile_sizes(layout: str) -> list[tuple[int, ...]]:
    """The tiles of a layout, from the outermost in: T(8,128)(2,1) is [(8, 128), (2, 1)]; a * is 0."""
    tiles = _TILES.search(layout.partition(":")[2])
    texts = re.findall(r"\(([^)]*)\)", tiles[1] if tiles else "")
    return [tuple(int(size.replace("*", "0")) for size in text.split(",")) for text in texts]


def _stored_bits(dtype: str, layout: str) -> int:
    """The bits that an element takes in memory: whole bytes, unless the layout packs it, as E(4) does."""
    packed = re.search(r"E\((\d+)\)", layout)
    return int(packed[1]) if packed else -(-_bits(dtype) // 8) * 8


def _bits(dtype: str) -> int:
    """The width of an element: the first number in the dtype's name, as in f8e4m3fn, s4 and bf16."""
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width and dtype not in _BITS:
        raise ValueError(f"unknown dtype in the HLO, please report it: {dtype!r}")
    return int(width[1]) if width else _BITS[dtype]
