"""A leaf of a sharded tree, and the page that draws them: HTML with SVG, without scripts or anything from elsewhere."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping

from zero_jax.core.text_tables import format_bytes, printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSummary:
    """A leaf of a sharded tree.

    Attributes:
      path: its path, such as params/embed.
      shape: its global shape.
      dtype: its dtype.
      spec: the mesh axes of each dim, such as `[data, -]`; how else it is placed, where it has no spec.
      parts: number of shards along each dim.
      num_copies: devices that hold the same shard.
      memory_kind: kind of the host memory that it is offloaded to, or None.
      global_bytes: bytes of all of it, once.
      device_bytes: bytes that a device holds.
      host_bytes: bytes that are kept in host memory for a device instead.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    parts: tuple[int, ...]
    num_copies: int
    memory_kind: str | None
    global_bytes: int
    device_bytes: int
    host_bytes: int = 0

    @property
    def group(self) -> str:
        """The first component of its path."""
        return self.path.split("/")[0]


Groups = Mapping[str, tuple[LeafSummary, ...]]

_STYLE = """
.zero-summary { font: 14px/1.4 system-ui, sans-serif; color: #1a1a1a; }
.zero-summary h1 { font-size: 18px; margin: 0 0 12px; }
.zero-summary summary { font-weight: 600; font-size: 15px; padding: 8px 0; cursor: pointer; }
.zero-summary table { border-collapse: collapse; margin: 0 0 16px; }
.zero-summary th { text-align: left; font-weight: 600; color: #555; border-bottom: 1px solid #bbb; padding: 3px 14px 3px 0; }
.zero-summary td { border-bottom: 1px solid #eee; padding: 5px 14px 5px 0; vertical-align: middle; }
.zero-summary .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.zero-summary code { font: 13px ui-monospace, monospace; }
.zero-summary .dim { color: #777; font-size: 12px; }
.zero-summary svg { display: block; }
.zero-summary .legend span { display: inline-block; margin-right: 18px; }
.zero-summary .legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
"""  # noqa: E501
_LEGEND = (
    '<p class="dim">Each drawing is a leaf cut as its shards are: a color is a shard, and "x 4" says that four '
    "devices hold the same one. At most two dims are drawn, sharded ones first.</p>"
)
_LONG, _SHORT = 150, 26  # of a drawing, in pixels
_MAX_CELLS = 1024
_BAR = 720
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#9c6b4e", "#97bbf5", "#a463f2")


def draw_page(heading: str, groups: Groups, *, is_part: bool = False) -> str:
    """Returns leaves by group as a page, or as a part of one (for notebooks)."""
    groups = _merge_single_leaves(groups)
    title = _escaped(heading)
    parts = [f"<style>{_STYLE}</style>", '<div class="zero-summary">', f"<h1>{title}</h1>", _bar(groups)]
    parts += [_group(name, leaves) for name, leaves in groups.items()]
    parts += [_LEGEND, "</div>"]
    body = "\n".join(parts)
    if is_part:
        return body
    head = f'<head><meta charset="utf-8"><title>{title}</title></head>'
    return f'<!doctype html>\n<html lang="en">{head}\n<body style="margin: 24px">\n{body}\n</body></html>\n'


def _merge_single_leaves(groups: Groups) -> Groups:
    """Moves groups that are a single leaf, such as counters and keys, into a group `other` at the end."""
    single_names = {name for name, leaves in groups.items() if len(leaves) == 1 and leaves[0].path == name}
    single_leaves = tuple(leaf for name in groups if name in single_names for leaf in groups[name])
    merged = {name: leaves for name, leaves in groups.items() if name not in single_names}
    return merged | ({"other": (*merged.get("other", ()), *single_leaves)} if single_leaves else {})


def _bar(groups: Groups) -> str:
    """Draws the bytes of a device by group."""
    sizes = {name: sum(leaf.device_bytes for leaf in leaves) for name, leaves in groups.items()}
    total, x, parts, legend = max(sum(sizes.values()), 1), 0.0, [], []
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
    sizes = (sum(getattr(leaf, field) for leaf in leaves) for field in ("global_bytes", "device_bytes"))
    head = "{}: {}, {} a device".format(_escaped(name), *map(format_bytes, sizes))
    columns = "<th>leaf</th><th>shape</th><th>dtype</th><th>spec</th><th>global</th><th>per device</th><th>shards</th>"
    rows = "\n".join(map(_row, leaves))
    return f"<details open><summary>{head}</summary><table><tr>{columns}</tr>\n{rows}</table></details>"


