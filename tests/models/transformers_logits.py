"""Writes `transformers_logits.npz`: what transformers' PyTorch models answer for small configs.

Run it where `transformers` and `torch` are installed: `python tests/models/transformers_logits.py`.
"""

import json
import pathlib
import tempfile
import zlib
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
VOCAB, TOKENS = 48, 24
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama-3.1": _SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _LLAMA3, "head_dim": 16},
    "mistral": _SIZES | {"model_type": "mistral", "sliding_window": 5},
    "mixtral": _SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _SIZES | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 16},
    "qwen3-moe": _SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gemma2": _SIZES
    | _GEMMA
    | {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _SIZES
    | _GEMMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2),
    },
}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a tensor, which its name decides."""
    values = 0.15 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (values + (1 if "norm" in name else 0)).astype(np.float32)


def tokens() -> np.ndarray:
    """Returns the tokens `[2, TOKENS]`."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS))


def _answer(config: dict[str, Any]) -> np.ndarray:
    import safetensors.numpy
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    from zero_jax.models import huggingface

    shape = huggingface.decoder_config(config)
    tensors = {}
    for path, name in huggingface.tensor_names(shape, model_type=config["model_type"]).items():
        leaf = shape.shapes[path]
        for index in np.ndindex(*leaf[: name.num_indices]):
            values = leaf[name.num_indices :]
            key = name.of(index)
            tensors[key] = tensor(key, values[::-1] if name.is_transposed else values)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"{config['model_type']}: {info}")
    with torch.no_grad():
        return model(torch.tensor(tokens())).logits.numpy()


if __name__ == "__main__":
    answers = {name: _answer(config) for name, config in CONFIGS.items()}
    np.savez_compressed(PATH, **answers)  # pyright: ignore[reportArgumentType]
    print(f"wrote {PATH}")
