"""The three GPTs are one function of the same number of params."""

import functools

import chex
import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zero_jax.models import decoder, gpt

SIZES = {"vocab_size": 32, "seq_len": 16, "num_layers": 2, "d_model": 32, "num_heads": 4}
# Each value of each choice meets each value of each other one.
VARIANTS = [
    {"scan": True, "remat": True, "position": "rotary"},
    {"scan": True, "remat": False, "position": "learned"},
    {"scan": False, "remat": True, "position": "learned"},
    {"scan": False, "remat": False, "position": "rotary"},
]


def make_batch(config: gpt.GPTConfig):
    tokens = jax.random.randint(jax.random.key(7), (2, config.seq_len + 1), 0, config.vocab_size)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def noisy_params(config: gpt.GPTConfig):
    """Returns params of which none is at a special value, norm scales included."""
    return jax.jit(lambda: _noisy(gpt.init(config, jax.random.key(0))))()


def _noisy(params):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)])


def to_flax(params, config: gpt.GPTConfig):
    """Renames plain params to what a Flax module calls them; blocks stay as they are: stacked, or a list."""
    names = {"attention_norm": "scale", "mlp_norm": "scale", "final_norm": "scale", "embed": "embedding"}

    def block(plain):
        return {name: {names.get(name, "kernel"): x} for name, x in plain.items()}

    blocks = block(params["blocks"]) if config.scan else [block(b) for b in params["blocks"]]
    rest = {name: {names[name]: params[name]} for name in ("embed", "final_norm")}
    learned = {"position": params["position"]} if "position" in params else {}
    return {**rest, **learned, "blocks": blocks}


def to_linen(params, config: gpt.GPTConfig):
    flax = to_flax(params, config)
    if not config.scan:
        flax |= {f"block_{i}": block for i, block in enumerate(flax.pop("blocks"))}
    return flax


def to_nnx(params, config: gpt.GPTConfig):
    flax = to_flax(params, config)
    if not config.scan:
        flax["blocks"] = dict(enumerate(flax["blocks"]))
    state = jax.eval_shape(gpt_nnx.make(config)[0], jax.random.key(0))
    nnx.replace_by_pure_dict(state, flax)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2]], ids=str)
def test_linen_and_nnx_are_the_same_function(variant):
    config = gpt.GPTConfig(**SIZES, **variant)
    batch = make_batch(config)
    plain = noisy_params(config)
    run = jax.jit(jax.value_and_grad(gpt.loss_fn(config), has_aux=True))
    (loss, aux), grads = run(plain, batch)
    assert loss.dtype == jnp.float32
    chex.assert_trees_all_close(aux["bits_per_token"], loss / jnp.log(2.0))
    for module, convert in ((gpt_linen, to_linen), (gpt_nnx, to_nnx)):
        _, loss_fn = module.make(config)
        (other_loss, _), other_grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(convert(plain, config), batch)
        # The same sums in float32, in another order.
        chex.assert_trees_all_close(other_loss, loss, rtol=1e-6)
        expected = jax.tree.leaves(convert(grads, config))
        chex.assert_trees_all_close(jax.tree.leaves(other_grads), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_number_of_params(variant):
    config = gpt.GPTConfig(**SIZES, **variant)
    for init_fn in (functools.partial(gpt.init, config), gpt_linen.make(config)[0], gpt_nnx.make(config)[0]):
        shapes = jax.eval_shape(init_fn, jax.random.key(0))
        assert sum(x.size for x in jax.tree.leaves(shapes)) == config.num_params


def test_presets_have_the_sizes_that_they_are_named_for():
    millions = {name: round(config.num_params / 1e6) for name, config in gpt.PRESETS.items()}
    assert millions["gpt-271m"] == 271
    assert millions["gpt-1t"] == 1_007_976
    for name, config in gpt.PRESETS.items():
        shapes = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
        assert sum(x.size for x in jax.tree.leaves(shapes)) == config.num_params, name


@pytest.mark.slow
def test_scanned_and_unscanned_layers_start_alike():
    scanned, unscanned = (gpt.GPTConfig(**SIZES, scan=scan) for scan in (True, False))
    stacked = jax.jit(functools.partial(gpt.init, scanned))(jax.random.key(3))
    apart = jax.jit(functools.partial(gpt.init, unscanned))(jax.random.key(3))
    chex.assert_trees_all_equal(stacked["blocks"], jax.tree.map(lambda *xs: jnp.stack(xs), *apart["blocks"]))
    batch = make_batch(scanned)
    losses = (
        jax.jit(gpt.loss_fn(config))(params, batch) for config, params in ((scanned, stacked), (unscanned, apart))
    )
    chex.assert_trees_all_close(*losses, rtol=1e-6)


def logits_of(module, config, params, tokens):
    if module is gpt:
        return gpt.apply(config, params, tokens)
    if module is gpt_linen:
        return gpt_linen.GPT(config).apply({"params": params}, tokens)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: gpt_nnx.GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, params)(tokens)


