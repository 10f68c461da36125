"""The keys of a DeepSpeed config, with the kind of their values, and what zero_jax makes of them.

Names and meanings are those of DeepSpeed's page "DeepSpeed Configuration JSON" and of the classes that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

# A block is an object whose keys DeepSpeed checks itself.
Kind = Literal["bool", "int", "number", "text", "list", "block", "any"]
# `read`: a translator makes its row.
Fate = Literal["read", "same", "no meaning", "not translated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a DeepSpeed config.

    Attributes:
      kind: the kind of its value; `"auto"` passes as well.
      fate: what becomes of it.
      reason: why.
      off: values with which there is nothing to translate.
      switch: of a block, the entry that turns it on.
    """

    kind: Kind
    fate: Fate = "read"
    reason: str = ""
    off: tuple[Any, ...] = ()
    switch: str | None = None


def _read(kind: Kind, names: str) -> dict[str, Key]:
    return {name: Key(kind=kind) for name in names.split()}


def _none(kind: Kind, names: str, reason: str) -> dict[str, Key]:
    return {name: Key(kind=kind, fate="no meaning", reason=reason) for name in names.split()}


def _differs(kind: Kind, name: str, reason: str, off: tuple[Any, ...] = ()) -> dict[str, Key]:
    return {name: Key(kind=kind, fate="not translated", reason=reason, off=off)}


def _block(name: str, reason: str, *, fate: Fate = "not translated", switch: str | None = "enabled") -> dict[str, Key]:
    return {name: Key(kind="block", fate=fate, reason=reason, switch=switch)}


_XLA = "XLA schedules and combines collectives"
_NO_OFFLOAD = (
    "zero.offload = 'all' keeps the params in host memory at stage 3, with the optimizer's state: set it by hand if "
    "`zero-jax plan` says that they do not fit"
)
_CHECKPOINTS = "checkpoints are sharded, and restore on any mesh, stage and number of processes (`[checkpoint]`)"
_PROFILES = "`zero-jax train --profile-steps` records a profile; `metrics.jsonl` has step times and MFU"

