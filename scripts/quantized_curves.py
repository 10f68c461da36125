"""Trains a GPT on the standard library's text in fewer bits, in a set of ways, and draws the losses beside each other.

python scripts/quantized_curves.py --steps 1000 --out docs/pictures
python scripts/quantized_curves.py --steps 1000 --model gpt-mini --seq-len 128 --batch-size 8 --out docs/pictures
python scripts/quantized_curves.py --steps 1000 --set replicas --out docs/pictures
python scripts/quantized_curves.py --steps 1000 --set masters --model gpt-mini --seeds 3 --out docs/pictures

The runs of a set have the same data, seeds and learning rates, at stage 3 on 8 simulated devices
(`JAX_NUM_CPU_DEVICES`). `quantized` sends collectives in 8 and 4 bits, `replicas` the gradients between four replicas
of two devices alone, with and without error feedback; `masters` keeps the state in bfloat16. With `--outliers`, some
features of the params are 30 times as large as the others from the start, as those of trained language models become
(LLM.int8, arXiv:2208.07339): the hard case for a scale that a block shares.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero
from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.models import gpt


class Variant(NamedTuple):
    """A run: the config of its step, and its optimizer of a learning rate."""

    config: Mapping[str, Any] = {}
    optimizer: Callable[..., optax.GradientTransformation] = optax.adamw


def small_adamw(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns AdamW whose moments are bfloat16."""
    return zero.round_state(adamw(schedule, mu_dtype=jnp.bfloat16), "nu", jnp.bfloat16)


adamw = functools.partial(optax.adamw, b2=0.95)
_BETWEEN = zero.Quantize(grads="int4", grads_over="replica")
_BF16 = dict.fromkeys(("param", "compute", "reduce", "master"), jnp.bfloat16)
# The first of a set is what the others are compared with.
SETS = {
    "quantized": {
        "bf16": Variant(),
        "gathers int8, grads int8": Variant({"quantize": zero.Quantize(gathers="int8", grads="int8")}),
        "gathers fp8, grads int4": Variant({"quantize": zero.Quantize(gathers="fp8", grads="int4")}),
    },
    "replicas": {
        "bf16": Variant(),
        "grads int4": Variant({"quantize": _BETWEEN}),
        "grads int4, error feedback": Variant({"quantize": dataclasses.replace(_BETWEEN, error_feedback=True)}),
    },
    "masters": {
        "float32 masters": Variant(optimizer=adamw),
        "bfloat16 masters, rounded to nearest": Variant({"precision": zero.Precision(**_BF16)}, adamw),
        "bfloat16 masters, rounded stochastically": Variant({"precision": "bf16-stochastic"}, adamw),
        "the same, moments in bfloat16 too": Variant({"precision": "bf16-stochastic"}, small_adamw),
    },
}
MODELS = {
    "small": gpt.GPTConfig(num_layers=2, d_model=128, num_heads=4),
    **gpt.PRESETS,
}
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73")


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


def train(variant: Variant, options: argparse.Namespace, *, seed: int) -> list[float]:
    """Returns the loss of each step."""
    steps = options.steps
    model = dataclasses.replace(MODELS[options.model], vocab_size=256, seq_len=options.seq_len)
    mesh = zero.make_mesh(replica=4, data=2) if options.set == "replicas" else zero.make_mesh()
    config = zero.ZeroConfig(**{"stage": 3, "precision": "bf16", "clip_norm": 1.0} | dict(variant.config))
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, min(50, steps // 4), steps)
    tx = variant.optimizer(schedule)
    make = functools.partial(init, model=model, outliers=options.outliers)
    state = zero.init_state(make, tx, jax.random.key(seed), mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(model), tx, mesh=mesh, config=config)
    data, losses = text(), []
    for index in range(steps):
        state, metrics = step(state, batch(data, seed * steps + index, options.batch_size, model.seq_len))
        losses.append(float(metrics.loss))
        if (index + 1) % 50 == 0:
            print(f"  step {index + 1}: loss {np.mean(losses[-50:]):.4f}", flush=True)
    return losses


def main() -> None:
    """Trains, writes the losses and draws them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", choices=sorted(SETS), default="quantized")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--outliers", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    names = ["quantized"] * (options.set != "masters") + [options.set] * (options.set != "quantized")
    names += [options.model.replace("-", "_")] * (options.model != "small") + ["outliers"] * options.outliers
    path = options.out / "_".join(names)
    options.out.mkdir(parents=True, exist_ok=True)
    variants = SETS[options.set]
    curves: dict[str, list[list[float]]] = {name: [] for name in variants}
    for seed in range(options.seeds):
        for name, variant in variants.items():
            start = time.monotonic()
            curves[name].append(train(variant, options, seed=seed))
            path.with_suffix(".json").write_text(json.dumps(curves))
            last, first = (float(np.mean(curves[x][-1][-100:])) for x in (name, next(iter(variants))))
            seconds = time.monotonic() - start
            ratio = f"{last / first:.4f} of that of {next(iter(variants))!r} ({seconds:.0f} s)"
            print(f"{name}, seed {seed}: mean loss of the last 100 steps {last:.4f}, {ratio}", flush=True)
            draw({label: of_seeds for label, of_seeds in curves.items() if of_seeds}, path.with_suffix(".png"))


def draw(curves: Mapping[str, Sequence[Sequence[float]]], path: pathlib.Path) -> None:
    """Draws the mean of each run's losses over seeds, and between the least and the greatest of them an area."""
    figure = new_figure(path, width=6, height=3.2)
    panel = figure.add_subplot()
    for (label, of_seeds), color in zip(curves.items(), COLORS, strict=False):
        window = max(1, len(of_seeds[0]) // 50)
        smooth = np.stack([np.convolve(losses, np.ones(window) / window, "valid") for losses in of_seeds])
        steps = np.arange(window - 1, len(of_seeds[0]))
        panel.plot(steps, smooth.mean(0), label=label, color=color, linewidth=1.2)
        panel.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.2, linewidth=0)
    panel.set_xlabel("step")
    panel.set_ylabel("loss (nats a byte)")
    panel.set_ylim(top=next(iter(curves.values()))[0][0])
    panel.legend(frameon=False)
    tidy(panel)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
