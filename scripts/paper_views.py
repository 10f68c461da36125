"""Tables and a plot of the results of `paper_tables.py`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from paper_formulas import PAPER_CASES, model_state_bytes

from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.analysis.paper import PaperTable, show_gb, show_params

Rows = Sequence[dict[str, Any]]
_CASES = tuple(PAPER_CASES)
# Table 2 as the paper measured it, on 64 data-parallel parts of N / 64 model-parallel devices of 32 GB each.
_PAPER_MEASURED = {
    0: {64: 1.3e9, 128: 2.5e9, 256: 5e9, 512: 10e9, 1024: 20e9},
    1: {64: 6.2e9, 128: 12.5e9, 256: 25e9, 512: 50e9, 1024: 100e9},
}


def views(rows: Rows) -> str:
    """Returns all tables that have results."""
    made = (make(rows) for make in (table_1, table_2, scaling))
    return "\n\n".join(str(table) for table in made if table.rows) or "nothing was measured yet"


def table_1(rows: Rows) -> PaperTable:
    """Returns Table 1: model states of a device."""
    lines = []
    for row in _sorted(rows, "table 1", "paper_params", "num_devices", "stage"):
        case, psi = _CASES[row["stage"]], row["paper_params"]
        theory = model_state_bytes(psi, sharded=PAPER_CASES[case], num_devices=row["num_devices"])
        head = (show_params(psi), str(row["num_devices"]), case, gb(sum(theory.values())))
        if "error" in row:
            lines.append((*head, "-", "failed", "", "", ""))
            continue
        shape = f"{row['num_layers']} x {row['d_model']}"
        if "state_bytes" not in row:
            lines.append((*head, shape, "does not fit", "", "", gb(row["needed_bytes"])))
            continue
        state, ours = row["state_bytes"], _persistent_bytes(row)
        found = (gb(ours), gb(state), gb(row["peak_grads_bytes"]), gb(row["needed_bytes"]))
        lines.append((*head, shape, *found))
    return PaperTable(
        name="table1",
        title="Table 1, measured: model states per device (GB)",
        columns=("psi", "N", "case", "paper", "layers x width", "formula", "arguments", "grads at peak", "needed"),
        rows=tuple(lines),
        show=show_gb,
        note="paper: params, gradients and optimizer state. formula: what the program's arguments should be: without\n"
        "gradients, and at stage 3 without a low-precision copy. needed: everything.",
    )


def _persistent_bytes(row: dict[str, Any]) -> float:
    """Returns the state between steps: 12 bytes a parameter, and the low-precision copy if replicated."""
    sharded = PAPER_CASES[_CASES[row["stage"]]]
    states = model_state_bytes(
        row["num_params"],
        sharded=sharded,
        num_devices=row["num_devices"],
        grad_bytes=0,
        param_bytes=0 if "params" in sharded else 2,
    )
    return sum(states.values())


def table_2(rows: Rows) -> PaperTable:
    """Returns Table 2: the largest model that fits."""
    lines = []
    for row in _sorted(rows, "table 2", "num_devices", "stage"):
        stage, n = row["stage"], row["num_devices"]
        head = (str(n), _CASES[stage])
        if "num_params" not in row:
            lines.append((*head, row.get("error", "none fits").split(":")[0], *[""] * 7))
            continue
        over = row.get("too_large")
        theory = row["theory_params"]
        lines.append((
            *head,
            show_params(row["num_params"]) + ("" if row["is_settled"] else " or more"),
            f"{row['num_layers']} x {row['d_model']}",
            gb(row["needed_bytes"]),
            "-" if over is None else f"{over['num_layers']}: {gb(over['needed_bytes'])}",
            show_params(theory),
            f"{row['num_params'] / theory:.2f}",
            show_params(row["theory_32gb_params"]),
            show_params(_PAPER_MEASURED[stage][n]) if stage in _PAPER_MEASURED else "-",
        ))  # fmt: skip
    return PaperTable(
        name="table2",
        title="Table 2, measured: the largest model that fits (GB per device)",
        columns=tuple("N|case|largest|layers x width|needs GB|too large|theory|ratio|32 GB|paper".split("|")),
        rows=tuple(lines),
        show=show_params,
        note="needs: of a device. too large: layers that do not fit, and what they need. theory: the model states\n"
        "alone in this device's memory; ratio: largest / theory. 32 GB: the same for the paper's devices. paper: as\n"
        "measured there, with N / 64 model-parallel parts.",
    )


def scaling(rows: Rows) -> PaperTable:
    """Returns the largest batch that fits, and the throughput, against the number of devices."""
    found = [row for row in _sorted(rows, "scaling", "num_devices") if "time" in row]
    lines = []
    for row in found:
        n, first, time = row["num_devices"], found[0], row["time"]
        total = time["tokens_per_second"] / first["time"]["tokens_per_second"]
        over = row.get("too_large")
        lines.append((
            str(n),
            str(row["per_device_batch_size"]),
            gb(row["needed_bytes"]),
            "-" if over is None else f"{over['per_device_batch_size']}: {gb(over['needed_bytes'])}",
            f"{time['step_seconds']:.2f}",
            f"{time['exposed_seconds'] / time['step_seconds']:.0%}",
            f"{time['tokens_per_second'] / n:,.0f}",
            f"{time['mfu']:.1%}",
            f"{time['tokens_per_second'] / 1e3:,.0f}k",
            f"{total:.2f}",
            f"{n / first['num_devices']:g}",
        ))  # fmt: skip
    return PaperTable(
        name="scaling",
        title="Section 10.3: the largest batch of a device that fits, and the estimated throughput",
        columns=tuple("N|batch|needs GB|too large|step s|waits|tokens/s each|MFU|tokens/s|x|N x".split("|")),
        rows=tuple(lines),
        show=show_gb,
        note="x: throughput over that of the first row; N x: devices over those of the first row. Times are estimates.",
    )


def plot_scaling(path: pathlib.Path, rows: Rows, *, title: str) -> None:
    """Plots the largest batch that fits and the estimated throughput, both per device, against the number of devices.

    A dashed line shows linear scaling: the same throughput per device as on the fewest devices.
    """
    found = [row for row in _sorted(rows, "scaling", "num_devices") if "time" in row]
    if not found:
        raise ValueError("plot_scaling: there are no rows to draw")
    devices = [row["num_devices"] for row in found]
    throughputs = [row["time"]["tokens_per_second"] / row["num_devices"] for row in found]
    series = (
        ("largest batch per device (examples)", [row["per_device_batch_size"] for row in found], "#0072B2", "o"),
        ("estimated throughput per device (tokens/s)", throughputs, "#D55E00", "s"),
    )
    figure = new_figure(path, width=9, height=4)
    panels = figure.subplots(1, 2)
    for panel, (label, values, color, marker) in zip(panels, series, strict=True):
        panel.plot(devices, values, color=color, marker=marker, linewidth=1.5, markersize=5)
        for x, y in zip(devices, values, strict=True):
            text = f"{y:,.0f}" if y >= 100 else f"{y:.3g}"
            panel.annotate(text, (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(devices, [f"{n:,}" for n in devices])
        panel.minorticks_off()
        panel.set_xlabel("devices (N)")
        panel.set_ylabel(label)
        panel.set_ylim(0, max(values) * 1.15)
        panel.margins(x=0.08)
        tidy(panel)
    panels[1].axhline(throughputs[0], color="#666666", linestyle="--", linewidth=1, label="linear scaling")
    panels[1].legend(frameon=False, loc="lower right")
    figure.suptitle(title)
    save_figure(figure, path)


def _sorted(rows: Rows, kind: str, *names: str) -> list[dict[str, Any]]:
    return sorted((row for row in rows if row["kind"] == kind), key=lambda row: [row[name] for name in names])


def gb(num_bytes: float | None) -> str:
    """Returns a size in GB."""
    return "unknown" if num_bytes is None else show_gb(num_bytes / 1e9)
