"""The contents of a sharded tree: its leaves as a table (shape, dtype, spec, bytes), and drawn as a page.

The page is HTML with SVG, without scripts or anything from elsewhere.
"""

import dataclasses
import html
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.analysis.leaves import host_memory_kind
from zero_jax.core.files.json_lines import write_text
from zero_jax.core.text_tables import Report, aligned, format_bytes, printable
from zero_jax.core.tree import PyTree, check_arrays, leaf_names, shard_bytes
from zero_jax.sharding.spec import dims_of

_LEGEND = (
    '<p class="dim">Each drawing is a leaf cut as its shards are: a color is a shard, and "x 4" says that four '
    "devices hold the same one. At most two dims are drawn, sharded ones first.</p>"
)
_LONG, _SHORT = 150, 26  # of a drawing, in pixels
_MAX_CELLS = 1024
_BAR = 720
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#9c6b4e", "#97bbf5", "#a463f2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSummary:
    """A leaf of a sharded tree."""

    path: str  # its path, such as params/embed
    shape: tuple[int, ...]  # its global shape
    dtype: str  # its dtype
    spec: str  # the mesh axes of each dim, such as `[data, -]`; how else it is placed, where it has no spec
    parts: tuple[int, ...]  # number of shards along each dim
    num_copies: int  # devices that hold the same shard
    memory_kind: str | None  # kind of the host memory that it is offloaded to, or None
    global_bytes: int  # bytes of all of it, once
    device_bytes: int  # bytes that a device holds
    host_bytes: int = 0  # bytes that are kept in host memory for a device instead

    @property
    def group(self) -> str:
        """The first component of its path."""
        return self.path.split("/")[0]


