"""Layers as the stages of a pipeline: every stage of ZeRO trains as plain optax does on one device."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from reference import assert_close, make_config, run_plain, run_zero

import zero_jax as zero
from zero_jax import hlo
from zero_jax.attention import function
from zero_jax.models import gpt
from zero_jax.program.subcalls import equations
from zero_jax.sharding.mesh import axes_of
from zero_jax.training import StepLoss
from zero_jax.transforms.pipeline.cut import LayerLoop
from zero_jax.transforms.pipeline.place import StagePlace
from zero_jax.transforms.pipeline.scans import layers_outside

# As in test_parity.py: sums in another order, and Adam's division by a gradient's own size.
FLOAT32 = 1e-5
LAYERS, FEATURES, VOCAB, LENGTH, BATCH_SIZE = 8, 16, 24, 4, 16


def optimizer():
    return optax.chain(reference.keep_grads(), optax.adam(1e-2))


def with_curvature(grads, state, params, *, value_fn):
    curvature = jax.jvp(jax.grad(value_fn), (params,), (grads,))[1]
    return jax.tree.map(lambda g, c: -0.1 * g - 0.1 * c, grads, curvature), state


def init_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / 4  # noqa: E731
    return {
        "embed": normal(VOCAB, FEATURES),
        "layers": {"w": normal(LAYERS, FEATURES, FEATURES), "bias": normal(LAYERS, FEATURES)},
        "gate": normal(FEATURES),
        "head": normal(FEATURES, VOCAB),
    }


def make_batches(num_steps=3, size=BATCH_SIZE):
    rng = np.random.default_rng(1)
    return [
        {
            "tokens": rng.integers(0, VOCAB, (size, LENGTH), dtype=np.int32),
            "mask": rng.integers(0, 2, (size, LENGTH)).astype(np.float32),
            "weights": rng.random((size,), dtype=np.float32),
        }
        for _ in range(num_steps)
    ]


def loss_fn(params, batch):
    """Layers that read a mask of the examples and a param that all share, carry a sum of means, a count of examples and
    the number of the layer, and stack a mean, a value of each example and one of neither."""
    x = params["embed"][batch["tokens"]]

    def layer(carry, w):
        x, aux, count, i = carry
        y = x + jnp.tanh(x @ w["w"] * params["gate"] + w["bias"] + i) * batch["mask"][..., None]
        carry = y, aux + jnp.square(y).mean(), count + (y > 0).sum(), i + 0.1
        return carry, (y.mean(), y[:, 0], w["bias"].sum())

    (x, aux, count, i), (means, firsts, biases) = jax.lax.scan(layer, (x, 0.5, 0, 0.0), params["layers"])
    nll = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["tokens"]).mean(1)
    loss = (
        (nll * batch["weights"]).mean()
        + 0.1 * aux * i
        + (means * jnp.arange(len(means))).sum()
        + jnp.square(firsts).mean()
        + jnp.square(biases).sum()
    )
    return loss, {"count": count, "aux": aux}


SPECS = {"layers/w": PartitionSpec(None, None, "model"), "layers/bias": PartitionSpec(None, "model")}
# `test_combinations.py` has every pair of settings; these are for what this loss does between and beside its layers.
ROWS = [
    {"stage": 1, "pipe": 4, "model": 1, "num_microbatches": 8, "remat": "own", "replica": 1, "pipeline": "gpipe"},
    {"stage": 3, "pipe": 2, "model": 2, "num_microbatches": 4, "remat": "full", "replica": 1, "pipeline": "1f1b"},
    {"stage": 2, "pipe": 2, "model": 1, "num_microbatches": 4, "remat": "none", "replica": 2, "pipeline": "circular:4"},
    {"stage": 3, "pipe": 4, "model": 2, "num_microbatches": 8, "remat": "none", "replica": 1, "pipeline": "1f1b"},
    {"stage": 0, "pipe": 4, "model": 1, "num_microbatches": 4, "remat": "full", "replica": 2, "pipeline": "circular:2"},
    {"stage": 1, "pipe": 2, "model": 1, "num_microbatches": 4, "remat": "own", "replica": 1, "pipeline": "1f1b:4"},
    {"stage": 3, "pipe": 2, "model": 2, "num_microbatches": 8, "remat": "none", "replica": 1, "pipeline": "1f1b:2"},
]


@functools.cache
def plain_run():
    return run_plain(lambda *args: loss_fn(*args)[0], optimizer(), make_batches(), params=init_params())


def check_run(row):
    sizes = {name: row[name] for name in ("pipe", "model", "replica")}
    fields = {name: row[name] for name in ("stage", "num_microbatches", "remat", "pipeline")}
    if row["model"] > 1:
        fields["param_specs"] = SPECS
    mesh = zero.make_mesh(**sizes)
    state, history = run_zero(loss_fn, optimizer(), make_batches(), mesh=mesh, params=init_params(), **fields)
    params, opt_state, losses = plain_run()
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], opt_state[0], tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    return state, history


@pytest.mark.parametrize("row", [ROWS[0], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[1:])], ids=str)
def test_every_stage_trains_as_one_device(row):
    with jax.enable_x64(row["stage"] == 1):  # whole numbers are 64 bits wide there, those of ticks are not
        state, history = check_run(row)
    assert state.params["layers"]["w"].sharding.spec[0] == "pipe"
    assert state.params["layers"]["bias"].sharding.spec[0] == "pipe"
    _, aux = jax.jit(loss_fn)(init_params(), make_batches()[0])
    assert_close(history[0].aux, aux, tolerance=FLOAT32)


def one_step(loss_fn, params, batch, *, mesh, **fields):
    """Returns loss and gradients of the first step, on a mesh and on one device."""
    config = make_config(**fields)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    return step.grads(state, batch)


def assert_step_of_one_device(loss_fn, params, batch, *, tolerance=FLOAT32, **fields):
    """Asserts that loss and gradients of the first step are those of one device, without a pipeline."""
    found = one_step(loss_fn, params, batch, **fields)
    assert_close(found, jax.jit(jax.value_and_grad(loss_fn))(params, batch), tolerance=tolerance)


def first_step(loss_fn, params, batch, *, mesh, **fields):
    """Returns `((loss, aux), gradients)` of the first step of a loss with aux, all of one program."""
    tx = optax.chain(reference.keep_grads(), optax.sgd(0.1))
    state, (metrics,) = run_zero(loss_fn, tx, [batch], mesh=mesh, params=params, **fields)
    return (metrics.loss, metrics.aux), state.opt_state[0]


CONFIG = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=4, d_model=16, num_heads=2, scan=True)


def text_batch(size=16):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 32, (size, 9), dtype=np.int32)
    segments = np.sort(rng.integers(0, 3, (size, 8), dtype=np.int32), axis=1)
    weights = rng.random((size, 8), dtype=np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": weights}


def test_two_scans_with_the_same_stages_are_not_the_same_layers():
    """A loop is a parameter of its equation: equal ones would count as one equation."""
    mesh = zero.make_mesh(pipe=2, data=4)
    stages = {"place": StagePlace(mesh=mesh, pipe=("pipe",), batch=("data",)), "axes": axes_of(mesh)}
    of_loop = {"num_layers": 2, "consts": (), "carry": (), "ys": (), "num_slices": 1, "unroll": 1, "policy": None}
    make = functools.partial(LayerLoop, **stages, **of_loop, num_microbatches=2, keeps_values=False)
    first, other = make(layer=jax.make_jaxpr(jnp.sin)(0.0)), make(layer=jax.make_jaxpr(jnp.cos)(0.0))
    assert first != other and len({first, other, dataclasses.replace(first), first}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    ["gpipe", "1f1b", "circular:2", "1f1b:2"],
)
def test_random_numbers_are_other_ones_in_each_layer_and_microbatch(pipeline):
    pipe, k, mesh = 4, 8, zero.make_mesh(pipe=4)
    params, batch = init_params(), make_batches(1, size=32)[0]

    def layers(params, x, keys, number=None):
        def layer(x, slices):
            w, key = slices
            key = key if number is None else jax.random.fold_in(key, number)
            kept = jax.random.bernoulli(key, 0.5, x.shape)
            noise = jax.random.normal(slices[1], x.shape[1:])  # the same for all examples
            return x + jnp.where(kept, jnp.tanh(x @ w["w"]) + noise, 0), None

        return jax.lax.scan(layer, x, (params["layers"], keys))[0]

    def loss_fn(params, batch, key):
        keys = jax.random.split(key, LAYERS)
        return jnp.square(layers(params, params["embed"][batch["tokens"]], keys) @ params["head"]).mean()

    def by_hand(params, batch, key):
        keys, size = jax.random.split(key, LAYERS), len(batch["tokens"])
        # Devices of a stage x microbatches x examples: a microbatch has those of all devices.
        places = np.arange(size).reshape(mesh.shape["data"], k, -1)
        if not pipeline.startswith("1f1b"):  # microbatch `slot * stages + stage` of stages x slots
            places = places.reshape(mesh.shape["data"], pipe, k // pipe, -1).swapaxes(1, 2).reshape(places.shape)
        losses = []
        for number in range(k):
            x = params["embed"][batch["tokens"][places[:, number].reshape(-1)]]
            losses.append(jnp.square(layers(params, x, keys, number) @ params["head"]).mean())
        return sum(losses) / k

    config = make_config(stage=2, num_microbatches=k, pipeline=pipeline)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(3), mesh=mesh, config=config)
    loss, grads = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config).grads(state, batch)
    key = jax.random.fold_in(state.key, state.step)
    expected = jax.jit(jax.value_and_grad(by_hand))(params, batch, key)
    assert_close((loss, grads), expected, tolerance=FLOAT32)


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

    def loss_fn(params, batch, key, model_state, *, is_rolled):
        if kind == "counts":
            keys = [jax.random.fold_in(jax.random.key(5), count) for count in model_state["counts"]]
            model_state = {"counts": [count + LAYERS for count in model_state["counts"]]}
        else:
            keys = [*jax.random.split(key, LAYERS)]
        return of_keys(params, batch, jnp.stack(keys) if is_rolled else keys), {}, model_state

    mesh, key = zero.make_mesh(pipe=4), jax.random.PRNGKey(3) if kind == "raw slices" else jax.random.key(3)
    config = make_config(stage=2, num_microbatches=8)
    variables = zero.Variables(params=init_params(), model_state={"counts": [*jnp.arange(LAYERS)]})
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
@pytest.mark.parametrize(("pipeline", "remat"), [("gpipe", "own"), ("1f1b", "none"), ("1f1b:2", "full")])
def test_keys_that_go_from_layer_to_layer_and_leave_are_those_of_one_device(pipeline, remat):
    def loss_fn(params, batch, key):
        def layer(carry, w):
            x, key = carry
            draw, after = jax.random.split(key)
            return (x + jnp.tanh(x @ w["w"]) * jax.random.normal(draw, (FEATURES,)), after), key

        x = params["embed"][batch["tokens"]]
        (x, key), keys = jax.lax.scan(layer, (x, key), params["layers"])
        return jnp.square(x @ params["head"]).mean(), {"last": key, "all": keys}

    params, batch, mesh = init_params(), make_batches(1)[0], zero.make_mesh(pipe=2)
    config = make_config(stage=2, num_microbatches=4, pipeline=pipeline, remat=remat)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(3), mesh=mesh, config=config)
    key = jax.random.fold_in(state.key, state.step)
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch, key)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    assert_close(step.grads(state, batch), (loss, grads), tolerance=FLOAT32)
    _, metrics = step(state, batch)
    for name, value in aux.items():
        np.testing.assert_array_equal(jax.random.key_data(metrics.aux[name]), jax.random.key_data(value))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "circular:2"])
def test_adapters_on_a_frozen_base(pipeline):
    lora, plain = zero.Lora(rules={"layers/w": "sio"}, rank=2, base="own"), lambda *args: loss_fn(*args)[0]
    variables = jax.jit(lora.init)(init_params(), jax.random.key(0))
    noisy, base = jax.tree.map(lambda x: x + 0.1, variables.params), variables.model_state
    adapted, batch = lora.loss_fn(plain), make_batches(1)[0]
    expected = jax.jit(jax.value_and_grad(lambda params: adapted(params, batch, model_state=base)[0]))(noisy)
    variables = zero.Variables(params=noisy, model_state=base)
    fields = {"stage": 3, "num_microbatches": 4, "pipeline": pipeline}
    found = one_step(adapted, variables, batch, mesh=zero.make_mesh(pipe=2), **fields)
    assert_close(found, expected, tolerance=FLOAT32)


@pytest.mark.parametrize("num_microbatches", [16, 6])  # the batch has fewer; as many, which are no multiple of stages
def test_an_evaluation_is_of_the_whole_batch(num_microbatches):
    mesh, config = zero.make_mesh(pipe=4), make_config(stage=3, num_microbatches=num_microbatches, pipeline="1f1b")
    batch = make_batches(1, size=24)[0]
    state = zero.init_state(init_params(), optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    metrics = zero.make_eval_step(loss_fn, mesh=mesh, config=config)(state, batch)
    assert_close((metrics.loss, metrics.aux), jax.jit(loss_fn)(init_params(), batch), tolerance=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    ["gpipe", "1f1b", "circular:2", "1f1b:2"],
)
def test_values_that_no_microbatch_has_leave_no_nan(pipeline):
    """Layers that divide by zero where they run before their microbatch arrives, and a head that does between stages.

    Layer 0 is the embedding's distance from its center away, all others are not defined on the embedding or on zeros.
    """
    params, batch = init_params(), make_batches(1)[0]
    row = np.linspace(1, 2, FEATURES, dtype=np.float32)
    params["embed"] = np.tile(row, (VOCAB, 1))
    params["layers"]["bias"] = np.stack([-row, *[row] * (LAYERS - 2), 0 * row])
    params["layers"]["end"] = np.stack([*[0 * row] * (LAYERS - 1), row])

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]

        def layer(carry, w):
            x, y, aux = carry
            away = (x - w["bias"]) * params["gate"]
            x = x + away / jnp.linalg.norm(away, axis=-1, keepdims=True)
            return (x, y + w["end"], aux + x.mean()), x.mean()

        carry = x, 0 * x, jnp.float32(0)
        (x, y, aux), means = jax.lax.scan(layer, carry, params["layers"])
        logits = (x / jnp.linalg.norm(y, axis=-1, keepdims=True)) @ params["head"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return nll.mean() + aux + jnp.sqrt(jnp.square(y - x).sum(-1)).mean() + means.sum(), {"aux": aux}

    expected = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    fields = {"mesh": zero.make_mesh(pipe=4), "stage": 2, "num_microbatches": 4, "pipeline": pipeline}
    assert_close(first_step(loss_fn, params, batch, **fields), expected, tolerance=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "pipeline", "remat", "stages", "bubble"),
    [
        (1, "gpipe", "own", "0-2, 3-5, 6-8, 9", 1 - 8 * 10 / (11 * 12)),
        (3, "1f1b", "own", "0-2, 3-5, 6-8, 9", 1 - 8 * 10 / (11 * 12)),
        (2, "circular:2", "own", "0-1 and 8-9, 2-3, 4-5, 6-7", 1 - 2 * 8 * 10 / (19 * 16)),
        (1, "1f1b:2", "none", "0-1 and 8-9, 2-3, 4-5, 6-7", 1 - 2 * 8 * 10 / (19 * 16)),
    ],
)
def test_layers_that_do_not_divide_have_idle_places(stage, pipeline, remat, stages, bubble):
    """Of 10 layers on 4 stages, the last of which, run twice, divides by zero."""
    params, batch, unit = init_params(), make_batches(1, size=32)[0], np.eye(FEATURES, dtype=np.float64)[0]
    params["layers"] = jax.tree.map(lambda x: np.concatenate([x, x[:2]]), params["layers"])
    params["layers"] |= {"center": np.stack([*[0 * unit] * 9, unit]), "scale": np.array([2.0] * 9 + [1])}

    def loss_fn(params, batch):
        def layer(carry, w):
            x, y, aux, i = carry
            x = x + jnp.tanh(x @ w["w"] * params["gate"] + w["bias"] + i) * batch["mask"][..., None]
            y = w["scale"] * (y - w["center"]) / jnp.linalg.norm(y - w["center"], axis=-1, keepdims=True)
            return (x, y, aux + jnp.square(x).mean(), i + 1), (x.mean(), x[:, 0] * y[:, 0], w["bias"].sum())

        x = params["embed"][batch["tokens"]]
        (x, y, aux, i), (means, firsts, biases) = jax.lax.scan(layer, (x, 0 * x + 3 * unit, 0.5, 0), params["layers"])
        loss = jnp.square((x + y) @ params["head"]).mean() + (means * jnp.arange(10)).sum() + aux * i
        return loss + jnp.square(firsts).mean() + jnp.square(biases).sum()

    fields = {"stage": stage, "num_microbatches": 8, "pipeline": pipeline, "remat": remat}
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        assert_step_of_one_device(loss_fn, params, batch, mesh=zero.make_mesh(pipe=4), **fields, tolerance=1e-12)
        config = make_config(**fields)
        report = zero.pipeline_report(loss_fn, params, batch, mesh=zero.make_mesh(pipe=4), config=config)
    assert f"by stage: {stages}" in str(report)
    assert report.bubble == pytest.approx(bubble)
    model = dataclasses.replace(CONFIG, num_layers=10)
    residuals = zero.memory.transformer_residuals(model, batch_size=32, mesh=zero.make_mesh(pipe=4), config=config)
    assert residuals.num_layers == {"gpipe": 12, "1f1b": 3 * 7, "circular:2": 16, "1f1b:2": 2 * 15}[pipeline]


def large_layers(*, pipe, num_microbatches, pipeline, is_checkpointed):
    """Returns a lowered step of large layers."""
    wrap = jax.checkpoint if is_checkpointed else lambda layer: layer

    def loss_fn(params, batch):
        return jnp.square(jax.lax.scan(wrap(lambda x, w: (x + jnp.tanh(x @ w), None)), batch, params)[0]).mean()

    mesh, fields = zero.make_mesh(pipe=pipe), {"num_microbatches": num_microbatches, "pipeline": pipeline}
    config = make_config(stage=1, **fields)
    state = zero.abstract_state(lambda _: jnp.zeros((LAYERS, 256, 256)), optax.sgd(0.1), mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((4 * num_microbatches, 256), jnp.float32)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    return step.lower(state, batch)


def temporaries(**fields):
    """Returns the temporaries of a step of large layers, in bytes of the params of a layer."""
    return large_layers(**fields).compile().memory_analysis().temp_size_in_bytes / (256 * 256 * 4)


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "circular:2", "1f1b:2"])
def test_gradients_of_a_layer_are_no_scatter(pipeline):
    """As a scatter, XLA:TPU copies the sum of a layer, and reads it twice. Nor are the params of a group copied."""
    text = large_layers(pipe=2, num_microbatches=4, pipeline=pipeline, is_checkpointed=False).as_text()
    updated = set(re.findall(r"dynamic_update_slice .*: \(tensor<([x\d]*)x256x256xf32>", text))
    assert updated == {"4x1x4" if pipeline.endswith(":2") else "4x2x4"}  # sums of the four layers of a stage
    assert not re.search(r"\}\) : \(tensor<[x\d]*x256x256xf32>, tensor<[x\d]*i32>", text)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "circular:2"])
def test_params_are_kept_once_for_all_ticks(pipeline):
    """Of checkpointed layers whose params are large beside the activations."""
    few, many = (temporaries(pipe=4, num_microbatches=k, pipeline=pipeline, is_checkpointed=True) for k in (4, 16))
    assert many - few < 1  # one of the two layers of a stage, of 12 ticks more


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_gradients_of_a_tick_are_added_in_place(pipeline):
    """A stage of four layers has their gradients twice, as summed and as exchanged, and not those of a tick."""
    assert temporaries(pipe=2, num_microbatches=4, pipeline=pipeline, is_checkpointed=False) < 2.4 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_checkpointed", "remat", "num_products"), [(True, "own", 8), (False, "own", 8), (True, "none", 2 * 6)]
)
def test_1f1b_runs_a_layer_forward_no_more_often_than_remat_says(is_checkpointed, remat, num_products):
    """By the products of its loops: of one tick forward, of one in both directions, and of one backward.

    Both layers of a stage are compiled where they keep more than their inputs.
    """
    wrap = jax.checkpoint if is_checkpointed else lambda layer: layer

    def loss_fn(params, batch):
        return jnp.square(jax.lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), batch, params)[0]).mean()

    mesh, config = zero.make_mesh(pipe=4), make_config(stage=1, num_microbatches=4, pipeline="1f1b", remat=remat)
    state = zero.abstract_state(lambda _: jnp.zeros((LAYERS, 16, 16)), optax.sgd(0.1), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    text = step.lower(state, jnp.zeros((16, 16))).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == num_products


def ends_in(loss):
    """Returns a loss with another end: `loss(logits, batch, params)`."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])[0]
        return loss(x @ params["head"], batch, params)

    return loss_fn


