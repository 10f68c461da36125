"""Small folders in the format of the Hugging Face hub, with tensors whose names decide their values."""

import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax

from zero_jax.core.tree import leaf_names
from zero_jax.models import hub_families, huggingface
from zero_jax.pretrained.mapping import tensor_shape

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FOLDERS = {
    "llama": SIZES | {"model_type": "llama", "rope_scaling": ROPE, "eos_token_id": 5},
    "qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "gemma3": SIZES | {"model_type": "gemma3_text", "tie_word_embeddings": True, "head_dim": 8, "num_hidden_layers": 7},
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "deepseek_v3": SIZES
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "gpt_neox": SIZES | {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "falcon": SIZES | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
}


def tensors_of(hf_config, dtype="float32"):
    """Returns the tensors of a model by their names."""
    config = huggingface.decoder_config(hf_config)
    tensors = {}
    for path, name in hub_families.tensor_names(config, model_type=hf_config["model_type"]).items():
        shape = config.shapes[path]
        for index in np.ndindex(*shape[: name.num_indices]):
            key = name.of(index)
            values = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(tensor_shape(path, shape, name))
            tensors[key] = values.astype(jnp.dtype(dtype))
    return tensors


def write(folder, hf_config, tensors, *, num_files=1):
    """Writes a folder, of one file or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    names = list(tensors)
    files = {f"model-{i + 1:05d}-of-{num_files:05d}.safetensors": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {"model.safetensors": names}
    else:
        weight_map = {name: file for file, each in files.items() for name in each}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, each in files.items():
        arrays = {name: jnp.asarray(tensors[name]) for name in each}
        safetensors.flax.save_file(arrays, folder / file, metadata={"format": "pt"})
    return folder


def read(folder):
    """Returns the tensors of a folder, by the library."""
    files = map(safetensors.flax.load_file, sorted(folder.glob("*.safetensors")))
    return {name: x for tensors in files for name, x in tensors.items()}


def assert_same_bits(actual, expected):
    """Asserts that two dicts of arrays are equal in names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        x, y = np.asarray(x), np.asarray(actual[name])
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name


def assert_params(params, tensors, hf_config):
    """Asserts that params have the values of the tensors."""
    config = huggingface.decoder_config(hf_config)
    names = hub_families.tensor_names(config, model_type=hf_config["model_type"])
    flat = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    assert flat.keys() == names.keys()
    for path, name in names.items():
        host = np.asarray(flat[path])
        for index in np.ndindex(*host.shape[: name.num_indices]):
            tensor = tensors[name.of(index)]
            tensor = tensor.T if name.is_transposed else tensor
            if name.part is not None:
                start, stop, period = name.part
                grouped = tensor.reshape(*tensor.shape[:-1], -1, period)[..., start:stop]
                tensor = grouped.reshape(*tensor.shape[:-1], -1)
            np.testing.assert_array_equal(host[index], tensor, err_msg=path)
