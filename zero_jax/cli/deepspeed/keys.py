"""The table of the keys of a DeepSpeed config: the kind of their values, and the rule of what zero_jax makes of them.

Names and meanings are those of DeepSpeed's page "DeepSpeed Configuration JSON" and of the classes that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zero_jax.cli.deepspeed import rules
from zero_jax.cli.deepspeed.optimizer import (
    OPTIMIZER_PARAMS,
    PARAMS,
    SCHEDULE,
    SCHEDULE_PARAMS,
    optimizer_param,
    optimizer_type,
    scheduler_param,
    scheduler_type,
)
from zero_jax.cli.deepspeed.rows import Kind, Rule
from zero_jax.cli.deepspeed.rules import block, differs, no_meaning


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a DeepSpeed config.

    Attributes:
      kind: the kind of its value; `"auto"` passes as well.
      rule: makes its row.
    """

    kind: Kind
    rule: Rule


def _section(*rows: tuple[Kind, str, Rule | str]) -> dict[str, Key]:
    """Returns keys by name. A row has a kind, names, and their rule; a text is why they have no meaning here."""
    keys = {}
    for kind, names, rule in rows:
        keys |= dict.fromkeys(names.split(), Key(kind, no_meaning(rule) if isinstance(rule, str) else rule))
    return keys


_XLA = "XLA schedules and combines collectives"
_NO_OFFLOAD = (
    "zero.offload = 'all' keeps the params in host memory at stage 3, with the optimizer's state: set it by hand if "
    "`zero-jax plan` says that they do not fit"
)
_CHECKPOINTS = "checkpoints are sharded, and restore on any mesh, stage and number of processes (`[checkpoint]`)"
_PROFILES = "`zero-jax train --profile-steps` records a profile; `metrics.jsonl` has step times and MFU"