def weighted(logits, batch, params):
    """A mean by a number of the batch and one by its size, a term of the params, and aux of all kinds."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]) * batch["mask"]
    mean = nll.sum() / jnp.maximum(batch["mask"].sum(), 1)
    loss = mean + 0.1 * jnp.square(params["head"]).sum() + jnp.square(logits).mean()
    aux = {"each": nll.sum(1), "tokens": batch["mask"].sum(), "largest": jnp.abs(params["gate"]).max()}
    return loss, {**aux, "perplexity": jnp.exp(mean), "ratio": nll.sum() / jnp.square(logits).sum()}


def powered(logits, batch, params):
    """Any function of one sum."""
    return jnp.sqrt(1 + jnp.square(logits).sum()) * jnp.square(params["gate"]).mean(), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "end", "pipeline"),
    [
        (32, weighted, "1f1b"),
        (16, weighted, "1f1b:2"),
        (16, powered, "1f1b"),
    ],
)
def test_a_loss_by_microbatch_is_that_of_the_batch(size, end, pipeline):
    """With the weights of the whole batch; on two examples a microbatch, and on a single one."""
    loss_fn, params, batch = ends_in(end), init_params(), make_batches(1, size=size)[0]
    mesh = zero.make_mesh(data=2 if size == 16 else 1, pipe=4, devices=jax.devices()[: 8 if size == 16 else 4])
    found = first_step(loss_fn, params, batch, mesh=mesh, stage=2, num_microbatches=size // 2, pipeline=pipeline)
    expected = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)
    assert_close(found, expected, tolerance=FLOAT32)


@pytest.mark.parametrize("num_tokens", [64, 1024])
def test_the_gradient_of_a_lookup_keeps_its_shards_of_the_model_axis(num_tokens):
    """Of few tokens and of many, in the ticks of 1F1B at stage 3."""
    mesh, tx = zero.make_mesh(pipe=2, model=2), optax.sgd(0.1)
    specs = {"table": PartitionSpec(None, "model"), "layers": None}
    config = make_config(stage=3, num_microbatches=2, pipeline="1f1b", param_specs=specs)
    init_fn = lambda key: {"table": jnp.ones((1024, 64)), "layers": jnp.ones((4, 64, 64))}  # noqa: E731

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["table"][batch], params["layers"])
        return jnp.square(x).mean()

    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((16, num_tokens), jnp.int32)
    compiled = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).compile()
    whole = 4 * 1024 * 64
    assert not [x for x in hlo.collectives(compiled.as_text()) if x.kind == "all-reduce" and x.full_bytes >= whole]


def test_few_threads_for_simulated_devices_are_warned_of(monkeypatch):
    fields = {"mesh": zero.make_mesh(pipe=2), "config": make_config(num_microbatches=4)}
    monkeypatch.setenv("NPROC", "8")
    with pytest.warns(UserWarning, match=r"a pipeline on 8 simulated devices may stop for good.*NPROC=32"):
        zero.make_train_step(loss_fn, optax.sgd(0.1), **fields)
    monkeypatch.setenv("NPROC", "32")
    zero.make_train_step(loss_fn, optax.sgd(0.1), **fields)


@pytest.mark.slow
def test_what_is_no_sum_over_microbatches_is_refused_by_1f1b():
    def contrasted(logits, batch, params):
        means = logits.mean(1)
        return jax.nn.logsumexp(means @ means.T, axis=1).mean()

    def quotient(logits, batch, params):
        return jnp.square(logits).sum() / jnp.abs(logits).sum()

    def of_columns(params, batch):
        """Layers that read what others made, with examples along the second dim."""
        made = x = params["embed"][batch["tokens"].T]
        made, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), made, params["layers"])
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(made @ w["w"]), None), x, params["layers"])
        return jnp.square(x @ params["head"]).mean()

    def worst(logits, batch, params):
        losses = jnp.square(logits).mean((1, 2))
        return losses.mean(), {"worst": losses.max()}

    refused = {
        worst: "an entry of aux is not made of those of microbatches",
        contrasted: "the loss is not made of those of microbatches: .* at .*test_pipeline",
        quotient: "the loss is a function of several sums over the examples",
    }
    for loss, message in refused.items():
        with pytest.raises(ValueError, match=f"pipeline='1f1b'.*{message}.*give pipeline='gpipe'; or leave pipe out"):
            lowered(ends_in(loss), pipeline="1f1b")
        lowered(ends_in(loss), pipeline="gpipe")
    with pytest.raises(ValueError, match=r"pipeline='1f1b'.*there are several that have to be.*give pipeline='gpipe'"):
        lowered(of_columns, pipeline="1f1b")
    with pytest.raises(ValueError, match=r"derivatives that are defined at .*test_pipeline.*give pipeline='gpipe'"):
        lowered(with_gradients_of_steps, pipeline="1f1b")
    scaled = zero.Precision(loss_scale=zero.LossScaleConfig())
    with pytest.raises(ValueError, match=r"a loss scale with pipeline='1f1b'.*bf16"):
        lowered(loss_fn, pipeline="1f1b", precision=scaled)
    with pytest.raises(ValueError, match=r"remat='full_offloaded' with pipeline='1f1b' is not supported.*remat='full'"):
        lowered(loss_fn, pipeline="1f1b", remat="full_offloaded")


def test_of_several_chains_1f1b_has_the_longest():
    """Others with fewer layers, as the dense layers before those with experts, are stages before it."""

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
        first = jax.tree.map(lambda x: x[:2], params["layers"])
        x = jax.lax.scan(layer, params["embed"][batch["tokens"]], first)[0]
        return jnp.square(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]).mean()

    params, batch, mesh = init_params(), make_batches(1)[0], zero.make_mesh(pipe=2)
    fields = {"stage": 1, "num_microbatches": 4, "pipeline": "1f1b"}
    report = zero.pipeline_report(loss_fn, params, batch, mesh=mesh, config=make_config(**fields))
    assert ([loop.num_layers for loop in report.loops], report.left) == ([2, LAYERS], ())
    assert_step_of_one_device(loss_fn, params, batch, mesh=mesh, **fields)


def two_chains(params, batch, *, kind):
    """Two chains of which the second has no derivatives by the first: it reads nothing of it, or not to learn it."""
    layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
    x = params["embed"][batch["tokens"]]
    first = jax.lax.scan(layer, x, params["layers"])[0]
    labels = jax.lax.stop_gradient(first).argmax(-1) % VOCAB
    behind = jax.lax.stop_gradient(first) if kind == "stopped" else x[:, ::-1]
    second = jax.lax.scan(layer, behind, params["layers"])[0]
    if kind == "labels":
        return -jnp.take_along_axis(jax.nn.log_softmax(second @ params["head"]), labels[..., None], -1).mean()
    ends = jnp.square(first) @ params["head"], jnp.square(second) @ params["head"]
    return ends[0].mean() + jnp.square(ends[1]).mean() if kind == "added" else (ends[0] - ends[1]).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "kind"),
    [
        *(("gpipe", kind) for kind in ("apart", "stopped", "labels")),
        *(("1f1b", kind) for kind in ("apart", "added", "stopped", "labels")),
    ],
)
def test_chains_that_derive_nothing_of_one_another_wait_on_simulated_devices(pipeline, kind):
    """Of any two loops whose stages send, one depends on the other, in both passes."""
    loss_fn = functools.partial(two_chains, kind=kind)
    fields = {"mesh": zero.make_mesh(pipe=2), "stage": 1, "num_microbatches": 4, "pipeline": pipeline}
    program = hlo.parse(lowered(loss_fn, **fields).compile())
    senders = {x.computation for x in program.instructions() if x.opcode == "collective-permute"}
    senders |= {x.computation for x in program.instructions() if senders.intersection(x.called.values())}
    loops = [x for x in program.instructions() if x.opcode == "while" and senders.intersection(x.called.values())]

    before = {}
    for loop in loops:
        before[loop], new = set(), [loop]
        while new:
            new = [x for each in new for x in program.operands(each) if x not in before[loop]]
            before[loop].update(new)
    assert len(loops) > 2
    assert all(a in before[b] or b in before[a] for a, b in itertools.combinations(loops, 2))
    assert_step_of_one_device(loss_fn, init_params(), make_batches(1)[0], **fields)


def test_layers_without_a_gradient_behind_those_of_1f1b_are_of_each_stage():
    """The report and a warning say that they are no stages; what they make is right."""

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
        x = jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0]
        judge = jax.tree.map(lambda w: jnp.sin(w[2:]), params["layers"])
        judged = jax.lax.stop_gradient(jax.lax.scan(layer, x, judge)[0]).mean(1)
        return jnp.square(x.mean(1) @ params["head"] - jnp.cos(judged @ params["head"])).mean()

    params, batch, mesh = init_params(), make_batches(1)[0], zero.make_mesh(pipe=2)
    fields = {"stage": 1, "num_microbatches": 4, "pipeline": "1f1b"}
    report = zero.pipeline_report(loss_fn, params, batch, mesh=mesh, config=make_config(**fields))
    assert [loop.num_layers for loop in report.loops] == [LAYERS]
    assert "runs all of them in each stage" in report.left[0]
    with pytest.warns(UserWarning, match="layers at .*test_pipeline.* not cut .* runs all of them in each stage"):
        assert_step_of_one_device(loss_fn, params, batch, mesh=mesh, **fields)


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


def in_a_checkpoint(params, batch):
    """A `jax.checkpoint` around all layers and the head."""

    def run(params, x):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])[0]
        return x @ params["head"]

    return jnp.square(jax.checkpoint(run)(params, params["embed"][batch["tokens"]])).mean()


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


def with_skips(params, batch):
    """Layers that read what those of another chain have made, the last one first."""
    layer = lambda x, w: x + jnp.tanh(x @ w["w"])  # noqa: E731
    x, skips = jax.lax.scan(lambda x, w: (layer(x, w), x), params["embed"][batch["tokens"]], params["layers"])
    slices = params["layers"], jnp.arange(LAYERS)
    x = jax.lax.scan(lambda x, w: (layer(x + skips[LAYERS - 1 - w[1]], w[0]), None), x, slices)[0]
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


def with_returned_keys(params, batch):
    """As Flax NNX has its state come out of `nnx.remat`: layers return keys, one of all and one of each example."""
    own = jax.vmap(lambda tokens: jax.random.key(tokens.sum()))(batch["tokens"])

    def layer(x, slices):
        w, key = slices
        keys = jax.vmap(jax.random.fold_in, (0, None))(own, jnp.int32(w["bias"][0] > 0))
        x = x + jnp.tanh(x @ w["w"]) * jax.random.bernoulli(key, 0.5, (FEATURES,))
        return x, (jax.random.fold_in(key, 1), keys)

    keys = jax.random.split(jax.random.key(0), LAYERS)
    x, returned = jax.lax.scan(layer, params["embed"][batch["tokens"]], (params["layers"], keys))
    of_layers, of_examples = (jax.vmap(jax.random.uniform)(x.reshape(-1)).reshape(x.shape) for x in returned)
    scale = (of_layers[:, None] * of_examples).sum(0)[:, None, None]
    return jnp.square(x @ params["head"] * scale).mean()


def smoothed(x, padding):
    """Returns the mean of three places, each feature by itself."""
    kernel, fields = jnp.ones((3, 1, FEATURES)) / 3, {"feature_group_count": FEATURES}
    return jax.lax.conv_general_dilated(x, kernel, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC"), **fields)


def with_examples(params, batch):
    """A scan whose layers take slices of what is made of the batch, with a gradient and without."""
    x = params["embed"][batch["tokens"]]
    xs = params["layers"], x * jnp.arange(LAYERS)[:, None, None, None], jnp.tile(batch["mask"].T, (2, 1))
    layer = lambda x, w: (jnp.tanh(x @ w[0]["w"]) + w[1] * w[2][:, None, None], None)  # noqa: E731
    return jnp.square(jax.lax.scan(layer, x, xs)[0]).mean()


def with_convolutions(params, batch):
    """As vision transformers and state space models have them: of patches before the layers, and depthwise in each."""
    images = params["embed"][batch["tokens"]].reshape(-1, 8, 8, 1)
    patches = params["head"].reshape(2, 2, 1, 4 * VOCAB)[..., :FEATURES]
    x = jax.lax.conv_general_dilated(images, patches, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def layer(x, w):
        kernel, fields = w["w"][:3, None], {"feature_group_count": FEATURES}
        y = jax.lax.conv_general_dilated(x, kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"), **fields)
        return x + jnp.tanh(y) + w["bias"], None

    return jnp.square(jax.lax.scan(layer, x.reshape(-1, 16, FEATURES), params["layers"])[0]).mean()


def one_in_a_checkpoint(params, batch):
    """Two chains of layers, the first of them within a `jax.checkpoint`."""
    scan = lambda x, layers: jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, layers)[0]  # noqa: E731
    x = jax.checkpoint(scan)(params["embed"][batch["tokens"]], params["layers"])
    return jnp.square(scan(x, {"w": params["layers"]["w"] / 2}) @ params["head"]).mean()


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


def of_complex_numbers(params, batch):
    """Layers that turn features by an angle and multiply them by complex params, which `jax.checkpoint` cannot keep."""

    def layer(x, w):
        turned = (x * jnp.exp(1j * w["bias"])) @ (w["w"] + 1j * w["w"].T)
        return x + jnp.tanh(turned.real + jnp.abs(turned)), None

    return jnp.square(jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0]).mean()


def with_gradients_of_steps(params, batch):
    """Layers whose gradients are a function of those of the loss of the whole batch that is not linear."""
    stepped = jax.custom_vjp(lambda x: x)
    stepped.defvjp(lambda x: (x, None), lambda _, dot: (jnp.tanh(100 * dot) + 0.1,))
    layer = lambda x, w: (x + stepped(jnp.tanh(x @ w["w"])), None)  # noqa: E731
    return jnp.square(jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0]).mean()


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


def over_examples(params, batch):
    """Layers that read how many examples the batch has, as a number that is known when the loss is traced."""
    x, size = params["embed"][batch["tokens"]], jnp.float32(len(batch["tokens"]))
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]) / size, None), x, params["layers"])
    return jnp.square(x @ params["head"]).mean()


def with_a_mean(params, batch):
    """Layers that read a mean over the batch of what params have made."""
    x = params["embed"][batch["tokens"]]
    mean = jnp.sin(x).mean((0, 1))
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]) * mean, None), x, params["layers"])
    return jnp.square(x @ params["head"]).mean()


def with_a_token(params, batch):
    """A token in front of each example's, as in a vision transformer."""
    x = params["embed"][batch["tokens"]]
    x = jnp.concatenate([jnp.tile(params["embed"][:1, None], (len(x), 1, 1)), x], axis=1)
    x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x.mean(1, keepdims=True) @ w["w"]), None), x, params["layers"])[0]
    return jnp.square(x[:, 0] @ params["head"]).mean()


