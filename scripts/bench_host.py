"""Times what the host does for a run beside what does the same without zero_jax, on one CPU device.

    python scripts/bench_host.py step          # the dispatch of a step, beside that of the `jax.jit` function in it
    python scripts/bench_host.py checkpoint    # a save and a restore of 1 GB, beside orbax
    python scripts/bench_host.py pretrained    # `load_hf` of 1.6 GB, beside `safetensors.numpy.load_file`
    python scripts/bench_host.py batches       # `train_batches`, beside rows of a memory-mapped array

Rounds are interleaved and medians compared. Where memory counts, each measurement is a process of its own; CPU seconds
are those of all its threads, bytes what its memory grew by at most (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero


def medians(runs: dict[Any, Callable[[], float]], num_rounds: int) -> dict[Any, float]:
    """Returns the median of what each function returns, over interleaved rounds."""
    results: dict[Any, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(num_rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            results[name].append(runs[name]())
    return {name: statistics.median(values) for name, values in results.items()}


def step_dispatch(num_rounds: int) -> None:
    """Prints the seconds that a call takes before it returns, by the number of leaves of the state."""
    mesh = zero.make_mesh(devices=jax.devices()[:1])
    print(f"{'leaves':>8}{'zero_jax us':>14}{'jax.jit us':>12}{'ratio':>8}")
    for num_params in (3, 32, 332):  # adam has two more leaves of each param, and the state four scalars

        def init_fn(key: jax.Array, num: int = num_params) -> dict[str, jax.Array]:
            return {f"w{i}": jnp.full((8,), 1.0) for i in range(num)}

        def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
            return sum((x * batch["x"].mean(0)).sum() for x in params.values())

        tx, config = optax.adam(1e-3), zero.ZeroConfig(stage=3)
        batch = zero.shard_batch({"x": np.ones((4, 8), np.float32)}, mesh=mesh)
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

        def calls(call: Callable[[Any, Any], Any], state: Any, batch: Any = batch) -> Callable[[], float]:
            current = [call(jax.block_until_ready(state), batch)[0]]

            def run() -> float:
                seconds = []
                for _ in range(20):
                    jax.block_until_ready(current[0])
                    start = time.perf_counter()
                    current[0], _ = call(current[0], batch)
                    seconds.append(time.perf_counter() - start)
                return statistics.median(seconds)

            return run

        states = [zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config) for _ in range(2)]
        num_leaves, plain = len(jax.tree.leaves(states[0])), step.jitted(states[0])
        times = medians({"zero_jax": calls(step, states[0]), "jax.jit": calls(plain, states[1])}, num_rounds)
        ours, theirs = 1e6 * times["zero_jax"], 1e6 * times["jax.jit"]
        print(f"{num_leaves:>8}{ours:>14.1f}{theirs:>12.1f}{ours / theirs:>8.2f}", flush=True)


def init_large(key: jax.Array) -> dict[str, jax.Array]:
    """Returns params of 333 MB; with adam a state of 1 GB."""
    return {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (2048, 3392)) for i in range(12)}


def measured(run: Callable[[], Any]) -> dict[str, float]:
    """Returns the seconds, the CPU seconds and the most bytes of memory that a call takes more than there were."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    memory = lambda name: 1024 * int(re.findall(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[0])  # noqa: E731
    before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    result = run()
    results = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    del result
    return {**results, "bytes": memory("VmHWM") - before}


def checkpoint_child(what: str, folder: str) -> dict[str, float]:
    """Saves or restores a state by zero_jax, or the same arrays by orbax."""
    import orbax.checkpoint as ocp

    mesh, tx, config = zero.make_mesh(devices=jax.devices()[:1]), optax.adam(1e-3), zero.ZeroConfig(stage=3)
    arguments: Any = dict(mesh=mesh, config=config)
    path, checkpointer_of, restore = pathlib.Path(folder), zero.Checkpointer, zero.restore
    if what.startswith("save"):
        shutil.rmtree(path / ("ours" if what.endswith("jax") else "theirs"), ignore_errors=True)
        state = jax.block_until_ready(zero.init_state(init_large, tx, jax.random.key(0), **arguments))
    if what == "save zero_jax":

        def save() -> None:
            with checkpointer_of(path / "ours") as checkpointer:
                checkpointer.save(1, state)

        return measured(save)
    tree = ocp.PyTreeCheckpointer()
    if what == "save orbax":
        return measured(lambda: tree.save(path / "theirs", {"params": state.params, "opt_state": state.opt_state}))
    if what == "restore zero_jax":
        return measured(lambda: restore(path / "ours", init_fn=init_large, tx=tx, **arguments))
    abstract = zero.abstract_state(init_large, tx, **arguments)
    item = {"params": abstract.params, "opt_state": abstract.opt_state}
    args = ocp.checkpoint_utils.construct_restore_args(item)
    return measured(lambda: tree.restore(path / "theirs", item=item, restore_args=args))


