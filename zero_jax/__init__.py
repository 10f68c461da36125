"""ZeRO for JAX: sharded optimizer states, gradients and parameters as `PartitionSpec` rules over a device mesh."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_jax import checkpoint, cluster, data, pretrained, trainer
    from zero_jax.analysis import PAPER_CONFIGS, LossTrace, StateSummary, comms, memory, paper, summary, trace_loss
    from zero_jax.attention import dot_product_attention
    from zero_jax.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Restored, restore
    from zero_jax.core.variables import Variables
    from zero_jax.data import BatchBuffers
    from zero_jax.finetuning import Lora
    from zero_jax.libraries import ModelFunctions, from_equinox, from_linen, from_nnx
    from zero_jax.planning import (
        AutoPlan,
        CompilerCrash,
        LayoutPlans,
        ModelError,
        PlanReport,
        plan,
        plan_auto,
        plan_layouts,
    )
    from zero_jax.pretrained import Pretrained, load_hf, save_hf
    from zero_jax.sharding.mesh import batch_sharding, make_mesh
    from zero_jax.sharding.precision import LossScaleConfig, Precision
    from zero_jax.sharding.quantized import Quantize
    from zero_jax.sharding.rules import ShardingReport
    from zero_jax.trainer import TrainConfig, Trainer, TrainResult
    from zero_jax.training import (
        MeshLoss,
        Metrics,
        NoiseScale,
        Offload,
        TrainState,
        TrainStep,
        ZeroConfig,
        abstract_state,
        compiler_options,
        ema_params,
        init_state,
        losses,
        make_eval_step,
        make_train_step,
        params_ema,
        pipeline_report,
        read_leaf,
        read_leaves,
        round_state,
        sequence_parallel,
        shard_batch,
        sharding_report,
        state_shardings,
        write_leaf,
        write_leaves,
    )
    from zero_jax.transforms import (
        AttentionReport,
        GatherReport,
        PipelineReport,
        Remat,
        RematReport,
        attention_report,
        fuse_attention,
        gather_on_use,
        gather_report,
        remat_report,
        rematerialize,
    )
    from zero_jax.verification import LeafDifference, Verification, verify

# The module of each public name, imported when the name is first used: `import zero_jax` costs only what is used of it.
__version__ = "0.2.0"
_PUBLIC = {
    "zero_jax": "checkpoint cluster data pretrained trainer",
    "zero_jax.analysis": "LossTrace PAPER_CONFIGS StateSummary comms memory paper summary trace_loss",
    "zero_jax.attention": "dot_product_attention",
    "zero_jax.checkpoint": "CheckpointConfig CheckpointError Checkpointer Restored restore",
    "zero_jax.core.variables": "Variables",
    "zero_jax.data": "BatchBuffers",
    "zero_jax.finetuning": "Lora",
    "zero_jax.libraries": "ModelFunctions from_equinox from_linen from_nnx",
    "zero_jax.planning": "AutoPlan CompilerCrash LayoutPlans ModelError PlanReport plan plan_auto plan_layouts",
    "zero_jax.pretrained": "Pretrained load_hf save_hf",
    "zero_jax.sharding.mesh": "batch_sharding make_mesh",
    "zero_jax.sharding.precision": "LossScaleConfig Precision",
    "zero_jax.sharding.quantized": "Quantize",
    "zero_jax.sharding.rules": "ShardingReport",
    "zero_jax.trainer": "TrainConfig TrainResult Trainer",
    "zero_jax.training": (
        "MeshLoss Metrics NoiseScale Offload TrainState TrainStep ZeroConfig abstract_state compiler_options "
        "ema_params init_state losses make_eval_step make_train_step params_ema pipeline_report read_leaf "
        "read_leaves round_state sequence_parallel shard_batch sharding_report state_shardings write_leaf write_leaves"
    ),
    "zero_jax.verification": "LeafDifference Verification verify",
    "zero_jax.transforms": (
        "AttentionReport GatherReport PipelineReport Remat RematReport attention_report fuse_attention gather_on_use "
        "gather_report remat_report rematerialize"
    ),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [
    "PAPER_CONFIGS",
    "AttentionReport",
    "AutoPlan",
    "BatchBuffers",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "CompilerCrash",
    "GatherReport",
    "LayoutPlans",
    "LeafDifference",
    "Lora",
    "LossScaleConfig",
    "LossTrace",
    "MeshLoss",
    "Metrics",
    "ModelError",
    "ModelFunctions",
    "NoiseScale",
    "Offload",
    "PipelineReport",
    "PlanReport",
    "Precision",
    "Pretrained",
    "Quantize",
    "Remat",
    "RematReport",
    "Restored",
    "ShardingReport",
    "StateSummary",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "TrainStep",
    "Trainer",
    "Variables",
    "Verification",
    "ZeroConfig",
    "abstract_state",
    "attention_report",
    "batch_sharding",
    "checkpoint",
    "cluster",
    "comms",
    "compiler_options",
    "data",
    "dot_product_attention",
    "ema_params",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "fuse_attention",
    "gather_on_use",
    "gather_report",
    "init_state",
    "load_hf",
    "losses",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "memory",
    "paper",
    "params_ema",
    "pipeline_report",
    "plan",
    "plan_auto",
    "plan_layouts",
    "pretrained",
    "read_leaf",
    "read_leaves",
    "remat_report",
    "rematerialize",
    "restore",
    "round_state",
    "save_hf",
    "sequence_parallel",
    "shard_batch",
    "sharding_report",
    "state_shardings",
    "summary",
    "trace_loss",
    "trainer",
    "verify",
    "write_leaf",
    "write_leaves",
]


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        if name == "launch":  # `launch.join` was the documented name of `cluster.join`
            name = "cluster"
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if module == __name__:
            return importlib.import_module(f"{__name__}.{name}")
        value = globals()[name] = getattr(importlib.import_module(module), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
