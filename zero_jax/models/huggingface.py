"""Checkpoints of the Hugging Face hub as decoders: `config.json` both ways, and the name of every param."""

import dataclasses
import difflib
import string
from collections.abc import Mapping
from typing import Any

from zero_jax.models.decoder_config import DecoderConfig, RopeScaling
from zero_jax.models.fields import short

_GEMMA = ("gemma2", "gemma3_text")
_EXPERTS = ("mixtral", "qwen3_moe")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MODEL_TYPES = tuple(_ARCHITECTURES)
# What a decoder cannot do, by key of config.json: the values that mean it is not asked for.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
# What a key that is missing means, where that is not what it means for Llama.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
}
_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256}
# Keys by our names of the same.
_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "seq_len": "max_position_embeddings",
}
_CAPS = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
_LARGEST = 3.4e38  # of float32
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclasses.dataclass(frozen=True)
class TensorName:
    """Where a param is in a checkpoint: in one tensor, or in several of which each is a slice of its leading dims.

    Attributes:
      template: the tensor's name; each placeholder, such as `{layer}`, stands for the index of a leading dim of the
        param, in order.
      is_transposed: whether the tensor's dims are in reverse order, as PyTorch's `Linear` has `[out, in]`.
      shape: the tensor's shape where it has fewer dims than the (rest of the) param: `[out, in]` for a param of
        `[in, heads, head]`. None: it has the same ones.
    """

    template: str
    is_transposed: bool = False
    shape: tuple[int, ...] | None = None

    @property
    def num_indices(self) -> int:
        """How many leading dims of the param are spread over several tensors."""
        return len(self._fields)

    @property
    def _fields(self) -> list[str]:
        return [field for _, field, _, _ in string.Formatter().parse(self.template) if field is not None]

    def of(self, index: tuple[int, ...]) -> str:
        """Returns the name of the tensor at an index of the leading dims: the layer, and the expert if there is one."""
        fields = self._fields
        if not all(fields):
            return self.template.format(*index)
        return self.template.format(**dict(zip(fields, index, strict=True)))


