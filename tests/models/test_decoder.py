"""The decoder: transformers' logits, published sizes, stages, errors."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import transformers_logits
from jax.sharding import NamedSharding
from jax.test_util import check_grads

import zero_jax as zero
from zero_jax.cli.models import presets
from zero_jax.models import decoder, experts, hub_families, huggingface
from zero_jax.models.decoder_config import DECODERS, DecoderConfig
from zero_jax.models.experts import SigmoidRouting
from zero_jax.models.latent_attention import LatentAttention
from zero_jax.pretrained.mapping import LeafTensors, indices, tensor_shape


class Held(np.ndarray):
    """A tensor that is in no file."""

    def open(self, mode):
        """Returns its values."""
        del mode
        return np.asarray(self)


def params_of(hf_config):
    """Returns config and params of a decoder with the tensors that transformers was given."""
    config = huggingface.decoder_config(hf_config)
    params = {}
    for path, name in hub_families.tensor_names(config, model_type=hf_config["model_type"]).items():
        shape = config.shapes[path]
        of_tensor = tensor_shape(path, shape, name)
        tensors = {i: transformers_logits.tensor(name.of(i), of_tensor).view(Held) for i in indices(shape, name)}
        leaf = LeafTensors(path=path, shape=shape, name=name, tensors=tensors)
        group, _, last = path.rpartition("/")
        of_group = params.setdefault(group, {}) if group else params
        of_group[last] = jnp.asarray(leaf.read((slice(None),) * len(shape), np.float32))
    return config, params


QUICK = ("llama-3.1", "mixtral", "gemma3", "gpt2", "falcon-40b", "deepseek-v3")  # a model of each kind


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in transformers_logits.CONFIGS]
)
def test_logits_are_those_of_transformers(name):
    config, params = params_of(transformers_logits.CONFIGS[name])
    with np.load(transformers_logits.PATH) as answers:
        expected = answers[name]
    logits = jax.jit(lambda params, tokens: decoder.apply(config, params, tokens))(
        params, jnp.asarray(transformers_logits.tokens())
    )
    assert np.std(expected) > 0.05
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    made = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)


@pytest.mark.slow
def test_the_loss_of_extra_tokens_is_that_of_transformers_logits():
    """Of the token after the next one, by the layer on top; weights and segments take out targets."""
    extra = {"num_nextn_predict_layers": 1}
    config, params = params_of(transformers_logits.CONFIGS["deepseek-v3"] | extra)
    with np.load(transformers_logits.PATH) as answers:
        log_probs = jax.nn.log_softmax(answers[transformers_logits.EXTRA])
    inputs = transformers_logits.tokens()
    targets = np.roll(inputs, -1, axis=1)
    losses = -np.take_along_axis(np.asarray(log_probs), np.roll(targets, -1, axis=1)[..., None], axis=-1)[:, :-1, 0]
    loss_fn = jax.jit(decoder.loss_fn(config))
    value, aux = loss_fn(params, {"inputs": inputs, "targets": targets})
    np.testing.assert_allclose(aux["extra_tokens"], losses.sum() / inputs.size, rtol=1e-5)
    without, _ = jax.jit(decoder.loss_fn(dataclasses.replace(config, num_extra_tokens=0)))(
        {**params, "extra_blocks": None}, {"inputs": inputs, "targets": targets}
    )
    np.testing.assert_allclose(value, without + 0.3 * aux["extra_tokens"], rtol=1e-6)
    weights = np.ones(inputs.shape, np.float32)
    weights[0, 5:9] = 0  # the target at a place is that of the place before, too
    _, aux = loss_fn(params, {"inputs": inputs, "targets": targets, "weights": weights})
    np.testing.assert_allclose(aux["extra_tokens"], (losses * weights[:, 1:]).sum() / weights.sum(), rtol=1e-5)
    segments = (np.arange(inputs.shape[1]) >= 10) + np.zeros(inputs.shape, np.int32)
    halves = [{"inputs": inputs[:, part], "targets": targets[:, part]} for part in (slice(10), slice(10, None))]
    in_halves = [float(loss_fn(params, half)[1]["extra_tokens"]) * half["inputs"].size for half in halves]
    _, aux = loss_fn(params, {"inputs": inputs, "targets": targets, "segments": segments})
    np.testing.assert_allclose(aux["extra_tokens"], sum(in_halves) / inputs.size, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3-8b", 8.030),
        ("llama-3.1-405b", 405.853),
        ("qwen-2.5-0.5b", 0.494),
        ("qwen-3-30b-a3b", 30.532),
        ("gemma-2-9b", 9.242),
        ("gemma-3-1b", 1.000),
        ("mistral-7b", 7.242),
        ("mixtral-8x7b", 46.703),
        ("gpt-neox-20b", 20.555),
        ("falcon-40b", 41.303),
        ("falcon-180b", 179.523),
    ],
)
def test_presets_have_the_published_numbers_of_params(name, billions):
    assert round(DECODERS[name].num_params / 1e9, 3) == billions


def test_deepseek_v3_has_the_published_number_of_params_below_the_layer_that_predicts_another_token():
    config = dataclasses.replace(DECODERS["deepseek-v3"], num_extra_tokens=0)
    assert round(config.num_params / 1e9, 3) == 671.026


@pytest.mark.parametrize(("name", "billions"), [("turing-nlg-17b", 17), ("mt-nlg-530b", 530)])
def test_presets_without_a_checkpoint_have_the_published_number_of_params_as_it_was_rounded(name, billions):
    assert round(DECODERS[name].num_params / 1e9) == billions


SMALL = dict(vocab_size=32, seq_len=16, num_layers=5, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_hidden=48)
EXPERTS = DecoderConfig(**SMALL, num_experts=4, expert_balance=0.1)
GEMMA = DecoderConfig(**SMALL, window=5, window_period=2, norm_offset=True, post_norms=True, attention_soft_cap=2.0)

FALCON = DecoderConfig(**SMALL, norm="layer", gated_mlp=False, parallel=True, out_bias=True, mlp_bias=True, window=5)
DEEPSEEK = DecoderConfig(
    **SMALL | {"num_layers": 3, "num_kv_heads": 4, "head_dim": 12},
    latent=LatentAttention(query_rank=12, key_rank=10, rotary_dim=4, value_dim=6),
    num_experts=4,
    num_shared_experts=1,
    num_dense_layers=1,
    d_hidden_dense=64,
    routing=SigmoidRouting(num_groups=2, num_kept=1, bias_rate=0.5),
    expert_capacity=2.0,
    num_extra_tokens=1,
)


def batch(rows=8):
    tokens = jax.random.randint(jax.random.key(1), (rows, 16), 0, 32)
    segments = jnp.where(jnp.arange(16) < 6, 0, 1) + jnp.zeros((rows, 1), jnp.int32)
    return {"inputs": tokens, "targets": jnp.roll(tokens, 1, axis=1), "segments": segments}


@pytest.mark.slow
@pytest.mark.parametrize("config", [EXPERTS, DEEPSEEK], ids=["softmax", "sigmoid"])
def test_experts_with_room_for_all_compute_what_dense_experts_compute(config):
    params = decoder.init(config, jax.random.key(0))
    # 2.0 x 2 of 4 experts: all tokens
    dense, roomy = (dataclasses.replace(config, expert_capacity=capacity) for capacity in (None, 2.0))
    expected, got = (
        jax.jit(jax.value_and_grad(decoder.loss_fn(c), has_aux=True))(params, batch()) for c in (dense, roomy)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, got)
    tight = jax.jit(decoder.loss_fn(dataclasses.replace(config, expert_capacity=0.5)))(params, batch())
    assert abs(tight[0] - expected[0][0]) > 1e-6


@pytest.mark.slow
def test_an_expert_takes_the_first_tokens_that_chose_it():
    """Against a loop over the tokens, with fewer places than tokens."""
    random = np.random.default_rng(0)
    y, logits = random.standard_normal((2, 10, 3)), random.standard_normal((2, 10, 4))
    routes = experts.softmax_routes(jnp.asarray(logits), 2, normalize=True)
    gate, up, down = (random.standard_normal((4, 3, 3)) for _ in range(3))
    expected, C = np.zeros_like(y), 3  # 0.6 x 10 tokens x 2 / 4
    for b in range(2):
        taken = dict.fromkeys(range(4), 0)
        for t in range(10):
            for expert, weight in zip(routes.experts_BTk[b, t].tolist(), routes.weights_BTk[b, t], strict=True):
                if taken[expert] < C:
                    expected[b, t] += weight * (np.tanh(y[b, t] @ gate[expert]) * (y[b, t] @ up[expert])) @ down[expert]
                taken[expert] += 1
        assert max(taken.values()) > C
    run = lambda y, *ws: experts.run_dispatched(y, routes, experts.Experts(*ws, jnp.tanh), capacity=0.6)  # noqa: E731
    arrays = [jnp.asarray(x, jnp.float32) for x in (y, gate, up, down)]
    np.testing.assert_allclose(run(*arrays), expected, atol=1e-5)
    check_grads(run, arrays, order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_the_gradient_of_a_routers_bias_is_the_error_of_the_load():
    """Sign descent on it, the published rule, evens out loads that biases have made uneven."""
    config = dataclasses.replace(DEEPSEEK, routing=SigmoidRouting(bias_rate=0.5))
    params = decoder.init(config, jax.random.key(0))
    params["blocks"]["router"] *= 20  # tokens differ, so that a small step of a bias moves few
    params["blocks"]["router_bias"] += jnp.asarray([0.5, 0.0, 0.0, -0.5])
    value_and_grad = jax.jit(jax.value_and_grad(decoder.loss_fn(config), has_aux=True))
    loss, grads = value_and_grad(params, batch())
    without = dataclasses.replace(config, routing=SigmoidRouting(bias_rate=0.0))
    np.testing.assert_array_equal(loss[0], jax.jit(decoder.loss_fn(without))(params, batch())[0])
    error = grads["blocks"]["router_bias"] / 0.5
    np.testing.assert_allclose(error.sum(axis=-1), 0, atol=1e-5)  # of fractions of the mean load
    assert np.all(error >= -1 - 1e-6) and np.abs(error).max() > 0.9

    for _ in range(80):
        grads = value_and_grad(params, batch())[1]["blocks"]["router_bias"]
        params["blocks"]["router_bias"] -= 0.01 * jnp.sign(grads)
    assert jnp.abs(grads).max() / 0.5 < 0.5 * np.abs(error).max()


def test_balanced_experts_have_a_balance_loss_of_one():
    params = decoder.init(EXPERTS, jax.random.key(0))
    params["blocks"]["router"] *= 0  # the same probability for all experts
    _, aux = jax.jit(decoder.loss_fn(EXPERTS))(params, batch())
    np.testing.assert_allclose(aux["expert_balance"], 1.0, rtol=1e-6)


@pytest.mark.slow
def test_losses_of_experts_and_extra_tokens_add_up_over_parts_of_a_batch():
    """A part counts by the weights of its tokens, so that microbatches are one batch."""
    config = dataclasses.replace(DEEPSEEK, expert_balance=0.1, num_extra_tokens=2)
    params, whole = decoder.init(config, jax.random.key(0)), batch(4)
    whole["weights"] = np.where(np.arange(4)[:, None] == 1, 0.25, np.ones((4, 16), np.float32))
    value_and_grad = jax.jit(jax.value_and_grad(decoder.loss_fn(config), has_aux=True))
    parts = [{name: x[part] for name, x in whole.items()} for part in (slice(2), slice(2, 4))]
    shares = [part["weights"].sum() / whole["weights"].sum() for part in parts]
    expected, got = value_and_grad(params, whole), [value_and_grad(params, part) for part in parts]
    summed = jax.tree.map(lambda *xs: sum(x * share for x, share in zip(xs, shares, strict=True)), *got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, summed)
    assert np.abs(expected[1]["blocks"]["router_bias"]).max() > 0


@pytest.mark.slow
def test_blocks_that_are_a_list_are_those_of_the_stack():
    """Also where the layers with a window make no whole number of periods."""
    config = dataclasses.replace(GEMMA, num_layers=3)
    params, tokens = decoder.init(config, jax.random.key(0)), batch(1)["inputs"]
    blocks = [jax.tree.map(lambda stack, i=i: stack[i], params["blocks"]) for i in range(3)]
    of_stack, of_list = (decoder.apply(config, {**params, "blocks": x}, tokens) for x in (params["blocks"], blocks))
    np.testing.assert_allclose(of_list, of_stack, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_token_attends_to_its_own_document_within_its_window():
    params, tokens = decoder.init(GEMMA, jax.random.key(0)), batch(1)["inputs"]
    windowed = dataclasses.replace(GEMMA, window_period=1, num_layers=1)
    one_layer = {**params, "blocks": jax.tree.map(lambda stack: stack[:1], params["blocks"])}

    def seen(config, params, segments=None):
        """The positions whose embedding the last position's logits depend on."""
        table = jax.nn.one_hot(tokens[0], 32) @ params["embed"]
        moved = lambda x: decoder.hidden(  # noqa: E731
            config, {**params, "embed": x}, jnp.arange(16)[None], decoder.Hooks(segments)
        )[0][0, -1].sum()
        return np.flatnonzero(np.abs(jax.jit(jax.grad(moved))(table)).sum(axis=1) > 0).tolist()

    assert seen(windowed, one_layer) == [11, 12, 13, 14, 15]
    assert seen(GEMMA, params) == list(range(16))
    assert seen(GEMMA, params, batch(1)["segments"]) == list(range(6, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "stage"),
    [(EXPERTS, 1), (EXPERTS, 3), (GEMMA, 3), (DEEPSEEK, 3), (FALCON, 1)],
    ids=["experts-1", "experts-3", "gemma-3", "deepseek-3", "falcon-1"],
)
def test_stages_train_as_plain_optax_does(config, stage):
    loss_fn, tx = decoder.loss_fn(config), optax.adam(1e-2)
    params = decoder.init(config, jax.random.key(0))
    *_, expected = reference.run_plain(
        lambda params, batch: loss_fn(params, batch)[0], tx, [batch()] * 3, params=params
    )
    mesh = zero.make_mesh(data=4, model=2)
    zero_config = zero.ZeroConfig(stage=stage, min_shard_size=1, param_specs=decoder.param_specs(config, model_size=2))
    init_fn = lambda key: decoder.init(config, key)  # noqa: E731
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=zero_config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=zero_config)
    losses = []
    for _ in range(3):
        state, metrics = step(state, zero.shard_batch(batch(), mesh=mesh))
        losses.append(metrics.loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [EXPERTS, GEMMA, DEEPSEEK], ids=["experts", "gemma", "deepseek"])
