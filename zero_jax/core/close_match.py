"""Did you mean: the closest of some known names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from zero_jax.core.text_tables import printable

_MAX_CHARACTERS = 1000  # of a name from outside
# What transformers, torchtitan, MaxText, DeepSpeed and Megatron call the fields of the configs, by the names here.
_ELSEWHERE = {
    "activation": "hidden_act act_fn mlp_activations hidden_activation",
    "attention": "attn_implementation flash_attention use_flash_attention attn_type sdpa_attention use_flash_attn",
    "batch_size": "global_batch_size train_batch_size per_device_train_batch_size per_device_batch_size bs "
    "micro_batch_size train_micro_batch_size_per_gpu local_batch_size per_gpu_train_batch_size per_device_parallelism",
    "beta1": "adam_beta1 b1 adam_b1 betas",
    "beta2": "adam_beta2 b2 adam_b2",
    "checkpoints": "checkpoint_dir checkpoint_folder checkpoint_directory",
    "clip_norm": "max_grad_norm max_norm gradient_clipping gradient_clipping_threshold clip_grad grad_clip "
    "gradient_clip_val clip_gradients grad_norm",
    "config": "config_file ds_config deepspeed deepspeed_config job_config_file yaml",
    "d_hidden": "intermediate_size ffn_hidden_size mlp_dim base_mlp_dim n_inner",
    "d_model": "hidden_size emb_dim base_emb_dim n_embd dim embed_dim hidden_dim",
    "data": "dataset dataset_name dataset_path data_path train_file hf_train_files grain_train_files data_files "
    "data_dir train_data training_dataset",
    "devices": "num_devices n_devices num_gpus gpus nproc_per_node data_parallel_size num_slices world_size",
    "ema_decay": "ema use_ema",
    "epochs": "num_epochs num_train_epochs n_epochs max_epochs epoch",
    "epsilon": "adam_epsilon adam_eps eps",
    "eval_batches": "max_eval_samples limit_val_batches eval_iters validation_steps",
    "eval_every": "eval_steps eval_interval eval_freq steps_per_eval val_check_interval validation_freq",
    "final_learning_rate": "min_lr lr_min min_lr_ratio end_lr cosine_learning_rate_final_fraction",
    "from_hf": "model_name_or_path hf_path hf_model hf_assets_path load_parameters_path pretrained hf_repo model_name "
    "pretrained_model_name_or_path base_model model_id",
    "hang_seconds": "comm_timeout_seconds train_timeout_seconds ddp_timeout",
    "init_from": "load_checkpoint initial_load_path warm_start pretrained_checkpoint load_full_state_path",
    "keep_gathered": "reshard_after_forward fsdp_reshard_after_forward",
    "keep_last": "save_total_limit max_to_keep keep_latest_k max_num_checkpoints_to_keep",
    "learning_rate": "lr peak_lr max_lr base_lr",
    "log_every": "logging_steps log_period log_freq log_interval steps_per_print log_every_n_steps",
    "lora": "target_modules lora_target_modules use_lora peft lora_targets adapter",
    "lora_alpha": "alpha",
    "lora_base": "load_in_4bit load_in_8bit bnb_4bit_quant_type quantization qlora use_qlora",
    "lora_dora": "use_dora dora",
    "lora_rank": "r lora_r rank",
    "lora_train": "modules_to_save",
    "max_nonfinite_steps": "skip_bad_steps",
    "min_shard_size": "min_num_params stage3_param_persistence_threshold fsdp_min_num_params",
    "model": "model_type model_flavor flavor arch architecture model_arch preset",
    "model_axis": "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
    "ici_tensor_parallelism model_parallel_size autotp_size tp_size",
    "name": "run_name job_name experiment_name exp_name",
    "no_decay": "no_decay_params weight_decay_mask",
    "num_experts": "num_local_experts n_routed_experts n_experts",
    "num_heads": "num_attention_heads n_heads n_head base_num_query_heads",
    "num_kv_heads": "num_key_value_heads n_kv_heads base_num_kv_heads num_query_groups",
    "num_layers": "num_hidden_layers n_layers n_layer base_num_decoder_layers",
    "num_microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps accumulation_steps "
    "gradient_accumulation accumulate_grad_batches",
    "offload": "cpu_offload offload_optimizer optimizer_memory_host_offload enable_cpu_offload offload_param",
    "optimizer": "optim opt_type opt optimizer_type",
    "out": "output_dir base_output_directory save_dir log_dir dump_folder output default_root_dir",
    "overlap": "overlap_comm",
    "precision": "bf16 fp16 dtype mixed_precision mixed_precision_param weight_dtype torch_dtype mp tf32",
    "profile_steps": "profile profiler enable_profiling profile_freq skip_first_n_steps_for_profiler",
    "quantize_gathers": "zero_quantized_weights",
    "quantize_grads": "zero_quantized_gradients",
    "remat": "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy recompute_granularity "
    "checkpoint_activations",
    "replica": "data_parallel_replicate_degree dp_replicate hsdp dcn_data_parallelism ici_data_parallelism",
    "resume": "resume_from_checkpoint resume_from",
    "rope_theta": "rotary_emb_base rope_max_timescale rope_base",
    "sample_prompt": "prompt",
    "save_every": "save_steps checkpoint_period checkpoint_interval save_interval checkpoint_every save_freq",
    "scan": "scan_layers",
    "schedule": "lr_scheduler_type lr_scheduler learning_rate_schedule lr_decay_style scheduler",
    "secondary": "zero_hpz_partition_size hpz",
    "seed": "random_seed data_seed init_weights_seed data_shuffle_seed",
    "separate_documents": "packing sample_packing document_masking",
    "seq_len": "max_seq_len max_seq_length max_length block_size context_length sequence_length seq_length cutoff_len "
    "max_target_length max_position_embeddings model_max_length",
    "stage": "fsdp zero zero_stage zero_optimization sharding_strategy fsdp_sharding_strategy",
    "steps": "max_steps num_steps train_steps train_iters max_iters num_train_steps training_steps total_steps",
    "temperature": "sampling_temperature",
    "text_field": "dataset_text_field text_column content_field",
    "tie_embedding": "tie_word_embeddings logits_via_embedding",
    "tokenizer": "tokenizer_path tokenizer_name",
    "validation": "eval_dataset val_data validation_file",
    "validation_fraction": "val_size val_set_size validation_split validation_split_percentage",
    "wandb": "report_to wandb_project enable_wandb use_wandb",
    "tensorboard": "enable_tensorboard use_tensorboard",
    "warmup_steps": "num_warmup_steps warmup warmup_ratio lr_warmup_iters warmup_steps_fraction warmup_num_steps",
    "weight_decay": "wd adam_weight_decay",
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
