"""The `config.json` of the Hugging Face hub as the config of a decoder, and back."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from zero_jax.models.decoder_config import RECORDS, DecoderConfig
from zero_jax.models.experts import SigmoidRouting
from zero_jax.models.fields import short
from zero_jax.models.hub_families import DEFAULTS, FAMILIES, MUST_BE, SETTINGS, SIZES, Family
from zero_jax.models.rope import RopeScaling

MODEL_TYPES = tuple(FAMILIES)
_GEMMA = ("gemma2", "gemma3_text")
_LARGEST = 3.4e38  # of float32
# By the names of transformers: `gelu` is exact, the other GELUs are its tanh approximation.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
}
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_LLAMA3 = ("low_freq_factor", "high_freq_factor")


def decoder_config(hf_config: Mapping[str, Any], *, seq_len: int | None = None) -> DecoderConfig:
    """Returns the shape of the decoder that a `config.json` describes; `ValueError` names what a decoder does not have.

    `seq_len` are the tokens of a training sequence; None takes the model's longest context.
    """
    model_type = hf_config.get("model_type")
    if model_type not in MODEL_TYPES:
        near = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(
            f"model_type={short(model_type)} is none of {', '.join(MODEL_TYPES)}{hint}: give one of these, or load "
            "its tensors into a model of your own (docs/huggingface.md)"
        )
    family = FAMILIES[model_type]
    aliased = {family.aliases.get(key, key): value for key, value in hf_config.items()}
    # transformers writes no key whose value is the default of its class, which differs between families.
    hf_config = {**DEFAULTS, **family.defaults, **aliased}
    for key, allowed in {**MUST_BE, **family.must_be}.items():
        if allowed and hf_config.get(key) not in allowed:
            raise ValueError(f"{key}={short(hf_config[key])} is not supported: a decoder needs {allowed[0]!r}")
    keys = _keys(model_type)
    activation = hf_config[keys["activation"]]
    if model_type in _GEMMA and hf_config["hidden_activation"] is not None:
        # What transformers reads of Gemma; `hidden_act`, which its configs have as well, counts where that is null.
        activation = hf_config["hidden_activation"]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(
            f"{keys['activation']}={short(activation)} is not supported: only {', '.join(_ACTIVATIONS)} are"
        )
    sizes = _sizes(hf_config, model_type)
    settings: dict[str, Any] = {
        **sizes,
        "num_kv_heads": _first(hf_config.get("num_key_value_heads"), sizes["num_heads"]),
        "head_dim": _first(hf_config.get("head_dim"), sizes["d_model"] // sizes["num_heads"]),
        "activation": _ACTIVATIONS[activation],
        "norm_eps": hf_config[keys["norm_eps"]],
        "tie_embedding": hf_config["tie_word_embeddings"],
        **_windows(hf_config, model_type, sizes["num_layers"]),
        **_rope(hf_config, model_type),
        **(_equal_heads(sizes) if family.settings.get("norm") == "layer" else {}),
        **family.settings,
        **_own(hf_config, family),
        **(_READ[model_type](hf_config, sizes) if model_type in _READ else {}),
    }
    settings["seq_len"] = seq_len or sizes["seq_len"]
    return DecoderConfig(**settings)


def _own(hf_config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the fields whose keys Llama does not have, by the family's table."""
    defaults, own = vars(DecoderConfig()), dict[str, Any]()
    records: dict[str, dict[str, Any]] = {}
    for path, key in family.own.items():
        record, _, name = path.rpartition(".")
        if record:
            records.setdefault(record, {})[name] = hf_config[key]
        else:
            own[name] = _switch(hf_config, key) if isinstance(defaults[name], bool) else hf_config.get(key)
    return own | {record: RECORDS[record](**fields) for record, fields in records.items()}


