"""Measures the ZeRO paper's Tables 1 and 2 and its scaling, compiled for TPU.

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU. All of it is data parallelism: where the paper also
shards a model over a model-parallel axis, this does not. Each result is appended to a file at once, and compiled
programs are cached in the user's cache folder, so an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import compile_only  # noqa: F401 - before JAX
import optax
import paper_views
from largest_fit import LargestFit, largest_fit
from paper_formulas import PAPER_CASES, max_params

import zero_jax as zero
from zero_jax.cli.models.planned import reference_model
from zero_jax.core.files.user_cache import cache_folder
from zero_jax.models import gpt
from zero_jax.planning.process import CompilerCrash
from zero_jax.planning.report import PlanReport
from zero_jax.sharding import topology

CASES = dict(enumerate(PAPER_CASES.values()))
SHAPES = {64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"}
TABLE_1_PARAMS = (7.5e9, 128e9, 1e12)
SCALED = "gpt-60b"
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
KEY = ("hardware", "kind", "num_devices", "stage", "paper_params")
Compile = Callable[..., PlanReport]


def width_for(num_params: float) -> int:
    """Returns the width of models of a size."""
    return 4096 if num_params < 10e9 else 8192 if num_params < 200e9 else 25600


def model_of(num_layers: int, d_model: int) -> gpt.GPTConfig:
    """Returns a GPT of the paper's kind: sequences of 1024 tokens, heads of 128 (160 at width 25600)."""
    return gpt.GPTConfig(
        vocab_size=51200 if d_model == 25600 else 50304,
        seq_len=1024,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // (160 if d_model == 25600 else 128),
        position="learned",
    )


def layers_for(num_params: float, d_model: int) -> float:
    """Returns the number of layers of a model size, as a fraction."""
    one, two = (model_of(n, d_model).num_params for n in (1, 2))
    return max(1.0, 1 + (num_params - one) / (two - one))


def plan_step(
    model: gpt.GPTConfig, *, hardware: str, num_devices: int, stage: int, per_device_batch_size: int = 1
) -> PlanReport:
    """Compiles a step in bf16 with adamw, every block rematerialized."""
    shape = f"{hardware}:{SHAPES[num_devices]}"
    planned = reference_model(f"{model.num_layers} x {model.d_model}, stage {stage}", model)
    report = zero.plan(
        planned.loss_fn,
        planned.init_fn,
        optax.adamw(3e-4),
        batch=planned.batch_fn(per_device_batch_size * num_devices),
        topology=shape,
        config=zero.ZeroConfig(stage=stage, precision="bf16"),
        name=planned.name,
        timeout_seconds=1800,
    )
    return shown(f"{shape}, {planned.name}, batch {per_device_batch_size}", report)


def shown(name: str, report: PlanReport) -> PlanReport:
    """Returns a plan, and prints whether it fits."""
    verdict = "fits" if report.fits else "does not fit"
    needed = "an unknown amount" if report.needed_bytes is None else f"{report.needed_bytes / 1e9:.1f} GB"
    seconds = f"{report.compile_seconds:.0f} s{', before' if report.from_cache else ''}"
    print(f"  {name}: {verdict}, needs {needed} ({seconds})", file=sys.stderr, flush=True)
    return report


def figures(report: PlanReport) -> dict[str, Any]:
    """Returns the figures of a plan: sizes in bytes per device."""
    row: dict[str, Any] = {
        name: getattr(report, name)
        for name in ("fits", "needed_bytes", "usable_bytes", "num_params", "stage", "num_devices", "compile_seconds")
    }
    if report.memory:
        memory = report.memory
        state = {group: memory.arguments.get(group, 0) for group in ("params", "master", "opt_state")}
        row |= {f"{group}_bytes": size for group, size in state.items()}
        row |= {
            "state_bytes": sum(state.values()),
            "peak_grads_bytes": memory.temporaries.get("grads", 0),
            "argument_bytes": memory.argument_bytes,
            "temp_bytes": memory.temp_bytes,
            "heap_bytes": memory.heap_bytes,
            "live_peak_bytes": memory.live_peak_bytes,
            "temporaries": dict(memory.temporaries),
            "left_whole_bytes": sum(leaf.num_bytes for leaf in memory.left_whole),
            "traffic_ratio": report.traffic_ratio,
        }
    return row


def table_1_cell(num_params: float, *, stage: int, num_devices: int, hardware: str, compile: Compile) -> dict[str, Any]:
    """Measures the model states of one cell of Table 1."""
    width = width_for(num_params)
    model = model_of(round(layers_for(num_params, width)), width)
    report = compile(model, hardware=hardware, num_devices=num_devices, stage=stage)
    return {"paper_params": num_params, **_shape(model), **figures(report)}


def table_2_cell(*, stage: int, num_devices: int, hardware: str, compile: Compile) -> dict[str, Any]:
    """Finds the largest model of one cell of Table 2."""
    usable = topology.parse(f"{hardware}:{SHAPES[num_devices]}").hardware.usable_bytes
    theory = max_params(usable, sharded=CASES[stage], num_devices=num_devices)
    width = width_for(theory)

    def attempt(num_layers: int) -> PlanReport:
        return compile(model_of(num_layers, width), hardware=hardware, num_devices=num_devices, stage=stage)

    # The size of the model states alone is too large; the compiler refuses it at once.
    first = layers_for(theory, width)
    found = largest_fit(attempt, sizes=range(1, 2 * math.ceil(first) + 2), first=first, capacity_bytes=usable)
    return {
        "stage": stage,
        "num_devices": num_devices,
        "usable_bytes": usable,
        "theory_params": theory,
        "theory_32gb_params": max_params(32e9, sharded=CASES[stage], num_devices=num_devices),
        **_found(found, lambda layers: _shape(model_of(layers, width))),
    }