@pytest.mark.parametrize("module", [gpt, gpt_linen, gpt_nnx], ids=lambda module: module.__name__.split(".")[-1])
def test_compute_dtype_is_that_of_the_params(module):
    config = gpt.GPTConfig(**SIZES, position="learned")
    init_fn = functools.partial(gpt.init, config) if module is gpt else module.make(config)[0]
    loss_fn = gpt.loss_fn(config) if module is gpt else module.make(config)[1]
    params = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_fn(jax.random.key(0))))
    batch = make_batch(config)
    logits = jax.eval_shape(lambda p: logits_of(module, config, p, batch["inputs"]), params)
    assert logits.dtype == jnp.bfloat16
    loss, _ = jax.eval_shape(loss_fn, params, batch)
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize("position", ["rotary", pytest.param("learned", marks=pytest.mark.slow)])
def test_no_token_sees_those_after_it(position):
    config = gpt.GPTConfig(**SIZES, position=position)
    params = noisy_params(config)
    tokens = make_batch(config)["inputs"]
    changed = tokens.at[:, 9].add(1) % config.vocab_size
    apply = jax.jit(functools.partial(gpt.apply, config))
    before, after = (apply(params, t) for t in (tokens, changed))
    chex.assert_trees_all_close(before[:, :9], after[:, :9], atol=1e-6)
    assert jnp.abs(before[:, 9:] - after[:, 9:]).min(axis=-1).max() > 0


def test_rotary_attention_sees_distances_and_not_places():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    turned = decoder.rotate(jnp.broadcast_to(x, (1, 12, 1, 8)))[0, :, 0]
    scores = turned @ turned.T
    chex.assert_trees_all_close(scores[0, :6], scores[5, 5:11], rtol=1e-5)


@pytest.mark.slow
def test_generate_goes_on_greedily_past_the_window():
    config = gpt.GPTConfig(**SIZES)
    params = noisy_params(config)
    prompt = jnp.arange(5)
    run = jax.jit(functools.partial(gpt.generate, config, num_tokens=20, temperature=0.0))
    tokens = run(params, prompt, jax.random.key(0))
    expected = prompt.tolist()
    apply = jax.jit(functools.partial(gpt.apply, config))
    for _ in range(20):
        window = expected[-config.seq_len :]
        padded = jnp.array(window + [0] * (config.seq_len - len(window)))
        expected.append(int(apply(params, padded[None])[0, len(window) - 1].argmax()))
    assert tokens.tolist() == expected[5:]


@pytest.mark.slow
def test_generate_draws_among_the_top_k_only():
    config = gpt.GPTConfig(**SIZES)
    params = noisy_params(config)
    prompt = jnp.arange(3)
    logits = jax.jit(functools.partial(gpt.apply, config))(params, prompt[None])
    top = set(jax.lax.top_k(logits[0, -1], 4)[1].tolist())
    run = jax.jit(functools.partial(gpt.generate, config, num_tokens=1, temperature=5.0, top_k=4))
    drawn = {int(run(params, prompt, jax.random.key(seed))[0]) for seed in range(50)}
    assert drawn == top


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"position": "sinus"}, "'rotary' or 'learned'"),
        ({"d_model": 12, "num_heads": 4}, "even head size"),
    ],
)
def test_shapes_that_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt.GPTConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("wrong", [{"num_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_k": 33}])
def test_generate_refuses_numbers_out_of_range(wrong):
    config = gpt.GPTConfig(**SIZES)
    with pytest.raises(ValueError, match="top_k between 1 and the vocabulary's 32"):
        gpt.generate(config, {}, jnp.arange(3), jax.random.key(0), **{"num_tokens": 1, **wrong})


