"""Layers of a Python loop are stages as those of a scan are, with attention by kernels and without."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_cases import (
    FEATURES,
    FLOAT32,
    LAYERS,
    LENGTH,
    VOCAB,
    assert_step_of_one_device,
    form_tests,
    init_params,
    lowered,
    make_batches,
)
from reference import assert_close, make_config

import zero_jax as zero
from zero_jax.attention import function
from zero_jax.program.subcalls import equations
from zero_jax.training import StepLoss


def of_keys(params, batch, keys):
    def layer(x, slices):
        w, key = slices
        return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w["w"]), 0)

    x = params["embed"][batch["tokens"]]
    if isinstance(keys, list):
        for i, key in enumerate(keys):
            x = layer(x, (jax.tree.map(lambda w: w[i], params["layers"]), key))  # noqa: B023
    else:
        x, _ = jax.lax.scan(lambda x, slices: (layer(x, slices), None), x, (params["layers"], keys))
    return jnp.square(x @ params["head"]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slices", "raw slices", "counts"])
def test_layers_of_a_python_loop_draw_by_keys_of_their_own(kind):
    """The keys are slices, or made of model state, as in Flax NNX; they draw what the layers of a scan do."""
    count, params = 4, init_params()
    params["layers"] = jax.tree.map(lambda x: x[:count], params["layers"])

    def loss_fn(params, batch, key, model_state, *, is_rolled):
        if kind == "counts":
            keys = [jax.random.fold_in(jax.random.key(5), number) for number in model_state["counts"]]
            model_state = {"counts": [number + count for number in model_state["counts"]]}
        else:
            keys = [*jax.random.split(key, count)]
        return of_keys(params, batch, jnp.stack(keys) if is_rolled else keys), {}, model_state

    mesh, key = zero.make_mesh(pipe=2), jax.random.PRNGKey(3) if kind == "raw slices" else jax.random.key(3)
    config = make_config(stage=2, num_microbatches=4)
    variables = zero.Variables(params=params, model_state={"counts": [*jnp.arange(count)]})
    made = []
    for is_rolled in (True, False):
        step = zero.make_train_step(
            functools.partial(loss_fn, is_rolled=is_rolled), optax.sgd(0.1), mesh=mesh, config=config
        )
        state = zero.init_state(variables, optax.sgd(0.1), key, mesh=mesh, config=config)
        made.append(step(state, make_batches(1, size=32)[0]))
    (rolled, metrics), (looped, of_loop) = made
    assert_close((looped.params, of_loop.loss), (rolled.params, metrics.loss), tolerance=FLOAT32)
    assert jax.tree.map(int, looped.model_state) == jax.tree.map(int, rolled.model_state)


def test_a_constant_in_bfloat16_as_long_as_the_batch_is_of_examples():
    """A loop that is rolled has made it, before the layers: NaN for targets that are none, as in lookups on TPUs."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ params["layers"]["w"][i])
        logits = jax.nn.log_softmax(x @ params["head"]).max(-1)
        return -jnp.where(batch["tokens"] < VOCAB, logits, jnp.nan).mean()

    config = make_config(stage=1, num_microbatches=4, pipeline="1f1b", precision="bf16")
    report = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(pipe=2), config=config
    )
    assert [x.num_layers for x in report.loops] == [LAYERS], report


@pytest.mark.slow
def test_a_loop_over_layers_is_rolled():
    """Layers that slice their params of stacks, share a table, add to a sum and return something on the way."""

    def looped(params, batch):
        x, aux, firsts = params["embed"][batch["tokens"]], jnp.float32(0), []
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ params["layers"]["w"][i] * params["gate"]) * batch["mask"][..., None]
            aux = aux + jnp.square(x).mean()
            firsts.append(x[:, 0])
        return jnp.square(x @ params["head"]).mean() + aux + jnp.square(sum(firsts)).mean()

    params, batch = init_params(), make_batches(1)[0]
    fields = {"mesh": zero.make_mesh(pipe=2), "stage": 2, "num_microbatches": 4}
    assert_step_of_one_device(looped, params, batch, **fields)
    report = zero.pipeline_report(looped, params, batch, mesh=fields["mesh"], config=make_config(num_microbatches=4))
    assert report.loops[0].stacked
    assert "their params are stacked in each step" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("is_forward", [True, False])