def scaling_cell(*, num_devices: int, hardware: str, compile: Compile) -> dict[str, Any]:
    """Finds the largest batch per device for the scaled model, and its estimated throughput."""
    model = gpt.PRESETS[SCALED]
    usable = topology.parse(f"{hardware}:{SHAPES[num_devices]}").hardware.usable_bytes
    # Beside the residuals, the logits: bf16, and float32 for the loss.
    residuals = zero.memory.TransformerResiduals(
        num_layers=model.num_layers, d_model=model.d_model, batch_size=1, seq_len=model.seq_len
    )
    each = residuals.device_bytes + 6 * model.vocab_size * model.seq_len
    first = (usable - 16 * model.num_params / num_devices) / each

    def attempt(batch_size: int) -> PlanReport:
        options = {"hardware": hardware, "num_devices": num_devices, "stage": 3}
        return compile(model, **options, per_device_batch_size=batch_size)

    found = largest_fit(attempt, sizes=BATCH_SIZES, first=first, capacity_bytes=usable)
    row = {"model": SCALED, "num_devices": num_devices, "stage": 3}
    row |= _found(found, lambda batch_size: {"per_device_batch_size": batch_size})
    best = None if found.largest is None else found.outcomes[found.largest]
    return row | ({"time": dataclasses.asdict(best.time)} if best and best.time else {})


def _shape(model: gpt.GPTConfig) -> dict[str, int]:
    return {"num_layers": model.num_layers, "d_model": model.d_model, "num_params": model.num_params}


def _found(found: LargestFit, describe: Callable[[int], dict[str, int]]) -> dict[str, Any]:
    """Returns the figures of a search: the largest size that fits, and the smallest that does not."""
    row: dict[str, Any] = {"is_settled": found.is_settled, "attempts": len(found.outcomes)}
    if found.largest is not None:
        row |= {**figures(found.outcomes[found.largest]), **describe(found.largest)}
    if found.too_large is not None:
        needed = found.outcomes[found.too_large].needed_bytes
        row["too_large"] = {**describe(found.too_large), "needed_bytes": needed}
    return row


def cells(args: argparse.Namespace, compile: Compile) -> Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Returns the requested cells: each cell's key, and the function that measures it."""
    common = {"hardware": args.hardware, "compile": compile}
    if args.table == 2:
        for n in args.devices:
            for stage in args.stage:
                key = {"kind": "table 2", "stage": stage, "num_devices": n}
                yield key, functools.partial(table_2_cell, stage=stage, num_devices=n, **common)
    if args.scaling:
        for n in args.devices:
            key = {"kind": "scaling", "num_devices": n}
            yield key, functools.partial(scaling_cell, num_devices=n, **common)
    if args.table == 1:
        for n in args.devices:
            for psi in TABLE_1_PARAMS:
                for stage in (stage for stage in args.stage if stage):
                    key = {"kind": "table 1", "stage": stage, "num_devices": n, "paper_params": psi}
                    yield key, functools.partial(table_1_cell, psi, stage=stage, num_devices=n, **common)


def run(args: argparse.Namespace, compile: Compile) -> None:
    """Measures the cells and appends each to the file."""
    for key, measure in cells(args, compile):
        append(args.out, {"hardware": args.hardware, **key}, measure)


def append(path: pathlib.Path, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Measures a cell, and appends its key and figures, or its error, to a file."""
    print(", ".join(f"{name} {value}" for name, value in key.items()), file=sys.stderr, flush=True)
    try:
        row = measure()
    except (CompilerCrash, RuntimeError) as error:
        row = {"error": f"{type(error).__name__}: {error}"}
        print(f"  {row['error']}", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**key, **row}) + "\n")


def load(path: pathlib.Path, names: Sequence[str] = KEY) -> list[dict[str, Any]]:
    """Returns the rows of a file, the last of each cell; `names` are the fields that identify a cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({tuple(row.get(name) for name in names): row for row in map(json.loads, lines)}.values())


def main() -> None:
    """Measures the requested cells, and prints their results in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=int, choices=(1, 2), help="which table to measure")
    parser.add_argument("--scaling", action="store_true", help=f"measure the largest batches of {SCALED}")
    parser.add_argument("--hardware", default="v5p", choices=("v4", "v5p"), help="the device (default: %(default)s)")
    parser.add_argument("--devices", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--stage", type=int, nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=pathlib.Path, default=cache_folder("programs").parent / "paper_tables.jsonl")
    parser.add_argument("--show", action="store_true", help="compile nothing; print the results in the file")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the scaling: a PNG or SVG")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.show:
        run(args, plan_step)
    rows = [row for row in load(args.out) if row["hardware"] == args.hardware]
    if args.plot:
        paper_views.plot_scaling(args.plot, rows, title=f"{SCALED} at stage 3 on TPU {args.hardware}")
    print(json.dumps(rows) if args.json else paper_views.views(rows))


if __name__ == "__main__":
    main()