def in_reverse(params, batch):
    """Layers whose params are read by number, the last of them not, and back through all of them with what these made.

    The way back reads its params in a `jax.checkpoint`.
    """
    layer = lambda x, i: x + jnp.tanh(x @ params["layers"]["w"][i] + jnp.take(params["layers"]["bias"], i, axis=0))  # noqa: E731
    x = jax.lax.fori_loop(0, LAYERS - 1, lambda i, x: layer(x, i), params["embed"][batch["tokens"]])
    one_ahead = lambda x, i: ((layer(x[0], i + x[1]), 0), x[0])  # noqa: E731
    (x, _), made = jax.lax.scan(one_ahead, (x, 1), jnp.arange(-1, LAYERS - 1).at[1:].add(1))
    back = lambda x, w: (jax.checkpoint(layer)(x + w[1], w[0]) - w[2], w[2].sum() * x)  # noqa: E731
    slices = jnp.arange(LAYERS), made, params["layers"]["bias"]
    x, others = jax.lax.scan(back, x, slices, reverse=True)
    return (jnp.square(x @ params["head"]).mean() + (others.mean((1, 2, 3)) * jnp.arange(LAYERS)).sum()) / 16


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


def with_an_encoder(params, batch):
    """An encoder, and a decoder of as many layers, each of which reads what the encoder makes, as the loss does."""
    first, second = (jax.tree.map(lambda x: x[i : i + LAYERS // 2], params["layers"]) for i in (0, LAYERS // 2))  # noqa: B023
    layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
    made = jax.lax.scan(layer, params["embed"][batch["tokens"][:, ::-1]], first)[0] * params["gate"]
    read = lambda x, w: layer(x + made * jnp.tanh(x * made).sum(-1, keepdims=True), w)  # noqa: E731
    x = jax.lax.scan(read, params["embed"][batch["tokens"]], second)[0]
    return jnp.square((x + made[:, :1]) @ params["head"]).mean() + 0.1 * jnp.square(made).mean()


def with_an_early_exit(params, batch):
    """A loss behind half of the layers, which add to a sum on the way, and one behind all."""
    halves = [jax.tree.map(lambda x, i=i: x[i : i + LAYERS // 2], params["layers"]) for i in (0, LAYERS // 2)]

    def layer(carry, w):
        x, aux = carry
        x = x + jnp.tanh(x @ w["w"] + w["bias"])
        return (x, aux + jnp.square(x).mean()), None

    (x, aux), _ = jax.lax.scan(layer, (params["embed"][batch["tokens"]], 0.0), halves[0])
    early = jnp.square(x @ params["head"]).mean()
    x = jax.lax.scan(lambda x, w: (layer((x, 0.0), w)[0][0], None), x, halves[1])[0]
    return 0.3 * early + jnp.square(jnp.sin(x) @ params["head"]).mean() + 0.1 * aux


def of_one_set(params, batch):
    """A Python loop over layers that all have the same params, and numbers of their own, within a `jax.checkpoint`."""

    @jax.checkpoint
    def layers(w, x):
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ w["w"][0] + w["bias"][0]) * batch["mask"][..., None] / (1 + i)
        return x

    return jnp.square(layers(params["layers"], params["embed"][batch["tokens"]]) @ params["head"]).mean()


def of_one_set_in_a_loop(params, batch):
    """A loop whose layers all have the same params, as the steps of a universal transformer; the first is not in it."""
    layer = lambda i, x: x + jnp.tanh(x @ params["head"] @ params["head"].T * params["gate"] + i)  # noqa: E731
    x = jax.lax.fori_loop(0, LAYERS, layer, layer(0, params["embed"][batch["tokens"]]))
    return jnp.square(x @ params["head"]).mean()


def of_one_set_in_reverse(params, batch):
    """A scan over numbers in reverse, whose layers all have the same params."""
    layer = lambda x, i: (x + jnp.tanh(x @ params["layers"]["w"][0] + i), None)  # noqa: E731
    x, _ = jax.lax.scan(layer, params["embed"][batch["tokens"]], jnp.arange(LAYERS), reverse=True)
    return jnp.square(x @ params["head"]).mean()


def preferred(params, batch):
    """What is preferred to other tokens, as in DPO: examples and those others behind one another, in a batch of two."""
    tokens = jnp.concatenate([batch["tokens"], batch["tokens"][:, ::-1]])
    turn = jnp.cos(jax.lax.broadcasted_iota(jnp.float32, tokens.shape, 1))[..., None]

    def layer(carry, w):
        x, aux = carry
        x = x + jnp.tanh((x * turn) @ w["w"] + w["bias"]) * mask[..., None]
        return (x, aux + jnp.square(x).mean()), x[:, 0]

    mask = jnp.tile(batch["mask"], (2, 1)) + jnp.stack([0 * batch["mask"], batch["mask"]]).reshape(tokens.shape)
    (x, aux), firsts = jax.lax.scan(layer, (params["embed"][tokens], 0.5), params["layers"])
    logps = jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"]), tokens[..., None], -1)[..., 0].sum(1)
    chosen, others = jnp.split(logps, 2)
    firsts = firsts[:, : len(chosen)] - firsts[:, len(chosen) :]
    loss = -jax.nn.log_sigmoid((chosen - others) * batch["weights"]).mean() + 0.1 * aux + jnp.square(firsts).mean()
    return loss, {"logps": logps, "margin": (chosen - others).mean()}


def of_pairs(params, batch):
    """As `preferred`, with each example before its other."""
    tokens = jnp.stack([batch["tokens"], batch["tokens"][:, ::-1]], 1).reshape(-1, LENGTH)
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), params["embed"][tokens], params["layers"])
    return jnp.square(x[::2].mean(1) @ params["head"] - x[1::2].mean(1) @ params["head"]).mean()


def of_two_views(params, batch):
    """All examples of two views against all others, as in contrastive learning."""
    tokens = jnp.concatenate([batch["tokens"], batch["tokens"][:, ::-1]])
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), params["embed"][tokens], params["layers"])
    products = x[:, 0] @ x[:, 1].T
    labels = jnp.roll(jnp.arange(len(x)), len(x) // 2)
    return optax.softmax_cross_entropy_with_integer_labels(products, labels).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "pipe", "size", "pipeline"),
    [
        (3, 4, 16, "gpipe"),
        (2, 4, 16, "1f1b"),
        (2, 2, 32, "circular:2"),
        (3, 2, 32, "1f1b:2"),
        (0, 4, 16, "1f1b"),
        (1, 4, 32, "gpipe"),
        (3, 8, 8, "gpipe"),
    ],
)
@pytest.mark.filterwarnings("ignore:aux is returned without 'logps'")
def test_batches_behind_one_another_train_as_one_device(stage, pipe, size, pipeline):
    """With microbatches of one example, too."""
    batches, fields = make_batches(size=size), {"stage": stage, "num_microbatches": 8 if pipe == 8 else 4}
    mesh = zero.make_mesh(pipe=pipe)
    options = {"params": init_params(), "pipeline": pipeline, **fields}
    state, history = run_zero(preferred, optimizer(), batches, mesh=mesh, **options)
    loss_fn = lambda *args: preferred(*args)[0]  # noqa: E731
    params, opt_state, losses = run_plain(loss_fn, optimizer(), batches, params=init_params())
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], opt_state[0], tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    _, aux = jax.jit(preferred)(init_params(), batches[0])
    assert_close(history[0].aux, {name: aux[name] for name in history[0].aux}, tolerance=FLOAT32)
    assert stage < 2 or "logps" in history[0].aux


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_each_row_of_batches_behind_one_another_has_random_numbers_of_its_own(pipeline):
    """Of a microbatch, device by device, a part of each batch, the first one first."""
    pipe, k, mesh = 4, 8, zero.make_mesh(pipe=4)
    params, batch = init_params(), make_batches(1, size=32)[0]

    def loss(params, tokens, keys):
        def layer(x, slices):
            w, key = slices
            return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w["w"]), 0), None

        return jax.lax.scan(layer, params["embed"][tokens], (params["layers"], keys))[0] @ params["head"]

    def loss_fn(params, batch, key):
        x = loss(params, jnp.concatenate([batch["tokens"], batch["tokens"][:, ::-1]]), jax.random.split(key, LAYERS))
        chosen, others = jnp.split(x, 2)
        return jnp.square(chosen - 0.5 * others).mean()

    def by_hand(params, batch, key):
        keys, losses = jax.random.split(key, LAYERS), []
        places = np.arange(32).reshape(2, k, -1)
        if pipeline == "gpipe":
            places = places.reshape(2, pipe, k // pipe, -1).swapaxes(1, 2).reshape(places.shape)
        for number in range(k):
            tokens = batch["tokens"][places[:, number]]
            tokens = jnp.stack([tokens, tokens[..., ::-1]], 1).reshape(-1, LENGTH)
            x = loss(params, tokens, jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(keys))
            x = x.reshape(2, 2, -1, LENGTH, VOCAB)
            losses.append(jnp.square(x[:, 0] - 0.5 * x[:, 1]).mean())
        return sum(losses) / k

    config = make_config(stage=2, num_microbatches=k, pipeline=pipeline)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(3), mesh=mesh, config=config)
    found = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config).grads(state, batch)
    key = jax.random.fold_in(state.key, state.step)
    assert_close(found, jax.jit(jax.value_and_grad(by_hand))(params, batch, key), tolerance=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [lambda x: (x[::2], x[1::2]), lambda x: x.reshape(-1, 2).T], ids=["steps", "shape"])
