"""One of two processes that differ, or end first; see test_together.py. Usage: together_worker.py ADDRESS INDEX OUT."""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import dataclasses
import os
import sys

ADDRESS, INDEX, OUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax

jax.distributed.initialize(ADDRESS, 2, INDEX, initialization_timeout=60)

import jax.numpy as jnp
import numpy as np
import optax
from processes import report

import zero_jax as zero
from zero_jax.checkpoint import CheckpointConfig
from zero_jax.core.agreement import turns_of
from zero_jax.trainer import OptimizerConfig

WIDTH = 8
CONFIG = zero.TrainConfig(
    zero=zero.ZeroConfig(stage=3, min_shard_size=0, precision="fp32", clip_norm=None),
    optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1),
    checkpoint=CheckpointConfig(save_every=100),
    steps=5,
    eval_every=100,
    log_every=100,
    out=OUT,
    resume="auto",
    hang_seconds=60,
)
result, lines = {}, []


def own(one, other):
    """Returns what this process takes: the second process is the other one."""
    return other if INDEX else one


def attempt(what):
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def init_fn(key, width=WIDTH):
    return {"w": jax.random.normal(key, (WIDTH, width))}


def loss_fn(params, batch, scale=1.0):
    jax.debug.callback(lambda _: None, batch["x"].sum())  # has no address of this process in the program
    return scale * jnp.square(batch["x"] @ params["w"]).mean()


def batch_of(step, size=4):
    return {"x": np.random.default_rng(10 * step + INDEX).normal(size=(size, WIDTH)).astype(np.float32)}


def whole_batch_of(step):
    """Returns the same in both processes; the number is not divided."""
    return {"x": np.random.default_rng(step).normal(size=(8, WIDTH)).astype(np.float32), "scale": np.float32(1)}


def half_batch_of(step):
    return {**(batch := whole_batch_of(step)), "x": batch["x"][4 * INDEX :][:4]}


def batches_until(num):
    return map(batch_of, range(num))


def failing(step, process):
    def batches(at):
        if at == step and INDEX == process:
            raise OSError("the disk is on fire")
        return batch_of(at)

    return batches


class FailingLater:
    """Validation batches of which the second pass fails in process 0."""

    def __init__(self):
        self.num_passes = -1  # the first one is read to learn the shapes

    def __iter__(self):
        self.num_passes += 1
        return map(failing(1 if self.num_passes == 2 else 9, process=0), range(2))


class Stateful:
    """An iterator with a state, the number of the next batch."""

    def __init__(self, num):
        self.num, self.at = num, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.num:
            raise StopIteration
        self.at += 1
        return batch_of(self.at - 1)

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = state


def train(name, batches=batch_of, *, loss=loss_fn, init=init_fn, log=None, validation=None, callbacks=(), **changes):
    """Trains a run; returns its status, steps and checkpoints, or its error and checkpoints."""
    config = dataclasses.replace(CONFIG, name=name, **changes)
    options = {"config": config, "validation": validation, "callbacks": callbacks}
    trainer, log = zero.Trainer(loss, init, batches, **options), log or lines.append

    def run():
        done = trainer.train(log=log)
        return f"{done.status} at step {done.num_steps}"

    done, folder = attempt(run), f"{OUT}/{name}/checkpoints"
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else None
    return [done, names and [name for name in names if name.startswith("step_")]]  # process 0 may still hold its lock


# Processes that differ, in the trainer

lr = own(0.02, 0.03)
result["config"] = train(
    "config",
    steps=own(5, 6),
    seed=own(0, 1),
    zero=zero.ZeroConfig(stage=own(3, 1), min_shard_size=0),
    optimizer=OptimizerConfig(learning_rate=lr, warmup_steps=1),
    hang_seconds=own(60, 50),
)
result["batch size"] = train("size", lambda step: batch_of(step, size=own(8, 4)))
result["loss"] = train("loss", loss=lambda params, batch: loss_fn(params, batch, scale=own(1.0, 2.0)))
result["width"] = train("width", init=lambda key: init_fn(key, width=own(8, 16)))
result["first batch"] = train("first", failing(0, process=1))

# Processes that give the same batch

result["equal"] = train("equal", whole_batch_of)
result["whole"] = train("whole", whole_batch_of, process_batches="whole")
result["halves"] = train("halves", half_batch_of)
result["twice"] = train("twice", whole_batch_of, process_batches="equal")
result["not whole"] = train("not", process_batches="whole")

