"""Fine-tunes a small GPT on questions about Python's standard library, with NF4 and LoRA; the answers are docstrings.

It trains all params on the source code first, then adapters on `{"messages": ...}` lines:
JAX_NUM_CPU_DEVICES=8 python examples/finetune_docstrings.py
"""

import argparse
import inspect
import json
import pathlib
import pkgutil
import statistics
import string
import tempfile
import textwrap

import jax
import optax

import zero_jax as zero
from zero_jax.data import DataConfig, load_dataset, train_batches
from zero_jax.models import gpt

MODULES = (argparse, inspect, json, pathlib, pkgutil, statistics, string, tempfile, textwrap)
CONFIG = gpt.GPTConfig(vocab_size=256, seq_len=256, num_layers=2, d_model=128, num_heads=4)


def write_questions(path):
    """Writes a question for each public function of some modules; its answer is the first line of its docstring."""
    with path.open("w", encoding="utf-8") as file:
        for module in MODULES:
            for name, value in vars(module).items():
                line = (inspect.getdoc(value) or "").split("\n")[0]
                if callable(value) and not name.startswith("_") and line and len(line) < 200:
                    question = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                    answer = {"role": "assistant", "content": line}
                    file.write(json.dumps({"messages": [question, answer]}) + "\n")


def train(state, loss_fn, tx, data, *, steps, mesh, config):
    """Trains a state on a data set and prints its loss now and then."""
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    dataset = load_dataset(data, seq_len=CONFIG.seq_len)
    print(dataset)
    rows = {"batch_size": 16, "seq_len": CONFIG.seq_len, "seed": 0, "sharding": zero.batch_sharding(mesh)}
    with train_batches(dataset, **rows, separate_documents=data.has_segments) as batches:
        for number in range(1, steps + 1):
            state, metrics = step(state, next(batches))
            if number % max(1, steps // 5) == 0 or number == 1:
                print(f"step {number:3d}, loss {metrics.loss:.3f}")
    return state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=3, precision="bf16"), optax.adamw(3e-3)
    common = {"mesh": mesh, "config": config}
    state = zero.init_state(lambda key: gpt.init(CONFIG, key), tx, jax.random.key(0), **common)
    state = train(state, gpt.loss_fn(CONFIG), tx, DataConfig(), steps=steps, **common)

    lora = zero.Lora(rules={"blocks/*": "sio"}, rank=8, base="nf4")
    state = zero.init_state(lora.init(state.params, jax.random.key(1)), tx, jax.random.key(1), **common)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "questions.jsonl"
        write_questions(path)
        chat = DataConfig(data=str(path), format="chat")
        state = train(state, lora.loss_fn(gpt.loss_fn(CONFIG)), tx, chat, steps=steps, **common)
    params = lora.merge(state)
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} params again")
    print(zero.sharding_report(state, **common))


if __name__ == "__main__":
    main()
