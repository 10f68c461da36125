"""Layers as the stages of a pipeline: every stage of ZeRO trains as plain optax does on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec
from pipeline_cases import (
    CONFIG,
    FEATURES,
    FLOAT32,
    LAYERS,
    VOCAB,
    assert_step_of_one_device,
    ends_in,
    first_step,
    init_params,
    loss_fn,
    lowered,
    make_batches,
    one_step,
    optimizer,
)
from reference import assert_close, make_config, run_plain, run_zero

import zero_jax as zero
from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms.pipeline.cut import LayerLoop
from zero_jax.transforms.pipeline.place import StagePlace

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
        places = jnp.asarray(places.swapaxes(0, 1).reshape(k, -1))

        def of_microbatch(number):
            x = params["embed"][batch["tokens"][places[number]]]
            return jnp.square(layers(params, x, keys, number) @ params["head"]).mean()

        return jax.lax.map(of_microbatch, jnp.arange(k)).mean()

    config = make_config(stage=2, num_microbatches=k, pipeline=pipeline)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(3), mesh=mesh, config=config)
    loss, grads = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config).grads(state, batch)
    key = jax.random.fold_in(state.key, state.step)
    expected = jax.jit(jax.value_and_grad(by_hand))(params, batch, key)
    assert_close((loss, grads), expected, tolerance=FLOAT32)


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
    fields = {"stage": 2, "num_microbatches": 4, "pipeline": pipeline, "remat": remat, "key": jax.random.key(3)}
    tx = optax.chain(reference.keep_grads(), optax.sgd(0.1))
    state, step = reference.make_trainer(loss_fn, tx, mesh=mesh, params=params, **fields)
    key = jax.random.fold_in(state.key, state.step)
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch, key)
    state, metrics = step(state, batch)
    assert_close((metrics.loss, state.opt_state[0]), (loss, grads), tolerance=FLOAT32)
    for name, value in aux.items():
        np.testing.assert_array_equal(jax.random.key_data(metrics.aux[name]), jax.random.key_data(value))


@pytest.fixture(scope="module")
def adapted():
    """A loss of adapters, their variables, and its value and gradients on one device."""
    lora, plain = zero.Lora(rules={"layers/w": "sio"}, rank=2, base="own"), lambda *args: loss_fn(*args)[0]
    variables = jax.jit(lora.init)(init_params(), jax.random.key(0))
    noisy, base = jax.tree.map(lambda x: x + 0.1, variables.params), variables.model_state
    adapted, batch = lora.loss_fn(plain), make_batches(1)[0]
    expected = jax.jit(jax.value_and_grad(lambda params: adapted(params, batch, model_state=base)[0]))(noisy)
    return adapted, zero.Variables(params=noisy, model_state=base), expected


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "circular:2"])
def test_adapters_on_a_frozen_base(pipeline, adapted):
    loss_fn, variables, expected = adapted
    fields = {"stage": 3, "num_microbatches": 4, "pipeline": pipeline}
    found = one_step(loss_fn, variables, make_batches(1)[0], mesh=zero.make_mesh(pipe=2), **fields)
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