def decoder_config(hf_config: Mapping[str, Any], *, seq_len: int | None = None) -> DecoderConfig:
    """Returns the shape of the decoder that a `config.json` describes.

    `seq_len` are the tokens of a training sequence; None takes the model's longest context.

    Raises:
      ValueError: a kind of model, or a setting, that a decoder does not have; it names the key and the value.
    """
    model_type = hf_config.get("model_type")
    if model_type not in MODEL_TYPES:
        near = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"model_type={short(model_type)} is none of {', '.join(MODEL_TYPES)}{hint}")
    defaults = _DEFAULTS.get(model_type, {}) | (_GEMMA_DEFAULTS if model_type in _GEMMA else {})
    hf_config = {**defaults, **hf_config}
    for key, allowed in _MUST_BE.items():
        if hf_config.get(key) not in allowed:
            raise ValueError(f"{key}={short(hf_config[key])} is not supported: a decoder needs {allowed[0]!r}")
    activation = hf_config.get("hidden_act", "silu")
    if model_type in _GEMMA and hf_config["hidden_activation"] is not None:
        activation = hf_config["hidden_activation"]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act={short(activation)} is not supported: only {', '.join(_ACTIVATIONS)} are")
    sizes = _sizes(hf_config, model_type)
    settings = {
        **sizes,
        "seq_len": seq_len or sizes["seq_len"],
        "num_kv_heads": _first(hf_config.get("num_key_value_heads"), sizes["num_heads"]),
        "head_dim": _first(hf_config.get("head_dim"), sizes["d_model"] // sizes["num_heads"]),
        "activation": _ACTIVATIONS[activation],
        "norm_eps": hf_config.get("rms_norm_eps", 1e-6),
        "tie_embedding": hf_config.get("tie_word_embeddings", model_type in _GEMMA),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        **_windows(hf_config, model_type, sizes["num_layers"]),
        **_rope(hf_config),
    }
    if model_type in _GEMMA:
        settings |= dict.fromkeys(("norm_offset", "post_norms", "scale_embedding"), True)
        settings["query_scale"] = _positive(hf_config, "query_pre_attn_scalar") ** -0.5
        settings |= {field: hf_config.get(key) for field, key in _CAPS.items()}
    if model_type in _EXPERTS:
        settings["normalize_expert_weights"] = model_type == "mixtral" or hf_config.get("norm_topk_prob", False)
    return DecoderConfig(**settings)


def _size_keys(model_type: str) -> dict[str, str]:
    """Returns the keys of the sizes that every config.json of a family has, by our names."""
    keys = _SIZES | {"d_hidden": "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"}
    if model_type in _EXPERTS:
        keys |= {"num_experts": "num_local_experts" if model_type == "mixtral" else "num_experts"}
        keys |= {"experts_per_token": "num_experts_per_tok"}
    return keys


def _sizes(hf_config: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Returns the sizes of a config; raises `ValueError` for one that is missing, or no whole number."""
    keys = _size_keys(model_type)
    sizes: dict[str, Any] = {name: hf_config.get(key) for name, key in keys.items()}
    if model_type in _EXPERTS:  # releases of transformers differ in the key
        sizes["num_experts"] = hf_config.get("num_local_experts", hf_config.get("num_experts"))
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{keys[name]}={short(value)}: the config needs a whole number of at least 1")
    return sizes


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _positive(settings: Mapping[str, Any], key: str) -> float:
    """Returns a number of a config; raises `ValueError` for anything else, and for what is missing."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ValueError(f"{key}={short(value)}: the config needs a number above 0 and of float32")
    return float(value)


def _section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object of a config, empty where there is none; raises `ValueError` for anything else."""
    value = settings.get(key)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{key}={short(value)}: the config needs an object")
    return value or {}


def _windows(hf_config: Mapping[str, Any], model_type: str, num_layers: int) -> dict[str, Any]:
    """Returns which layers have a sliding window; raises `ValueError` where they do not alternate by a period."""
    kinds = hf_config.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != num_layers:
            raise ValueError(
                f"layer_types={short(kinds)} is not supported: a decoder needs 'full_attention' or 'sliding_attention' "
                f"for each of its {num_layers} layers"
            )
    window = hf_config.get("sliding_window")
    if model_type == "llama" or (model_type.startswith("qwen") and not hf_config.get("use_sliding_window")):
        window = None
    if window is None:
        return {}
    default = {"gemma2": 2, "gemma3_text": hf_config.get("sliding_window_pattern") or 6}.get(model_type, 1)
    if kinds is None:
        if model_type.startswith("qwen"):
            raise ValueError("use_sliding_window=True without layer_types is not supported: list the layers' types")
        return {"window": window, "window_period": default}
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == num_layers:
        return {}
    period = full[0] + 1 if full else (default if num_layers < default else 1)
    settings = {"window": window, "window_period": period}
    expected = [period > 1 and (layer + 1) % period == 0 for layer in range(num_layers)]
    if [layer in full for layer in range(num_layers)] != expected:
        raise ValueError(
            f"layer_types={short(kinds)} is not supported: every n-th layer and no other can be without a window"
        )
    return settings


def _rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    older, parameters = _section(hf_config, "rope_scaling"), _section(hf_config, "rope_parameters")
    if older and parameters and older != parameters:
        raise ValueError("rope_scaling and rope_parameters differ: transformers takes one of them, so leave one out")
    parameters = older or parameters
    full = _section(parameters, "full_attention") if "full_attention" in parameters else parameters
    sliding = _section(parameters, "sliding_attention")
    for each in (full, sliding):
        if each.get("partial_rotary_factor") not in _MUST_BE["partial_rotary_factor"]:
            raise ValueError(
                f"partial_rotary_factor={short(each['partial_rotary_factor'])} is not supported: only 1 is"
            )
    if _rope_type(sliding) != "default":
        raise ValueError(
            f"rope_type={short(_rope_type(sliding))} of sliding_attention is not supported: only 'default' is"
        )
    local = _first(sliding.get("rope_theta"), hf_config.get("rope_local_base_freq"))
    theta = _first(full.get("rope_theta"), hf_config.get("rope_theta"), 10_000.0)
    settings: dict[str, Any] = {
        "rope_theta": _positive({"rope_theta": theta}, "rope_theta"),
        "window_rope_theta": local,
    }
    kind = _rope_type(full)
    if kind == "default":
        return settings
    if kind == "linear":
        return settings | {"rope_scaling": RopeScaling(factor=_positive(full, "factor"))}
    if kind != "llama3":
        raise ValueError(f"rope_type={short(kind)} is not supported: only 'default', 'linear' and 'llama3' are")
    return settings | {
        "rope_scaling": RopeScaling(
            factor=_positive(full, "factor"),
            low_freq_factor=_positive(full, "low_freq_factor"),
            high_freq_factor=_positive(full, "high_freq_factor"),
            original_seq_len=int(_positive(full, "original_max_position_embeddings")),
        )
    }


def _rope_type(section: Mapping[str, Any]) -> Any:
    """Returns how rotary frequencies are scaled, by the newer or the older key."""
    return _first(section.get("rope_type"), section.get("type"), "default")


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns a `config.json` that describes a decoder.

    Raises:
      ValueError: no family has such settings; it names those that the nearest one has not.
    """
    model_type = _model_type(config)
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{key: getattr(config, name) for name, key in _size_keys(model_type).items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embedding,
        "sliding_window": config.window,
        "hidden_act": "silu",
    }
    if config.rope_scaling is not None:
        settings["rope_scaling"] = _scaling(config.rope_scaling)
    if config.window is not None and model_type not in ("mistral", "mixtral"):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[config.has_window(layer)] for layer in range(config.num_layers)]
        settings |= {"use_sliding_window": True} if model_type.startswith("qwen") else {}
    if model_type in _GEMMA:
        scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
        settings |= {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}
        settings |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
        settings |= {key: getattr(config, name) for name, key in _CAPS.items()}
    if config.window_rope_theta is not None:
        settings["rope_local_base_freq"] = config.window_rope_theta
    if model_type in _EXPERTS:
        settings["norm_topk_prob"] = config.normalize_expert_weights
    _check_described(config, settings)
    return settings


def _model_type(config: DecoderConfig) -> str:
    """Returns the family that a decoder is nearest to."""
    if config.norm_offset:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.qk_norm or config.qkv_bias:
        return "qwen3" if config.qk_norm else "qwen2"
    return "llama" if config.window is None else "mistral"


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.low_freq_factor is None:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }


