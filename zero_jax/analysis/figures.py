"""Plots memory by stage, and has what all figures share: PNG, SVG or PDF."""

import pathlib
from collections.abc import Mapping
from typing import Any

from zero_jax.core.extras import extra

# The parts of a bar from the bottom up: the groups that they sum, and a colour of Okabe and Ito's colour-blind-safe
# palette. All other groups are drawn as `other temporaries`.
_PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "params": (("params",), "#0072B2"),
    "gradients": (("grads",), "#E69F00"),
    "optimizer state": (("master", "opt_state"), "#009E73"),
    "residuals": (("residuals",), "#CC79A7"),
}
_OTHER = ("other temporaries", "#999999")
_SUFFIXES = (".png", ".svg", ".pdf")
_BAR_WIDTH = 0.4


def plot_memory(
    path: pathlib.Path | str,
    bars: Mapping[str, tuple[Mapping[str, float], Mapping[str, float] | None]],
    *,
    title: str = "",
    capacity_bytes: float | None = None,
) -> None:
    """Plots stacked bars of memory per stage: the paper's Figure 1, measured beside the formula.

    Args:
      path: the file: `.png`, `.svg` or `.pdf`.
      bars: by the label below them, such as `stage 2`, bytes per device by group: by formula, with groups as in
        `MemoryEstimate.by_group`, and of a compiled program, or None. Groups of any other name are drawn together as
        other temporaries.
      title: the title.
      capacity_bytes: memory of a device, drawn as a line.

    Raises:
      ValueError: no bars, or another suffix.
    """
    if not bars:
        raise ValueError("plot_memory: there are no bars to draw")
    figure = new_figure(path, width=max(7.5, 1.1 * len(bars) + 1.5), height=4.8)
    from matplotlib.patches import Patch

    panel = figure.subplots()
    for i, (formula, measured) in enumerate(bars.values()):
        # The two bars of a stage touch; a stage of one bar has it in the middle.
        offset = 0 if measured is None else _BAR_WIDTH / 2
        _draw_bar(panel, i - offset, formula, alpha=0.45, hatch="///")
        if measured is not None:
            _draw_bar(panel, i + offset, measured)
    panel.set_xticks(range(len(bars)), list(bars))
    panel.set_xlim(-0.6, len(bars) - 0.4)
    tidy(panel)
    panel.grid(axis="x", visible=False)
    if capacity_bytes is not None:
        label = f"memory of a device ({_gb(capacity_bytes / 1e9)} GB)"
        panel.axhline(capacity_bytes / 1e9, color="#D55E00", linewidth=1, linestyle="--", label=label)
    panel.set_ylabel("memory per device (GB = 10⁹ bytes)")
    panel.set_ylim(0, panel.get_ylim()[1] * 1.06)  # room for the figure above the highest bar
    if title:
        figure.suptitle(title)
    # By label: each bar has a handle of each of its parts.
    handles = {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    gray: dict[str, Any] = {"facecolor": "#666666", "edgecolor": "white"}
    handles["formula"] = Patch(**gray, alpha=0.45, hatch="///")
    if any(measured is not None for _, measured in bars.values()):
        handles["measured"] = Patch(**gray)
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(handles), 4)}
    figure.legend(list(handles.values()), list(handles), **place, frameon=False)
    save_figure(figure, path)


def _draw_bar(panel: Any, x: float, groups: Mapping[str, float], **style: Any) -> None:
    bottom = 0.0
    for part, (size, color) in _stack(groups).items():
        panel.bar(
            x, size, _BAR_WIDTH * 0.94, bottom, color=color, edgecolor="white", linewidth=0.4, label=part, **style
        )
        bottom += size
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    panel.annotate(_gb(bottom), (x, bottom), (0, 2), **place, fontsize=7.5)


def _stack(groups: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Returns the parts of a bar, in GB, with their colours, from the bottom up."""
    part_groups = {name for names, _ in _PARTS.values() for name in names}
    sums = {part: (sum(groups.get(name, 0) for name in names), color) for part, (names, color) in _PARTS.items()}
    sums[_OTHER[0]] = (sum(size for name, size in groups.items() if name not in part_groups), _OTHER[1])
    return {part: (size / 1e9, color) for part, (size, color) in sums.items() if size}


def _gb(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def check_name(path: pathlib.Path | str) -> None:
    """Raises `ValueError` for a path that no figure can be written to, `MissingPackage` without matplotlib."""
    with extra("plot"):
        import matplotlib  # noqa: F401
    if pathlib.Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"cannot draw {str(path)!r}: give a name that ends in {', '.join(_SUFFIXES)}")
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise ValueError(f"cannot draw {str(path)!r}: there is no such folder, make it first")


def new_figure(path: pathlib.Path | str, *, width: float, height: float) -> Any:
    """Returns an empty matplotlib figure for a file, of a size in inches; raises as `check_name` does."""
    check_name(path)
    # Figure and canvas by hand: pyplot would keep state between pictures and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(panel: Any) -> None:
    """Gives axes the style of all figures: a pale grid, no frame above and at the right."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)  # or the grid would be drawn over bars


def save_figure(figure: Any, path: pathlib.Path | str) -> None:
    """Writes a figure to a file; the same data give the same bytes."""
    import matplotlib

    # Text stays text in an SVG, and its ids, which are random without a salt, are the same.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero_jax"}):
        is_svg = pathlib.Path(path).suffix.lower() == ".svg"
        figure.savefig(path, metadata={"Date": None} if is_svg else None)  # an SVG has the time of writing