def _falcon(hf_config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    is_new, parallel = _switch(hf_config, "new_decoder_architecture"), _switch(hf_config, "parallel_attn")
    num_norms = hf_config.get("num_ln_in_parallel_attn")
    num_kv_heads = 1 if _switch(hf_config, "multi_query") else sizes["num_heads"]
    if is_new:
        num_kv_heads = _first(hf_config.get("num_kv_heads"), sizes["num_heads"])
    if num_norms not in (None, 1, 2) or (num_norms == 2 and not is_new) or (is_new and not parallel):
        raise ValueError(
            f"num_ln_in_parallel_attn={short(num_norms)}, parallel_attn={parallel}, new_decoder_architecture={is_new} "
            "are not supported: transformers has 1 or 2 norms in the new architecture, which is parallel, and 1 in "
            "the older one"
        )
    return {"num_kv_heads": num_kv_heads, "shared_norm": parallel and not (is_new and num_norms != 1)}


def _deepseek_v3(hf_config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    for key in ("qk_nope_head_dim", "qk_rope_head_dim"):
        _positive(hf_config, key)
    if _first(hf_config.get("num_key_value_heads"), sizes["num_heads"]) != sizes["num_heads"]:
        raise ValueError(
            f"num_key_value_heads={short(hf_config['num_key_value_heads'])} is not supported: latent attention has "
            f"{sizes['num_heads']}, as many as query heads"
        )
    return {
        "num_kv_heads": sizes["num_heads"],
        "head_dim": hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"],
        "num_extra_tokens": _first(hf_config.get("num_nextn_predict_layers"), hf_config.get("num_mtp_layers"), 0),
    }


def _equal_heads(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of heads that share the width of the model; raises `ValueError` where they cannot."""
    if sizes["d_model"] % sizes["num_heads"]:
        raise ValueError(f"a width of {sizes['d_model']} does not divide into {sizes['num_heads']} heads")
    return {"num_kv_heads": sizes["num_heads"], "head_dim": sizes["d_model"] // sizes["num_heads"]}


def _switch(hf_config: Mapping[str, Any], key: str) -> bool:
    """Returns a switch of a config, False where it is missing; raises `ValueError` for anything else."""
    return bool(_given(hf_config, key, bool, "true or false"))


# What a family reads of a config besides its table.
_READ: dict[str, Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Any]]] = {
    **dict.fromkeys(_GEMMA, lambda config, _: {"query_scale": _positive(config, "query_pre_attn_scalar") ** -0.5}),
    "falcon": _falcon,
    "deepseek_v3": _deepseek_v3,
}


def _keys(model_type: str) -> dict[str, str]:
    """Returns the keys of config.json by our names: sizes first, which every config of a family has."""
    return SIZES | SETTINGS | dict(FAMILIES[model_type].keys)


def _sizes(hf_config: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Returns the sizes of a config; raises `ValueError` for one that is missing, or no whole number."""
    keys = {name: key for name, key in _keys(model_type).items() if name not in SETTINGS}
    sizes: dict[str, Any] = {name: hf_config.get(key) for name, key in keys.items()}
    if "num_experts" in keys:  # releases of transformers differ in the key
        names = ("num_local_experts", "num_experts", keys["num_experts"])
        sizes["num_experts"] = next((hf_config[name] for name in names if name in hf_config), None)
    if keys["d_hidden"] in ("n_inner", "ffn_hidden_size") and sizes["d_hidden"] is None:
        sizes["d_hidden"] = sizes["d_model"] * 4 if isinstance(sizes["d_model"], int) else None
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{keys[name]}={short(value)}: the config needs a whole number of at least 1")
    return sizes


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _positive(settings: Mapping[str, Any], key: str) -> float:
    """Returns a number of a config; raises `ValueError` for anything else, and for what is missing."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ValueError(f"{key}={short(value)}: the config needs a number above 0 and of float32")
    return float(value)


def _section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object of a config, empty where there is none; raises `ValueError` for anything else."""
    return _given(settings, key, Mapping, "an object") or {}


def _given(settings: Mapping[str, Any], key: str, kind: type, needed: str) -> Any:
    value = settings.get(key)
    if not isinstance(value, kind | None):
        raise ValueError(f"{key}={short(value)}: the config needs {needed}")
    return value


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
    # transformers reads no window of these families, whatever the config says, and of Qwen's only with the switch.
    has_none = model_type in ("llama", "gpt2", "gpt_neox", "falcon", "deepseek_v3")
    if has_none or (model_type.startswith("qwen") and not hf_config.get("use_sliding_window")):
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
    # Where no layer is without a window, all have one, or the model is shorter than a period of its family.
    period = full[0] + 1 if full else (default if num_layers < default else 1)
    if full != [layer for layer in range(num_layers) if period > 1 and (layer + 1) % period == 0]:
        raise ValueError(
            f"layer_types={short(kinds)} is not supported: every n-th layer and no other can be without a window"
        )
    return {"window": window, "window_period": period}


def _rope(hf_config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    older, parameters = _section(hf_config, "rope_scaling"), _section(hf_config, "rope_parameters")
    if older and parameters and older != parameters:
        raise ValueError("rope_scaling and rope_parameters differ: transformers takes one of them, so leave one out")
    parameters = older or parameters
    full = _section(parameters, "full_attention") if "full_attention" in parameters else parameters
    sliding = _section(parameters, "sliding_attention")
    is_partial = "partial_rotary_factor" in FAMILIES[model_type].must_be
    for each in (full, sliding):
        if not is_partial and each.get("partial_rotary_factor") not in MUST_BE["partial_rotary_factor"]:
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
        "rotary_fraction": _first(full.get("partial_rotary_factor"), hf_config.get("partial_rotary_factor"), 1.0),
        "rope_theta": _positive({"rope_theta": theta}, "rope_theta"),
        "window_rope_theta": local,
    }
    kind = _rope_type(full)
    if kind == "default":
        return settings
    if kind == "linear":
        return settings | {"rope_scaling": RopeScaling(factor=_positive(full, "factor"))}
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_type={short(kind)} is not supported: only 'default', 'linear', 'llama3' and 'yarn' are")
    scaling: dict[str, Any] = {"factor": _positive(full, "factor")}
    key = "original_max_position_embeddings"
    if kind == "llama3":
        scaling |= {name: _positive(full, name) for name in _LLAMA3}
    else:
        scaling |= {"beta_fast": 32.0} | {name: full[name] for name in _YARN if full.get(name) is not None}
        # Where the length of the pretraining is missing, transformers takes the longest context.
        full = {key: hf_config.get("max_position_embeddings")} | {**full}
    return settings | {"rope_scaling": RopeScaling(**scaling, original_seq_len=int(_positive(full, key)))}


def _rope_type(section: Mapping[str, Any]) -> Any:
    """Returns how rotary frequencies are scaled, by the newer or the older key."""
    return _first(section.get("rope_type"), section.get("type"), "default")


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns a `config.json` that describes a decoder; `ValueError` names the settings that no family has."""
    model_type = _model_type(config)
    keys, family = _keys(model_type), FAMILIES[model_type]
    settings: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{key: getattr(config, name) for name, key in keys.items()},
        keys["activation"]: _ACTIVATION_NAMES[config.activation],
        "tie_word_embeddings": config.tie_embedding,
    }
    settings |= _WRITE[model_type](config) if model_type in _WRITE else _llama_settings(config, model_type)
    for path, key in family.own.items():
        record, _, name = path.rpartition(".")
        settings[key] = getattr(getattr(config, record) or RECORDS[record]() if record else config, name)
    if config.num_rotary:  # with learned positions there is no such key
        settings["rope_theta"] = config.rope_theta
    if config.rope_scaling is not None:
        settings["rope_scaling"] = _scaling(config.rope_scaling)
    own_names = {llama: own for own, llama in family.aliases.items()}
    settings = {own_names.get(key, key): value for key, value in settings.items()}
    _check_described(config, settings)
    return settings


def _llama_settings(config: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Returns what the configs of Llama, and of the families that have its keys, say besides sizes."""
    settings: dict[str, Any] = {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.window,
    }
    if config.window is not None and model_type not in ("mistral", "mixtral"):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[config.has_window(layer)] for layer in range(config.num_layers)]
        settings |= {"use_sliding_window": True} if model_type.startswith("qwen") else {}
    if model_type in _GEMMA:
        # The hub has a whole number, of which the two powers leave a rounding error.
        scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
        settings |= {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}
        settings["hidden_activation"] = _ACTIVATION_NAMES[config.activation]
    if config.window_rope_theta is not None:
        settings["rope_local_base_freq"] = config.window_rope_theta
    if FAMILIES[model_type].experts:
        settings["norm_topk_prob"] = config.normalize_expert_weights
    return settings


def _falcon_settings(config: DecoderConfig) -> dict[str, Any]:
    is_new = config.num_kv_heads not in (1, config.num_heads) or (config.parallel and not config.shared_norm)
    return {
        "new_decoder_architecture": is_new,
        "num_kv_heads": config.num_kv_heads,
        "multi_query": is_new or config.num_kv_heads == 1,
        "num_ln_in_parallel_attn": 2 if config.parallel and not config.shared_norm else 1,
        "alibi": False,
    }


def _deepseek_v3_settings(config: DecoderConfig) -> dict[str, Any]:
    assert config.latent is not None
    return {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "intermediate_size": config.d_hidden_dense or config.d_hidden,
        "num_key_value_heads": config.num_kv_heads,
        "qk_nope_head_dim": config.head_dim - config.latent.rotary_dim,
        "num_nextn_predict_layers": config.num_extra_tokens,
    }


# What a family writes besides sizes, where it is not what Llama writes.
_WRITE: dict[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "gpt2": lambda _: {},
    "gpt_neox": lambda config: {"partial_rotary_factor": config.rotary_fraction},
    "falcon": _falcon_settings,
    "deepseek_v3": _deepseek_v3_settings,
}


def _model_type(config: DecoderConfig) -> str:
    if config.latent is not None:
        return "deepseek_v3"
    if config.norm == "layer":
        if config.learned_positions:
            return "gpt2"
        is_neox = config.mlp_bias and not config.shared_norm and config.num_kv_heads == config.num_heads
        return "gpt_neox" if is_neox else "falcon"
    if config.norm_offset:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.qk_norm or config.qkv_bias:
        return "qwen3" if config.qk_norm else "qwen2"
    return "llama" if config.window is None else "mistral"


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.beta_fast is not None:
        kind, keys = "yarn", _YARN
    else:
        kind, keys = ("llama3", _LLAMA3) if scaling.low_freq_factor is not None else ("linear", ())
    original = {"original_max_position_embeddings": scaling.original_seq_len} if keys else {}
    settings = {key: getattr(scaling, key) for key in keys if getattr(scaling, key) is not None}
    return {"rope_type": kind, "factor": scaling.factor, **original, **settings}


def _check_described(config: DecoderConfig, settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for settings that a `config.json` does not describe."""
    # Read back: a setting that the family has no key for comes back as another one.
    described = decoder_config(settings, seq_len=config.seq_len)
    own = {"remat", "expert_capacity", "expert_balance", "extra_token_weight"}  # of training, not of the function
    own |= {"d_hidden_dense"} if not config.num_dense_layers else set()
    own |= set() if config.num_experts else {"experts_per_token", "normalize_expert_weights"}
    own |= {"window_period"} if config.window is None else set()
    differ = []
    for field in dataclasses.fields(config):
        wanted, got = getattr(config, field.name), getattr(described, field.name)
        if field.name == "query_scale":
            wanted, got = (config.head_dim**-0.5 if scale is None else scale for scale in (wanted, got))
            got = wanted if abs(wanted - got) <= 1e-9 * wanted else got
        if isinstance(wanted, SigmoidRouting):
            wanted = dataclasses.replace(wanted, bias_rate=SigmoidRouting().bias_rate)
        if wanted != got and field.name not in own:
            differ.append(f"{field.name}={wanted!r}")
    if differ:
        raise ValueError(
            f"no family of the hub has these settings: the nearest, {settings['model_type']}, is without "
            f"{', '.join(differ)}: export as plain safetensors instead"
        )