def _check_described(config: DecoderConfig, settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for settings that a `config.json` does not describe."""
    described = decoder_config(settings, seq_len=config.seq_len)
    own = {"remat", "expert_capacity", "expert_balance"}  # of training, not of the function
    own |= set() if config.num_experts else {"experts_per_token", "normalize_expert_weights"}
    own |= {"window_period"} if config.window is None else set()
    differ = []
    for field in dataclasses.fields(config):
        wanted, got = getattr(config, field.name), getattr(described, field.name)
        if field.name == "query_scale":
            wanted, got = (config.head_dim**-0.5 if scale is None else scale for scale in (wanted, got))
            got = wanted if abs(wanted - got) <= 1e-9 * wanted else got
        if wanted != got and field.name not in own:
            differ.append(f"{field.name}={wanted!r}")
    if differ:
        raise ValueError(
            f"no family of the hub has these settings: the nearest, {settings['model_type']}, is without "
            f"{', '.join(differ)}: export as plain safetensors instead"
        )


def tensor_names(config: DecoderConfig, *, model_type: str) -> dict[str, TensorName]:
    """Returns the name of the tensor (or tensors, one a layer and expert) of every param, by the param's path."""
    layer = "model.layers.{layer}."
    mlp = layer + ("block_sparse_moe." if model_type == "mixtral" else "mlp.")
    experts = mlp + "experts.{expert}." if config.num_experts else mlp
    matrices = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    blocks = {
        "query": TensorName(layer + "self_attn.q_proj.weight", True),
        "key": TensorName(layer + "self_attn.k_proj.weight", True),
        "value": TensorName(layer + "self_attn.v_proj.weight", True),
        "out": TensorName(layer + "self_attn.o_proj.weight", True),
        "query_bias": TensorName(layer + "self_attn.q_proj.bias"),
        "key_bias": TensorName(layer + "self_attn.k_proj.bias"),
        "value_bias": TensorName(layer + "self_attn.v_proj.bias"),
        "query_norm": TensorName(layer + "self_attn.q_norm.weight"),
        "key_norm": TensorName(layer + "self_attn.k_norm.weight"),
        "router": TensorName(mlp + "gate.weight", True),
        "attention_norm": TensorName(layer + "input_layernorm.weight"),
        "attention_post_norm": TensorName(layer + "post_attention_layernorm.weight"),
        "mlp_norm": TensorName(
            layer + f"{'pre_feedforward' if config.post_norms else 'post_attention'}_layernorm.weight"
        ),
        "mlp_post_norm": TensorName(layer + "post_feedforward_layernorm.weight"),
    }
    for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
        blocks[name] = TensorName(f"{experts}{matrix}.weight", True)
    names = {f"blocks/{name}": blocks[name] for name in config.block_shapes}
    names |= {"embed": TensorName("model.embed_tokens.weight"), "final_norm": TensorName("model.norm.weight")}
    return names if config.tie_embedding else names | {"head": TensorName("lm_head.weight", True)}
