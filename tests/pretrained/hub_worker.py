"""One process of several: loads a folder of the hub and saves it; see test_hub_processes.py.

Usage: hub_worker.py ADDRESS NUM_PROCESSES INDEX FOLDER OUT; reports its result.
"""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import os
import sys

ADDRESS, NUM_PROCESSES, INDEX, FOLDER, OUT = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.distributed.initialize(ADDRESS, int(NUM_PROCESSES), int(INDEX), initialization_timeout=60)

from processes import report

import zero_jax as zero
from zero_jax.pretrained import mapping

original, num_read = mapping.LeafTensors.read, 0


def count(leaf, index, dtype):
    global num_read
    values = original(leaf, index, dtype)
    num_read += values.size
    return values


mapping.LeafTensors.read = count
mesh = zero.make_mesh(data=jax.device_count())
result = {}
try:
    loaded = zero.load_hf(FOLDER, mesh=mesh, config=zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=8))
    result |= {"num_read": num_read, "num_params": loaded.source.config.num_params}
    result["saved"] = str(zero.save_hf(OUT, loaded.params, loaded, max_file_bytes=9000))
    own = multihost_utils.process_allgather(loaded.params, tiled=True)
    own["blocks"] = jax.tree.map(jnp.asarray, own["blocks"])  # on a device of each process, the others on the host
    zero.save_hf(f"{OUT}-own", own, loaded)
except ValueError as error:
    result["error"] = str(error)
report(result)