def test_layers_whose_derivatives_differ_are_not_equal(is_forward):
    """The same values in each layer, and gradients scaled by a number of the layer: no two layers are one scan."""

    def scaled(x, scale):
        rule = (jax.custom_jvp if is_forward else jax.custom_vjp)(jnp.tanh)
        if is_forward:
            rule.defjvp(lambda primals, dots: (jnp.tanh(primals[0]), dots[0] * scale))
        else:
            rule.defvjp(lambda x: (jnp.tanh(x), None), lambda _, dot: (dot * scale,))
        return rule(x)

    def loss_fn(params, batch, scales):
        x = params["embed"][batch["tokens"]]
        for i, scale in enumerate(scales):
            x = x + scaled(x @ params["layers"]["w"][i], scale)
        return jnp.square(x @ params["head"]).mean()

    params, batch = init_params(), make_batches(1)[0]
    fields = {"mesh": zero.make_mesh(pipe=2), "stage": 2, "num_microbatches": 4}
    equal = functools.partial(loss_fn, scales=[0.5] * LAYERS)
    assert_step_of_one_device(equal, params, batch, **fields)
    for scales in (range(1, 1 + LAYERS), np.arange(1, 1 + LAYERS, dtype=np.float32)[:, None]):
        with pytest.raises(ValueError, match=r"block 1 and block 0 differ: custom_.*test_pipeline.*other derivatives"):
            lowered(functools.partial(loss_fn, scales=scales), params=params, batch=batch, **fields)


def with_windows(params, batch):
    """A Python loop over layers whose masks differ."""
    x, places = params["embed"][batch["tokens"]], jnp.arange(LENGTH)
    for i in range(LAYERS):
        is_near = places[:, None] - places < (1 if i % 4 else LENGTH)
        scores = jnp.where(is_near & (places[:, None] >= places), x @ x.swapaxes(1, 2), -1e9)
        x = x + jax.nn.softmax(scores) @ jnp.tanh(x @ params["layers"]["w"][i])
    return jnp.square(x @ params["head"]).mean()


def with_attention(params, batch, *, windows=(None, 2)):
    """A Python loop over layers whose causal attention is in segments, and in windows by turns; None is no window."""
    x, places, ids = params["embed"][batch["tokens"]], jnp.arange(LENGTH), batch["tokens"] % 2
    same = ids[:, :, None] == ids[:, None, :]
    for i in range(LAYERS):
        is_near = places[:, None] - places < (windows[i % len(windows)] or LENGTH)
        heads = (x @ params["layers"]["w"][i]).reshape(*x.shape[:2], 2, FEATURES // 2)
        mask = (is_near & (places[:, None] >= places) & same)[:, None]
        scores = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", heads, heads), -1e9)
        x = x + jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), heads).reshape(x.shape)
    return jnp.square(x @ params["head"]).mean()


def with_slices(params, batch):
    """A Python loop whose layers take values of their own by their number: of an array, and of the examples."""
    x, sizes = params["embed"][batch["tokens"]], jnp.asarray([1, 2, 3, 2, 1, 1, 4, 2])
    for i in range(LAYERS):
        kept = jnp.arange(FEATURES) % sizes[i] == 0
        scale = batch["mask"][:, i % LENGTH, None, None] + params["layers"]["bias"][i]
        x = x + jnp.where(kept, scale, 0.5) * jnp.tanh(x @ params["layers"]["w"][i])
    return jnp.square(x @ params["head"]).mean()