def test_generate_refuses_an_empty_prompt():
    config = gpt.GPTConfig(**SIZES)
    with pytest.raises(ValueError, match="at least one token"):
        gpt.generate(config, {}, jnp.zeros(0, jnp.int32), jax.random.key(0), num_tokens=1)


QUICK = {(gpt_linen, "rotary", True)}
DOCUMENTS = [
    pytest.param(
        module,
        position,
        variant,
        id=f"{module.__name__.split('.')[-1]}-{position}-{'scan' if variant['scan'] else 'loop'}",
        marks=() if (module, position, variant["scan"]) in QUICK else pytest.mark.slow,
    )
    for module in (gpt, gpt_linen, gpt_nnx)
    for position in ("rotary", "learned")
    for variant in (VARIANTS[0], VARIANTS[3])
]


@pytest.mark.parametrize(("module", "position", "variant"), DOCUMENTS)
def test_a_document_in_a_row_with_another_is_as_if_alone(module, position, variant):
    config = gpt.GPTConfig(**SIZES, **{**variant, "position": position})
    loss_fn = gpt.loss_fn(config) if module is gpt else module.make(config)[1]
    convert = {gpt: lambda params, _: params, gpt_linen: to_linen, gpt_nnx: to_nnx}[module]
    params = convert(noisy_params(config), config)
    both = make_batch(config)
    # Rotary positions are relative, and learned ones begin anew: the second document, which begins at 10, may be
    # looked at by itself.
    segments = jnp.where(jnp.arange(config.seq_len) < 10, 0, 1)[None].repeat(2, 0)
    only_second = jnp.where(segments == 1, 1.0, 0.0)
    run = jax.jit(loss_fn)
    packed, aux = run(params, {**both, "segments": segments, "weights": only_second})
    alone, _ = run(params, {name: x[:, 10:] for name, x in both.items()})
    seen, _ = run(params, {**both, "weights": only_second})
    chex.assert_trees_all_close(packed, alone, rtol=1e-5)
    assert abs(seen - alone) > 1e-3
    chex.assert_trees_all_close(aux["bits_per_token"], packed / jnp.log(2.0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [gpt, gpt_linen, gpt_nnx],
    ids=["gpt", "gpt_linen", "gpt_nnx"],
)
def test_float16_gives_the_loss_and_gradients_of_float32_on_any_backend(module):
    """`jax.nn.dot_product_attention` asks for a float16 dot that CPUs do not have."""
    config = gpt.GPTConfig(**SIZES)
    init_fn = functools.partial(gpt.init, config) if module is gpt else module.make(config)[0]
    loss_fn = gpt.loss_fn(config) if module is gpt else module.make(config)[1]
    params, batch = jax.jit(init_fn)(jax.random.key(0)), make_batch(config)
    batch["segments"] = jnp.repeat(jnp.arange(2), config.seq_len // 2)[None].repeat(2, 0)
    step = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, batch)[0]))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    (loss, grads), (half_loss, half_grads) = step(params), step(half)
    # 11 bits, some dozens of roundings one after the other; of gradients, as shares of the largest of each leaf.
    assert abs(loss - half_loss) < 1e-3
    largest = [float(jnp.abs(x).max()) for x in jax.tree.leaves(grads)]
    for x, y, scale in zip(jax.tree.leaves(grads), jax.tree.leaves(half_grads), largest, strict=True):
        assert jnp.abs(x - y.astype(jnp.float32)).max() < 0.05 * scale
