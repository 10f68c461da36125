"""Did you mean: the closest of some known names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from zero_jax.core.text_tables import printable

_MAX_CHARACTERS = 1000  # of a name from outside
# What transformers, torchtitan, MaxText, DeepSpeed and Megatron call the fields of the configs, by the names here.
_ELSEWHERE = {
    "activation": "hidden_act act_fn mlp_activations",
    "attention": "attn_implementation flash_attention use_flash_attention",
    "batch_size": "global_batch_size train_batch_size per_device_train_batch_size per_device_batch_size "
    "micro_batch_size train_micro_batch_size_per_gpu local_batch_size",
    "beta1": "adam_beta1 b1 adam_b1",
    "beta2": "adam_beta2 b2 adam_b2",
    "clip_norm": "max_grad_norm max_norm gradient_clipping gradient_clipping_threshold clip_grad grad_clip",
    "d_hidden": "intermediate_size ffn_hidden_size mlp_dim base_mlp_dim n_inner",
    "d_model": "hidden_size emb_dim base_emb_dim n_embd dim",
    "data": "dataset dataset_name dataset_path data_path train_file hf_train_files grain_train_files",
    "epsilon": "adam_epsilon adam_eps eps",
    "eval_every": "eval_steps eval_interval eval_freq",
    "from_hf": "model_name_or_path hf_path hf_model hf_assets_path load_parameters_path",
    "keep_last": "save_total_limit max_to_keep keep_latest_k",
    "learning_rate": "lr peak_lr max_lr",
    "log_every": "logging_steps log_period log_freq log_interval",
    "lora_alpha": "alpha",
    "lora_rank": "r lora_r rank",
    "model_axis": "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
    "ici_tensor_parallelism model_parallel_size",
    "num_heads": "num_attention_heads n_heads n_head base_num_query_heads",
    "num_kv_heads": "num_key_value_heads n_kv_heads base_num_kv_heads num_query_groups",
    "num_layers": "num_hidden_layers n_layers n_layer base_num_decoder_layers",
    "num_microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps accumulation_steps",
    "offload": "cpu_offload offload_optimizer optimizer_memory_host_offload",
    "optimizer": "optim opt_type",
    "out": "output_dir base_output_directory save_dir log_dir dump_folder",
    "precision": "bf16 fp16 dtype mixed_precision mixed_precision_param weight_dtype",
    "remat": "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy recompute_granularity",
    "replica": "data_parallel_replicate_degree dp_replicate hsdp dcn_data_parallelism",
    "resume": "resume_from_checkpoint",
    "save_every": "save_steps checkpoint_period checkpoint_interval save_interval",
    "schedule": "lr_scheduler_type lr_scheduler learning_rate_schedule lr_decay_style",
    "seq_len": "max_seq_len max_seq_length max_length block_size context_length sequence_length seq_length "
    "max_target_length max_position_embeddings",
    "stage": "fsdp zero zero_stage zero_optimization sharding_strategy",
    "steps": "epochs num_epochs num_train_epochs max_steps num_steps train_steps train_iters",
    "tokenizer": "tokenizer_path tokenizer_name",
    "validation": "eval_dataset val_data validation_file",
    "warmup_steps": "num_warmup_steps warmup warmup_ratio lr_warmup_iters",
    "weight_decay": "wd",
}
_HERE = {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}


def did_you_mean(
    name: object, known: Iterable[object], text: str = "did you mean {!r}? ", *, cutoff: float = 0.6
) -> str:
    """Returns a hint with the closest known name (formatted by `text`), or '' if none is as similar as `cutoff`.

    A known name that other systems call so comes first. Upper and lower case are the same, unless names differ in
    nothing else.
    """
    name, known = str(name)[:_MAX_CHARACTERS], [str(other) for other in known]
    ours = _HERE.get(_plain(name))
    for other in known:
        if ours is not None and _plain(other) == ours:
            return text.format(printable(other))
    by_lower: dict[str, list[str]] = {}
    for other in known:
        by_lower.setdefault(other.lower(), []).append(other)
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return text.format(printable(*difflib.get_close_matches(name, by_lower[near[0]], n=1, cutoff=0.0))) if near else ""


def _plain(name: str) -> str:
    """Returns an option or a key as the name of a field."""
    return name.strip("-").replace("-", "_").lower()
