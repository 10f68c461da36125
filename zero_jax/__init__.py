"""ZeRO for JAX: sharded optimizer states, gradients and parameters as `PartitionSpec` rules over a device mesh."""

from zero_jax import comms, losses, memory
from zero_jax.analysis.loss_trace import LossTrace, trace_loss
from zero_jax.analysis.paper_configs import PAPER_CONFIGS
from zero_jax.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Restored, restore
from zero_jax.core.variables import Variables
from zero_jax.data.batch_buffers import BatchBuffers
from zero_jax.planning.auto import AutoPlan, plan_auto
from zero_jax.planning.errors import CompilerCrash, ModelError
from zero_jax.planning.layouts import LayoutPlans, plan_layouts
from zero_jax.planning.report import PlanReport
from zero_jax.planning.single import plan
from zero_jax.sharding.mesh import batch_sharding, make_mesh
from zero_jax.sharding.precision import LossScaleConfig, Precision
from zero_jax.sharding.rules import ShardingReport
from zero_jax.training.ema import ema_params, params_ema
from zero_jax.training.evaluation import Metrics, make_eval_step, shard_batch
from zero_jax.training.grads import MeshLoss
from zero_jax.training.noise_scale import NoiseScale
from zero_jax.training.sequence_parallel import sequence_parallel
from zero_jax.training.state.shardings import sharding_report, state_shardings
from zero_jax.training.state.train_state import TrainState, ZeroConfig, abstract_state, init_state
from zero_jax.training.step import TrainStep, make_train_step
from zero_jax.transforms.gather.transform import GatherReport, gather_on_use, gather_report
from zero_jax.transforms.remat.transform import Remat, RematReport, remat_report, rematerialize

__all__ = [
    "PAPER_CONFIGS",
    "AutoPlan",
    "BatchBuffers",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "CompilerCrash",
    "GatherReport",
    "LayoutPlans",
    "LossScaleConfig",
    "LossTrace",
    "MeshLoss",
    "Metrics",
    "ModelError",
    "NoiseScale",
    "PlanReport",
    "Precision",
    "Remat",
    "RematReport",
    "Restored",
    "ShardingReport",
    "TrainState",
    "TrainStep",
    "Variables",
    "ZeroConfig",
    "abstract_state",
    "batch_sharding",
    "comms",
    "ema_params",
    "gather_on_use",
    "gather_report",
    "init_state",
    "losses",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "memory",
    "params_ema",
    "plan",
    "plan_auto",
    "plan_layouts",
    "remat_report",
    "rematerialize",
    "restore",
    "sequence_parallel",
    "shard_batch",
    "sharding_report",
    "state_shardings",
    "trace_loss",
]
