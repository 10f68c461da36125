"""What compiled pipelines keep and send, on TPUs too, and what reports and estimates say of it."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from pipeline_cases import (
    CONFIG,
    LAYERS,
    init_params,
    loss_fn,
    lowered,
    make_batches,
)
from reference import make_config

import zero_jax as zero
from zero_jax import hlo
from zero_jax.models import gpt


def text_batch(size=16):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 32, (size, 9), dtype=np.int32)
    segments = np.sort(rng.integers(0, 3, (size, 8), dtype=np.int32), axis=1)
    weights = rng.random((size, 8), dtype=np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": weights}


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


@pytest.mark.tpu_compiler
def test_on_a_tpu_a_microbatch_may_have_fewer_examples_than_there_are_devices():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    params = {"layers": np.zeros((4, 128, 128), np.float32)}
    loss = lambda p, b: jnp.square(jax.lax.scan(lambda x, w: (x @ w, None), b["x"], p["layers"])[0]).mean()  # noqa: E731
    batch, mesh = {"x": np.zeros((4, 8, 128), np.float32)}, zero.make_mesh(topology="v5p:2x2x1", pipe=2)
    lowered(loss, params=params, batch=batch, mesh=mesh, stage=3, num_microbatches=2)


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
    assert "pipeline_cases.py" in loop.where
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
@pytest.mark.parametrize(("pipeline", "k"), [("gpipe", 4), ("1f1b", 8), ("circular:2", 8), ("1f1b:2", 8)])
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
