"""Language models of Tunix (`google-tunix`) and Penzai, where their wheels are installed: nothing here was made for us.

`WHEEL_MODELS` holds `make()` by name, which returns `(init_fn, loss_fn, make_batch)` or skips.
"""

import functools
import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from architectures import LENGTH, VOCAB, random_tokens
from flax import nnx


def tunix_model(name):
    """Imports a model of Tunix without the package's `__init__`, which imports trainers and all that they need."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        if spec is None:
            pytest.skip("pip install google-tunix")
        parent = types.ModuleType("tunix")
        parent.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["tunix"] = parent
    return importlib.import_module(f"tunix.models.{name}.model")


SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
LLAMA = {"rope_theta": 10_000, "norm_eps": 1e-6}


def next_tokens_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens_batch(seed):
    return {"tokens": random_tokens(seed, LENGTH + 1)}


def unsharded(module):
    """Returns the default shardings with none of the mesh axes that Tunix names."""
    shardings = module.ShardingConfig.get_default_sharding()
    fields = {name: getattr(shardings, name) for name in shardings.__dataclass_fields__}
    return type(shardings)(**{k: (None,) * len(v) if isinstance(v, tuple) else v for k, v in fields.items()})


def tunix(name, class_name, vocab="vocab_size", **fields):
    module = tunix_model(name)
    config = module.ModelConfig(**{**SIZES, vocab: VOCAB, "shd_config": unsharded(module), **fields})
    make = lambda rngs: getattr(module, class_name)(config, rngs=rngs)  # noqa: E731
    graphdef, _, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    assert not jax.tree.leaves(rest)

    def init_fn(key):
        params = nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)[1]
        leaves, tree = jax.tree.flatten(params)  # many are zeros, for a checkpoint to fill in
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])

    def loss_fn(params, batch):
        tokens = batch["tokens"][:, :-1]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (*tokens.shape, tokens.shape[1]))
        logits, _ = nnx.merge(graphdef, params, rest)(tokens, positions, None, mask)
        return next_tokens_loss(logits.astype(jnp.float32), batch["tokens"])

    return init_fn, loss_fn, tokens_batch


def gemma_2():
    kind = tunix_model("gemma").AttentionType
    fields = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "final_logit_softcap": 30.0}
    fields |= {"attn_logits_soft_cap": 50.0, "sliding_window_size": 4, "num_kv_heads": 1}
    kinds = (kind.LOCAL_SLIDING, kind.GLOBAL)
    return tunix("gemma", "Gemma", "num_embed", attention_types=kinds, **fields)


def penzai_llama():
    pytest.importorskip("penzai", reason="pip install penzai")
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=VOCAB,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )

    def init_fn(key):
        model = llamalike_common.build_llamalike_transformer(config, init_base_rng=key)
        _, params = pz.unbind_params(model, freeze=True)
        return {p.label: p.value for p in params}

    unbound, _ = pz.unbind_params(llamalike_common.build_llamalike_transformer(config, jax.random.key(0)))

    def loss_fn(params, batch):
        model = pz.bind_variables(unbound, [pz.ParameterValue(label=k, value=v) for k, v in params.items()])
        tokens = pz.nx.wrap(batch["tokens"][:, :-1]).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(LENGTH)).tag("seq")
        logits = model(tokens, token_positions=positions)
        return next_tokens_loss(logits.unwrap("batch", "seq", "vocabulary"), batch["tokens"])

    return init_fn, loss_fn, tokens_batch


WHEEL_MODELS = {
    "qwen2": functools.partial(tunix, "qwen2", "Qwen2", use_tied_embedding=True, **LLAMA),
    "qwen3-moe": functools.partial(tunix, "qwen3", "Qwen3", num_experts=4, num_experts_per_tok=2, **LLAMA),
    "llama3": functools.partial(tunix, "llama3", "Llama3", **LLAMA),
    "gemma2": gemma_2,
    "gemma3": functools.partial(
        tunix, "gemma3", "Gemma3", "num_embed", sliding_window_size=4, param_dtype=jnp.float32, num_layers=6
    ),
    "penzai-llama": penzai_llama,
}
