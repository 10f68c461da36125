"""Runs zero_jax on the accelerators of this machine, and prints what a report of them needs: numbers, times, memory.

    python scripts/accelerator_report.py                      # numbers: every row against plain optax on the CPU
    python scripts/accelerator_report.py --attention          # the kernels that attention gets, against float32
    python scripts/accelerator_report.py --time gpt-xl --batch-size 16 --remat dots

The first table compares three steps of a small GPT, in float32 products, with a plain loop on the CPU of the same
machine. The second compares attention by its fused kernels in bfloat16, and its gradients, with XLA's in float32. The
third times zero_jax's step beside a plain `jax.jit` with the same attention kernel, in interleaved
rounds. Memory is the most that the process has had until then: time one variant alone (`--only`) to read its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
import traceback
from typing import Any

if platforms := os.environ.get("JAX_PLATFORMS"):
    os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # the reference runs on the CPU
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hand_written import make_step, repeated

import zero_jax as zero
from zero_jax.attention import attention_choice
from zero_jax.core.text_tables import aligned
from zero_jax.models import decoder, gpt
from zero_jax.pretrained import attend

SMALL = gpt.GPTConfig(vocab_size=512, seq_len=256, num_layers=4, d_model=256, num_heads=4)
NUM_STEPS = 3
EXACT = 1e-4
ROUNDED = 3e-2

# Name, settings of the config, the largest relative difference of the params' changes.
CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("stage 0", {"stage": 0}, EXACT),
    ("stage 1", {"stage": 1}, EXACT),
    ("stage 2", {"stage": 2}, EXACT),
    ("stage 3", {"stage": 3}, EXACT),
    ("stage 1, 4 microbatches", {"stage": 1, "num_microbatches": 4}, EXACT),
    ("stage 3, 4 microbatches", {"stage": 3, "num_microbatches": 4}, EXACT),
    ("remat full", {"stage": 3, "remat": "full"}, EXACT),
    ("remat dots", {"stage": 3, "remat": "dots"}, EXACT),
    ("remat full, offloaded", {"stage": 3, "remat": "full_offloaded"}, EXACT),
    ("optimizer state on the host", {"stage": 3, "offload": "optimizer"}, EXACT),
    ("state on the host", {"stage": 3, "offload": "state"}, EXACT),
    ("params and state on the host", {"stage": 3, "offload": "all"}, EXACT),
    ("bf16", {"stage": 3, "precision": "bf16"}, ROUNDED),
    ("bf16, fused attention", {"stage": 3, "precision": "bf16", "attention": "fused"}, ROUNDED),
    ("bf16, fused, remat dots", {"stage": 3, "precision": "bf16", "attention": "fused", "remat": "dots"}, ROUNDED),
    ("bf16, fused, offloaded", {"precision": "bf16", "attention": "fused", "remat": "full_offloaded"}, ROUNDED),
    ("fp16, fused attention", {"stage": 3, "precision": "fp16", "attention": "fused"}, ROUNDED),
    ("bf16, stochastic rounding", {"stage": 3, "precision": "bf16-stochastic"}, 0.5),
)

# Name, options of `zero.dot_product_attention`, sizes that differ from `SIZES`: batch, queries, keys, heads, heads of
# keys, their width, that of values.
SIZES = {"b": 4, "t": 1024, "s": 1024, "n": 8, "k": 8, "h": 128, "v": 128}
FORMS: tuple[tuple[str, dict[str, Any], dict[str, int]], ...] = (
    ("no mask", {}, {}),
    ("causal", {"is_causal": True}, {}),
    ("causal, grouped heads", {"is_causal": True}, {"k": 2}),
    ("causal, an odd length", {"is_causal": True}, {"t": 1001, "s": 1001}),
    ("causal, heads of 64", {"is_causal": True}, {"h": 64, "v": 64}),
    ("causal, heads of 256", {"is_causal": True}, {"h": 256, "v": 256}),
    ("causal, heads of 192, values of 128", {"is_causal": True}, {"h": 192}),
    ("window of 256", {"is_causal": True, "local_window_size": (255, 0)}, {"k": 4}),
    ("window of 256, heads of 256", {"is_causal": True, "local_window_size": (255, 0)}, {"h": 256, "v": 256}),
    ("more keys than queries", {}, {"s": 1536}),
    ("lengths of keys", {"key_value_seq_lengths": np.array([1, 100, 777, 1024], np.int32)}, {}),
    ("segments", {"is_causal": True, "segment_ids": "few"}, {}),
    ("segments, grouped heads of 64", {"is_causal": True, "segment_ids": "few"}, {"k": 2, "h": 64, "v": 64}),
    ("segments, heads of 256", {"is_causal": True, "segment_ids": "few"}, {"h": 256, "v": 256}),
    ("segments, no order", {"segment_ids": "few"}, {"t": 1001, "s": 1001}),
    ("segments of 24 tokens", {"is_causal": True, "segment_ids": "many"}, {"k": 4}),
    ("segments in pieces", {"is_causal": True, "segment_ids": "mixed"}, {}),
)


def batches(config: gpt.GPTConfig, batch_size: int, count: int) -> list[dict[str, np.ndarray]]:
    """Returns batches of random tokens."""
    rng = np.random.default_rng(0)
    shape = (count, batch_size, config.seq_len + 1)
    return [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in rng.integers(config.vocab_size, size=shape, dtype="i4")]


def changes(before: Any, after: Any) -> np.ndarray:
    """Returns all params' changes, one after the other."""
    change = jax.tree.map(lambda old, new: np.ravel(np.float32(new) - np.float32(old)), before, after)
    return np.concatenate(jax.tree.leaves(change))


