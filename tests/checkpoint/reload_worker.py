"""One process of several: trains, saves, and goes on from what was saved; see test_reload_processes.py.

Usage: reload_worker.py ADDRESS NUM_PROCESSES INDEX NUM_DEVICES STAGE FOLDER ACTION; reports its result. The action
is `save` (two steps, a checkpoint, two more steps), `load` (two steps from the checkpoint on), or `fail` (as `save`,
but the files that the last process writes may not grow: its disk is full).
"""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import os
import sys

ADDRESS, NUM_PROCESSES, INDEX, NUM_DEVICES, STAGE, FOLDER, ACTION = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = NUM_DEVICES

import resource

import jax

if int(NUM_PROCESSES) > 1:
    jax.distributed.initialize(ADDRESS, int(NUM_PROCESSES), int(INDEX), initialization_timeout=60)

import optax
import reference
from processes import report

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, CheckpointError, restore

TX = optax.adamw(1e-2)
mesh = zero.make_mesh(data=jax.device_count())
config = reference.make_config(stage=int(STAGE))
step = zero.make_train_step(reference.loss_fn, TX, mesh=mesh, config=config)
batches = reference.make_batches(4)
told = []


def run(state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss).hex())
    return state, losses


result = {}
if ACTION == "load":
    try:
        back = restore(FOLDER, init_fn=reference.init_params, tx=TX, mesh=mesh, config=config, log=told.append)
        _, result["losses"] = run(back.state, batches[2:])
        result["step"] = back.step
    except CheckpointError as error:
        result["error"] = str(error)
else:
    state = zero.init_state(reference.init_params, TX, jax.random.PRNGKey(0), mesh=mesh, config=config)
    state, _ = run(state, batches[:2])
    with Checkpointer(FOLDER, log=told.append) as checkpointer:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ACTION == "fail" and int(INDEX) == int(NUM_PROCESSES) - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, limit[1]))
        checkpointer.save(2, state)
        _, result["losses"] = run(state, batches[2:])
        checkpointer.wait()
        result |= {"failed": checkpointer.num_failed, "steps": checkpointer.steps()}
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
report({**result, "told": told})