def with_keys_of_examples(params, batch):
    """As Equinox models are called: each example has a key, and takes one of it for each layer."""

    def of_example(tokens):
        x = params["embed"][tokens]
        for i, key in enumerate(jax.random.split(jax.random.key(tokens.sum()), LAYERS)):
            x = x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ params["layers"]["w"][i]), 0)
        return jnp.square(x @ params["head"]).mean()

    return jax.vmap(of_example)(batch["tokens"]).mean()


def with_split_keys(params, batch):
    """As above, where the first of the keys is not a layer's."""

    def of_example(tokens):
        x = params["embed"][tokens]
        first, *keys = jax.random.split(jax.random.key(tokens.sum()), LAYERS + 1)
        x = x + jax.random.normal(first, x.shape)
        for i, key in enumerate(keys):
            x = x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ params["layers"]["w"][i]), 0)
        return jnp.square(x @ params["head"]).mean()

    return jax.vmap(of_example)(batch["tokens"]).mean()


def of_one_equation(params, batch):
    """A Python loop whose layers are one equation each, fewer than what is repeated behind them."""
    x, branches = params["embed"][batch["tokens"]], (lambda x, w: x + jnp.tanh(x @ w), lambda x, w: x + jnp.sin(x @ w))
    for i in range(LAYERS):
        x = jax.lax.cond(params["gate"][0] > 0, *branches, x, params["layers"]["w"][i])
    x = sum([jnp.tanh(x - x.mean(-1, keepdims=True)) for _ in range(3)])
    return jnp.square(x @ params["head"]).mean()


def with_params_of_examples(params, batch):
    """A Python loop in which each layer makes something for all examples of its params alone."""
    x = params["embed"][batch["tokens"]]
    for i in range(LAYERS):
        layer = lambda x, w=params["layers"]["w"][i]: jnp.tanh(x @ w)  # noqa: E731
        y, tangent = jax.jvp(layer, (x,), (jnp.ones_like(x),))
        x = x + y + tangent
    return jnp.square(x @ params["head"]).mean()


def in_two_halves(params, batch):
    """A Python loop with something else between as many equal layers before it as behind it."""
    x = params["embed"][batch["tokens"]]
    for i in range(LAYERS):
        if i == LAYERS // 2:
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ (params["head"] @ params["head"].T)
        x = x + jnp.tanh(x @ params["layers"]["w"][i]) * batch["mask"][..., None]
    return jnp.square(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ params["head"]).mean()


def with_odd_ends(params, batch):
    """A Python loop whose first two layers and whose last one differ from the others."""
    x = params["embed"][batch["tokens"]]
    for i in range(LAYERS):
        w = params["layers"]["w"][i]
        y = jax.nn.softmax(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w)
        x = x + (jnp.sin(y) if i < 2 else jnp.cumsum(y, axis=1) if i == LAYERS - 1 else jnp.tanh(y)) @ w.T
    return jnp.square(x @ params["head"]).mean()


def with_small_loops(params, batch):
    """A Python loop whose layers are loops, of which the last turn does more."""
    x = params["embed"][batch["tokens"]]
    for i in range(0, LAYERS, 2):
        y = x
        for j in range(2):
            y = jax.nn.relu(y @ params["layers"]["w"][i + j])
        x = x + y
    return jnp.square(x @ params["head"]).mean()


def with_statistics(params, batch):
    """Layers that read the number of tokens, and the mean and the deviation of the batch; they add up parts of a loss.

    The number of the last one goes from layer to layer.
    """
    mean, deviation, count = batch["weights"].mean(), batch["weights"].std(), batch["mask"].sum()
    x, loss = params["embed"][batch["tokens"]], 0.0
    for i in range(LAYERS):
        scale = (batch["weights"] - mean) / deviation
        x = x + jnp.tanh(x @ params["layers"]["w"][i] * scale[:, None, None])
        loss = loss + (i + 1) * (jnp.square(x @ params["head"]).mean(-1) * batch["mask"]).sum() / count
    return loss / LAYERS


