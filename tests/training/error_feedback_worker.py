"""One process of several with error feedback: takes a step and saves, or takes a step from what was saved.

Usage: error_feedback_worker.py ADDRESS NUM_PROCESSES INDEX NUM_DEVICES REPLICAS FOLDER ACTION; reports the results by
number of replicas, of which there may be several. See test_error_feedback_processes.py.
"""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import os
import sys

ADDRESS, NUM_PROCESSES, INDEX, NUM_DEVICES, REPLICAS, FOLDER, ACTION = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = NUM_DEVICES

import jax

if int(NUM_PROCESSES) > 1:
    jax.distributed.initialize(ADDRESS, int(NUM_PROCESSES), int(INDEX), initialization_timeout=60)

import numpy as np
from jax.experimental.multihost_utils import process_allgather
from processes import report
from test_error_feedback import FEEDBACK, SUM, exact, init, loss_fn, make_batch

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, restore

config = zero.ZeroConfig(quantize=FEEDBACK)


def host(tree):
    return jax.tree.map(lambda x: np.asarray(process_allgather(x, tiled=True)), tree)


def lost(state, num_steps):
    """Returns how much of the computed gradients is neither applied nor still to be added, of their largest."""
    applied, errors = host(state.opt_state[0].trace), host(state.grad_errors)
    expected = {name: num_steps * exact()[name] for name in ("up", "down")}
    return max(
        float(np.abs(applied[name] + errors[name].sum(0) - expected[name]).max() / np.abs(expected[name]).max())
        for name in expected
    )


def run(replica):
    """Takes a step, after one that was saved or that it saves."""
    mesh, warnings = zero.make_mesh(replica=replica), ()
    step = zero.make_train_step(loss_fn, SUM, mesh=mesh, config=config)
    if ACTION == "load":
        back = restore(FOLDER, init_fn=init, tx=SUM, mesh=mesh, config=config, log=str)
        state, warnings = back.state, back.warnings
    else:
        state = zero.init_state(init, SUM, jax.random.key(0), mesh=mesh, config=config)
        state, _ = step(state, make_batch())
        with Checkpointer(FOLDER) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            assert checkpointer.num_saved == 1
    errors = host({name: state.grad_errors[name] for name in ("up", "down")})
    sums = {name: [float(x).hex() for x in np.abs(of_devices).sum((1, 2, 3))] for name, of_devices in errors.items()}
    before = lost(state, 1)
    state, _ = step(state, make_batch())
    return {"sums": sums, "lost": [before, lost(state, 2)], "warnings": list(warnings)}


report({replica: run(int(replica)) for replica in REPLICAS.split(",")})