def _row(leaf: LeafSummary) -> str:
    inside = leaf.path.partition("/")[2] or leaf.path
    shape = " &times; ".join(map(str, leaf.shape)) or "scalar"
    sizes = "".join(f'<td class="n">{format_bytes(size)}</td>' for size in (leaf.global_bytes, leaf.device_bytes))
    offloaded = f"{format_bytes(leaf.host_bytes)} in {_escaped(leaf.memory_kind or '')}"
    memory = f' <span class="dim">{offloaded}</span>' if leaf.memory_kind else ""
    cells = [f"<code>{_escaped(inside)}</code>", shape, _escaped(leaf.dtype)]
    cells.append(f"<code>{_escaped(leaf.spec)}</code>{memory}")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{sizes}<td>{_drawing(leaf)}</td></tr>"


def _drawing(leaf: LeafSummary) -> str:
    """Draws the shards of a leaf as cells of a rectangle, beside the number of copies and of undrawn shards."""
    rows_dim, columns_dim = _drawn_dims(leaf)
    rows = 1 if rows_dim is None else leaf.parts[rows_dim]
    columns = 1 if columns_dim is None else leaf.parts[columns_dim]
    num_undrawn = math.prod(leaf.parts) // (rows * columns)
    width, height = _size(leaf, rows_dim, columns_dim)
    num_cells = rows * columns
    places = range(num_cells) if num_cells <= _MAX_CELLS else ()
    cells = [] if places else [f'<rect x="1" y="1" width="{width}" height="{height}" fill="#bbb"/>']
    for place in places:
        row, column = divmod(place, columns)
        cells.append(
            f'<rect x="{1 + column * width / columns:.2f}" y="{1 + row * height / rows:.2f}" '
            f'width="{width / columns:.2f}" height="{height / rows:.2f}" fill="{_color(place, num_cells)}" '
            f'stroke="#fff" stroke-width="{0.8 if num_cells < 65 else 0.2}">'
            f"<title>{_cell_title(leaf, {rows_dim: row, columns_dim: column})}</title></rect>"
        )
    notes = [f"{math.prod(leaf.parts):,} shards" if math.prod(leaf.parts) > 1 else "whole"]
    notes += [f"x {leaf.num_copies}"] if leaf.num_copies > 1 else []
    notes += [f"{num_undrawn} along dims not drawn"] if num_undrawn > 1 else []
    text = f'<text x="{width + 10}" y="{height / 2 + 5:.1f}" font-size="12" fill="#777">{", ".join(notes)}</text>'
    total = width + 10 + 7 * len(", ".join(notes)) + 8
    border = f'<rect x="1" y="1" width="{width}" height="{height}" fill="none" stroke="#555"/>'
    return f'<svg width="{total}" height="{height + 2}">{"".join(cells)}{border}{text}</svg>'


def _drawn_dims(leaf: LeafSummary) -> tuple[int | None, int | None]:
    """Returns the dims of rows and columns: sharded ones first, then large ones."""
    order = sorted(range(len(leaf.shape)), key=lambda i: (leaf.parts[i] == 1, -leaf.shape[i]))[:2]
    if len(order) == 2:
        return min(order), max(order)
    return None, order[0] if order else None


def _size(leaf: LeafSummary, rows_dim: int | None, columns_dim: int | None) -> tuple[int, int]:
    """Returns width and height in pixels, nearer to a square than the leaf is."""
    rows, columns = (1 if dim is None else max(leaf.shape[dim], 1) for dim in (rows_dim, columns_dim))
    if columns_dim is None:
        return _SHORT - 10, _SHORT - 10
    if rows_dim is None:
        return _LONG, _SHORT - 10
    ratio = (rows / columns) ** 0.5
    if ratio <= 1:
        return _LONG, max(_SHORT, round(min(_LONG * 0.5, _LONG * ratio * 0.5)))
    return max(_SHORT * 2, round(_LONG / ratio)), _LONG // 2


def _color(place: int, count: int) -> str:
    """Returns the color of a shard: neighbors differ in lightness, all in hue."""
    return f"hsl({round(320 * place / count)} 62% {64 if place % 2 else 54}%)" if count > 1 else "hsl(215 18% 72%)"


def _cell_title(leaf: LeafSummary, places: dict[int | None, int]) -> str:
    """Returns the slice of each dim that a cell stands for."""
    spans = []
    for dim, size in enumerate(leaf.shape):
        step = -(-size // leaf.parts[dim]) if leaf.parts[dim] else size
        start = places[dim] * step if dim in places else None
        spans.append(":" if start is None or leaf.parts[dim] == 1 else f"{start}:{min(start + step, size)}")
    return _escaped(f"{leaf.path}[{', '.join(spans)}], {format_bytes(leaf.device_bytes + leaf.host_bytes)}")


def _escaped(text: str) -> str:
    """Returns text for a page: a leaf may have any name."""
    return html.escape(printable(text))