_ZERO = _section(
    ("int", "stage", rules.stage),
    ("int", "mics_shard_size", rules.replicas),
    ("bool", "overlap_comm", rules.overlap),
    ("bool", "contiguous_gradients", "gradients are leaves with specs; XLA lays out memory"),
    ("bool", "reduce_scatter use_multi_rank_bucket_allreduce", "XLA chooses the collective of each spec"),
    ("bool", "allgather_partitions round_robin_gradients stage3_allgather_sequential", _XLA),
    ("bool", "stage3_use_all_reduce_for_fetch_params mics_hierarchical_params_gather", _XLA),
    (
        "number",
        "reduce_bucket_size allgather_bucket_size",
        f"{_XLA}; zero.combine_bytes limits their size, in bytes and not in elements",
    ),
    (
        "number",
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
        "stage3_max_reuse_distance max_reuse_distance",
        "each param is gathered where it is used and dropped after; XLA schedules it",
    ),
    (
        "number",
        "stage3_param_persistence_threshold param_persistence_threshold",
        "which small params stay whole: zero.min_shard_size does so for their optimizer state too, in elements",
    ),
    ("number", "stage3_model_persistence_threshold model_persistence_threshold", "no such bound is needed"),
    ("number", "sub_group_size", "the update runs leaf by leaf on shards"),
    ("number", "stage3_module_granularity_threshold module_granularity_threshold", "there are no module hooks"),
    ("number", "stage3_partition_stream_chunk_size", "params are made in shards (`zero.init_state`)"),
    (
        "bool",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        "`zero-jax export --dtype bfloat16` writes whole params from any checkpoint",
    ),
    ("bool", "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _CHECKPOINTS),
    ("bool", "ignore_unused_parameters", "an unused param has a gradient of zeros, as in jax.grad"),
    ("bool", "legacy_stage1 override_module_apply memory_efficient_linear parameter_alignment", "PyTorch's own"),
    ("bool", "log_trace_cache_warnings enable_sanity_checks", "there is no trace: a step is compiled once"),
    ("bool", "cpu_offload_use_pin_memory save_muon_momentum_buffer_in_memory", "part of offloading"),
    ("bool", "compute_grad_norm", "the norm is part of the metrics of every step"),
    ("any", "leaf_module", "there are no module hooks: params are gathered where they are used"),
    ("block", "offload_param", block(_NO_OFFLOAD, switch="device")),
    ("block", "offload_optimizer", rules.offload),
    ("bool", "cpu_offload", rules.old_offload),
    ("bool", "cpu_offload_param", differs(_NO_OFFLOAD, False)),
    ("block", "zenflow", block("zero_jax has no asynchronous updates of offloaded state", switch=None)),
    (
        "int",
        "zero_hpz_partition_size",
        differs(
            "zero.secondary = true keeps a secondary shard of the params inside each node, of any number of devices",
            0,
            1,
        ),
    ),
    ("bool", "zero_quantized_weights", rules.quantized("quantize_gathers")),
    ("bool", "zero_quantized_gradients", rules.quantized("quantize_grads")),
    (
        "bool",
        "zero_quantized_nontrainable_weights",
        differs("zero.Quantize(gathers={...}) names what is quantized by path, in a loop of your own", False),
    ),
    (
        "block",
        "zeropp_loco_param",
        block("zero.quantize_error_feedback is for gradients between replicas", switch=None),
    ),
)
_LOSS_SCALE = (
    "zero-jax train scales the loss by its own defaults; which steps are skipped may differ, gradients do not. In "
    "code: zero.Precision(..., loss_scale=zero.LossScaleConfig(...))"
)
_FP16 = _section(
    ("bool", "enabled", rules.precision),
    ("number", "loss_scale", differs(f"0 is dynamic, others are a fixed scale. {_LOSS_SCALE}", 0)),
    ("int", "initial_scale_power", differs(f"here it starts at 2**15. {_LOSS_SCALE}", 15)),
    ("int", "loss_scale_window", differs(f"here it grows after 2,000 finite steps. {_LOSS_SCALE}", 2000)),
    ("int", "hysteresis", differs(f"here it falls at the first non-finite step. {_LOSS_SCALE}", 1)),
    ("bool", "consecutive_hysteresis", differs(f"there is no hysteresis. {_LOSS_SCALE}", False)),
    ("number", "min_loss_scale", differs(f"here it falls to 1 at least. {_LOSS_SCALE}", 1)),
    ("bool", "fp16_master_weights_and_grads", differs("master params are float32 here", False)),
    ("bool", "auto_cast", "floating inputs of the model are always cast (zero.keep_batch_dtype)"),
    ("bool", "fused_mode", "PyTorch's own"),
    ("any", "opt_level", "an option of Apex, which DeepSpeed ignores here"),
)
_BF16 = _section(
    ("bool", "enabled", rules.precision),
    (
        "bool",
        "bf16_master_weights_and_grads",
        differs("master params are float32 here; zero.precision = 'bf16-stochastic' keeps bfloat16 ones", False),
    ),
    (
        "bool",
        "bf16_optimizer_states",
        differs("the optimizer's state is float32 here; optimizer.mu_dtype and nu_dtype keep it in bfloat16", False),
    ),
    ("bool", "immediate_grad_update auto_cast", "XLA schedules the gradients"),
    ("bool", "check_grad_overflow", "steps with non-finite gradients are skipped (zero.skip_nonfinite)"),
)
_REMAT = _section(
    ("bool", "partition_activations", rules.partitioned_residuals),
    ("bool", "cpu_checkpointing", rules.offloaded_residuals),
    ("any", "contiguous_memory_optimization number_checkpoints", "XLA lays out memory (docs/fragmentation.md)"),
    ("bool", "synchronize_checkpoint_boundary profile", "a step is one program"),
)
_TENSOR_PARALLEL = _section(
    ("int", "autotp_size", rules.tensor_parallel),
    ("any", "preset_model partition_config", "the model has specs for the axis `model` (zero.param_specs)"),
    ("any", "tp_overlap_comm vocab_parallel_lm_head dtype", _XLA),
)
_TOP = _section(
    ("int", "train_batch_size", rules.batch("run.batch_size")),
    ("int", "train_micro_batch_size_per_gpu", rules.microbatch_size),
    ("int", "gradient_accumulation_steps", rules.batch("zero.num_microbatches")),
    ("int", "steps_per_print", rules.log_every),
    ("number", "gradient_clipping", rules.clipping),
    ("bool", "zero_optimization", rules.old_stage),
    ("block", "tensorboard", rules.tensorboard),
    ("block", "wandb", rules.wandb),
    ("bool", "managed_gradient_accumulation", "a step takes the whole batch and splits it itself"),
    (
        "text",
        "communication_data_type",
        differs("gradients are summed in the dtype of zero.precision. In code: zero.Precision(..., reduce=...)"),
    ),
    ("text", "gradient_allreduce_op", differs("gradients are those of the mean over the batch", "mean")),
    ("bool", "fp32_allreduce", differs("in code: zero.Precision(..., reduce=jnp.float32)", False)),
    ("any", "prescale_gradients gradient_predivide_factor", "the mean is the same; it guards fp16 in NCCL"),
    ("text", "seq_parallel_comm_data_type seq_parallel_communication_data_type", "part of Ulysses"),
    (
        "int",
        "sequence_parallel_size",
        differs("Ulysses does not exist here; activations.sequence_parallel is another thing (Korthikanti et al.)", 1),
    ),
    ("bool", "sparse_gradients", "gradients of embeddings are dense, and sharded"),
    ("bool", "disable_allgather dataloader_drop_last graph_harvesting dump_state", "PyTorch's own"),
    ("bool", "memory_breakdown", "`zero-jax memory` has each byte; metrics have the bytes in use"),
    ("bool", "wall_clock_breakdown timers", _PROFILES),
    ("bool", "disable_python_gc use_data_before_expert_parallelism", "PyTorch's own"),
    ("bool", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "any optax optimizer is sharded"),
    ("any", "vocabulary_size local_rank", "of the model or of the launcher"),
    ("block", "flops_profiler", _PROFILES),
    ("block", "comms_logger", "`zero-jax comms` reads what a step sends from its program"),
    ("block", "autotuning", "`zero-jax plan --auto` searches by compiling"),
    ("block", "csv_monitor", "`metrics.jsonl` of each run has all figures"),
    ("block", "comet", "there is no writer for Comet; `metrics.jsonl` has all figures"),
    ("block", "aio", "part of offloading to NVMe"),
    ("block", "checkpoint", _CHECKPOINTS),
    ("block", "nebula", _CHECKPOINTS),
    ("bool", "load_universal_checkpoint", _CHECKPOINTS),
    ("block", "elasticity", block("a run resumes on any number of devices (`--resume auto`)")),
    ("block", "compile", "a step is compiled by XLA anyway"),
    ("block", "amp", block("Apex does not exist here; zero.precision is 'bf16', 'fp16' or 'fp32'")),
    ("block", "torch_autocast", block("in code: zero.Precision(compute=jnp.bfloat16), for all of the loss function")),
    ("block", "data_efficiency", block("zero_jax has no curriculum and drops no tokens")),
    ("block", "curriculum_learning", block("zero_jax has no curriculum")),
    ("block", "progressive_layer_drop", block("the model is yours: drop layers in the loss function")),
    ("block", "eigenvalue", block("part of DeepSpeed's quantized training")),
    ("block", "quantize_training", block("zero_jax does not quantize while training")),
    ("block", "compression_training", block("zero_jax does not compress models", switch=None)),
    ("block", "weight_quantization", block("zero_jax does not quantize while training", switch=None)),
    ("block", "sparse_attention", block("`zero.dot_product_attention` takes windows and masks", switch=None)),
    ("block", "hybrid_engine", block("zero_jax has no inference engine")),
    ("block", "expert_parallel", block("experts are sharded by specs of the model")),
    ("block", "pipeline", block("a mesh axis here: `zero.make_mesh(pipe=...)`, or --pipe", switch=None)),
)
_DATA_TYPES = _section(
    ("text", "grad_accum_dtype", differs("microbatches are accumulated in float32 here", "fp32", "float32"))
)
_PARTS: Mapping[str, Mapping[str, Key]] = {
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "activation_checkpointing": _REMAT,
    "tensor_parallel": _TENSOR_PARALLEL,
    "data_types": _DATA_TYPES,
    "optimizer": _section(("text", "type", optimizer_type), ("bool", "legacy_fusion", "PyTorch's own")),
    "scheduler": _section(("text", "type", scheduler_type)),
    "optimizer.params": {name: Key(x.kind, optimizer_param) for name, x in OPTIMIZER_PARAMS.items()},
    "scheduler.params": {name: Key(x.kind, scheduler_param) for name, x in SCHEDULE_PARAMS.items()},
}
SECTIONS: frozenset[str] = frozenset(_PARTS)
KEYS: Mapping[str, Key] = _TOP | {
    f"{section}.{name}": key for section, part in _PARTS.items() for name, key in part.items()
}
# The rules of keys whose absence says something, or whose default is not that of zero_jax, in the order of their rows.
ABSENT: Mapping[str, Rule] = {
    "zero_optimization.stage": rules.stage,
    "bf16 and fp16": rules.no_precision,
    **{name: KEYS[name].rule for name in ("gradient_clipping", "train_batch_size", "gradient_accumulation_steps")},
    "optimizer.type": optimizer_type,
    **{f"{PARAMS}{name}": optimizer_param for name in OPTIMIZER_PARAMS},
    "scheduler.type": scheduler_type,
    **{f"{SCHEDULE}{name}": scheduler_param for name in SCHEDULE_PARAMS},
}