def rows_of(head: tuple[str, ...], cases: Any, names: list[str], figures: Any) -> list[tuple[str, ...]]:
    """Returns a row for each case with one of the words in its name, or for all: its figures, or its error."""
    rows = [head]
    for name, *case in cases:
        if names and not any(word in name for word in names):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows.append((name, *figures(*case)))
        except Exception as error:  # a report names all that fails
            traceback.print_exc()
            rows.append((name, *[""] * (len(head) - 2), f"{type(error).__name__}: {str(error)[:90]}"))
    return rows


def compare(names: list[str]) -> list[tuple[str, ...]]:
    """Returns rows: the case, the largest relative difference of a loss, that of the params' changes, a verdict."""
    cpu, tx = jax.devices("cpu")[0], optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, eps=1e-4))
    some = batches(SMALL, 8, NUM_STEPS)
    with jax.default_device(cpu):
        start = jax.device_get(gpt.init(SMALL, jax.random.key(0)))
        params, losses = start, []
        state = tx.init(params)
        grad_fn = jax.jit(jax.value_and_grad(gpt.loss_fn(SMALL), has_aux=True))
        for batch in some:
            (loss, _), grads = grad_fn(params, batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
    wanted, mesh = changes(start, params), zero.make_mesh()

    def figures(settings: dict[str, Any], bound: float) -> tuple[str, ...]:
        config = zero.ZeroConfig(**{"precision": "fp32", "clip_norm": 1.0, "min_shard_size": 0, **settings})
        adam = optax.adam(1e-3, eps=1e-4)
        ours = zero.init_state(lambda _: start, adam, jax.random.key(0), mesh=mesh, config=config)
        step = zero.make_train_step(gpt.loss_fn(SMALL), adam, mesh=mesh, config=config)
        seen = []
        for batch in some:
            ours, metrics = step(ours, zero.shard_batch(batch, mesh=mesh))
            seen.append(float(metrics.loss))
        got = changes(start, jax.device_get(ours.params))
        loss_off = np.max(np.abs(np.subtract(seen, losses)) / np.abs(losses))
        params_off = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        verdict = "ok" if params_off <= bound and np.isfinite(seen).all() else "DIFFERS"
        return f"{loss_off:.1e}", f"{params_off:.1e}", f"{bound:.0e}", verdict

    return rows_of(("case", "loss", "params' changes", "largest allowed", "verdict"), CASES, names, figures)


def attention_forms(names: list[str]) -> list[tuple[str, ...]]:
    """Returns rows: the form, its kernel, the relative differences of results and gradients from XLA's in float32."""
    rng = np.random.default_rng(0)

    def figures(options: dict[str, Any], sizes: dict[str, int]) -> tuple[str, ...]:
        b, t, s, n, k, h, v = (SIZES | sizes).values()
        segments = {
            "few": np.sort(rng.integers(0, 5, (b, t)), axis=1),
            "many": np.broadcast_to(np.arange(t) // 24, (b, t)),
            "mixed": rng.integers(0, 30, (b, t)),
        }
        data = {key: segments[ids].astype(np.int32) for key, ids in options.items() if isinstance(ids, str)}
        rest = {key: value for key, value in options.items() if key not in data}
        shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v), (b, t, n, v))
        arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]

        def both(query, key, value, cotangent, data, **how):
            attend = functools.partial(zero.dot_product_attention, **data, **rest, **how)
            out, pull = jax.vjp(attend, query, key, value)
            return out, *pull(cotangent.astype(out.dtype))

        kernel = attention_choice(*arrays[:3], **data, **rest).implementation
        run = jax.jit(both)
        got = run(*arrays, data)
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(both, implementation="xla"))
            wanted = exact(*(x.astype("float32") for x in arrays), data)
        pairs = zip(got, wanted, strict=True)
        off = [float(jnp.linalg.norm(x.astype("float32") - y) / jnp.linalg.norm(y)) for x, y in pairs]
        milliseconds = seconds_of(lambda: run(*arrays, data), 20) * 1e3
        verdict = "ok" if max(off) <= ROUNDED else "DIFFERS"
        first, *others = (f"{x:.1e}" for x in off)
        return kernel, first, " ".join(others), f"{milliseconds:.3f}", verdict

    head = "attention", "kernel", "result", "gradients of query, key, value", "ms, both passes", "verdict"
    return rows_of(head, FORMS, names, figures)