def in_children(topic: str, names: list[str], num_rounds: int, folder: str) -> None:
    """Prints the medians of measurements by name, each in a process of its own."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name in names:
            command = [sys.executable, __file__, topic, "--child", name, "--folder", folder]
            rows[name].append(json.loads(subprocess.check_output(command).splitlines()[-1]))
    print(f"{'':<24}{'seconds':>9}{'CPU s':>8}{'MB more':>9}")
    for name, results in rows.items():
        of = {key: statistics.median(row[key] for row in results) for key in results[0]}
        print(f"{name:<24}{of['seconds']:>9.2f}{of['cpu']:>8.2f}{of['bytes'] / 1e6:>9.0f}", flush=True)


def checkpoints(num_rounds: int) -> None:
    """Prints what a save and a restore take, beside orbax."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{what} {by}" for what in ("save", "restore") for by in ("zero_jax", "orbax")]
        in_children("checkpoint", names, num_rounds, folder)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make_llama(folder: pathlib.Path) -> None:
    """Writes a checkpoint of the hub, 1.6 GB in float32."""
    from safetensors.numpy import save_file

    d, hidden, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, d), "lm_head": (vocab, d), "model.norm": (d,)}
    for i in range(LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj": (d, d) for x in "qkvo"}
        shapes |= {f"{layer}mlp.{x}_proj": (hidden, d) for x in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj": (d, hidden)}
        shapes |= {f"{layer}{x}_layernorm": (d,) for x in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    save_file(
        {f"{x}.weight": rng.random(shape, np.float32) for x, shape in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(LLAMA))


def pretrained_child(what: str, folder: str) -> dict[str, float]:
    """Loads a checkpoint of the hub by zero_jax, or its tensors by safetensors."""
    from safetensors.numpy import load_file

    mesh, config = zero.make_mesh(devices=jax.devices()[:1]), zero.ZeroConfig(stage=3)
    load_hf = zero.load_hf  # what it is in is imported now
    if what == "load_hf":
        return measured(lambda: jax.block_until_ready(load_hf(folder, mesh=mesh, config=config).params))
    return measured(lambda: load_file(pathlib.Path(folder) / "model.safetensors"))


def pretrained(num_rounds: int) -> None:
    """Prints what loading a checkpoint of the hub takes, beside safetensors."""
    with tempfile.TemporaryDirectory() as folder:
        make_llama(pathlib.Path(folder))
        in_children("pretrained", ["load_hf", "load_file"], num_rounds, folder)


def batch_tokens(num_rounds: int) -> None:
    """Prints the tokens that a CPU second makes batches of, for rows of several lengths."""
    from zero_jax.data import DataConfig, load_dataset, train_batches

    sharding = jax.sharding.NamedSharding(zero.make_mesh(devices=jax.devices()[:1]), jax.sharding.PartitionSpec("data"))
    print(f"{'seq_len':>8}{'document':>10}{'zero_jax M/s':>14}{'memmap M/s':>12}")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for seq_len, document in ((256, 500), (1024, 500), (1024, 50), (8192, 5000)):
            batch_size = (1 << 18) // seq_len
            tokens = rng.integers(1, 256, size=1 << 24, dtype=np.uint16)
            tokens[rng.integers(0, tokens.size, size=tokens.size // document)] = 0  # ends a document
            path = pathlib.Path(folder) / f"{seq_len}_{document}.bin"
            tokens.tofile(path)
            config = DataConfig(data=str(path), format="tokens", token_cache=f"{folder}/cache")
            dataset = load_dataset(config, seq_len=seq_len)
            arguments: Any = dict(batch_size=batch_size, seq_len=seq_len, seed=0, sharding=sharding)
            batches = train_batches(dataset, **arguments, separate_documents=False)
            mapped = np.memmap(path, np.uint16, "r")

            def theirs(mapped: Any = mapped, seq_len: int = seq_len, batch_size: int = batch_size) -> Any:
                starts = rng.integers(0, mapped.size // seq_len - 1, size=batch_size) * seq_len
                rows = np.stack([mapped[start : start + seq_len + 1].astype(np.int32) for start in starts])
                return jax.device_put({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, sharding)

            def rate(make: Callable[[], Any], num_tokens: int = batch_size * seq_len) -> Callable[[], float]:
                def run(num_batches: int = 12) -> float:
                    start = time.process_time()
                    for _ in range(num_batches):
                        jax.block_until_ready(make())
                    return num_batches * num_tokens / 1e6 / (time.process_time() - start)

                return run

            rates = medians(
                {"zero_jax": rate(lambda batches=batches: next(batches)), "memmap": rate(theirs)}, num_rounds
            )
            print(f"{seq_len:>8}{document:>10}{rates['zero_jax']:>14.1f}{rates['memmap']:>12.1f}", flush=True)
            batches.close()


TOPICS = {"step": step_dispatch, "checkpoint": checkpoints, "pretrained": pretrained, "batches": batch_tokens}
CHILDREN = {"checkpoint": checkpoint_child, "pretrained": pretrained_child}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(CHILDREN[args.topic](args.child, args.folder)))
    else:
        TOPICS[args.topic](args.rounds)


if __name__ == "__main__":
    main()
