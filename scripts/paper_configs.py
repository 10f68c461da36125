"""Measures the ZeRO paper's Figures 6 and 7 (configurations C1 to C5), compiled for TPU.

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU. The mesh is `data` x `model` = 32 x 16, for the paper's
25 x 16. Each result is appended to a file at once, and compiled programs are cached in the user's cache folder, so an
interrupted run resumes. Figure 6 starts its search from Figure 7's results, if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import optax
import paper_config_views
import paper_tables
from largest_fit import largest_fit
from paper_formulas import PAPER_CASES, model_state_bytes

import zero_jax as zero
from zero_jax.analysis.paper import PAPER_CONFIGS
from zero_jax.cli.models.planned import reference_model
from zero_jax.core.files.user_cache import cache_folder
from zero_jax.models import gpt
from zero_jax.planning.report import PlanReport
from zero_jax.sharding import topology

SHAPE, DATA, MODEL = "4x8x16", 32, 16
WIDTH, SEQ_LEN = 8192, 1024
EXAMPLES = 16  # per model replica and microbatch
SIZES = {"40B": 50, "100B": 125}  # layers of Figure 7's models
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A configuration on some hardware.

    Attributes:
      name: C1 to C5.
      hardware: the device.
      num_microbatches: forward passes of a step.
    """

    name: str
    hardware: str
    num_microbatches: int

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a program may use."""
        return topology.parse(f"{self.hardware}:{SHAPE}").hardware.usable_bytes


Compile = Callable[[Cell, int], PlanReport]


def compile_step(cell: Cell, num_layers: int) -> PlanReport:
    """Compiles the train step of a GPT of the paper's width with Megatron's tensor parallelism, and adamw."""
    model = paper_tables.model_of(num_layers, WIDTH)
    planned = reference_model(f"{num_layers} x {WIDTH}, {cell.name}", model)
    config = dataclasses.replace(
        PAPER_CONFIGS[cell.name],
        num_microbatches=cell.num_microbatches,
        param_specs=gpt.param_specs(model, model_size=MODEL),
    )
    report = zero.plan(
        planned.loss_fn,
        planned.init_fn,
        optax.adamw(3e-4),
        batch=planned.batch_fn(EXAMPLES * cell.num_microbatches * DATA),
        topology=f"{cell.hardware}:{SHAPE}",
        model=MODEL,
        config=config,
        name=planned.name,
        timeout_seconds=2400,
    )
    return paper_tables.shown(f"{planned.name}, {cell.num_microbatches} x {EXAMPLES} examples", report)


def figures(report: PlanReport) -> Row:
    """Returns the figures of a plan: sizes in bytes per device."""
    row: Row = {name: getattr(report, name) for name in ("fits", "needed_bytes", "num_params", "compile_seconds")}
    if report.memory:
        memory = report.memory
        row |= {
            "by_group": memory.by_group,
            "host_bytes": memory.host_bytes,
            "argument_bytes": memory.argument_bytes,
            "heap_bytes": memory.heap_bytes,
            "temp_bytes": memory.temp_bytes,
            "left_whole_bytes": sum(leaf.num_bytes for leaf in memory.left_whole),
        }
    if report.comms:
        row["sent_bytes"] = report.comms.sent_bytes
    if report.time:
        row["step_seconds"] = report.time.step_seconds
    return row


def layer_bytes(cell: Cell) -> float:
    """Returns what each further layer adds to a device by the paper's formulas: model states, and its saved input.

    Without microbatches the program of stage 1 is that of stage 2: its gradients are always shards.
    """
    config = PAPER_CONFIGS[cell.name]
    params = 12 * WIDTH**2 / MODEL
    case = "P_os" if config.stage == 1 and cell.num_microbatches > 1 else "P_os+g"
    states = model_state_bytes(params, sharded=PAPER_CASES[case], num_devices=DATA)
    sizes = {"num_layers": 1, "d_model": WIDTH, "batch_size": EXAMPLES, "seq_len": SEQ_LEN}
    placed = {"model": 1 if config.remat == "full" else MODEL, "offload": config.remat == "full_offloaded"}
    return sum(states.values()) + zero.memory.TransformerResiduals(**sizes, **placed).device_bytes


def first_layers(cell: Cell, known: Sequence[tuple[int, float]]) -> float:
    """Returns the first size to try: where a line through known `(layers, bytes)` crosses the capacity.

    A line through a single point has the slope of the formulas.
    """
    if not known:
        return cell.usable_bytes / layer_bytes(cell)
    (x0, y0), (x1, y1) = min(known), max(known)
    return x0 + (cell.usable_bytes - y0) / ((y1 - y0) / (x1 - x0) if x1 > x0 else layer_bytes(cell))


def figure_6(cell: Cell, rows: Sequence[Row], compile: Compile) -> Row:
    """Finds the largest model of a configuration."""
    alike = ("config", "num_microbatches")
    known = [
        (row["num_layers"], row["needed_bytes"])
        for row in rows
        if row["figure"] == 7 and all(row[name] == key(6, cell)[name] for name in alike) and row.get("by_group")
    ]
    found = largest_fit(
        lambda num_layers: compile(cell, num_layers),
        sizes=range(1, 401),
        first=first_layers(cell, known),
        capacity_bytes=cell.usable_bytes,
    )
    row: Row = {
        "is_settled": found.is_settled,
        "usable_bytes": cell.usable_bytes,
        "formula_layers": cell.usable_bytes / layer_bytes(cell),
    }
    if found.largest is not None:
        row |= {"num_layers": found.largest, **figures(found.outcomes[found.largest])}
    if found.too_large is not None:
        needed = found.outcomes[found.too_large].needed_bytes
        row["too_large"] = {"num_layers": found.too_large, "needed_bytes": needed}
    return row


def figure_7(cell: Cell, num_layers: int, compile: Compile) -> Row:
    """Measures a model in a configuration."""
    return {"num_layers": num_layers, **figures(compile(cell, num_layers))}


def key(figure: int, cell: Cell, size: str | None = None) -> Row:
    """Returns the identity of a row."""
    names = {"figure": figure, "config": cell.name, "hardware": cell.hardware, "size": size}
    return {**names, "num_microbatches": cell.num_microbatches}


def run(args: argparse.Namespace, compile: Compile) -> None:
    """Measures the requested cells and appends each row to the file."""
    for name in args.config:
        cell = Cell(name=name, hardware=args.hardware, num_microbatches=args.microbatches)
        sizes = args.size if args.figure == 7 else [None]
        for size in sizes:
            if size is None:
                measure = functools.partial(figure_6, cell, load(args.out), compile)
            else:
                measure = functools.partial(figure_7, cell, SIZES[size], compile)
            paper_tables.append(args.out, key(args.figure, cell, size), measure)


def load(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a file, the last of each cell."""
    return paper_tables.load(path, tuple(key(6, Cell(name="C1", hardware="v4", num_microbatches=1))))


def main() -> None:
    """Measures the requested cells, and prints all results in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=int, choices=(6, 7), help="which figure to measure; none: only print")
    parser.add_argument("--config", nargs="+", default=list(PAPER_CONFIGS), choices=list(PAPER_CONFIGS))
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES), help="models of Figure 7")
    parser.add_argument("--hardware", default="v4", choices=("v4", "v5p"), help="the device (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help=f"of {EXAMPLES} examples (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=cache_folder("programs").parent / "paper_configs.jsonl")
    parser.add_argument("--plot", type=pathlib.Path, help="draw both figures: a PNG or SVG")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.figure:
        run(args, compile_step)
    rows = load(args.out)
    if args.plot:
        paper_config_views.plot(args.plot, rows)
    print(json.dumps(rows) if args.json else paper_config_views.views(rows))


if __name__ == "__main__":
    main()
