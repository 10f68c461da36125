"""ZeRO for JAX: sharded optimizer states, gradients and parameters as `PartitionSpec` rules over a device mesh."""

from zero_jax.gather import GatherReport, gather_on_use, gather_report
from zero_jax.mesh import batch_sharding, make_mesh
from zero_jax.precision import LossScaleConfig, Precision
from zero_jax.sharding import ShardingReport
from zero_jax.state import TrainState, ZeroConfig, abstract_state, init_state, sharding_report, state_shardings
from zero_jax.step import Metrics, TrainStep, make_eval_step, make_train_step, shard_batch

__all__ = [
    "GatherReport",
    "LossScaleConfig",
    "Metrics",
    "Precision",
    "ShardingReport",
    "TrainState",
    "TrainStep",
    "ZeroConfig",
    "abstract_state",
    "batch_sharding",
    "gather_on_use",
    "gather_report",
    "init_state",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "shard_batch",
    "sharding_report",
    "state_shardings",
]