# and in loops of one's own

mesh = zero.make_mesh(data=4)


def step_of(learning_rate, seed=0, size=4):
    tx = optax.sgd(learning_rate)
    state = zero.init_state(init_fn, tx, jax.random.key(seed), mesh=mesh, config=CONFIG.zero)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=CONFIG.zero)
    return step, state, batch_of(0, size=size)


def take_step(*arguments, **options):
    step, state, batch = step_of(*arguments, **options)
    state, _ = step(state, batch)
    return float(step(state, batch)[1].loss)


result["own step"] = attempt(lambda: take_step(0.1))
result["own learning rate"] = attempt(lambda: take_step(own(0.1, 0.2)))
result["own seed"] = attempt(lambda: take_step(0.1, seed=own(0, 1)))
stages = dataclasses.replace(CONFIG.zero, stage=own(3, 2))  # of which one gathers the params of a state
result["own stage"] = attempt(
    lambda: zero.init_state(init_fn, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=stages)
)
with zero.Checkpointer(f"{OUT}/of_stages") as checkpointer:
    checkpointer.save(1, step_of(0.1)[1])
result["own restored stage"] = attempt(
    lambda: zero.restore(f"{OUT}/of_stages", init_fn=init_fn, tx=optax.sgd(0.1), mesh=mesh, config=stages)
)
result["own batch size"] = attempt(lambda: take_step(0.1, size=own(4, 6)))
evaluate = zero.make_eval_step(
    lambda params, batch: loss_fn(params, batch, own(1.0, 3.0)), mesh=mesh, config=CONFIG.zero
)
result["own evaluation"] = attempt(lambda: evaluate(step_of(0.1)[1], batch_of(0)))
alone = zero.make_mesh(devices=jax.local_devices())
result["alone"] = attempt(
    lambda: [zero.shard_batch(batch_of(0, size=size), mesh=alone) and 1 for size in (own(4, 2), 8)]
)
result["sharded"] = attempt(lambda: list(zero.shard_batch(batch_of(0), mesh=mesh)["x"].shape))
if INDEX == 0:
    zero.shard_batch({"y": np.zeros((4, 3))}, mesh=mesh)  # of one process alone: nobody waits
turns_of().take()
result["divided"] = attempt(lambda: zero.shard_batch(batch_of(0, size=own(3, 5)), mesh=mesh))
result["sharded sizes"] = attempt(lambda: (zero.shard_batch(batch_of(0, size=own(2, 8)), mesh=mesh), turns_of().take()))

# Ends that are one process's own

result["ended"] = train("ended", batches_until(own(5, 3)))
result["goes on"] = train("ended", batches_until(9))
result["ended with a state"] = train("state", Stateful(own(9, 3)))
result["goes on with a state"] = train("state", Stateful(9))
result["shorter"] = train("ended", batches_until(own(9, 3)), steps=6)
result["data"] = train("data", failing(3, process=1))
result["sizes"] = train("sizes", lambda step: batch_of(step, size=own(4, 4 if step < 3 else 2)))
result["validation"] = train("validation", validation=FailingLater(), eval_every=2)
result["fewer validation batches"] = train("fewer", validation=[batch_of(9)] * own(3, 2), steps=2)


def full(line):
    if "step 3/5" in line:
        raise RuntimeError("no log")


batches = [batch_of(9), batch_of(8, size=own(4, 2))]
result["sizes of validation batches"] = train("shapes", validation=batches, steps=2)
result["log"] = train("log", log=full, log_every=1)
result["done"] = train("done")


def stops(step, metrics, state):
    return step == own(9, 2)


def fails(step, metrics, state):
    if step == own(2, 9):
        raise RuntimeError("the callback is lost")


result["stopped"] = train("stopped", callbacks=[stops])
result["callback"] = train("callback", callbacks=[fails])
result["callbacks"] = train("callbacks", callbacks=[zero.trainer.Callback(stops, every=own(1, 2))])

result["lines"] = lines
names = ("ended", "state", "done", "whole", "halves", "twice")
records = {name: zero.trainer.read_run(f"{OUT}/{name}").train for name in names}
result["losses"] = {name: [x["loss"] for x in found] for name, found in records.items()}
result["examples"] = {name: found[-1]["examples"] for name, found in records.items()}
report(result)
