"""A tiny run to break: its model and config, faults to inject, and what its records say.

`python faults.py FAULT FOLDER` trains it in a process of its own, or as one of several, and breaks it there.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp

from zero_jax import trainer
from zero_jax.checkpoint import CheckpointConfig
from zero_jax.data.dataset import DataConfig
from zero_jax.models import gpt
from zero_jax.trainer.inputs import text
from zero_jax.trainer.optimizers import OptimizerConfig
from zero_jax.trainer.run import Model
from zero_jax.trainer.train_config import TrainConfig
from zero_jax.training import ZeroConfig

STEPS, SAVE_EVERY, EVAL_EVERY, BATCH_SIZE = 12, 4, 6, 8
GPT = gpt.GPTConfig(vocab_size=256, seq_len=16, num_layers=1, d_model=16, num_heads=2)
COMPARED = ("kind", "step", "loss", "grad_norm", "learning_rate", "skipped", "nonfinite_leaf", "loss_scale")


def make_model(shape=GPT, *, loss_fn=None):
    """Returns a GPT, by default the tiny one, with a loss function that may be broken."""
    return Model(
        name="gpt-test",
        config=shape,
        vocab_size=shape.vocab_size,
        seq_len=shape.seq_len,
        init_fn=functools.partial(gpt.init, shape),
        loss_fn=loss_fn or gpt.loss_fn(shape),
    )


MODEL = make_model()


def fp32():
    """Returns the placement of the run in fp32, in which other orders of sums differ in the last digits only."""
    return dataclasses.replace(ZERO, precision="fp32")


ZERO = ZeroConfig(stage=3, precision="bf16", clip_norm=1.0, min_shard_size=64)
CHECKPOINT = CheckpointConfig(save_every=SAVE_EVERY, keep_last=3, keep_best=0)


def make_config(folder, **changes):
    """Returns the config of the run `run` in a folder, with the text that it trains on."""
    folder = pathlib.Path(folder)
    words = folder / "text.txt"
    if not words.exists():
        words.write_text("the same words again and " * 200)
    config = TrainConfig(
        zero=ZERO,
        data=DataConfig(data=str(words), token_cache=None),
        optimizer=OptimizerConfig(warmup_steps=2, learning_rate=0.02),
        checkpoint=CHECKPOINT,
        devices=2,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        eval_every=EVAL_EVERY,
        eval_batches=2,
        log_every=4,
        sample_tokens=0,
        out=str(folder / "runs"),
        name="run",
        resume="auto",
    )
    return dataclasses.replace(config, **changes)


def train(folder, *, lines=None, model=MODEL, **changes):
    """Trains the run of a folder, or goes on with it."""
    log = (lambda _: None) if lines is None else lines.append
    return trainer.train(make_config(folder, **changes), model=model, log=log)


def checkpoints(folder):
    """Returns the names of what the run's folder of checkpoints holds."""
    return sorted(path.name for path in (pathlib.Path(folder) / "runs/run/checkpoints").iterdir())


def step_folder(folder, step):
    """Returns the folder of a step's checkpoint."""
    return pathlib.Path(folder) / f"runs/run/checkpoints/step_{step:08d}"


def read(folder):
    """Returns the records of a folder's run, without what the clock says."""
    lines = (pathlib.Path(folder) / "runs/run/metrics.jsonl").read_text().splitlines()
    return [{name: record.get(name) for name in COMPARED} for record in map(json.loads, lines)]


def assert_goes_on_as_if_nothing_had_happened(folder, unbroken, *, after):
    """Resumes a run, after a step, and compares all its records with those of a run that nothing happened to."""
    lines = []
    assert train(folder, lines=lines).status == "done"
    resumed = [line for line in lines if line.startswith("resuming after step ")]
    assert resumed[0].startswith(f"resuming after step {after} of ") if after else not resumed
    assert read(folder) == read(unbroken)


def unbroken_run(base):
    """Trains the run that all others are compared with, once; returns its folder."""
    folder = pathlib.Path(base) / "unbroken"
    if not folder.exists():
        folder.mkdir()
        assert train(folder).status == "done"
        assert checkpoints(folder) == [f"step_{step:08d}" for step in (4, 8, 12)]
    return folder


