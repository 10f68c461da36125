"""Tables and a plot of the results of `paper_configs.py`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from paper_views import gb

from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.analysis.paper import CONFIGS, PaperTable, show_gb, show_params
from zero_jax.sharding.topology import HARDWARE

Rows = Sequence[Mapping[str, Any]]
# Figure 6 of the paper: parameters of the largest model at a model-parallel degree of 16; its text gives none for C3.
PAPER_FIGURE_6 = {"C1": 40e9, "C2": 60e9, "C4": 140e9, "C5": 150e9}
# The parts of a bar: the groups of `MemoryReport.by_group` that they sum, and a colour of Okabe and Ito's palette.
PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "state": (("params", "master", "opt_state"), "#009E73"),
    "gradients": (("grads",), "#E69F00"),
    "residuals": (("residuals",), "#CC79A7"),
}
_REST = ("other", "#999999")
_DEVICE_GB = HARDWARE["v4"].usable_bytes / 1e9
_SERIES = {"paper": "#999999", 1: "#56B4E9", 2: "#0072B2"}


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the memory of a device in GB: model states, gradients, residuals, and the rest of the total."""
    groups = row["by_group"]
    parts = {part: sum(groups.get(name, 0) for name in names) / 1e9 for part, (names, _) in PARTS.items()}
    return parts | {_REST[0]: row["needed_bytes"] / 1e9 - sum(parts.values())}


def views(rows: Rows) -> str:
    """Returns all tables that have results."""
    runs = sorted({(row["hardware"], row["num_microbatches"]) for row in rows})
    tables = [
        make([row for row in rows if (row["hardware"], row["num_microbatches"]) == run], *run)
        for make in (figure_6, figure_7)
        for run in runs
    ]
    return "\n\n".join(str(table) for table in tables if table.rows) or "nothing was measured yet"


def figure_6(rows: Rows, hardware: str, num_microbatches: int) -> PaperTable:
    """Returns Figure 6: the largest model of each configuration."""
    found = {row["config"]: row for row in rows if row["figure"] == 6}
    first = found.get("C1", {}).get("num_params")
    lines = []
    for name in (name for name in CONFIGS if name in found):
        row, paper = found[name], PAPER_FIGURE_6.get(name)
        theirs = ("-", "-") if paper is None else (show_params(paper), f"{paper / PAPER_FIGURE_6['C1']:.2f}")
        if "num_params" not in row:
            lines.append((name, *theirs, row.get("error", "none fits").split(":")[0], *[""] * 5))
            continue
        over = row.get("too_large")
        lines.append((
            name,
            *theirs,
            show_params(row["num_params"]) + ("" if row["is_settled"] else " or more"),
            f"{row['num_params'] / first:.2f}" if first else "-",
            str(row["num_layers"]),
            gb(row["needed_bytes"]),
            "-" if over is None else f"{over['num_layers']}: {gb(over['needed_bytes'])}",
            f"{row['formula_layers']:.0f}",
        ))  # fmt: skip
    return PaperTable(
        name="figure6",
        title=f"Figure 6, measured: the largest model on {hardware}, {_batch(num_microbatches)} (GB per device)",
        columns=("", "paper", "x C1", "largest", "x C1", "layers", "needs GB", "too large", "formula layers"),
        rows=tuple(lines),
        show=show_params,
        note="paper: on 32 GB. too large: layers that do not fit, and what they need. formula: model states with\n"
        "gradients of 2 bytes, and saved inputs, would fill the device.",
    )


def figure_7(rows: Rows, hardware: str, num_microbatches: int) -> PaperTable:
    """Returns Figure 7: the memory of two models in each configuration."""
    found = {(row["size"], row["config"]): row for row in rows if row["figure"] == 7}
    lines = []
    for size in dict.fromkeys(size for size, _ in found):
        for name in (name for name in CONFIGS if (size, name) in found):
            row = found[size, name]
            if "by_group" not in row:
                said = row.get("error", "does not fit").split(":")[0]
                lines.append((f"{size} {name}", said, "", "", "", gb(row.get("needed_bytes")), ""))
                continue
            sizes = [show_gb(value) for value in parts_of(row).values()]
            lines.append((f"{size} {name}", *sizes, gb(row["needed_bytes"]), gb(row["host_bytes"])))
    return PaperTable(
        name="figure7",
        title=f"Figure 7, measured: memory of a device on {hardware}, {_batch(num_microbatches)} (GB)",
        columns=("model", *PARTS, _REST[0], "total", "host"),
        rows=tuple(lines),
        show=show_gb,
        note="gradients, residuals, other: temporaries that are alive when they are at their largest.",
    )


