"""Compiles a GPT of a trillion parameters for 1,024 TPU v5p chips, and checks what the paper's title claims.

It takes some minutes and 4 GB on two cores; no TPU is needed. The exit status is 0 if all bounds hold.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import compile_only  # before JAX
import jax
import optax

import zero_jax as zero
from zero_jax.models import gpt

TOPOLOGY = "v5p:8x8x16"
SEQ_LEN, BATCH_SIZE = 2048, 2048  # two sequences a chip
MAX_TRAFFIC_RATIO = 1.05
MAX_NEEDED_BYTES = 65e9
MIN_MFU = 0.62


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    return zero.dot_product_attention(query, key, value, is_causal=True, segment_ids=segments)


def main() -> int:
    """Prints the plan and the bounds."""
    model = dataclasses.replace(gpt.PRESETS["gpt-1t"], seq_len=SEQ_LEN)
    report = zero.plan(
        gpt.loss_fn(model, attend=_attend),
        functools.partial(gpt.init, model),
        optax.adamw(3e-4),
        batch=compile_only.batch(BATCH_SIZE, SEQ_LEN),
        topology=TOPOLOGY,
        config=zero.ZeroConfig(stage=3, precision="bf16", remat="full", clip_norm=1.0),
        name="gpt-1t",
        log=functools.partial(print, file=sys.stderr, flush=True),
    )
    print(report)
    ratio, needed, time = report.traffic_ratio, report.needed_bytes, report.time
    assert ratio is not None and needed is not None and time is not None
    holds = report.fits and ratio <= MAX_TRAFFIC_RATIO and needed <= MAX_NEEDED_BYTES and time.mfu >= MIN_MFU
    print(
        f"\n{report.num_params / 1e12:.3f} trillion params on {report.num_devices} chips: {needed / 1e9:.1f} GB a chip "
        f"(at most {MAX_NEEDED_BYTES / 1e9:.0f}), {ratio:.3f} x the ideal traffic (at most {MAX_TRAFFIC_RATIO}), "
        f"MFU {time.mfu:.1%} (at least {MIN_MFU:.0%}): "
        f"{'all bounds hold' if holds else 'A BOUND DOES NOT HOLD'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