def in_a_u(params, batch):
    """A Python loop over layers, and one over others that take what these were given, the last one first."""
    x, given = params["embed"][batch["tokens"]], []
    weights = jnp.unstack(params["layers"]["w"])
    for w in weights[: LAYERS // 2]:
        given.append(x)
        x = x + jnp.tanh(x @ w)
    for w in weights[LAYERS // 2 :]:
        x = x + jnp.tanh(jnp.sin(x + given.pop()) @ w)
    return jnp.square(x @ params["head"]).mean()


def in_towers(params, batch):
    """Two Python loops over equal layers, on values that have nothing to do with one another."""
    towers = [params["embed"][batch["tokens"]], params["embed"][batch["tokens"][:, ::-1]]]
    for i in range(LAYERS):
        x = towers[i * 2 // LAYERS]
        towers[i * 2 // LAYERS] = x + jnp.tanh(x @ params["layers"]["w"][i])
    return jnp.square((towers[0] * towers[1]) @ params["head"]).mean()


FORMS = {
    in_a_u: ("1f1b", 4, [LAYERS // 2] * 2),
    in_towers: ("1f1b", 4, [LAYERS // 2] * 2),
    with_windows: ("1f1b", 4, [LAYERS]),
    with_slices: ("circular:2", 4, [LAYERS]),
    with_keys_of_examples: ("gpipe", 4, [LAYERS]),
    with_split_keys: ("1f1b", 4, [LAYERS]),
    of_one_equation: ("1f1b", 4, [LAYERS]),
    with_params_of_examples: ("1f1b", 4, [LAYERS]),
    in_two_halves: ("gpipe", 4, [LAYERS // 2] * 2),
    with_odd_ends: ("1f1b", 4, [5]),
    with_small_loops: ("1f1b", 6, [LAYERS // 2]),
    with_statistics: ("1f1b", 4, [LAYERS]),
}
test_layers_in_other_forms_are_stages, test_layers_in_other_forms_train_as_one_device = form_tests(FORMS)


@pytest.mark.parametrize("size", [LAYERS, 4 * LAYERS])
@pytest.mark.parametrize("kind", ["scan", "loop", "of each example"])
def test_there_may_be_as_many_layers_as_examples(size, kind):
    """Of a batch, or of a microbatch: keys of layers are no keys of examples."""

    def loss_fn(params, batch, key):
        if kind == "of each example":
            own = lambda tokens, key: of_keys(params, {"tokens": tokens}, [*jax.random.split(key, LAYERS)])  # noqa: E731
            return jax.vmap(own)(batch["tokens"], jax.random.split(key, len(batch["tokens"]))).mean()
        keys = jax.random.split(key, LAYERS)
        return of_keys(params, batch, keys if kind == "scan" else [*keys])

    mesh, config = zero.make_mesh(pipe=4), make_config(num_microbatches=4)
    report = zero.pipeline_report(loss_fn, init_params(), make_batches(1, size)[0], mesh=mesh, config=config)
    assert [loop.num_layers for loop in report.loops] == [LAYERS]


def with_first_values(params, batch):
    """A Python loop of attentions, whose values are mixed with those of the first layer, which has none to mix."""
    x, first = params["embed"][batch["tokens"]], None
    is_before = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        w = params["layers"]["w"][i]
        values = x @ w if first is None else x @ w + params["layers"]["bias"][i, 0] * first
        first = values if first is None else first
        scores = jnp.where(is_before, (x @ w.T) @ x.swapaxes(1, 2), -1e9)
        x = x + jax.nn.softmax(scores) @ values
    return jnp.square(x @ params["head"]).mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pipe. block 0 of 8 of a Python loop, at .*test_pipeline")
def test_a_loop_whose_first_layer_differs_trains_as_one_device_with_one_example_a_microbatch():
    """Its trace on one example has other operations that change a shape than that on several."""
    params, batch = init_params(), make_batches(1, size=16)[0]
    fields = {"stage": 1, "num_microbatches": 8, "mesh": zero.make_mesh(pipe=4)}
    assert_step_of_one_device(with_first_values, params, batch, **fields)


def test_what_all_layers_of_a_loop_broadcast_does_not_travel():
    fields = {"mesh": zero.make_mesh(pipe=4), "config": make_config(num_microbatches=4)}
    (loop,) = zero.pipeline_report(with_windows, init_params(), make_batches(1)[0], **fields).loops
    assert loop.travelling == ("float32[4,4,16]",)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipeline"), [(3, "circular:2"), (1, "1f1b")])
def test_layers_of_a_loop_with_fused_attention_train_as_one_device(stage, pipeline, monkeypatch):
    """Layers with another window are one in turn, of which each has its kernel."""
    monkeypatch.setitem(function._BY_PLATFORM, "cpu", "splash")
    monkeypatch.setattr(function, "_FEW", 1)
    fields = {"stage": stage, "pipeline": pipeline, "num_microbatches": 4, "attention": "fused"}
    params, batch, mesh = init_params(), make_batches(1)[0], zero.make_mesh(pipe=2)
    report = zero.pipeline_report(with_attention, params, batch, mesh=mesh, config=make_config(**fields))
    loss = StepLoss.of(with_attention, params, mesh=mesh, config=make_config(**fields))
    names = [x.primitive.name for x in equations(loss.fused.trace(*loss.shapes(params, batch)).closed)]
    assert [x.num_layers for x in report.loops] == [LAYERS // 2]
    assert loss.attentions(params, batch).num_fused == LAYERS
    assert names.count("zero_attention") == 2
    assert_step_of_one_device(with_attention, params, batch, mesh=mesh, **fields)


@pytest.mark.parametrize(
    ("windows", "pipe", "pipeline", "why"),
    [
        ((None, 2, 2, 2), 4, "gpipe", r"only 2 in turn are equal, and the stages have 4 groups; give fewer stages"),
        ((None, 2), 4, "circular:2", r"only 4 in turn are equal, and the stages have 8 groups"),
        ((None, *[2] * 7), 4, "gpipe", r"block 0 of 8 of a Python loop, at .*test_pipeline.*; give fewer stages"),
        ((None, 1, 2, 3, 2, 1, 3, 2), 2, "1f1b", r"not equal to the others are block 0 of 8 of .*test_pipeline"),
    ],
)
def test_layers_that_kernels_of_attention_make_unequal_are_stages_without_them(windows, pipe, pipeline, why):
    """Their masks are data of the layers; the reports say why no kernel computes their attention."""
    loss_fn, mesh = functools.partial(with_attention, windows=windows), zero.make_mesh(pipe=pipe)
    params, batch = init_params(), make_batches(1)[0]
    config = make_config(num_microbatches=4, pipeline=pipeline, attention="fused")
    report = zero.pipeline_report(loss_fn, params, batch, mesh=mesh, config=config)
    assert [x.num_layers for x in report.loops] == [LAYERS]
    assert re.search(f"attention is not fused: .*{why}", str(report))
    loss = StepLoss.of(loss_fn, params, mesh=mesh, config=config)
    closed = loss.fused.trace(*loss.shapes(params, batch)).closed
    assert "zero_attention" not in {x.primitive.name for x in equations(closed)}
    (row,) = loss.attentions(params, batch).rows[:1]
    assert re.search(why, row.reason)


def test_too_few_layers_with_fused_attention_are_refused_with_as_many_as_there_are():
    fields = {"num_microbatches": 4, "attention": "fused", "pipeline": "circular:4", "mesh": zero.make_mesh(pipe=4)}
    why = "its 8 layers are fewer than 4 stages of 4 groups: choose pipe=2 or less"
    with pytest.raises(ValueError, match=why):
        lowered(with_attention, **fields)
    mesh = fields.pop("mesh")
    report = zero.pipeline_report(
        with_attention, init_params(), make_batches(1)[0], mesh=mesh, config=make_config(**fields)
    )
    assert why in report.why_none
    assert not report.unfused  # attention is not what layers are too few for