class Tampered:
    """Batches that something happens to at a step."""

    def __init__(self, batches, faults):
        self.batches, self.faults, self.stack = batches, faults, contextlib.ExitStack()

    @property
    def position(self):
        return self.batches.position

    def __enter__(self):
        self.stack.enter_context(self.batches)
        return self

    def __exit__(self, *error):
        self.stack.__exit__(*error)

    def __next__(self):
        step = self.position // BATCH_SIZE + 1
        fault = self.faults.get(step) or self.faults.get("each")
        batch = next(self.batches)
        changed = fault(batch, step) if fault else None
        return batch if changed is None else changed


real_train_batches = text.data.train_batches


def tampering(faults, real=real_train_batches):
    """Returns a `train_batches` with faults: by the step, functions of a batch and the step that may return another."""
    return lambda *args, **options: Tampered(real(*args, **options), faults)


def not_a_number(batch, step):
    """Makes loss and gradients NaN."""
    return {**batch, "weights": batch["weights"] * jnp.nan}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(folder):
    """Ends the process, of the first start alone."""
    if not (folder / "died").exists():
        (folder / "died").touch()
        die()


def hang():
    time.sleep(600)


def wait_for(path, seconds=60):
    """Waits until there is a file."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def at(step, what, *, saved=True, only=0):
    """Returns a fault that happens to one process before a step, once step 4 is saved if it is to be."""

    def inject(folder):
        def happen(*_):
            if jax.process_index() == only:
                if saved:
                    wait_for(step_folder(folder, SAVE_EVERY))
                what(folder) if what is half_a_record else what()

        text.data.train_batches = tampering({step: happen})

    return inject


def at_commit(step, what):
    """Returns a fault that happens when all arrays of a step's checkpoint are written, and it gets its name."""

    def inject(_):
        rename = os.rename

        def broken(path, target):
            if os.fspath(target).endswith(f"step_{step:08d}"):
                what()
            rename(path, target)

        os.rename = broken

    return inject


def half_a_record(folder):
    with open(folder / "runs/run/metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 6, "lo')
    die()


def slow_and_killed_once(folder):
    at(7, lambda: die_once(folder), only=1)(folder)
    killed = text.data.train_batches
    text.data.train_batches = tampering({"each": lambda *_: time.sleep(0.5)}, real=killed)


def hanging_step(folder):
    """Lets step 7 call a function on the host that does not return; its weights, all alike, tell it."""
    text.data.train_batches = tampering({7: lambda batch, step: {**batch, "weights": batch["weights"] * 4}})


def loss_that_may_hang(params, batch):
    jax.debug.callback(lambda largest: hang() if largest > 2 else None, batch["weights"].max())
    return gpt.loss_fn(GPT)(params, batch)


def slow(folder):
    text.data.train_batches = tampering({"each": lambda *_: time.sleep(0.5)})


QUICK = {"hang_seconds": 2.0}
FAULTS = {
    "none": (lambda folder: None, MODEL, {}),
    "killed at a step": (at(7, die), MODEL, {}),
    "killed before the first checkpoint": (at(3, die, saved=False), MODEL, {}),
    "killed while a record was written": (at(6, half_a_record), MODEL, {}),
    "killed during a save": (at_commit(8, die), MODEL, {}),
    "reading hangs": (at(7, hang), MODEL, QUICK),
    "a step hangs": (hanging_step, make_model(loss_fn=loss_that_may_hang), QUICK),
    "a save hangs": (at_commit(8, hang), MODEL, QUICK),
    "one of two killed": (at(7, die, only=1), MODEL, {}),
    "slow": (slow, MODEL, {}),
    "slow and killed once": (slow_and_killed_once, MODEL, {}),
}


def main(fault, folder, changes="{}"):
    """Trains with a fault, and ends with the status that `zero-jax train` would have."""
    from zero_jax.cluster.joining import join

    place, folder = join(), pathlib.Path(folder)
    inject, model, broken = FAULTS[fault]
    inject(folder)
    changes = {"zero": ZERO, **json.loads(changes), **broken}
    if "precision" in changes:
        changes["zero"] = dataclasses.replace(ZERO, precision=changes.pop("precision"))
    log = functools.partial(print, flush=True)
    result = trainer.train(make_config(folder, **changes), model=model, log=log)
    return place.leave(trainer.EXIT_STATUS[result.status])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
