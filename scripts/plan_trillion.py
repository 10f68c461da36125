"""Compiles a GPT of a trillion parameters for 1,024 TPU v5p chips, and checks what the paper's title claims.

It takes some minutes and 4 GB on two cores; no TPU is needed. The exit status is 0 if all bounds hold.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.models import gpt

TOPOLOGY = "v5p:8x8x16"
MAX_TRAFFIC_RATIO = 1.05
MAX_NEEDED_BYTES = 42e9


def main() -> int:
    """Prints the plan and the bounds."""
    model = gpt.PRESETS["gpt-1t"]
    tokens = jax.ShapeDtypeStruct((1024, model.seq_len), jnp.int32)
    report = zero.plan(
        gpt.loss_fn(model),
        functools.partial(gpt.init, model),
        optax.adamw(3e-4),
        batch={"inputs": tokens, "targets": tokens},
        topology=TOPOLOGY,
        config=zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0, overlap=False),
        name="gpt-1t",
        log=functools.partial(print, file=sys.stderr, flush=True),
    )
    print(report)
    ratio, needed = report.traffic_ratio, report.needed_bytes
    assert ratio is not None and needed is not None
    holds = report.fits and ratio <= MAX_TRAFFIC_RATIO and needed <= MAX_NEEDED_BYTES
    print(
        f"\n{report.num_params / 1e12:.3f} trillion params on {report.num_devices} chips: {needed / 1e9:.1f} GB a chip "
        f"(at most {MAX_NEEDED_BYTES / 1e9:.0f}), {ratio:.3f} x the ideal traffic (at most {MAX_TRAFFIC_RATIO}): "
        f"{'all bounds hold' if holds else 'A BOUND DOES NOT HOLD'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