Groups = Mapping[str, tuple[LeafSummary, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSummary(Report):
    """The leaves of a sharded tree by group; prints as a tree, and is drawn as HTML (`save_html`, notebooks).

    Attributes:
      title: the kind of the tree.
      mesh: size of each mesh axis, empty where the leaves have no common mesh.
      leaves: the leaves, in the order of the tree.

    Example:
      >>> report = zero.summary(state)
      >>> [leaf.path for leaf in report.leaves][:2]
      ['step', 'params/down']
    """

    title: str
    mesh: Mapping[str, int]
    leaves: tuple[LeafSummary, ...] = dataclasses.field(repr=False)

    @property
    def groups(self) -> dict[str, tuple[LeafSummary, ...]]:
        """The leaves by group."""
        groups: dict[str, list[LeafSummary]] = {}
        for leaf in self.leaves:
            groups.setdefault(leaf.group, []).append(leaf)
        return {name: tuple(leaves) for name, leaves in groups.items()}

    @property
    def global_bytes(self) -> int:
        """Bytes of all leaves, each once."""
        return sum(leaf.global_bytes for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes that a device holds."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def host_bytes(self) -> int:
        """Bytes that are kept in host memory for a device."""
        return sum(leaf.host_bytes for leaf in self.leaves)

    @property
    def heading(self) -> str:
        """What the tree is and where: a line."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1 or len(self.mesh) == 1)
        where = f" on mesh {mesh} ({math.prod(self.mesh.values())} devices)" if self.mesh else ""
        sizes = f"{format_bytes(self.global_bytes)}, {format_bytes(self.device_bytes)} a device"
        host = f", {format_bytes(self.host_bytes)} in host memory for each" if self.host_bytes else ""
        return f"{self.title}{where}: {len(self.leaves)} leaves, {sizes}{host}"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "shape", "dtype", "spec", "global", "per device", "")]
        above: list[str] = []
        for leaf in self.leaves:
            *folders, name = leaf.path.split("/")
            same = [a == b for a, b in zip(above, folders, strict=False)]
            # From the first folder that is not that of the leaf above.
            for depth in range([*same, False].index(False), len(folders)):
                totals = ("", "") if depth else _sizes(self.groups[folders[0]])
                rows.append((f"{'  ' * depth}{folders[depth]}", "", "", "", *totals, ""))
            above = folders
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            kind = f"{format_bytes(leaf.host_bytes)} in {leaf.memory_kind}" if leaf.memory_kind else ""
            rows.append((f"{'  ' * len(folders)}{name}", shape, leaf.dtype, leaf.spec, *_sizes([leaf]), kind))
        return f"{self.heading}\n{aligned(rows, right=(4, 5))}"

    def to_html(self) -> str:
        """Returns a page of its own, without scripts: the leaves with their shards drawn."""
        head = f'<head><meta charset="utf-8"><title>{_escaped(self.heading)}</title></head>'
        body = f'<body style="margin: 24px">\n{self._repr_html_()}\n</body>'
        return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page atomically."""
        write_text(pathlib.Path(path), self.to_html())

    def _repr_html_(self) -> str:
        groups = self.groups
        # Groups that are a single leaf, such as counters and keys, are one at the end.
        single = {name for name, leaves in groups.items() if len(leaves) == 1 and leaves[0].path == name}
        others = (*groups.get("other", ()), *(groups[name][0] for name in groups if name in single))
        groups = {name: leaves for name, leaves in groups.items() if name not in {*single, "other"}}
        groups |= {"other": others} if others else {}
        style = pathlib.Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        parts = [f"<style>\n{style}</style>", '<div class="zero-summary">', f"<h1>{_escaped(self.heading)}</h1>"]
        parts += [_bar(groups), *(_group(name, leaves) for name, leaves in groups.items())]
        return "\n".join([*parts, _LEGEND, "</div>"])


def _sizes(leaves: Sequence[LeafSummary]) -> list[str]:
    return [format_bytes(sum(getattr(x, field) for x in leaves)) for field in ("global_bytes", "device_bytes")]


def summary(tree: PyTree) -> StateSummary:
    """Summarizes what a sharded tree holds and where: each leaf's shape, dtype, spec and bytes, by group.

    Nothing is read from the devices, and no process waits for another.

    Args:
      tree: a `TrainState`, its params, or any pytree of arrays or `ShapeDtypeStruct`s, such as `zero.abstract_state`
        returns.

    Raises:
      ValueError: a leaf that is no array.

    Example:
      >>> zero.summary(state).groups["params"][0].shape
      (64, 64)
    """
    check_arrays("tree", tree, remedy="summarize a tree of arrays")
    leaves = [_leaf(name, leaf) for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)]
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    mesh = dict(meshes.pop().shape) if len(meshes) == 1 else {}  # with several, no sizes would be those of all leaves
    return StateSummary(title=type(tree).__name__, mesh=mesh, leaves=tuple(leaves))


def _leaf(name: str, leaf: Any) -> LeafSummary:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    sharding, shape = getattr(leaf, "sharding", None), tuple(leaf.shape)  # arrays of NumPy have no sharding
    shard = shape if sharding is None else tuple(sharding.shard_shape(shape))
    parts = tuple(-(-size // part) if part else 1 for size, part in zip(shape, shard, strict=True))  # the last is short
    num_devices = 1 if sharding is None else sharding.num_devices
    host_kind, on_one = host_memory_kind(sharding), shard_bytes(leaf)
    return LeafSummary(
        path=name or "value",
        shape=shape,
        dtype=str(leaf.dtype),
        spec=_spec(sharding, len(shape)),
        parts=parts,
        num_copies=max(1, num_devices // math.prod(parts)),
        memory_kind=host_kind,
        global_bytes=math.prod(shape) * leaf.dtype.itemsize,
        device_bytes=0 if host_kind else on_one,
        host_bytes=on_one if host_kind else 0,
    )


def _spec(sharding: Any, ndim: int) -> str:
    if sharding is None:
        return "on the host"
    if not isinstance(sharding, NamedSharding):
        return "one device" if sharding.num_devices == 1 else type(sharding).__name__
    return f"[{', '.join('+'.join(axes) or '-' for axes in dims_of(sharding, ndim))}]"


def _bar(groups: Groups) -> str:
    sizes = {name: sum(leaf.device_bytes for leaf in leaves) for name, leaves in groups.items()}
    total, x, parts, legend = max(sum(sizes.values()), 1), 0.0, [], []  # 1: of a tree without bytes the bar is empty
    for place, (name, size) in enumerate(sizes.items()):
        color, width = _COLORS[place % len(_COLORS)], _BAR * size / total
        text = f"{_escaped(name)}: {format_bytes(size)} a device"
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="22" fill="{color}"><title>{text}</title></rect>'
        )
        legend.append(f'<span><i style="background: {color}"></i>{text}</span>')
        x += width
    svg = f'<svg width="{_BAR}" height="22" role="img" aria-label="bytes of a device">{"".join(parts)}</svg>'
    return f'{svg}<p class="legend">{"".join(legend)}</p>'


def _group(name: str, leaves: tuple[LeafSummary, ...]) -> str:
    head = "{}: {}, {} a device".format(_escaped(name), *_sizes(leaves))
    columns = "<th>leaf</th><th>shape</th><th>dtype</th><th>spec</th><th>global</th><th>per device</th><th>shards</th>"
    rows = "\n".join(map(_row, leaves))
    return f"<details open><summary>{head}</summary><table><tr>{columns}</tr>\n{rows}</table></details>"


def _row(leaf: LeafSummary) -> str:
    inside = leaf.path.partition("/")[2] or leaf.path
    shape = " &times; ".join(map(str, leaf.shape)) or "scalar"
    sizes = "".join(f'<td class="n">{size}</td>' for size in _sizes([leaf]))
    offloaded = f"{format_bytes(leaf.host_bytes)} in {_escaped(leaf.memory_kind or '')}"
    memory = f' <span class="dim">{offloaded}</span>' if leaf.memory_kind else ""
    cells = [f"<code>{_escaped(inside)}</code>", shape, _escaped(leaf.dtype)]
    cells.append(f"<code>{_escaped(leaf.spec)}</code>{memory}")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{sizes}<td>{_drawing(leaf)}</td></tr>"


def _drawing(leaf: LeafSummary) -> str:
    """Draws the shards of a leaf as cells of a rectangle, beside the number of copies and of undrawn shards."""
    # Sharded dims first, then large ones: of rows and columns, or of columns alone.
    dims = sorted(sorted(range(len(leaf.shape)), key=lambda i: (leaf.parts[i] == 1, -leaf.shape[i]))[:2])
    rows, columns = [1, 1, *(leaf.parts[dim] for dim in dims)][-2:]
    width, height = _size([max(leaf.shape[dim], 1) for dim in dims])
    num_cells, num_shards = rows * columns, math.prod(leaf.parts)
    num_undrawn = num_shards // num_cells
    places = range(num_cells) if num_cells <= _MAX_CELLS else ()  # more could not be told apart
    cells = [] if places else [f'<rect x="1" y="1" width="{width}" height="{height}" fill="#bbb"/>']
    for place in places:
        row, column = divmod(place, columns)
        # Neighbors differ in lightness, all in hue.
        color = f"{round(320 * place / num_cells)} 62% {64 if place % 2 else 54}%" if num_cells > 1 else "215 18% 72%"
        cells.append(
            f'<rect x="{1 + column * width / columns:.2f}" y="{1 + row * height / rows:.2f}" '
            f'width="{width / columns:.2f}" height="{height / rows:.2f}" fill="hsl({color})" '
            f'stroke="#fff" stroke-width="{0.8 if num_cells < 65 else 0.2}">'
            f"<title>{_cell_title(leaf, dict(zip(dims[::-1], (column, row), strict=False)))}</title></rect>"
        )
    notes = [f"{num_shards:,} shards" if num_shards > 1 else "whole"]
    notes += [f"x {leaf.num_copies}"] if leaf.num_copies > 1 else []
    notes += [f"{num_undrawn} along dims not drawn"] if num_undrawn > 1 else []
    text = f'<text x="{width + 10}" y="{height / 2 + 5:.1f}" font-size="12" fill="#777">{", ".join(notes)}</text>'
    total = width + 10 + 7 * len(", ".join(notes)) + 8
    border = f'<rect x="1" y="1" width="{width}" height="{height}" fill="none" stroke="#555"/>'
    return f'<svg width="{total}" height="{height + 2}">{"".join(cells)}{border}{text}</svg>'


def _size(sizes: list[int]) -> tuple[int, int]:
    """Returns width and height in pixels of a drawing of dims, nearer to a square than these are."""
    if len(sizes) < 2:
        return _LONG if sizes else _SHORT - 10, _SHORT - 10
    ratio = (sizes[0] / sizes[1]) ** 0.5  # an embedding of 100,000 x 1,000 would be a line
    if ratio <= 1:
        return _LONG, max(_SHORT, round(min(_LONG * 0.5, _LONG * ratio * 0.5)))
    return max(_SHORT * 2, round(_LONG / ratio)), _LONG // 2


def _cell_title(leaf: LeafSummary, places: dict[int, int]) -> str:
    """Returns the slice of each dim that a cell stands for."""
    spans = []
    for dim, size in enumerate(leaf.shape):
        step = -(-size // leaf.parts[dim]) if leaf.parts[dim] else size  # rounded up, as JAX cuts uneven dims
        start = places[dim] * step if dim in places else None
        spans.append(":" if start is None or leaf.parts[dim] == 1 else f"{start}:{min(start + step, size)}")
    return _escaped(f"{leaf.path}[{', '.join(spans)}], {format_bytes(leaf.device_bytes + leaf.host_bytes)}")


def _escaped(text: str) -> str:
    return html.escape(printable(text))  # a leaf may have any name