def test_sharded_residuals_and_sequences_and_the_chosen_attention_change_nothing(config):
    """The loss function that the commands take, under a remat policy, against the plain one."""
    mesh = zero.make_mesh(data=4, model=2)
    params = decoder.init(config, jax.random.key(0))
    expected = jax.jit(jax.grad(decoder.loss_fn(config), has_aux=True))(params, batch())
    activations = presets.ActivationConfig(sequence_parallel=True)
    loss_fn = presets.loss_function(config, activations).make(mesh)
    grad_fn = jax.grad(zero.rematerialize(loss_fn, "full_sharded", mesh=mesh), has_aux=True)
    specs = decoder.param_specs(config, model_size=2)
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    got = jax.jit(grad_fn)(sharded, zero.shard_batch(batch(), mesh=mesh))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), expected, got)


def test_policies_find_the_blocks_of_decoders():
    mesh = zero.make_mesh(data=4, model=2)
    shapes = jax.eval_shape(lambda: decoder.init(GEMMA, jax.random.key(0)))
    report = str(zero.remat_report(decoder.loss_fn(GEMMA), shapes, batch(), remat="full_sharded", mesh=mesh))
    assert "0 blocks" not in report and "block" in report, report


def test_generate_goes_on_greedily():
    config = dataclasses.replace(GEMMA, logits_soft_cap=3.0)
    params = decoder.init(config, jax.random.key(0))
    generate = jax.jit(functools.partial(decoder.generate, config, num_tokens=2, temperature=0))
    tokens, apply = [0, 1, 2], jax.jit(functools.partial(decoder.apply, config))
    for _ in range(2):
        padded = jnp.asarray([tokens + [0] * (config.seq_len - len(tokens))])
        tokens.append(int(apply(params, padded)[0, len(tokens) - 1].argmax()))
    assert generate(params, jnp.arange(3), jax.random.key(0)).tolist() == tokens[3:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 is no multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"activation": "relu"}, "activation='relu' is unknown"),
        ({"window": 0}, "window=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_experts": 1}, "experts_per_token=2 is more than num_experts=1"),
        ({"num_shared_experts": 1}, "num_shared_experts=1: give num_experts"),
        ({"num_experts": 4, "num_dense_layers": 4}, "num_dense_layers=4 leaves none of num_layers=4"),
        ({"num_experts": 4, "routing": SigmoidRouting(num_groups=3)}, "do not divide into num_groups=3"),
        ({"num_experts": 4, "routing": SigmoidRouting(num_groups=4)}, "more than the 1 experts of num_kept=1 groups"),
        ({"latent": LatentAttention(key_rank=8, rotary_dim=8, value_dim=8)}, "as many key heads as query heads"),
        ({"rope_scaling": 2.0}, "rope_scaling=2.0: give a RopeScaling or None"),
        ({"num_experts": 4, "mlp_bias": True}, "experts have a gate and no bias"),
        ({"rotary_fraction": 0.1}, r"rotary_fraction=0\.1 of head_dim=32 are 3 features"),
        ({"rotary_fraction": 0.01}, r"rotary_fraction=0\.01 of head_dim=32 are 0 features"),
        ({"learned_positions": 64}, "seq_len=128 is more than learned_positions=64"),
        ({"shared_norm": True}, "give parallel=True too"),
        ({"norm": "layer", "norm_offset": True}, "norm_offset=True is of norm='rms'"),
    ],
)
def test_shapes_that_cannot_be_built_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DecoderConfig(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is none of llama.* into a model of your own"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope' is not supported"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "'yarn' of sliding_attention is not supported",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters differ",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor=None: the config needs a number above 0"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types=.* is not supported"),
        ({"layer_types": ["full_attention"]}, "for each of its 3 layers"),
        (
            {
                "model_type": "mistral",
                "sliding_window": 4,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "every n-th layer",
        ),
    ],
)
def test_checkpoints_that_a_decoder_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        huggingface.decoder_config(transformers_logits.CONFIGS["llama"] | change)


def test_a_window_is_of_families_that_have_one():
    """Transformers reads no `sliding_window` of a Llama, and `hidden_activation` of Gemma alone."""
    other = {"sliding_window": 4, "hidden_activation": "gelu_pytorch_tanh"}
    llama = transformers_logits.CONFIGS["llama"]
    assert huggingface.decoder_config(llama | other) == huggingface.decoder_config(llama)


_JUNK = (None, "x", -1, 0, 1.5, True, [], {}, [1], {"rope_type": "llama3"}, {"full_attention": 3}, 10**30, math.nan)
_MORE_KEYS = ("rope_parameters", "layer_types", "rope_local_base_freq", "query_pre_attn_scalar", "sliding_window")


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "gemma3", "mixtral", "llama-yarn", "gpt2", "gpt-neox", "falcon-40b", "deepseek-v3"]
)
def test_any_other_value_in_a_config_is_refused_as_one(name):
    config = transformers_logits.CONFIGS[name]
    for key in {*config, *_MORE_KEYS}:
        for value in _JUNK:
            try:
                huggingface.decoder_config(config | {key: value})
            except ValueError as error:
                assert str(error)