def test_neighbours_are_those_of_the_batch_with_one_example_a_microbatch(pairs):
    """They are of one batch each, of the two that are behind one another."""

    def loss_fn(params, batch):
        tokens = jnp.concatenate([batch["tokens"], batch["tokens"][:, ::-1]])
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), params["embed"][tokens], params["layers"])
        first, second = pairs((x.mean(1) @ params["head"]).mean(1))
        return jnp.square(first - 0.5 * second).mean()

    mesh, batches, tx = zero.make_mesh(pipe=8), make_batches(size=8), optax.sgd(0.1)
    state, history = run_zero(
        loss_fn, tx, batches, mesh=mesh, params=init_params(), pipeline="gpipe", stage=1, num_microbatches=8
    )
    params, _, losses = run_plain(loss_fn, tx, batches, params=init_params())
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_batches_behind_one_another_send_nothing_more(pipeline):
    sent, tokens = [], lambda x, y: jnp.concatenate([x, y])
    interleaved = lambda x, y: jnp.stack([x, y], 1).reshape(-1, LENGTH)  # noqa: E731
    for joined in (tokens, interleaved):

        def loss_fn(params, batch, joined=joined):
            x = params["embed"][joined(batch["tokens"], batch["tokens"][:, ::-1])]
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])
            x = (x @ params["head"]).mean(1)
            chosen, others = jnp.split(x, 2) if joined is tokens else (x[::2], x[1::2])
            return jnp.square(chosen - 2 * others).mean()

        report = zero.comms.measure(lowered(loss_fn, pipeline=pipeline, stage=3).compile(), mesh=zero.make_mesh(pipe=4))
        sent.append(sorted((row.kind, row.axes, row.total_sent_bytes) for row in report.rows))
    assert sent[0] == sent[1]