def plain_step(config: gpt.GPTConfig, tx: Any, remat: str) -> Any:
    """Returns a plain jitted step in bf16 with the GPU's attention kernel: what one writes without this library."""
    kernel = "cudnn" if jax.default_backend() == "gpu" else None

    def attention(q, k, v, *_, **__):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    block = functools.partial(decoder.apply_block, config.decoder, hooks=decoder.Hooks(attend=attention))
    if remat != "none":
        block = jax.checkpoint(block, prevent_cse=False, policy=policies[remat])

    def loss_fn(params, batch):
        x = params["embed"][batch["inputs"]]
        if "position" in params:
            x = x + params["position"][: x.shape[1]]
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer)[0], None), x, params["blocks"])
        return decoder.mean_loss(
            decoder.whole_logits(decoder.rms_norm(x, params["final_norm"]), params["embed"].T, batch["targets"])
        )

    return make_step(loss_fn, tx, params=None, sharded=None, opt_state=None, pin=False, dtype=jnp.bfloat16)


def peak_gb() -> float:
    """Returns the most memory that the first device's arrays and programs had until now, in GB."""
    return ((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or 0) / 1e9


def seconds_of(run: Any, num_steps: int) -> float:
    """Returns the seconds of a step, where one waits for the last of several."""
    start = time.perf_counter()
    for _ in range(num_steps):
        loss = run()
    jax.block_until_ready(loss)
    return (time.perf_counter() - start) / num_steps


def time_model(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Returns rows: zero_jax's step and the plain one, each with its time, MFU and memory."""
    config = dataclasses.replace(gpt.PRESETS[args.time], remat=args.remat != "none")
    config = dataclasses.replace(config, seq_len=args.seq_len or config.seq_len)
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    settings = {"remat": args.remat, "precision": "bf16", "clip_norm": None, "skip_nonfinite": False}
    if args.offload:
        settings["offload"] = args.offload
    zero_config, tx, mesh = zero.ZeroConfig(stage=3, **settings), optax.adamw(1e-4), zero.make_mesh()
    init_fn, loss_fn = functools.partial(gpt.init, config), gpt.loss_fn(config, attend=attend)
    host_batch = batches(config, args.batch_size, 1)[0]
    batch = zero.shard_batch(host_batch, mesh=mesh)
    times: dict[str, list[float]] = {}
    peaks, found = {}, {}

    def ours() -> Any:
        state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=zero_config)
        return repeated(zero.make_train_step(loss_fn, tx, mesh=mesh, config=zero_config), state, batch=batch)

    def plain() -> Any:
        params = jax.jit(init_fn)(jax.random.key(0))
        return repeated(plain_step(config, tx, args.remat), params, jax.jit(tx.init)(params), batch=batch)

    variants = {"zero_jax": ours, "plain": plain}
    variants = {args.only: variants[args.only]} if args.only else variants
    for round_ in range(args.rounds):
        for name in list(variants)[:: 1 if round_ % 2 == 0 else -1]:
            begin = time.perf_counter()
            run = variants[name]()  # one variant's state at a time: both do not fit
            found[name] = float(run())
            print(
                f"{name}: loss {found[name]:.4f} after {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True
            )
            jax.block_until_ready(run())
            times.setdefault(name, []).append(seconds_of(run, args.steps))
            peaks.setdefault(name, peak_gb())
            del run
    flops = zero_flops(config, args.batch_size)
    rows = [("step", "seconds (rounds)", "model TFLOP/s", "peak GB until then", "first loss")]
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rounds = " ".join(f"{s:.4f}" for s in seconds)
        memory, loss = f"{peaks[name]:.2f}", f"{found[name]:.5f}"
        rows.append((name, f"{middle:.4f} ({rounds})", f"{flops / middle / 1e12:.0f}", memory, loss))
    return rows


def rates() -> list[tuple[str, ...]]:
    """Returns rows: what products, copies and attention kernels reach alone, each over half a second or more."""
    key = jax.random.key(0)
    rows = [("operation", "ms", "reached")]

    def timed(name: str, run: Any, *, flops: float = 0.0, num_bytes: float = 0.0) -> None:
        jax.block_until_ready(run())
        single = seconds_of(run, 3)
        seconds = seconds_of(run, max(3, int(0.7 / single)))
        reached = f"{flops / seconds / 1e12:.0f} TFLOP/s" if flops else f"{num_bytes / seconds / 1e9:.0f} GB/s"
        rows.append((name, f"{seconds * 1e3:.3f}", reached))

    for m, k, n in (
        (8192, 8192, 8192), (16384, 4096, 16384), (16384, 16384, 4096), (16384, 4096, 4096), (4096, 16384, 16384),
        (4096, 16384, 4096), (16384, 4096, 50304), (32768, 1280, 5120), (32768, 1280, 1280), (1280, 32768, 5120),
    ):  # fmt: skip
        a, b = (jax.random.normal(key, shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
        product = jax.jit(jnp.matmul)
        timed(f"bf16 product {m} x {k} x {n}", functools.partial(product, a, b), flops=2 * m * k * n)
    x = jax.random.normal(key, (16384, 16384), jnp.bfloat16)
    timed("bf16 copy with a sum, 512 MB", functools.partial(jax.jit(lambda x: x + 1), x), num_bytes=4 * x.size)
    norm = jax.jit(lambda x: decoder.rms_norm(x, jnp.ones(x.shape[1], x.dtype)))
    y = jax.random.normal(key, (16384, 4096), jnp.bfloat16)
    timed("rms norm, bf16 16384 x 4096", functools.partial(norm, y), num_bytes=4 * y.size)
    z = jax.random.normal(key, (2**28,), jnp.float32)
    timed("fp32 copy with a sum, 1 GB", functools.partial(jax.jit(lambda x: x + 1), z), num_bytes=8 * z.size)
    del x, y, z
    kernel = "cudnn" if jax.default_backend() == "gpu" else None
    for b, t, h, d in ((8, 2048, 32, 128), (32, 1024, 20, 64)):
        q = jax.random.normal(key, (b, t, h, d), jnp.bfloat16)
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
        flops = 2 * 2 * b * h * t * t * d / 2  # of causal attention
        forward = jax.jit(lambda q: attention(q, q, q))  # noqa: B023 - called at once
        timed(f"causal attention {q.shape}, forward", functools.partial(forward, q), flops=flops)
        back = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))  # noqa: B023
        timed("the same, forward and backward", functools.partial(back, q, q, q), flops=3.5 * flops)
    if "pinned_host" in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        big = jax.random.normal(key, (2**29,), jnp.float32)
        host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        on_host = jax.device_put(big, host)
        timed("2 GB from the device to the host", lambda: jax.device_put(big, host), num_bytes=4 * big.size)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
        timed("2 GB from the host to the device", lambda: jax.device_put(on_host, device), num_bytes=4 * big.size)
    return rows


def zero_flops(config: gpt.GPTConfig, batch_size: int) -> float:
    """Returns the FLOPs of a step that count: 6 for a param and token, and causal attention's products."""
    tokens = batch_size * config.seq_len
    attention = 6 * config.num_layers * config.seq_len * config.d_model
    return tokens * (6 * config.num_params + attention)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-cases", nargs="*", default=[], help="words of the cases to run")
    parser.add_argument("--attention", action="store_true", help="the kernels of attention instead")
    parser.add_argument("--rates", action="store_true", help="what products, copies and kernels reach alone")
    parser.add_argument("--time", choices=gpt.PRESETS, help="time a model instead")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--remat", default="dots", help="full, dots, none; more for zero_jax alone")
    parser.add_argument("--offload")
    parser.add_argument("--only", choices=("zero_jax", "plain"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    device = jax.devices()[0]
    print(
        f"JAX {jax.__version__}, zero_jax {zero.__version__}, {jax.device_count()} x {device.device_kind}", flush=True
    )
    if args.time:
        print(aligned(time_model(args)))
        return
    if args.rates or args.attention:
        print(aligned(rates() if args.rates else attention_forms(args.only_cases)))
        return
    jax.config.update("jax_default_matmul_precision", "highest")
    print(aligned(compare(args.only_cases)))


if __name__ == "__main__":
    main()