_ZERO: dict[str, Key] = {
    **_read("int", "stage mics_shard_size"),
    **_read("bool", "overlap_comm"),
    **_none("bool", "contiguous_gradients", "gradients are leaves with specs; XLA lays out memory"),
    **_none("bool", "reduce_scatter use_multi_rank_bucket_allreduce", "XLA chooses the collective of each spec"),
    **_none("bool", "allgather_partitions round_robin_gradients stage3_allgather_sequential", _XLA),
    **_none("bool", "stage3_use_all_reduce_for_fetch_params mics_hierarchical_params_gather", _XLA),
    **_none(
        "number",
        "reduce_bucket_size allgather_bucket_size",
        f"{_XLA}; zero.combine_bytes limits their size, in bytes and not in elements",
    ),
    **_none(
        "number",
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
        "stage3_max_reuse_distance max_reuse_distance",
        "each param is gathered where it is used and dropped after; XLA schedules it",
    ),
    **_none(
        "number",
        "stage3_param_persistence_threshold param_persistence_threshold",
        "which small params stay whole: zero.min_shard_size does so for their optimizer state too, in elements",
    ),
    **_none("number", "stage3_model_persistence_threshold model_persistence_threshold", "no such bound is needed"),
    **_none("number", "sub_group_size", "the update runs leaf by leaf on shards"),
    **_none("number", "stage3_module_granularity_threshold module_granularity_threshold", "there are no module hooks"),
    **_none("number", "stage3_partition_stream_chunk_size", "params are made in shards (`zero.init_state`)"),
    **_none(
        "bool",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        "`zero-jax export --dtype bfloat16` writes whole params from any checkpoint",
    ),
    **_none("bool", "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _CHECKPOINTS),
    **_none("bool", "ignore_unused_parameters", "an unused param has a gradient of zeros, as in jax.grad"),
    **_none("bool", "legacy_stage1 override_module_apply memory_efficient_linear parameter_alignment", "PyTorch's own"),
    **_none("bool", "log_trace_cache_warnings enable_sanity_checks", "there is no trace: a step is compiled once"),
    **_none("bool", "cpu_offload_use_pin_memory save_muon_momentum_buffer_in_memory", "part of offloading"),
    **_none("bool", "compute_grad_norm", "the norm is part of the metrics of every step"),
    **_none("any", "leaf_module", "there are no module hooks: params are gathered where they are used"),
    **_block("offload_param", _NO_OFFLOAD, switch="device"),
    **_block("offload_optimizer", "", fate="read", switch="device"),
    **_read("bool", "cpu_offload"),
    **_differs("bool", "cpu_offload_param", _NO_OFFLOAD, off=(False,)),
    **_block("zenflow", "zero_jax has no asynchronous updates of offloaded state", switch=None),
    **_differs(
        "int",
        "zero_hpz_partition_size",
        "zero.secondary = true keeps a secondary shard of the params inside each node, of any number of devices",
        off=(0, 1),
    ),
    **_read("bool", "zero_quantized_weights zero_quantized_gradients"),
    **_differs(
        "bool",
        "zero_quantized_nontrainable_weights",
        "zero.Quantize(gathers={...}) names what is quantized by path, in a loop of your own",
        off=(False,),
    ),
    **_block("zeropp_loco_param", "zero.quantize_error_feedback is for gradients between replicas", switch=None),
}
_LOSS_SCALE = (
    "zero-jax train scales the loss by its own defaults; which steps are skipped may differ, gradients do not. In "
    "code: zero.Precision(..., loss_scale=zero.LossScaleConfig(...))"
)
_FP16: dict[str, Key] = {
    **_read("bool", "enabled"),
    **_differs("number", "loss_scale", f"0 is dynamic, others are a fixed scale. {_LOSS_SCALE}", off=(0,)),
    **_differs("int", "initial_scale_power", f"here it starts at 2**15. {_LOSS_SCALE}", off=(15,)),
    **_differs("int", "loss_scale_window", f"here it grows after 2,000 finite steps. {_LOSS_SCALE}", off=(2000,)),
    **_differs("int", "hysteresis", f"here it falls at the first non-finite step. {_LOSS_SCALE}", off=(1,)),
    **_differs("bool", "consecutive_hysteresis", f"there is no hysteresis. {_LOSS_SCALE}", off=(False,)),
    **_differs("number", "min_loss_scale", f"here it falls to 1 at least. {_LOSS_SCALE}", off=(1,)),
    **_differs("bool", "fp16_master_weights_and_grads", "master params are float32 here", off=(False,)),
    **_none("bool", "auto_cast", "floating inputs of the model are always cast (zero.keep_batch_dtype)"),
    **_none("bool", "fused_mode", "PyTorch's own"),
    **_none("any", "opt_level", "an option of Apex, which DeepSpeed ignores here"),
}
_BF16: dict[str, Key] = {
    **_read("bool", "enabled"),
    **_differs("bool", "bf16_master_weights_and_grads", "master params are float32 here", off=(False,)),
    **_differs("bool", "bf16_optimizer_states", "the optimizer's state is float32 here", off=(False,)),
    **_none("bool", "immediate_grad_update auto_cast", "XLA schedules the gradients"),
    **_none("bool", "check_grad_overflow", "steps with non-finite gradients are skipped (zero.skip_nonfinite)"),
}
_REMAT: dict[str, Key] = {
    **_read("bool", "partition_activations cpu_checkpointing"),
    **_none("any", "contiguous_memory_optimization number_checkpoints", "XLA lays out memory (docs/fragmentation.md)"),
    **_none("bool", "synchronize_checkpoint_boundary profile", "a step is one program"),
}
_TENSOR_PARALLEL: dict[str, Key] = {
    **_read("int", "autotp_size"),
    **_none("any", "preset_model partition_config", "the model has specs for the axis `model` (zero.param_specs)"),
    **_none("any", "tp_overlap_comm vocab_parallel_lm_head dtype", _XLA),
}
_TOP: dict[str, Key] = {
    **_read("int", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print"),
    **_read("number", "gradient_clipping"),
    **_read("bool", "zero_optimization"),
    **{name: Key(kind="block", switch="enabled") for name in ("tensorboard", "wandb")},
    **_none("bool", "managed_gradient_accumulation", "a step takes the whole batch and splits it itself"),
    **_differs(
        "text",
        "communication_data_type",
        "gradients are summed in the dtype of zero.precision. In code: zero.Precision(..., reduce=...)",
    ),
    **_differs("text", "gradient_allreduce_op", "gradients are those of the mean over the batch", off=("mean",)),
    **_differs("bool", "fp32_allreduce", "in code: zero.Precision(..., reduce=jnp.float32)", off=(False,)),
    **_none("any", "prescale_gradients gradient_predivide_factor", "the mean is the same; it guards fp16 in NCCL"),
    **_none("text", "seq_parallel_comm_data_type seq_parallel_communication_data_type", "part of Ulysses"),
    **_differs(
        "int",
        "sequence_parallel_size",
        "Ulysses does not exist here; activations.sequence_parallel is another thing (Korthikanti et al.)",
        off=(1,),
    ),
    **_none("bool", "sparse_gradients", "gradients of embeddings are dense, and sharded"),
    **_none("bool", "disable_allgather dataloader_drop_last graph_harvesting dump_state", "PyTorch's own"),
    **_none("bool", "memory_breakdown", "`zero-jax memory` has each byte; metrics have the bytes in use"),
    **_none("bool", "wall_clock_breakdown timers", _PROFILES),
    **_none("bool", "disable_python_gc use_data_before_expert_parallelism", "PyTorch's own"),
    **_none("bool", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "any optax optimizer is sharded"),
    **_none("any", "vocabulary_size local_rank", "of the model or of the launcher"),
    **_block("flops_profiler", _PROFILES, fate="no meaning"),
    **_block("comms_logger", "`zero-jax comms` reads what a step sends from its program", fate="no meaning"),
    **_block("autotuning", "`zero-jax plan --auto` searches by compiling", fate="no meaning"),
    **_block("csv_monitor", "`metrics.jsonl` of each run has all figures", fate="no meaning"),
    **_block("comet", "there is no writer for Comet; `metrics.jsonl` has all figures", fate="no meaning"),
    **_block("aio", "part of offloading to NVMe", fate="no meaning", switch=None),
    **_block("checkpoint", _CHECKPOINTS, fate="no meaning", switch=None),
    **_block("nebula", _CHECKPOINTS, fate="no meaning"),
    **_none("bool", "load_universal_checkpoint", _CHECKPOINTS),
    **_block("elasticity", "a run resumes on any number of devices (`--resume auto`)"),
    **_block("compile", "a step is compiled by XLA anyway", fate="no meaning", switch=None),
    **_block("amp", "Apex does not exist here; zero.precision is 'bf16', 'fp16' or 'fp32'"),
    **_block("torch_autocast", "in code: zero.Precision(compute=jnp.bfloat16), for all of the loss function"),
    **_block("data_efficiency", "zero_jax has no curriculum and drops no tokens"),
    **_block("curriculum_learning", "zero_jax has no curriculum"),
    **_block("progressive_layer_drop", "the model is yours: drop layers in the loss function"),
    **_block("eigenvalue", "part of DeepSpeed's quantized training"),
    **_block("quantize_training", "zero_jax does not quantize while training"),
    **_block("compression_training", "zero_jax does not compress models", switch=None),
    **_block("weight_quantization", "zero_jax does not quantize while training", switch=None),
    **_block("sparse_attention", "`zero.dot_product_attention` takes windows and masks", switch=None),
    **_block("hybrid_engine", "zero_jax has no inference engine"),
    **_block("expert_parallel", "experts are sharded by specs of the model"),
    **_block("pipeline", "zero_jax has no pipeline parallelism", switch=None),
}
_DATA_TYPES: dict[str, Key] = {
    **_differs("text", "grad_accum_dtype", "microbatches are accumulated in float32 here", off=("fp32", "float32")),
}
_PARTS: Mapping[str, Mapping[str, Key]] = {
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "activation_checkpointing": _REMAT,
    "tensor_parallel": _TENSOR_PARALLEL,
    "data_types": _DATA_TYPES,
    "optimizer": {**_read("text", "type"), **_none("bool", "legacy_fusion", "PyTorch's own")},
    "scheduler": _read("text", "type"),
    # By optimizer and scheduler; their own table says which exist.
    "optimizer.params": {
        **_read("number", "lr eps weight_decay momentum dampening max_grad_norm"),
        **_read("list", "betas"),
        **_read(
            "bool",
            "bias_correction adam_w_mode torch_adam amsgrad nesterov maximize set_grad_none fused foreach capturable "
            "differentiable fp32_optimizer_states",
        ),
        **_read(
            "any",
            "max_coeff min_coeff freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min "
            "factor_threshold var_freeze_step var_update_scaler local_step_scaler local_step_clipper muon_lr adam_lr "
            "ns_method per_head_muon eps_inside_sqrt lr_decay initial_accumulator_value alpha centered rho",
        ),
    },
    "scheduler.params": {
        **_read("int", "warmup_num_steps total_num_steps last_batch_iteration"),
        **_read("number", "warmup_min_ratio cos_min_ratio"),
        **_read("any", "warmup_min_lr warmup_max_lr"),
        **_read("text", "warmup_type"),
        **_read(
            "any",
            "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
            "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
            "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
            "cycle_max_mom decay_mom_rate",
        ),
    },
}
SECTIONS: frozenset[str] = frozenset(_PARTS)
KEYS: Mapping[str, Key] = _TOP | {
    f"{section}.{name}": key for section, part in _PARTS.items() for name, key in part.items()
}
