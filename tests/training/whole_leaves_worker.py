"""One process of two that read and write leaves; see test_whole_leaves.py. Usage: whole_leaves_worker.py ADDRESS INDEX."""
# ruff: noqa: E402, E501 (what JAX runs on is settled before it is imported)

import os
import sys

ADDRESS, INDEX = sys.argv[1], int(sys.argv[2])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax

jax.distributed.initialize(ADDRESS, 2, INDEX, initialization_timeout=60)

import jax.numpy as jnp
import numpy as np
import optax
from processes import report

import zero_jax as zero

mesh = zero.make_mesh(data=jax.device_count())
config = zero.ZeroConfig(stage=3, min_shard_size=1, offload="optimizer")
init_fn = lambda key: {"a": jnp.arange(64.0).reshape(8, 8), "b": jnp.float32(2)}  # noqa: E731
state = zero.init_state(init_fn, optax.adam(1e-2), jax.random.key(0), mesh=mesh, config=config)
value = np.arange(64, dtype=np.float32).reshape(8, 8)
result = {}


def equal(tree, scale):
    leaves = dict(zero.read_leaves(tree, "params/.*"))
    return [np.array_equal(leaves["params/a"], scale * value), leaves["params/b"] == 2]


def failure(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


result["read"] = [bool(x) for x in equal(state, 1)]
written = zero.write_leaf(state, "params/a", 3 * value)
result["written"] = [bool(x) for x in equal(written, 3)]
result["sharding"] = written.params["a"].sharding == state.params["a"].sharding
written = zero.write_leaf(written, "opt_state/0/mu/a", value)
result["offloaded"] = [
    bool(np.array_equal(zero.read_leaf(written, "opt_state/0/mu/a"), value)),
    written.opt_state[0].mu["a"].sharding.memory_kind == "pinned_host",
]
result["shape"] = failure(lambda: zero.write_leaf(state, "params/a", value[: 8 - INDEX]))
result["value"] = failure(lambda: zero.write_leaf(state, "params/a", value + INDEX))
result["path"] = failure(lambda: zero.read_leaf(state, ["params/a", "params/b"][INDEX]))
report(result)
