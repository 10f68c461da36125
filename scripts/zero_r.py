"""Measures the memory of a train step by remat policy, scanned and as a Python loop, compiled for TPU.

A GPT on long sequences at stage 3, sharded over `model`. It needs the TPU compiler (`pip install "jax[tpu]"`), not a
TPU. Compiled programs are cached, so the same command again only reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.models import decoder, gpt

TOPOLOGY, MODEL = "v5p:2x2x4", 4
GPT = gpt.GPTConfig(vocab_size=32768, seq_len=4096, num_layers=8, d_model=1024, num_heads=16, remat=False)
BATCH_SIZE = 4
POLICIES = ("none", "attention", "dots", "full", "full_sharded", "full_offloaded")
CHUNK = 4096
STATE = ("params", "master", "opt_state")
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Memory and traffic of a device."""

    name: str
    form: str
    state_bytes: int
    residual_bytes: int
    temp_bytes: int  # includes residuals
    host_bytes: int
    model_bytes: float
    data_bytes: float

    def __str__(self) -> str:
        sizes = (self.state_bytes, self.residual_bytes, self.temp_bytes, self.host_bytes)
        sent = (self.model_bytes, self.data_bytes)
        cells = [f"{size / MIB:,.0f}" for size in sizes] + [f"{size / 1e6:,.1f}" for size in sent]
        return f"| {self.name} | {self.form} | " + " | ".join(cells) + " |"


def compile_row(name: str, *, policy: str, scan: bool, chunked: bool = False, sequence: bool = False) -> Row:
    """Compiles a train step, or takes it from the cache."""
    config = dataclasses.replace(GPT, scan=scan)

    def make_loss(mesh: jax.sharding.Mesh) -> gpt.LossFn:
        losses = functools.partial(zero.losses.softmax_cross_entropy_with_integer_labels, mesh=mesh, chunk_size=CHUNK)
        return gpt.loss_fn(
            config,
            place=zero.sequence_parallel(mesh) if sequence else decoder.leave,
            token_losses=losses if chunked else gpt.whole_logits,
        )

    tokens = jax.ShapeDtypeStruct((BATCH_SIZE, config.seq_len), jnp.int32)
    report = zero.plan(
        zero.MeshLoss(make_loss),
        functools.partial(gpt.init, config),
        optax.adamw(3e-4),
        batch={"inputs": tokens, "targets": tokens},
        topology=TOPOLOGY,
        model=MODEL,
        config=zero.ZeroConfig(
            stage=3, precision="bf16", remat=policy, param_specs=gpt.param_specs(config), overlap=False
        ),
        name=f"{name} {'scanned' if scan else 'loop'}",
        log=lambda line: print(line, flush=True),
    )
    memory, comms = report.memory, report.comms
    if memory is None or comms is None:
        raise SystemExit(report.refusal)
    sent = comms.sent_by(lambda row: "model" if set(row.axes) == {"model"} else "data")
    return Row(
        name=name,
        form="scanned" if scan else "loop",
        state_bytes=sum(memory.arguments.get(group, 0) for group in STATE),
        residual_bytes=memory.residual_bytes,
        temp_bytes=memory.live_peak_bytes,
        host_bytes=memory.host_temp_bytes,
        model_bytes=sent.get("model", 0.0),
        data_bytes=sent.get("data", 0.0),
    )


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Plots a bar for each row: state, residuals and other temporaries on a device, and host memory."""
    parts = {
        "params and optimizer state": ([r.state_bytes for r in rows], "#009E73"),
        "residuals": ([min(r.residual_bytes, r.temp_bytes) for r in rows], "#CC79A7"),
        "other temporaries": ([max(r.temp_bytes - r.residual_bytes, 0) for r in rows], "#999999"),
    }
    figure = new_figure(path, width=11, height=4.8)
    axes = figure.add_subplot()
    places, width = range(len(rows)), 0.6
    bottom = [0.0] * len(rows)
    for label, (sizes, colour) in parts.items():
        heights = [size / MIB for size in sizes]
        axes.bar(places, heights, width, bottom=bottom, label=label, color=colour)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    host = [row.host_bytes / MIB for row in rows]
    axes.bar(places, host, width, bottom=bottom, label="on the host", fill=False, edgecolor="#CC79A7", hatch="///")
    axes.set_xticks(list(places), [f"{row.name.replace(', ', chr(10))}\n({row.form})" for row in rows], fontsize=8)
    axes.set_ylabel("MiB a device")
    axes.set_title(f"Where the bytes of a step live: {TOPOLOGY}, data=4 x model={MODEL}, stage 3, {GPT.seq_len} tokens")
    axes.legend(frameon=False)
    tidy(axes)
    save_figure(figure, path)


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    parser.add_argument("--plot", type=pathlib.Path, help="draw the scanned rows to this file")
    options = parser.parse_args()
    cases = [(policy, {"policy": policy}) for policy in options.policies]
    if "full_sharded" in options.policies:
        cases += [
            ("full_sharded, loss in chunks", {"policy": "full_sharded", "chunked": True}),
            ("full, sequence parallel, loss in chunks", {"policy": "full", "chunked": True, "sequence": True}),
        ]
    rows = []
    for name, case in cases:
        for scan in (True, False):
            rows.append(compile_row(name, scan=scan, **case))
            print(rows[-1], flush=True)
    print("\n| policy | form | state, MiB | residuals | temporaries | on the host | over model, MB | over data |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row)
    if options.plot:
        draw([row for row in rows if row.form == "scanned"], options.plot)
        print(f"picture  {options.plot}")


if __name__ == "__main__":
    main()
