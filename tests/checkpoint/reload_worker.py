"""Trains, saves, and goes on from what was saved; as a program, one of two processes of test_reload_processes.py.

Usage: reload_worker.py ADDRESS INDEX FOLDER ACTION...; reports the result of each action: `save` at stage 3, `fail` (as
`save`, but the files that the last process writes may not grow: its disk is full), `damaged` and `load` at stage 2 (of
what one process has saved); `broken` (as `load`, and the memory of the last process ends); `apart` saves into a folder
of each process; `late` takes such folders while the disk of the first process is full, and again.
"""

import os
import resource
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"

import jax

if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)

import optax
import reference
from processes import report

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, CheckpointError, leaf_files, restore, saving
from zero_jax.core.agreement import OtherProcessFailed

TX = optax.adamw(1e-2)


def train(state, batches, step):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss).hex())
    return state, losses


def made(stage, num_devices):
    """Returns a mesh of the first devices, a config and a step."""
    mesh, config = zero.make_mesh(devices=jax.devices()[:num_devices]), reference.make_config(stage=stage)
    return mesh, config, zero.make_train_step(reference.loss_fn, TX, mesh=mesh, config=config)


def saved(folder, stage, *, is_full=False, num_devices=8):
    """Takes two steps, saves a checkpoint, and takes two more; the disk of this process may be full."""
    mesh, config, step = made(stage, num_devices)
    batches, told = reference.make_batches(4), []
    state = zero.init_state(reference.init_params, TX, jax.random.PRNGKey(0), mesh=mesh, config=config)
    state, _ = train(state, batches[:2], step)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(folder, log=told.append) as checkpointer:
        if is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, limit[1]))
        checkpointer.save(2, state)
        _, losses = train(state, batches[2:], step)
        checkpointer.wait()
        result = {"losses": losses, "failed": checkpointer.num_failed, "steps": checkpointer.steps()}
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return result | {"told": told}


def loaded(folder, stage, *, num_devices=8):
    """Takes two steps from the checkpoint on, or returns the error."""
    mesh, config, step = made(stage, num_devices)
    told = []
    try:
        back = restore(folder, init_fn=reference.init_params, tx=TX, mesh=mesh, config=config, log=told.append)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"losses": train(back.state, reference.make_batches(4)[2:], step)[1], "step": back.step, "told": told}


def broken(folder):
    """Reads a checkpoint while the memory of the last process ends; returns the error."""
    read = leaf_files._start_reads

    def fail(*_):
        raise MemoryError("no room")

    leaf_files._start_reads = fail if jax.process_index() else read
    try:
        loaded(folder, 3)
    except (MemoryError, OtherProcessFailed) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        leaf_files._start_reads = read


def saved_apart(folder):
    """Saves into another folder in each process; returns the error."""
    saving._SEEN_SECONDS = 0.5
    try:
        return saved(f"{folder}{jax.process_index()}", 3)
    except ValueError as error:
        return {"error": str(error)}


def taken_late(folder):
    """Takes another folder in each process, the first time with a lock without content; returns the error."""
    saving._SEEN_SECONDS = 0.5
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(f"{folder}{jax.process_index()}", log=print) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        checkpointer.take()
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        try:
            checkpointer.take()
        except ValueError as error:
            return {"error": str(error)}


ACTIONS = {
    "late": lambda folder: taken_late(f"{folder}/late"),
    "apart": lambda folder: saved_apart(f"{folder}/apart"),
    "save": lambda folder: saved(f"{folder}/save", 3),
    "fail": lambda folder: saved(f"{folder}/fail", 3, is_full=jax.process_index() == 1),
    "load": lambda folder: loaded(f"{folder}/load", 2),
    "broken": lambda folder: broken(f"{folder}/load"),
    "damaged": lambda folder: loaded(f"{folder}/damaged", 3),
}

if __name__ == "__main__":
    report({action: ACTIONS[action](sys.argv[3]) for action in sys.argv[4:]})