def plot(path: pathlib.Path, rows: Rows) -> None:
    """Plots Figure 6 beside the paper's, and Figure 7 as stacked bars."""
    figure = new_figure(path, width=12, height=4.4)
    panels = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _draw_figure_6(panels[0], [row for row in rows if row["figure"] == 6 and "num_params" in row])
    least = min((row["num_microbatches"] for row in rows if row["figure"] == 7), default=1)
    stacks = [row for row in rows if row["figure"] == 7 and row["num_microbatches"] == least]
    for panel, size in zip(panels[1:], sorted({row["size"] for row in stacks}, key=len), strict=False):
        _draw_figure_7(panel, [row for row in stacks if row["size"] == size])
        panel.set_title(f"Figure 7: {size}, {_batch(least)}", fontsize="medium")
    for panel in panels:
        tidy(panel)
        panel.grid(axis="x", visible=False)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower right", ncols=5, frameon=False)
    save_figure(figure, path)


def _draw_figure_6(panel: Any, rows: Rows) -> None:
    bars: dict[Any, dict[str, float]] = {"paper": PAPER_FIGURE_6}
    for row in sorted(rows, key=lambda row: row["num_microbatches"]):
        bars.setdefault(row["num_microbatches"], {})[row["config"]] = row["num_params"]
    labels = {"paper": "paper, 400 V100 of 32 GB", 1: "one microbatch of 16", 2: "two microbatches of 16"}
    width = 0.8 / len(bars)
    for i, (series, values) in enumerate(bars.items()):
        for config, value in values.items():
            x = list(CONFIGS).index(config) + (i - (len(bars) - 1) / 2) * width
            label = labels[series] if config == next(iter(values)) else None
            panel.bar(x, value / 1e9, width * 0.94, color=_SERIES[series], label=label)
            panel.annotate(f"{value / 1e9:.0f}", (x, value / 1e9), (0, 2), textcoords="offset points", ha="center",
                           fontsize=7.5)  # fmt: skip
    panel.set_xticks(range(len(CONFIGS)), list(CONFIGS))
    panel.set_ylim(0, panel.get_ylim()[1] * 1.2)
    panel.set_ylabel("parameters of the largest model (billions)")
    panel.set_title("Figure 6: model = 16, 512 v4 of 33 GB", fontsize="medium")
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_figure_7(panel: Any, rows: Rows) -> None:
    colors = {part: color for part, (_, color) in PARTS.items()} | dict([_REST])
    drawn = [row for row in rows if "by_group" in row]
    names = sorted({row["config"] for row in rows})
    for row in drawn:
        bottom, x = 0.0, names.index(row["config"])
        for part, size in parts_of(row).items():
            label = part if row is drawn[0] else None
            panel.bar(x, size, 0.7, bottom, color=colors[part], edgecolor="white", linewidth=0.4, label=label)
            bottom += size
        text = f"{bottom:.3g}" + (f"\n+{row['host_bytes'] / 1e9:.2g} host" if row["host_bytes"] else "")
        panel.annotate(text, (x, bottom), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7.5)
    for name in set(names) - {row["config"] for row in drawn}:
        panel.annotate("does not fit", (names.index(name), 0.5), ha="center", va="bottom", fontsize=8, rotation=90)
    panel.axhline(_DEVICE_GB, color="#D55E00", linewidth=1, linestyle="--", label=f"device ({_DEVICE_GB:.0f} GB)")
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.set_ylim(0, _DEVICE_GB * 1.06)
    panel.set_ylabel("memory of a device (GB)")


def _batch(num_microbatches: int) -> str:
    return f"{num_microbatches} microbatch{'es' if num_microbatches > 1 else ''} of 16"
