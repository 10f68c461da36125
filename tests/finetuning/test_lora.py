"""Adapted loss functions equal the loss of weights that are adapted by the formula, in values and in gradients."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapted import RANK, RULES, adapt, init_params, largest_difference, loss_fn, moved, normal

import zero_jax as zero
from zero_jax.finetuning import dequantize

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 5))


def made(**settings):
    lora = zero.Lora(rules=RULES, rank=RANK, block_size=32, **settings)
    return lora, lora.init(init_params(), jax.random.key(1))


def plain_base(variables):
    is_quantized = lambda x: hasattr(x, "codes")  # noqa: E731
    base = variables.model_state["base"]
    return jax.tree.map(
        lambda x: dequantize(x) if is_quantized(x) else x.astype(jnp.float32), base, is_leaf=is_quantized
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "dora"),
    [
        ("int8", False),
        ("nf4", True),
        ("own", False),
        ("own", True),
        ("nf4", False),
        ("bfloat16", True),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(base, dora):
    lora, variables = made(base=base, dora=dora)
    variables, frozen = moved(variables), plain_base(variables)
    adapted = lora.loss_fn(loss_fn)

    def by_formula(adapters):
        return loss_fn(adapt(frozen, adapters, lora.scale), TOKENS)

    def by_lora(adapters):
        loss, _, model_state = adapted(adapters, TOKENS, model_state=variables.model_state)
        assert model_state is variables.model_state
        return loss

    found = jax.jit(jax.value_and_grad(by_lora))(variables.params)
    # Float32 sums in another order, through a dozen layers.
    assert largest_difference(found, jax.jit(jax.value_and_grad(by_formula))(variables.params)) < 5e-4


@pytest.mark.parametrize("dora", [False, True])
def test_new_adapters_change_nothing(dora):
    lora, variables = made(base="own", dora=dora)
    merged = lora.merge(variables)
    assert jax.tree.structure(merged) == jax.tree.structure(init_params())
    if not dora:
        jax.tree.map(np.testing.assert_array_equal, merged, init_params())
    assert largest_difference(merged, init_params()) < 1e-6


@pytest.mark.parametrize("dora", [False, True])
def test_outputs_of_zeros_are_finite_and_learn_and_empty_leaves_are_passed_over(dora):
    params = {"up": normal(0, 8, 4).at[:, 1].set(0), "empty": jnp.zeros((0, 4))}
    loss = lambda params, x: jnp.square(x @ params["up"] - 1).mean() + params["empty"].sum()  # noqa: E731
    lora = zero.Lora(rules=["*"], rank=2, base="own", dora=dora)
    mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=3, min_shard_size=2), optax.sgd(0.1)
    init_fn = lambda key: lora.init(params, key)  # noqa: E731
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    np.testing.assert_allclose(lora.merge(state)["up"], params["up"], rtol=1e-6)
    step = zero.make_train_step(lora.loss_fn(loss), tx, mesh=mesh, config=config)
    for _ in range(3):
        state, metrics = step(state, normal(1, 8, 8))
        assert np.isfinite(metrics.loss)
    assert list(state.params) == ["up"] and np.abs(lora.merge(state)["up"][:, 1]).max() > 0


@pytest.mark.parametrize("dora", [False, True])
def test_rows_beyond_a_table_are_what_the_lookup_says(dora):
    params, rows = {"table": np.eye(6, 4, dtype=np.float32)}, np.array([1, 5, 6, 9])
    look = lambda params, batch: params["table"].at[batch].get(mode="fill", fill_value=2.0).sum()  # noqa: E731
    lora = zero.Lora(rules={"table": "io"}, rank=2, alpha=2, base="own", dora=dora)
    variables = lora.init(params, jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 1, variables.params)
    value, *_ = lora.loss_fn(look)(adapters, rows, model_state=variables.model_state)
    merged = lora.merge(zero.Variables(params=adapters, model_state=variables.model_state))
    np.testing.assert_allclose(value, look(jax.tree.map(jnp.asarray, merged), rows), rtol=1e-6)


def test_merged_weights_are_the_formula_bit_for_bit():
    lora, variables = made(base="own")
    variables = moved(variables)
    merged = lora.merge(variables)
    formula = jax.jit(lambda w, a, b: w + lora.scale * jnp.einsum("sir,sro->sio", a, b))  # compiled alike
    adapter = variables.params["stack"]
    np.testing.assert_array_equal(merged["stack"], formula(init_params()["stack"], adapter["a"], adapter["b"]))
    low = lora.merge(variables, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(low["stack"], merged["stack"].astype(jnp.bfloat16))


def test_the_report_tells_factors_from_merged_weights():
    lora, _ = made(base="own")
    report = lora.report(loss_fn, init_params(), TOKENS)
    # One branch doubles the weight itself; the other transposes it and uses its factors.
    assert {use.path for use in report.merged} == {"odd"} and {use.path for use in report.uses} == set(RULES)
    assert [use.operation for use in report.uses if use.path == "embed"] == ["gather", "dot_general"]
    assert "MERGED  odd: mul at" in str(report) and "adapted.py" in str(report)


def test_leaves_may_be_trained_as_they_are():
    lora = zero.Lora(rules=["embed"], train=["bias", "odd"], rank=2)
    variables = lora.init(init_params(), jax.random.key(0))
    assert {*variables.params} == {"embed", "bias", "odd"}
    loss = lambda p: lora.loss_fn(loss_fn)(p, TOKENS, model_state=variables.model_state)[0]  # noqa: E731
    grads = jax.jit(jax.grad(loss))(variables.params)
    assert all(np.any(np.asarray(grads[name])) for name in ("bias", "odd"))
    np.testing.assert_array_equal(lora.merge(variables)["odd"], init_params()["odd"])


@pytest.mark.parametrize(
    ("name", "stored", "x64"), [("a", "bfloat16", False), ("z", "bfloat16", False), ("a", "float64", True)]
)
def test_frozen_leaves_are_seen_in_the_dtype_of_the_adapters(name, stored, x64):
    """It was that of the first leaf that is trained, by its name; and float64 models were computed in float32."""
    with jax.enable_x64(x64):
        params = {name: jnp.ones(4, stored), "up": jnp.ones((4, 4), stored), "norm": jnp.ones(4, stored)}
        params["down"] = jnp.ones((4, 4), "float32")
        lora = zero.Lora(rules=["down", "up"], train=[name], rank=2, base="own", dora=x64)
        variables = lora.init(params, jax.random.key(0))
        seen = {}

        def loss_fn(params, batch):
            seen.update({leaf: str(x.dtype) for leaf, x in params.items()})
            return (batch @ params["up"] @ params["down"] * params["norm"] * params[name]).sum()

        lora.loss_fn(loss_fn)(variables.params, jnp.ones((2, 4)), model_state=variables.model_state)
        wide = "float64" if x64 else "float32"
        assert seen == {name: stored, "down": "float32", "up": wide, "norm": wide}
        assert {key: x.dtype for key, x in lora.merge(variables).items()} == {key: x.dtype for key, x in params.items()}


def test_keys_and_model_state_of_the_model_pass_through():
    def stateful(params, batch, key, *, model_state):
        noise = jax.random.normal(key, ())
        return (batch @ params["w"]).mean() * noise, {"noise": noise}, {"count": model_state["count"] + 1}

    lora = zero.Lora(rules=["w"], rank=1, base="own")
    both = zero.Variables(params={"w": normal_square()}, model_state={"count": jnp.int32(3)})
    variables = lora.init(both, jax.random.key(0))
    loss, aux, new = lora.loss_fn(stateful)(
        variables.params, jnp.ones((2, 8)), jax.random.key(1), model_state=variables.model_state
    )
    expected, expected_aux, _ = stateful(both.params, jnp.ones((2, 8)), jax.random.key(1), model_state={"count": 0})
    assert new["model_state"]["count"] == 4 and aux["noise"] == expected_aux["noise"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def normal_square():
    return jnp.linspace(-1, 1, 64).reshape(8, 8)


PARAMS = {
    "layers": {"w": jnp.zeros((2, 64, 64)), "norm": jnp.zeros((2, 64))},
    "head": jnp.zeros((64, 48)),
    "n": jnp.arange(4),
}
WRONG = {
    "nothing": (["layer/w"], "matches the path of no leaf that is left: the nearest is 'layers/w'"),
    "a regular expression": (["layers/(q|w)"], "'layers/(q|w)' (a pattern as of file names, with"),
    "a stack?": (["layers/*"], "leaf 'layers/w' of shape [2, 64, 64] has 3 dims, and the rule 'layers/*' does not say"),
    "a vector": (["n"], "leaf 'n' of shape [4] and dtype int32 cannot be adapted as 'io'"),
    "no matrices": (["n*"], "'n*' matches no floating leaf of two dims: 'n' has shape [4]"),
    "other letters": ({"head": "ab"}, "'head' has dims 'ab': give a letter for each dim"),
    "a stack within": ({"head": "is"}, "'head' has dims 'is'"),
    "too many letters": ({"head": "sio"}, "leaf 'head' of shape [64, 48] and dtype float32 cannot be adapted as 'sio'"),
    "two rules": ({"head": "io", "he*": "oi"}, "leaf 'head' has dims 'io' by one rule and 'oi' by 'he*'"),
    "a text": ("head", "rules='head': give a list"),
    "none": ([], "rules=[]: give a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rules_that_do_not_fit_are_refused(name):
    rules, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        zero.Lora(rules=rules).init(PARAMS, jax.random.key(0))


def test_a_path_matches_itself_whatever_characters_it_has():
    params = {"w[0]": jnp.ones((8, 8)), "w0": jnp.ones((8, 8)), "v[*]": jnp.ones((8, 8))}
    lora = zero.Lora(rules=["w[0]"], train=["v[*]"], rank=2)
    assert {*lora.targets(params)} == {"w[0]", "w0"} and lora.trained(params) == ["v[*]"]
    with pytest.raises(ValueError, match="dtype='int8': give a floating dtype"):
        lora.merge(lora.init(params, jax.random.key(0)), dtype="int8")


def test_a_pattern_passes_over_leaves_of_other_dims():
    assert {*zero.Lora(rules={"layers/*": "sio"}).targets(PARAMS)} == {"layers/w"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: give at least 1"),
        ({"alpha": 0}, "alpha=0: give a positive number"),
        ({"base": "nf3"}, "base='nf3': did you mean 'nf4'? give one of own, bfloat16, int8, nf4"),
        ({"train": "head"}, "train='head': give a list"),
        ({"train": ["heads"]}, "train: 'heads' matches the path of no leaf that is left: the nearest is 'head'"),
        ({"base": "int8", "block_size": 60}, "leaf 'head', base='int8': a weight of 64 rows (shape [64, 48])"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        zero.Lora(rules=["head"], **settings).init(PARAMS, jax.random.key(0))


def test_a_loop_over_a_dim_that_is_no_stack_is_refused():
    def loop(params, batch):
        return jax.lax.scan(lambda x, w: (x * w, None), batch, params["w"])[0].sum()

    lora = zero.Lora(rules=["w"])
    variables = lora.init({"w": jnp.ones((4, 8))}, jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"leaf 'w' of shape \[4, 8\] was adapted as 'io', but .* loops over its first"
    ):
        lora.loss_fn(loop)(variables.params, jnp.ones(8), model_state=variables.model_state)


def test_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.ones((8, 8)), "a": {"b": jnp.ones((8, 8))}}
    with pytest.raises(ValueError, match=r"several leaves have the path 'a/b'.*rename one"):
        zero.Lora(rules=["a/b"], rank=2).init(params, jax.random.key(0))


def test_a_state_without_a_base_is_refused():
    with pytest.raises(ValueError, match=r"the state has no frozen base: make it with Lora\.init"):
        zero.Lora(rules=["w"]).merge(zero.Variables(params={"w": jnp.ones((4, 4))}))


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"rules": ["a"]}, "b"),
        ({"rules": {"*": "oi"}}, "a"),
        ({"rank": 4}, "a"),
        ({"dora": True}, "a"),
        ({"rules": ["a"], "train": ["b"]}, "b"),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_adapters_of_another_lora_are_refused(other, path, is_reversed):
    """Adapters were left out of the loss and of merged weights, or scaled by another rank, without a word."""
    params = {"a": jnp.ones((8, 4)), "b": jnp.ones((8, 4))}
    settings = {"rules": ["*"], "rank": 2}
    saved, read = (
        zero.Lora(**x) for x in ((settings | other, settings) if is_reversed else (settings, settings | other))
    )
    variables = saved.init(params, jax.random.key(0))
    if is_reversed and "train" in other:  # it is not frozen, and trained as it is whatever the settings say
        assert read.merge(variables)["b"].shape == (8, 4)
        return
    message = f"leaf '{path}' has .*: give the rules, rank, dora and train that .* made with"
    with pytest.raises(ValueError, match=message):
        read.merge(variables)
    with pytest.raises(ValueError, match=message):
        read.loss_fn(lambda params, batch: params["a"].sum())(variables.params, 0, model_state=variables.model_state)


def test_an_array_in_place_of_an_adapter_is_refused():
    lora = zero.Lora(rules=["a"], rank=2)
    variables = lora.init({"a": jnp.ones((8, 4)), "b": jnp.ones((8, 4))}, jax.random.key(0))
    for name in ("a", "b", "c"):
        params = {**variables.params, name: jnp.ones((8, 4))}
        with pytest.raises(ValueError, match=rf"leaf '{name}' has an array, and this Lora makes .* for it: give the"):
            lora.merge(dataclasses.replace(variables, params=params))


def linen_model():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(x)
            return x + linen.Dense(16)(linen.gelu(linen.Dense(32)(x))), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.scan(linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return Block()(stack()(x)[0])[0]

    model = Model()
    return (lambda key: model.init(key, jnp.ones((1, 3, 16)))["params"]), lambda p, x: model.apply({"params": p}, x)


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.conv = nnx.Conv(16, 8, (3,), rngs=rngs)

        def __call__(self, x):
            return self.conv(x + self.attention(x))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    return (lambda key: nnx.state(Model(nnx.Rngs(key)))), lambda p, x: nnx.merge(graphdef, p)(x)


MODELS = {
    "linen": (
        linen_model,
        {
            "Block_*/query/kernel": "ioo",
            "Block_*/out/kernel": "iio",
            "Scan*/key/kernel": "sioo",
            "Scan*/Dense_1/kernel": "sio",
        },
    ),
    "nnx": (nnx_model, {"attention/query/kernel*": "ioo", "attention/out/kernel*": "iio", "conv/kernel*": "iio"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flax_models_are_adapted_without_a_change(name):
    make, rules = MODELS[name]
    init_fn, apply = make()
    params, x = jax.jit(init_fn)(jax.random.key(0)), normal(7, 2, 3, 16)
    loss_fn = lambda p, x: jnp.square(apply(p, x)).mean()  # noqa: E731
    lora = zero.Lora(rules=rules, rank=2, base="own")
    report = lora.report(loss_fn, params, x)
    assert not report.merged and {use.path for use in report.uses} == {*lora.targets(params)}, report
    assert len(report.uses) == len(rules)
    variables = moved(lora.init(params, jax.random.key(1)))
    loss = lambda p: lora.loss_fn(loss_fn)(p, x, model_state=variables.model_state)[0]  # noqa: E731
    merged = lora.merge(variables)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_allclose(jax.jit(loss)(variables.params), jax.jit(loss_fn)(merged, x), rtol=1e-5)