def beside_a_reference(params, batch):
    """Layers, and others without a gradient, as of a reference model, whose logits are larger than what they make."""

    def hidden(layers):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
        return jax.lax.scan(layer, params["embed"][batch["tokens"]], layers)[0]

    frozen = jax.lax.stop_gradient(jax.nn.softmax(hidden(jax.tree.map(jnp.sin, params["layers"])) @ params["head"]))
    logps = jax.nn.log_softmax(hidden(params["layers"]) @ params["head"])
    return -((frozen * logps).sum(-1) * batch["mask"]).mean()


def by_experts(x, w):
    """Tokens `[tokens, features]` that are sorted by their experts: two, which are the halves of a matrix."""
    experts = w["w"].reshape(2, FEATURES // 2, FEATURES)
    chosen = jnp.argmax(x[:, :2], axis=1)
    order = jnp.argsort(chosen)
    rows = jax.lax.ragged_dot(x[order, : FEATURES // 2], experts, jnp.bincount(chosen, length=2).astype(jnp.int32))
    return jnp.tanh(rows[jnp.argsort(order)] + w["bias"])


def with_sorted_tokens(params, batch):
    """A mixture of experts without capacities, which sorts the tokens of each example by itself."""
    x = params["embed"][batch["tokens"]]
    layer = lambda x, w: (x + jax.lax.map(lambda row: by_experts(row, w), x), None)  # noqa: E731
    return jnp.square(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]).mean()


FORMS = {
    with_sorted_tokens: ("1f1b", 4, [LAYERS]),
    beside_a_reference: ("1f1b", 4, [LAYERS] * 2),
    of_pairs: ("1f1b", 4, [LAYERS]),
    of_two_views: ("gpipe", 4, [LAYERS]),
    of_one_set_in_reverse: ("gpipe", 4, [LAYERS]),
    of_one_set: ("circular:2", 4, [LAYERS]),
    of_one_set_in_a_loop: ("1f1b", 6, [LAYERS]),
    in_a_u: ("1f1b", 4, [LAYERS // 2] * 2),
    in_towers: ("1f1b", 4, [LAYERS // 2] * 2),
    with_an_early_exit: ("1f1b", 4, [LAYERS // 2] * 2),
    with_an_encoder: ("1f1b", 4, [LAYERS // 2] * 2),
    in_reverse: ("gpipe", 4, [LAYERS - 1, LAYERS, LAYERS]),
    in_a_checkpoint: ("1f1b", 6, [LAYERS]),
    with_windows: ("1f1b", 4, [LAYERS]),
    with_skips: ("gpipe", 4, [LAYERS] * 2),
    one_in_a_checkpoint: ("gpipe", 8, [LAYERS] * 2),
    with_slices: ("circular:2", 4, [LAYERS]),
    with_keys_of_examples: ("gpipe", 4, [LAYERS]),
    with_split_keys: ("1f1b", 4, [LAYERS]),
    with_returned_keys: ("circular:2", 8, [LAYERS]),
    with_examples: ("1f1b", 6, [LAYERS]),
    with_convolutions: ("1f1b", 4, [LAYERS]),
    of_one_equation: ("1f1b", 4, [LAYERS]),
    with_params_of_examples: ("1f1b", 4, [LAYERS]),
    of_complex_numbers: ("1f1b:2", 4, [LAYERS]),
    with_gradients_of_steps: ("circular:2", 4, [LAYERS]),
    in_two_halves: ("gpipe", 4, [LAYERS // 2] * 2),
    with_odd_ends: ("1f1b", 4, [5]),
    with_small_loops: ("1f1b", 6, [LAYERS // 2]),
    with_a_token: ("gpipe", 4, [LAYERS]),
    with_statistics: ("1f1b", 4, [LAYERS]),
    over_examples: ("1f1b", 4, [LAYERS]),
    with_a_mean: ("circular:2", 4, [LAYERS]),
}


@pytest.mark.parametrize("loss_fn", FORMS)
@pytest.mark.filterwarnings("ignore:pipe. blocks? .* of . of a Python loop, at .*test_pipeline")
def test_layers_in_other_forms_are_stages(loss_fn):
    pipeline, num_microbatches, num_layers = FORMS[loss_fn]
    config, mesh = make_config(stage=1, num_microbatches=num_microbatches, pipeline=pipeline), zero.make_mesh(pipe=4)
    report = zero.pipeline_report(loss_fn, init_params(), make_batches(1, size=48)[0], mesh=mesh, config=config)
    assert [loop.num_layers for loop in report.loops] == num_layers
    assert not report.left


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


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipeline"), [(0, "circular:2"), (1, "1f1b:2")])
def test_groups_of_layers_whose_stack_is_sharded_along_features_train_as_one_device(stage, pipeline):
    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"]), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])
        return jnp.square(x @ params["head"]).mean()

    specs = {"layers/w": PartitionSpec(None, None, "pipe")}
    fields = {"stage": stage, "num_microbatches": 4, "pipeline": pipeline, "param_specs": specs}
    params, batch = init_params(), make_batches(1)[0]
    assert_step_of_one_device(loss_fn, params, batch, mesh=zero.make_mesh(pipe=2), **fields)


@pytest.mark.slow
def test_targets_of_a_reference_train_as_one_device_with_one_example_a_microbatch():
    """What looks up in one example has no dim of examples, and may be made for all at once."""

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
        x = params["embed"][batch["tokens"]]
        frozen = jax.lax.stop_gradient({**params, "layers": jax.tree.map(jnp.sin, params["layers"])})
        targets = jnp.argmax(jax.lax.scan(layer, jax.lax.stop_gradient(x), frozen["layers"])[0] @ frozen["head"], -1)
        logps = jax.nn.log_softmax(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"])
        return -(jnp.take_along_axis(logps, targets[..., None], -1)[..., 0] * batch["mask"]).mean()

    mesh, batches, tx = zero.make_mesh(pipe=8), make_batches(size=8), optax.sgd(0.1)
    fields = {"params": init_params(), "pipeline": "1f1b", "stage": 1, "num_microbatches": 8}
    state, history = run_zero(loss_fn, tx, batches, mesh=mesh, **fields)
    params, _, losses = run_plain(loss_fn, tx, batches, params=init_params())
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)


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


@pytest.mark.parametrize("loss_fn", [with_an_encoder, beside_a_reference])
def test_a_trace_has_what_several_chains_of_1f1b_send(loss_fn):
    config, mesh = make_config(stage=1, num_microbatches=4, pipeline="1f1b"), zero.make_mesh(pipe=4)
    trace = zero.trace_loss(loss_fn, init_params(), make_batches(1)[0], mesh=mesh, config=config)
    sent = [move.phase for move in trace.moves if move.axes == ("pipe",)]
    assert sent.count("forward") == 2
    assert trace.residuals.device_bytes > 0


def test_of_a_chain_before_that_of_1f1b_all_microbatches_are_kept():
    fields, bytes_of = {"stage": 1, "pipeline": "1f1b", "remat": "own"}, {}
    for k in (4, 8):
        config, mesh = make_config(num_microbatches=k, **fields), zero.make_mesh(pipe=4)
        arguments = with_an_encoder, init_params(), make_batches(1)[0]
        loops = zero.pipeline_report(*arguments, mesh=mesh, config=config).loops
        assert [loop.num_kept for loop in loops] == [k + 3, 7]
        inputs = sum(loop.num_kept * loop.bytes_per_tick for loop in loops)
        bytes_of[k] = zero.trace_loss(*arguments, mesh=mesh, config=config).residuals.device_bytes - inputs
    assert bytes_of[4] == pytest.approx(2 * bytes_of[8])  # what is left are the residuals of a microbatch


def test_what_all_layers_of_a_loop_broadcast_does_not_travel():
    fields = {"mesh": zero.make_mesh(pipe=4), "config": make_config(num_microbatches=4)}
    (loop,) = zero.pipeline_report(with_windows, init_params(), make_batches(1)[0], **fields).loops
    assert loop.travelling == ("float32[4,4,16]",)


@pytest.mark.parametrize("pipeline", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:gradients are summed across devices in every tick of the pipeline, not once a step")
def test_constants_as_long_as_the_batch_train_as_on_one_device(pipeline):
    """NumPy makes them as the loss is traced: equal rows, within the layers and before, and a weight of each example.

    Places are those of the batch: examples that are looked up at their own are refused by 1F1B.
    """

    def loss_fn(params, batch, places=None):
        n = len(batch["x"])

        def layer(x, w):
            return x + jnp.tanh(x @ w + np.full((n, 8), 0.5, np.float32)) * 0.5, None

        x = jax.lax.scan(layer, batch["x"] * np.full((n, 1), 0.9, np.float32), params["layers"])[0]
        x = x if places is None else x[np.arange(n)]
        return (np.linspace(0.5, 1, n, dtype=np.float32) * jnp.square(x).mean(1)).mean()

    rng = np.random.default_rng(0)
    params = {"layers": rng.normal(size=(4, 8, 8)).astype(np.float32) / 4}
    batch = {"x": rng.normal(size=(16, 8)).astype(np.float32)}
    fields = {"stage": 1, "num_microbatches": 4, "pipeline": pipeline, "mesh": zero.make_mesh(pipe=2)}
    assert_step_of_one_device(loss_fn, params, batch, **fields)
    if pipeline == "1f1b":
        with pytest.raises(ValueError, match=r"a constant of shape \(16,\) is as long as the batch: make it by jnp"):
            lowered(functools.partial(loss_fn, places=True), params=params, batch=batch, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", FORMS)
@pytest.mark.filterwarnings("ignore:gradients are summed across devices in every tick of the pipeline, not once a step")
@pytest.mark.filterwarnings("ignore:pipe. blocks? .* of . of a Python loop, at .*test_pipeline")
def test_layers_in_other_forms_train_as_one_device(loss_fn):
    """With 6 microbatches in 4 stages, which 1F1B may have."""
    pipeline, num_microbatches, _ = FORMS[loss_fn]
    params, batch = init_params(), make_batches(1, size=48)[0]
    fields = {"mesh": zero.make_mesh(pipe=4), "stage": 1, "num_microbatches": num_microbatches, "pipeline": pipeline}
    assert_step_of_one_device(loss_fn, params, batch, **fields)


@pytest.mark.parametrize("is_more", [True, False])
def test_a_loss_that_does_something_else_with_one_example_is_refused_with_more_as_the_remedy(is_more):
    """It does more, or the same in another order."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        is_one = len(x) == 1
        x = jnp.tanh(x) if is_one or not is_more else x
        y = None if is_one else jnp.cos(x)
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])
        y = jnp.cos(x) if is_one else y
        return jnp.square((x + y) @ params["head"]).mean()

    why = "on a microbatch of one example than on several: give fewer microbatches, or"
    mesh, batch = zero.make_mesh(pipe=4), make_batches(1, size=8)[0]
    with pytest.raises(ValueError, match=why):
        lowered(loss_fn, batch=batch, stage=1)
    # Each of two devices calls the loss on one example: that is what the report is of.
    config = make_config(stage=1, num_microbatches=4)
    report = zero.pipeline_report(loss_fn, init_params(), batch, mesh=mesh, config=config)
    assert why in report.why_none


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipeline"), [(1, "gpipe"), (3, "circular:2"), (1, "1f1b"), (2, "1f1b:2")])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "pipeline", "loss_fn"),
    [
        (0, "gpipe", of_one_set),
        (2, "1f1b", of_one_set),
        (3, "circular:2", of_one_set),
        (3, "1f1b", of_one_set_in_a_loop),
        (2, "gpipe", of_one_set_in_a_loop),
    ],
)
def test_layers_that_share_params_train_as_one_device(stage, pipeline, loss_fn):
    """The params are sharded by ZeRO, over `pipe`, too, and whole in each stage."""
    params, batch, mesh = init_params(), make_batches(1)[0], zero.make_mesh(pipe=4)
    assert_step_of_one_device(loss_fn, params, batch, mesh=mesh, stage=stage, num_microbatches=4, pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipe", "pipeline"), [(0, 4, "1f1b"), (2, 2, "1f1b:2"), (3, 4, "1f1b")])
def test_an_encoder_before_the_layers_of_1f1b_trains_as_one_device(stage, pipe, pipeline):
    fields = {"params": init_params(), "stage": stage, "num_microbatches": 4, "pipeline": pipeline}
    batches, mesh = make_batches(), zero.make_mesh(pipe=pipe)
    state, history = run_zero(with_an_encoder, optimizer(), batches, mesh=mesh, **fields)
    params, opt_state, losses = run_plain(with_an_encoder, optimizer(), batches, params=init_params())
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], opt_state[0], tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)


def replaced(layer):
    """Returns a loss whose layers are others."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])[0]).mean()

    return loss_fn


def of_one_layer(params, batch):
    return jnp.square(jnp.tanh(params["embed"][batch["tokens"]] @ params["head"])).mean()


def in_parts(params, x):
    """A loss that adds up parts of the vocabulary, which are made again in the backward pass: no layers."""

    @jax.checkpoint
    def total(head, x):
        part = lambda i, total: total + jnp.tanh(x @ jax.lax.dynamic_slice_in_dim(head, i, 1, 1))[..., 0]  # noqa: E731
        return jax.lax.fori_loop(0, head.shape[1], part, jnp.zeros(x.shape[:2]))

    return total(params["head"], x).mean()


def unequal(params, batch):
    x = params["embed"][batch["tokens"]]
    for i in range(LAYERS):
        x = (jnp.tanh, jnp.sin, jnp.cos, jnp.exp, jnp.abs, jnp.square, jnp.arctan, jnp.negative)[i](
            x @ params["layers"]["w"][i]
        )
    return in_parts(params, x)


def test_a_checkpoint_around_what_is_no_layer_stays():
    def loss(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"]), None)  # noqa: E731
        return in_parts(params, jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0])

    params, batch = init_params(), make_batches(1)[0]
    closed = layers_outside(jax.make_jaxpr(loss)(params, batch), len(jax.tree.leaves(params)))
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert (names.count("scan"), names.count("remat2")) == (1, 1)


def looped(run):
    """Returns a loss with a Python loop; `run` takes the number of a layer, what was made before it, and a product."""

    def loss_fn(params, batch):
        xs = [params["embed"][batch["tokens"]]]
        for i in range(LAYERS):
            xs.append(run(i, xs, jnp.tanh(xs[-1] @ params["layers"]["w"][i])) + params["layers"]["bias"][i])
        return jnp.square(xs[-1]).mean()

    return loss_fn


def by_several_numbers(params, batch):
    layer = lambda x, i: x @ jnp.tanh(params["layers"]["w"][i])  # noqa: E731
    x = jax.lax.fori_loop(0, 4, lambda i, x: layer(layer(x, 2 * i), 2 * i + 1), params["embed"][batch["tokens"]])
    return jnp.square(x).mean()


def of_returned_params(params, batch):
    weights = params["layers"]["w"]
    layer = lambda x, i: (x + jnp.tanh(x @ weights[i]), weights)  # noqa: E731
    x, each = jax.lax.scan(layer, params["embed"][batch["tokens"]], jnp.arange(LAYERS))
    return jnp.square(x).mean() + jnp.square(each).mean()


def by_kernel(x, w):
    copied = lambda x: pl.pallas_call(lambda x, out: out.__setitem__(..., x[...]), out_shape=x, interpret=True)(x)  # noqa: E731
    return jax.vmap(copied)(x @ w["w"])


def shown(x, w):
    jax.debug.print("{}", x.sum())
    return x @ w["w"]


def in_layers(params, batch):
    """Layers that have a mask twice, one behind the other."""
    x = params["embed"][jnp.concatenate([batch["tokens"]] * 2)]
    twice = lambda: jnp.concatenate([batch["mask"]] * 2)[..., None]  # noqa: E731
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]) * twice(), None), x, params["layers"])
    return jnp.square(x @ params["head"]).mean()


def by_pattern(params, batch):
    """Every fourth example has the same weight, and a run of them has two examples."""
    weights = jnp.tile(jnp.arange(4.0), len(batch["tokens"]) // 4)[:, None, None]
    x = params["embed"][batch["tokens"]] * weights
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])
    return jnp.square(x @ params["head"]).mean()


def mapped(params, batch):
    """The layers are within a function of each device's examples."""
    whole, examples = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    own = lambda *args: jax.lax.pmean(loss_fn(*args), "data")  # noqa: E731
    mesh = zero.make_mesh(data=2, pipe=4)
    specs = {"in_specs": (whole, examples), "out_specs": whole, "check_vma": False}
    return jax.shard_map(own, mesh=mesh, **specs)(params, batch)


REFUSED = {
    "examples that are mixed": (replaced(lambda x, w: (x - x.mean(0)) @ w["w"]), "may be mixed at .*test_pipeline"),
    "a weighed mean": (replaced(lambda x, w: x @ w["w"] * (x.sum() / jnp.abs(x).sum())), "test_pipeline"),
    "tokens that are sorted": (
        replaced(lambda x, w: x + by_experts(x.reshape(-1, FEATURES), w).reshape(x.shape)),
        r"examples of a batch are sorted together at .*test_pipeline.*; sort what each example has by itself, by jax.",
    ),
    "a loop over examples": (
        lambda params, batch: jax.lax.map(lambda x: replaced(lambda x, w: x @ w["w"])(params, x), batch).mean(),
        r"within the loop at .*test_pipeline.*, each iteration of which runs all of them: take together what it goes",
    ),
    "a loop over tokens": (  # of which nothing is said that is true of examples alone
        lambda params, batch: jax.lax.map(
            lambda tokens: replaced(lambda x, w: x @ w["w"])(params, {**batch, "tokens": tokens[:, None]}),
            batch["tokens"].T,
        ).mean(),
        r"the layers are within the loop at [^,]*test_pipeline[^,]*, each iteration of which",
    ),
    "no layers": (of_one_layer, r"no jax.lax.scan over stacked params.*stack the params of equal layers"),
    "layers that differ": (unequal, r"8 kinds, block 1 and block 0 differ: sin of .*test_pipeline.*, and tanh of"),
    "another operation": (
        looped(lambda i, xs, y: xs[-1] + (jnp.sin if i == 4 else jnp.cos)(y)),
        r"of the 4 blocks .* block 2 and blocks 0, 1, 3 differ: sin of float32\[16,4,16\] at .*test_pipeline.*, and "
        r"cos of .*test_pipeline.*let all layers do the same",
    ),
    "another parameter": (
        looped(lambda i, xs, y: xs[-1] + jnp.cumsum(y, axis=2 if i == 3 else 1)),
        r"block . and .* differ: cumsum of .*test_pipeline.*, with axis=2 and with axis=1: let",
    ),
    "another convolution": (
        looped(lambda i, xs, y: xs[-1] + smoothed(y, [(2, 0)] if i == 4 else "SAME")),
        r"block . and .* differ: .* at .*test_pipeline.*, with .*: let",
    ),
    "layers before the one before": (
        looped(lambda i, xs, y: xs[-1] + jnp.sin(xs[max(i - 1, 0)] * y)),
        "of a Python loop read what layers further before them made, at .*test_pipeline.*: let",
    ),
    "other numbers": (by_several_numbers, "loop at .*test_pipeline.* otherwise than those of one layer by a number"),
    "params that are returned": (of_returned_params, "the loop at .*test_pipeline.* reads params at .*test_pipeline"),
    "effects": (replaced(shown), "debug.* at .*test_pipeline.* has effects"),
    "places": (
        looped(lambda i, xs, y: y * jnp.cos(jnp.arange(len(y)))[:, None, None]),
        "may depend on the places of examples in a batch; make these a leaf of the batch, as jnp.arange",
    ),
    "kernels": (replaced(by_kernel), "XLA does not partition the kernel at .*test_pipeline.* over stages"),
    "a pattern": (by_pattern, "examples of a batch may be mixed at .*test_pipeline"),
    "batches": (in_layers, "examples are put behind others at .*test_pipeline"),
    "mapped": (mapped, "what is in the jax.shard_map at .*test_pipeline.* is not looked into"),
}


def lowered(loss_fn, *, params=None, batch=None, mesh=None, **fields):
    mesh, config = mesh or zero.make_mesh(pipe=4), make_config(**{"stage": 2, "num_microbatches": 4, **fields})
    params, batch = params or init_params(), batch or make_batches(1)[0]
    state = zero.abstract_state(lambda _: params, optax.sgd(0.1), mesh=mesh, config=config)
    return zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config).lower(state, batch)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:pipe. block 0 of 8 of a Python loop, at .*test_pipeline")
def test_what_cannot_be_cut_is_refused_with_its_line(name):
    loss_fn, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"pipe=4: .*{message}.*leave pipe out"):
        lowered(loss_fn)
    report = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(pipe=4), config=make_config(num_microbatches=4)
    )
    assert not report.loops
    assert report.why_none in str(report)


@pytest.mark.parametrize("factor", [lambda params: params["gate"].sum(), lambda _: np.linspace(0, 1, LENGTH)])
def test_what_1f1b_makes_of_each_microbatch_is_refused_where_layers_read_that_of_the_batch(factor):
    """What is made of params, and of a constant of NumPy's."""

    def loss_fn(params, batch):
        mean = (batch["mask"] * factor(params)).mean()
        x = params["embed"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]) * mean, None), x, params["layers"])
        return jnp.square(x @ params["head"]).mean()

    with pytest.raises(ValueError, match="read what params and all examples have a part in; give pipeline='gpipe'"):
        lowered(loss_fn, pipeline="1f1b")


@pytest.mark.parametrize(("in_layers", "pipeline"), [(True, "gpipe"), (False, "1f1b")])
def test_scalars_like_those_of_the_batch_are_the_same_of_a_microbatch(in_layers, pipeline):
    """JAX types `jnp.ones_like` of a scalar with the mesh that the scalar has."""

    def loss_fn(params, batch):
        x, one = params["embed"][batch["tokens"]], lambda: jnp.ones_like(batch["mask"].sum())
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"]) * (one() if in_layers else 1.0), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, x, params["layers"])
        size = 1.0 if in_layers else jnp.maximum(batch["mask"].sum(), one())
        norm = jnp.square(params["head"]).sum() * one()
        return (jnp.square(x @ params["head"]).mean(2) * batch["mask"]).sum() / size + norm + x.mean()

    for stage in (1, 2):
        lowered(loss_fn, stage=stage, pipeline=pipeline)
    mesh, config = zero.make_mesh(pipe=4), make_config(stage=1, num_microbatches=4, pipeline=pipeline)
    assert zero.pipeline_report(loss_fn, init_params(), make_batches(1)[0], mesh=mesh, config=config).loops


def test_a_sum_that_goes_from_one_loop_into_another_is_refused_by_1f1b():
    def loss_fn(params, batch):
        x, total = params["embed"][batch["tokens"]], 0.0
        for half in (slice(0, 4), slice(4, 8)):
            layer = lambda c, w: ((x := c[0] + jnp.tanh(c[0] @ w), c[1] + jnp.square(x).mean()), None)  # noqa: E731
            (x, total), _ = jax.lax.scan(layer, (x, total), params["layers"]["w"][half])
            x = x * params["gate"]
        return jnp.square(x @ params["head"]).mean() + total

    message = "read a sum over the examples that those of another loop made .add it behind.* give pipeline='gpipe'"
    with pytest.raises(ValueError, match=message):
        lowered(loss_fn, pipeline="1f1b")


@pytest.mark.parametrize(("in_layers", "pipeline"), [(True, "gpipe"), (False, "1f1b")])
def test_a_number_that_is_another_of_one_example_is_refused(in_layers, pipeline):
    """Of more examples it is their number."""

    def loss_fn(params, batch):
        x, size = params["embed"][batch["tokens"]], max(len(batch["tokens"]), 2)
        sum_of = lambda x, is_here: jnp.square(x).sum() / size if is_here else jnp.square(x).mean()  # noqa: E731
        layer = lambda c, w: ((x := c[0] + jnp.tanh(c[0] @ w["w"]), c[1] + sum_of(x, in_layers)), None)  # noqa: E731
        (x, total), _ = jax.lax.scan(layer, (x, 0.0), params["layers"])
        return sum_of(x @ params["head"], not in_layers) + total

    mesh = zero.make_mesh(pipe=4, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="on a microbatch of one example than on several: give fewer microbatches"):
        lowered(loss_fn, mesh=mesh, pipeline=pipeline, num_microbatches=BATCH_SIZE)
    lowered(loss_fn, mesh=mesh, pipeline=pipeline, num_microbatches=4)


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_what_has_another_shape_of_one_example_is_not_that_of_the_batch(pipeline):
    """The layers that run are those of one example: the mean of two is another function there."""

    def loss_fn(params, batch):
        x, first = params["embed"][batch["tokens"]], batch["mask"][jnp.arange(min(len(batch["mask"]), 2))]
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"]) * first.mean(0)[:, None], None)  # noqa: E731
        return jnp.square(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]).mean()

    mesh = zero.make_mesh(pipe=4, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"pipe=4: .* at .*test_pipeline"):
        lowered(loss_fn, mesh=mesh, pipeline=pipeline, num_microbatches=BATCH_SIZE)
    lowered(loss_fn, mesh=mesh, pipeline=pipeline, num_microbatches=4)


def test_what_stages_0_and_1_do_not_return_names_the_stage_that_does():
    """At these each device has gradients of its own examples, so that aux is made of that of each."""
    perplexity = lambda p, b: jnp.exp(jax.nn.logsumexp(b["mask"].mean(0)) + b["mask"].std())  # noqa: E731
    with pytest.warns(UserWarning, match=r"without 'of all', .* of each device\. stage=2 returns all of it"):
        lowered(lambda p, b: (loss_fn(p, b)[0], {"of all": perplexity(p, b)}), stage=1)
    lowered(lambda p, b: (loss_fn(p, b)[0], {"of all": perplexity(p, b)}), stage=2)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"aux leaf 'key' holds PRNG keys, .* leave it out of aux, or set stage=2"):
        lowered(lambda p, b: (loss_fn(p, b)[0], {"key": key}), stage=1)
    odd = {**make_batches(1)[0], "odd": np.zeros(8)}
    with pytest.raises(ValueError, match=r"differ in their leading dim: .* or leave pipe out"):
        lowered(loss_fn, batch=odd)


def test_sizes_that_do_not_fit_are_refused_with_those_that_do():
    params = init_params()
    params["layers"] = jax.tree.map(lambda x: x[:3], params["layers"])
    with pytest.raises(ValueError, match=r"its 3 layers are fewer than 4 stages: choose pipe=3 or less;"):
        lowered(replaced(lambda x, w: x @ w["w"]), params=params)
    with pytest.raises(ValueError, match=r"its 8 layers are fewer than 4 stages of 4 groups: choose pipe=2 .*gpipe"):
        lowered(replaced(lambda x, w: x @ w["w"]), pipeline="circular:4")
    for name in ("circular:1", "circular:", "zb"):
        with pytest.raises(ValueError, match=rf"pipeline='{name}': give 'gpipe', '1f1b', or 'circular:2'"):
            make_config(pipeline=name)
    for count in (1, 2, 6):
        with pytest.raises(ValueError, match=rf"num_microbatches={count} with 4 stages.*give a multiple of 4, as"):
            lowered(loss_fn, num_microbatches=count)
    with pytest.raises(ValueError, match=r"20 examples.*2 devices.*4 microbatches.* a multiple of 8"):
        lowered(loss_fn, batch=make_batches(1, size=20)[0])
    for field in ({"stage": 1, "quantize_grads": "int8"}, {"stage": 3, "offload": "all"}):
        with pytest.raises(ValueError, match=r"with 4 stages \(pipe\) is not supported"):
            lowered(loss_fn, **field)


@pytest.mark.tpu_compiler
def test_on_a_tpu_a_microbatch_may_have_fewer_examples_than_there_are_devices():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    params = {"layers": np.zeros((4, 128, 128), np.float32)}
    loss = lambda p, b: jnp.square(jax.lax.scan(lambda x, w: (x @ w, None), b["x"], p["layers"])[0]).mean()  # noqa: E731
    batch, mesh = {"x": np.zeros((4, 8, 128), np.float32)}, zero.make_mesh(topology="v5p:2x2x1", pipe=2)
    lowered(loss, params=params, batch=batch, mesh=mesh, stage=3, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_table_of_which_a_stage_takes_many_rows_trains_as_on_one_device(stage):
    mean = ends_in(lambda logits, batch, params: (jnp.square(logits) * batch["mask"][..., None]).mean())
    params, batch = init_params(), make_batches(1, size=128)[0]
    assert_step_of_one_device(mean, params, batch, mesh=zero.make_mesh(pipe=2), stage=stage, num_microbatches=4)


HEADS = {
    "transposed": lambda x, table: x @ table.T,
    "in one operation": lambda x, table: jnp.einsum("btd,vd->btv", x, table),
    "in another dtype": lambda x, table: (x.astype(jnp.complex64) @ table.T.astype(jnp.complex64)).real,
    "from the left": lambda x, table: jnp.einsum("vd,btd->vbt", table, x),
    "in rows": lambda x, table: x.reshape(-1, x.shape[-1]) @ table.T,
    "in chunks": lambda x, table: jax.lax.map(lambda x: x @ table.T, x.swapaxes(0, 1)),
    "in a function": lambda x, table: jax.checkpoint(jax.jit(lambda x, table: jnp.tanh(x @ table.T)))(x, table),
    "twice": lambda x, table: x @ table.T + jnp.sin(x) @ (table @ table.T @ table).T,
}


@pytest.mark.slow
@pytest.mark.parametrize(  # how a head is written is the same to all stages
    ("stage", "head"), [(0, "transposed"), *(((i + 1) % 2, head) for i, head in enumerate(HEADS))]
)
def test_a_table_that_is_the_head_too_trains_as_on_one_device(stage, head):
    def tied(params, batch):
        x = params["embed"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.square(HEADS[head](x, params["embed"])).mean() + jnp.square(params["embed"]).sum()

    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(8, 16)) / 4, "layers": rng.normal(size=(4, 16, 16)) / 8}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    batch = {"tokens": rng.integers(0, 8, (64, 4))}
    assert_step_of_one_device(tied, params, batch, mesh=zero.make_mesh(pipe=2), stage=stage, num_microbatches=4)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("num_tokens", [256, 16])
def test_the_gradients_of_both_uses_of_a_table_are_reduce_scattered_over_stages_once(num_tokens):
    """XLA:TPU would all-reduce those of many lookups, and move the rows of few."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    shapes = {"embed": (512, 256), "layers": (4, 256, 256)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.square(x @ params["embed"].T).mean()

    mesh, batch = zero.make_mesh(topology="v5p:2x2x1", pipe=2), {"tokens": np.zeros((64, num_tokens), np.int32)}
    fields = {"stage": 1, "num_microbatches": 4, "precision": "bf16"}
    compiled = lowered(loss_fn, params=params, batch=batch, mesh=mesh, **fields).compile()
    rows = [x for x in zero.comms.measure(compiled, mesh=mesh).rows if x.axes == ("pipe",) and x.phase == "backward"]
    large = [x.kind for x in rows if x.total_sent_bytes > params["embed"].size / 2]
    assert {*large} <= {"reduce-scatter", "collective-permute"}
    assert large.count("reduce-scatter") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipeline"), [(1, "gpipe"), (3, "circular:2")])
def test_microbatches_that_are_rows_of_features_train_as_on_one_device(stage, pipeline):

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w) * batch["mask"], jnp.square(x).mean((1, 2)))  # noqa: E731
        x, squares = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.square(x).mean() + squares.mean()

    rng = np.random.default_rng(0)
    params = {"layers": rng.normal(size=(4, 8, 8)).astype(np.float32) / 4}
    batch = {"x": rng.normal(size=(64, 32, 8)), "mask": rng.random((64, 32, 1))}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)
    fields = {"stage": stage, "num_microbatches": 4, "pipeline": pipeline}
    assert_step_of_one_device(loss_fn, params, batch, mesh=zero.make_mesh(pipe=2), **fields)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_tpu_what_waits_to_enter_and_to_leave_is_not_copied_in_a_tick(stage):
    """Parts of microbatches are what a device has in memory one after another: XLA:TPU else lays them out anew."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    params = {"layers": np.zeros((4, 256, 256), np.float32)}
    loss = lambda p, b: jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b["x"], p["layers"])[0]).mean()  # noqa: E731
    batch, mesh = {"x": np.zeros((128, 64, 256), np.float32)}, zero.make_mesh(topology="v5p:2x2x1", pipe=2)
    fields = {"stage": stage, "num_microbatches": 8, "precision": "bf16", "overlap": False}
    text = lowered(loss, params=params, batch=batch, mesh=mesh, **fields).compile().as_text()
    loops = re.sub(r"^ENTRY .*?^}", "", text, flags=re.MULTILINE | re.DOTALL)
    copied = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", loops)]
    microbatch = 8 * 64 * 256  # of a device; as many of them wait as there are stages
    assert max(copied, default=0) <= microbatch


@pytest.mark.tpu_compiler
def test_stages_in_slices_of_their_own_come_first_in_a_mesh():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    best = zero.make_mesh(topology="2xv5e:2x2", pipe=2)
    grid = np.moveaxis(best.devices, [*best.axis_names].index("pipe"), -1).reshape(4, 2)
    own = jax.sharding.Mesh(grid, ("data", "pipe"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, batch = init_params(), make_batches(1, size=32)[0]
    reports = [
        zero.pipeline_report(loss_fn, params, batch, mesh=mesh, config=make_config(stage=2, num_microbatches=4))
        for mesh in (best, own)
    ]
    assert not reports[0].warning
    assert re.search("the mesh has data before pipe.* first, as zero.make_mesh", reports[1].warning)
    assert f"warning: {reports[1].warning}" in str(reports[1])
    with pytest.warns(UserWarning, match="the mesh has data before pipe"):
        lowered(loss_fn, params=params, batch=batch, mesh=own)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_experts_are_in_memory_and_sent_as_shards_but_for_a_layer():
    """The gradients of a stage are sums in shards, and so is that of the table, and there is no other copy of them."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    layers, experts, features, hidden, vocab = 4, 8, 512, 1024, 8192

    def loss_fn(params, batch):
        @jax.checkpoint
        def layer(x, w):
            of_experts = x.reshape(x.shape[0], experts, -1, features)
            y = jax.nn.relu(jnp.einsum("becd,edf->becf", of_experts, w["up"]))
            return x + jnp.einsum("becf,efd->becd", y, w["down"]).reshape(x.shape), None

        x, _ = jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])
        logits = (x @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()

    shapes = {"up": (layers, experts, features, hidden), "down": (layers, experts, hidden, features)}
    shapes = {"embed": (vocab, features), "layers": shapes}
    init = lambda _: jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    mesh, tx = zero.make_mesh(topology="v5p:2x2x4", pipe=2), optax.adam(1e-3)
    config = make_config(stage=3, num_microbatches=4, pipeline="1f1b", precision="bf16")
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((32, 64), jnp.int32)}
    compiled = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).compile()
    of_layer = 2 * 2 * experts * features * hidden
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * of_layer  # of a stage a sum is 4 of them, a shard a half
    large = [x for x in hlo.collectives(compiled) if x.total_sent_bytes > of_layer / 2]
    assert {x.kind for x in large} == {"all-gather", "reduce-scatter"}


def test_the_report_shows_stages_what_moves_and_the_bubble():
    report = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(pipe=4), config=make_config(num_microbatches=8)
    )
    (loop,) = report.loops
    assert report.num_stages == 4
    assert report.bubble == pytest.approx(3 / 11)
    assert loop.num_layers == LAYERS
    # Two examples a microbatch, on two devices: the mask, activations, the sums so far and the number of the layer.
    assert loop.travelling == ("float32[2,4]", "float32[2,4,16]", "float32[]", "int32[]", "float32[]")
    assert loop.bytes_per_tick == 4 * (4 + 64 + 3)
    assert "test_pipeline.py" in loop.where
    assert "8 layers at" in str(report)
    assert "27.3%; it keeps at most 11 (gpipe)" in str(report)
    config = make_config(num_microbatches=8, pipeline="1f1b")
    report = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(pipe=4), config=config
    )
    # No mask, and what is stacked: means, values of examples and of neither.
    stacks = ("float32[8]", "float32[8,2,16]", "float32[8]")
    assert report.loops[0].travelling == ("float32[2,4,16]", "float32[]", "int32[]", "float32[]", *stacks)
    assert report.num_kept == 7
    assert "keeps at most 7 (1f1b)" in str(report)
    config = make_config(num_microbatches=8, pipeline="circular")
    report = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(pipe=4), config=config
    )
    assert report.bubble == pytest.approx(3 / 19)
    assert "by stage: 0 and 4, 1 and 5, 2 and 6, 3 and 7" in str(report)
    assert "keeps at most 19 (circular:2)" in str(report)
    without = zero.pipeline_report(
        loss_fn, init_params(), make_batches(1)[0], mesh=zero.make_mesh(), config=make_config()
    )
    assert "make it with zero.make_mesh(pipe=...)" in str(without)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "k"), [("gpipe", 8), ("gpipe", 4), ("1f1b", 8), ("circular:2", 8), ("1f1b:2", 8)])
def test_the_estimate_has_what_the_compiled_step_sends_between_stages(pipeline, k):
    mesh, config = zero.make_mesh(pipe=4), make_config(stage=1, num_microbatches=k, pipeline=pipeline)
    model = dataclasses.replace(CONFIG, num_layers=8)
    init_fn, model_loss, batch = functools.partial(gpt.init, model), gpt.loss_fn(model), text_batch()
    state = zero.abstract_state(init_fn, optax.sgd(0.1), mesh=mesh, config=config)
    compiled = zero.make_train_step(model_loss, optax.sgd(0.1), mesh=mesh, config=config).lower(state, batch).compile()
    traced = zero.trace_loss(model_loss, state.params, batch, mesh=mesh, config=config)
    reports = (
        zero.comms.estimate(state, mesh=mesh, config=config, traced=traced),
        zero.comms.measure(compiled, mesh=mesh),
    )
    estimated, measured = (
        sum(row.total_sent_bytes for row in x.rows if row.kind == "collective-permute" and row.axes == ("pipe",))
        for x in reports
    )
    assert not reports[0].not_counted
    assert measured == pytest.approx(estimated, rel=0.02)
    residuals = zero.memory.transformer_residuals(model, batch_size=16, mesh=mesh, config=config)
    # Of 16 examples all of a device's, or those of a microbatch: 8 layers, or the inputs of two for each of 7, or of 1.
    assert (residuals.num_layers, residuals.batch_size) == {"1f1b": (14, 1), "1f1b:2": (15, 1)}.get(pipeline, (8, 2))


def test_the_estimate_of_1f1b_has_the_gradient_of_the_head_for_each_tick():
    """At stages 2 and 3 that is reduce-scattered over `data`, and those of all are summed over stages once."""
    mesh, config = zero.make_mesh(pipe=2), make_config(stage=2, num_microbatches=4, pipeline="1f1b")
    init_fn = lambda _: {"head": jnp.zeros((64, 64))}  # noqa: E731
    state = zero.abstract_state(init_fn, optax.sgd(0.1), mesh=mesh, config=config)
    rows = zero.comms.estimate(state, mesh=mesh, config=config).rows
    sent = {row.axes: row.total_sent_bytes for row in rows if row.phase == "backward"}
    size = 4 * 64 * 64
    assert sent == {("data",): pytest.approx(5 * size * 3 / 4), ("pipe",): pytest.approx(size / 4 / 2)}


@pytest.mark.parametrize(
    ("pipeline", "num_layers", "forward", "backward"),
    [("gpipe", 4, 1, 11), ("1f1b", 4, 11, 3), ("gpipe", 8, 11, 11), ("1f1b", 8, 11, 11), ("circular:2", 8, 9.5, 9.5)],
)
def test_the_estimate_gathers_the_one_layer_of_a_stage_once(pipeline, num_layers, forward, backward):
    """Before all ticks of a pass, or with 1F1B in each tick for both passes."""
    mesh, config = zero.make_mesh(pipe=4), make_config(stage=3, num_microbatches=8, pipeline=pipeline)
    init_fn = lambda _: {"w": jnp.zeros((num_layers, 64, 64)), "v": jnp.zeros((num_layers, 64, 64))}  # noqa: E731
    state = zero.abstract_state(init_fn, optax.sgd(0.1), mesh=mesh, config=config)
    rows = zero.comms.estimate(state, mesh=mesh, config=config).rows
    sent = {row.phase: row.total_sent_bytes for row in rows if row.kind == "all-gather" and row.axes == ("data",)}
    size = 2 * num_layers / 4 * 4 * 64 * 64 / 2  # of both leaves the half that a device has not
    assert sent == {"forward": pytest.approx(forward * size), "backward": pytest.approx(backward * size)}


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_large_gradients_of_stages_are_reduce_scattered_in_the_reduce_dtype(pipeline):
    """XLA:TPU all-reduces products of three dims beyond some 16 MB, on slices of few chips."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    like = jax.ShapeDtypeStruct
    layers = {"w": like((2, 2048, 8192), np.float32), "bias": like((2, 8192), np.float32)}
    params = {"layers": layers, "scale": like((2048,), np.float32), "head": like((8192, 2048), np.float32)}

    def loss_fn(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"])[:, :2048], None)  # noqa: E731
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.square(x * params["scale"] @ params["head"].T).astype(jnp.float32).mean()

    mesh, batch = zero.make_mesh(topology="v5p:2x2x2", pipe=2), {"x": like((64, 2048), np.float32)}
    precision = zero.Precision(compute=jnp.bfloat16, reduce=jnp.float32)
    fields = {"stage": 2, "num_microbatches": 4, "precision": precision, "pipeline": pipeline, "overlap": False}
    compiled = lowered(loss_fn, params=params, batch=batch, mesh=mesh, **fields).compile()
    rows = [x for x in zero.comms.measure(compiled, mesh=mesh).rows if x.kind in ("all-reduce", "reduce-scatter")]
    assert {x.kind for x in rows if x.total_sent_bytes > 2048 * 8192} == {"reduce-scatter"}
    assert {dtype for x in rows if x.phase == "backward" for dtype in x.dtypes} == {"f32"}


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_with_other_stages_and_schedules(tmp_path):
    batches, tx = make_batches(3), optax.adam(1e-2)
    settings = [(4, "1f1b", 1), (1, "gpipe", 3), (2, "1f1b:4", 2)]
    for number, ((pipe, schedule, stage), batch) in enumerate(zip(settings, batches, strict=True)):
        config = make_config(stage=stage, num_microbatches=4 if pipe > 1 else 1, pipeline=schedule)
        fields = {"mesh": zero.make_mesh(pipe=pipe), "config": config}
        if number:
            state = zero.restore(tmp_path, init_fn=init_params(), tx=tx, **fields).state
        else:
            state = zero.init_state(init_params(), tx, jax.random.key(0), **fields)
        state, _ = zero.make_train_step(lambda *args: loss_fn(*args)[0], tx, **fields)(state, batch)
        with zero.Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
            checkpointer.save(number + 1, state)
    params, _, _ = run_plain(lambda *args: loss_fn(*args)[0], tx, batches, params=init_params())
    assert_close(state.params, params, tolerance=FLOAT32)


@pytest.mark.parametrize(
    "pipeline", ["gpipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "circular:2"))]
)
def test_second_derivatives_are_refused(pipeline):
    tx = optax.GradientTransformationExtraArgs(lambda params: (), with_curvature)
    mesh = zero.make_mesh(devices=jax.devices()[:2], pipe=2)
    config = make_config(stage=1, num_microbatches=2, pipeline=pipeline)
    state = zero.abstract_state(lambda key: init_params(), tx, mesh=mesh, config=config)
    step = zero.make_train_step(lambda p, b: loss_fn(p, b)[0], tx, mesh=mesh, config=config)
    with pytest.raises(ValueError, match="second derivatives of the loss, which a pipeline does not have"):
        step.lower(state, make_batches()[0])
