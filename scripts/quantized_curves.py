"""Trains a GPT on the standard library's text with quantized collectives, and draws the losses beside bf16's.

python scripts/quantized_curves.py --steps 1000 --out docs/pictures
python scripts/quantized_curves.py --steps 1000 --model gpt-mini --seq-len 128 --batch-size 8 --out docs/pictures
python scripts/quantized_curves.py --steps 1000 --replicas --out docs/pictures

All runs have the same data, seed and optimizer, at stage 3 on 8 simulated devices. With `--outliers`, some features of
the params are 30 times as large as the others from the start, as those of trained language models become (LLM.int8,
arXiv:2208.07339): the hard case for a scale that a block shares. With `--replicas`, gradients are quantized between
four replicas of two devices alone, with and without error feedback.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sysconfig
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
import optax

import zero_jax as zero
from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.models import gpt

RUNS = {
    "bf16": None,
    "gathers int8, grads int8": zero.Quantize(gathers="int8", grads="int8"),
    "gathers fp8, grads int4": zero.Quantize(gathers="fp8", grads="int4"),
}
_BETWEEN = zero.Quantize(grads="int4", grads_over="replica")
REPLICAS = {
    "bf16": None,
    "grads int4": _BETWEEN,
    "grads int4, error feedback": dataclasses.replace(_BETWEEN, error_feedback=True),
}
MODELS = {
    "small": gpt.GPTConfig(num_layers=2, d_model=128, num_heads=4),
    **gpt.PRESETS,
}
COLORS = ("#000000", "#0072B2", "#E69F00")


def text() -> np.ndarray:
    """Returns the bytes of the modules at the top of the standard library, in order."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)


def batch(data: np.ndarray, step: int, size: int, seq_len: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step: `[size, seq_len]` tokens and the ones after them."""
    starts = np.random.default_rng(step).integers(0, len(data) - seq_len - 1, size)
    rows = np.stack([data[start : start + seq_len + 1] for start in starts]).astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def init(key: jax.Array, *, model: gpt.GPTConfig, outliers: bool) -> dict:
    """Returns params; with outliers, every 32nd feature of the residual stream is 30 times as large."""
    params = gpt.init(model, key)
    if outliers:
        params["embed"] = params["embed"].at[:, ::32].multiply(30.0)
    return params


def train(quantize: zero.Quantize | None, options: argparse.Namespace) -> list[float]:
    """Returns the loss of each step."""
    steps = options.steps
    model = dataclasses.replace(MODELS[options.model], vocab_size=256, seq_len=options.seq_len)
    mesh = zero.make_mesh(replica=4, data=2) if options.replicas else zero.make_mesh(data=8)
    config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0, quantize=quantize)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, min(50, steps // 4), steps)
    tx = optax.adamw(schedule)
    make = functools.partial(init, model=model, outliers=options.outliers)
    state = zero.init_state(make, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(model), tx, mesh=mesh, config=config)
    data, losses = text(), []
    for index in range(steps):
        state, metrics = step(state, batch(data, index, options.batch_size, model.seq_len))
        losses.append(float(metrics.loss))
        if (index + 1) % 50 == 0:
            print(f"  step {index + 1}: loss {np.mean(losses[-50:]):.4f}", flush=True)
    return losses


def main() -> None:
    """Trains, writes the losses and draws them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--outliers", action="store_true")
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    file = "_".join(
        ["quantized"]
        + [options.model.replace("-", "_")] * (options.model != "small")
        + ["replicas"] * options.replicas
        + ["outliers"] * options.outliers
    )
    options.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[float]] = {}
    for name, quantize in (REPLICAS if options.replicas else RUNS).items():
        start = time.monotonic()
        curves[name] = train(quantize, options)
        (options.out / f"{file}.json").write_text(json.dumps(curves))
        last = float(np.mean(curves[name][-100:]))
        ratio = last / float(np.mean(curves["bf16"][-100:]))
        seconds = time.monotonic() - start
        print(
            f"{name}: mean loss of the last 100 steps {last:.4f}, {ratio:.4f} of bf16's ({seconds:.0f} s)", flush=True
        )
    figure = new_figure(options.out / f"{file}.png", width=6, height=3.2)
    panel = figure.add_subplot()
    for (label, losses), color in zip(curves.items(), COLORS, strict=True):
        window = max(1, options.steps // 50)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        panel.plot(np.arange(window - 1, options.steps), smooth, label=label, color=color, linewidth=1.2)
    panel.set_xlabel("step")
    panel.set_ylabel("loss (nats a byte)")
    panel.set_ylim(top=curves["bf16"][0])
    panel.legend(frameon=False)
    tidy(panel)
    save_figure(figure, options.out / f"{file}.png")


if __name__ == "__main__":
    main()
