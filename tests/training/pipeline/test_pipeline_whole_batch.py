"""What is of the whole batch, before the layers of a pipeline and in aux; and what needs gradients of devices' own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, make_config

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, restore

# As in test_parity.py: sums in another order.
FLOAT32 = 1e-5
LAYERS, FEATURES, VOCAB, LENGTH, BATCH_SIZE = 4, 32, 24, 4, 16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 6


PARAMS = {"embed": normal(VOCAB, FEATURES), "w": normal(LAYERS, FEATURES, FEATURES), "head": normal(FEATURES, VOCAB)}
BATCH = {
    "tokens": np.random.default_rng(1).integers(0, VOCAB, (BATCH_SIZE, LENGTH), dtype=np.int32),
    "images": normal(BATCH_SIZE, LENGTH, FEATURES, seed=2),
    "order": np.random.default_rng(3).permutation(BATCH_SIZE).astype(np.int32),
}


def on_one_device(loss_fn):
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(PARAMS, BATCH)
    return (loss, grads), aux


def one_step(loss_fn, *, mesh, **fields):
    """Returns the loss and gradients, and the metrics, of a step."""
    config = make_config(**{"num_microbatches": 4, **fields})
    tx = optax.chain(reference.keep_grads(), optax.sgd(0.1))
    state = zero.init_state(PARAMS, tx, jax.random.key(0), mesh=mesh, config=config)
    state, metrics = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, BATCH)
    return (metrics.loss, state.opt_state[0]), metrics


def of_mixed_examples(params, batch):
    """Examples that are mixed and sorted before layers, which read their places, carry the largest value and stack the
    smallest; aux that no microbatch has a part of."""
    x = batch["images"][jnp.argsort(batch["order"])]
    x = 0.7 * x + 0.3 * x[::-1] + params["embed"][batch["tokens"]]
    places = jnp.arange(len(x))

    def layer(carry, w):
        x, most, has_nan = carry
        x = x + jnp.tanh(x @ w) * jnp.cos(places)[:, None, None]
        return (x, jnp.maximum(most, x.max((0, 1))), has_nan | jnp.isnan(x).any()), (x.min(), (8 * x).astype(int).max())

    start = x, jnp.full(FEATURES, -1.0), jnp.zeros((), bool)
    (x, most, has_nan), (least, largest) = jax.lax.scan(layer, start, params["w"])
    logits = x @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    aux = {
        "most": most,
        "has_nan": has_nan,
        "least": least,
        "largest": largest,
        "logits": logits.max(),
        "median": jnp.median(losses.mean(1)),
        "std": logits.std(),
        "sorted": jnp.sort(losses[:, 0]),
        "positive": (logits > 0).sum() // len(x),
    }
    return losses.mean(), aux


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", pytest.param("circular:2", marks=pytest.mark.slow)])
def test_values_of_the_whole_batch_are_those_of_one_device(pipeline):
    found, metrics = one_step(of_mixed_examples, mesh=zero.make_mesh(pipe=2), stage=2, pipeline=pipeline)
    expected, aux = on_one_device(of_mixed_examples)
    assert_close(found, expected, tolerance=FLOAT32)
    assert_close(metrics.aux, aux, tolerance=FLOAT32)


def of_batch_statistics(params, batch):
    x = params["embed"][batch["tokens"]]
    x = (x - x.mean((0, 1))) / x.std((0, 1))
    x, most = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), x.max()), x, params["w"])
    return jnp.square(x @ params["head"]).mean(), {"most": most}


def of_batch_statistics_in_layers(params, batch):
    """Layers on the sorted tokens of the batch that read means over it of what params and constants of NumPy's have
    made, and carry other numbers of it and their number; the loss has the largest values of all without a gradient."""
    x, carried = params["embed"][batch["tokens"]], jnp.std(batch["images"])
    read = (x * np.linspace(0.5, 1, LENGTH, dtype=np.float32)[:, None]).mean((0, 1))
    tokens = x.reshape(-1, FEATURES)

    def layer(carry, w):
        x, total, spread, size = carry
        x = x + jnp.tanh(x @ w * read * spread) * size
        return (x, total + jnp.square(x).sum(), spread * 0.9, size / BATCH_SIZE), x.max()

    start = tokens[jnp.argsort(tokens[:, 0])], jnp.square(x).sum(), carried, float(len(x))
    (x, total, spread, _), largest = jax.lax.scan(layer, start, params["w"])
    loss = jnp.square(x @ params["head"] * jnp.repeat(batch["images"][:, 0, 0], LENGTH)[:, None]).mean()
    return loss + 1e-3 * total + spread + jax.lax.stop_gradient(largest).sum(), {}


def of_an_encoder(params, batch):
    """Two chains: layers read a sum that others made, go on with another one, and behind them examples are mixed."""

    def layer(carry, w):
        x, total, count, read = carry
        x = x + jnp.tanh(x @ w * read)
        return (x, total + jnp.square(x).sum(), count + (x > 0).sum(), read), None

    start = params["embed"][batch["tokens"]], 0.0, 0, 1.0
    (other, total, count, _), _ = jax.lax.scan(layer, start, params["w"] / 2)
    start = batch["images"] + other, total, count, total / other.size
    (x, total, count, _), _ = jax.lax.scan(layer, start, params["w"])
    return jnp.square(x - other[::-1]).mean() + 1e-3 * total, {"count": count}


def of_mixed_pairs(params, batch):
    """Pairs of examples that are mixed and put behind one another, and a function of their order."""
    x = params["embed"][jnp.concatenate([batch["tokens"][batch["order"]], batch["tokens"]])]
    weights = jnp.concatenate([batch["images"], batch["images"] * 2]).mean((1, 2))
    scale = 1 + jnp.dot(weights, jnp.cos(jnp.arange(len(weights)) * 1.0))
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["w"])
    chosen, rejected = jnp.split(jnp.square(x @ params["head"]).mean((1, 2)), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean() * scale, {}


def of_rows_in_a_loop(params, batch):
    """Layers of a Python loop that look up by the numbers of examples, and divide by how many there are."""
    x = params["embed"][batch["tokens"]]
    for w in params["w"]:
        first = x[jnp.arange(len(x)), jnp.argmax(x[..., 0], 1)]
        x = x + jnp.tanh(x @ w) * first[:, None] / np.asarray(float(len(x)), np.float32)
    return jnp.square(x @ params["head"]).mean(), {}


OF_THE_BATCH = [of_batch_statistics, of_batch_statistics_in_layers, of_mixed_pairs, of_rows_in_a_loop]


@pytest.mark.parametrize("loss_fn", OF_THE_BATCH)
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", pytest.param("circular:2", marks=pytest.mark.slow)])
def test_layers_take_what_is_made_of_the_batch_by_all_schedules(loss_fn, pipeline):
    found, metrics = one_step(loss_fn, mesh=zero.make_mesh(pipe=2), stage=2, pipeline=pipeline)
    expected, aux = on_one_device(loss_fn)
    assert_close((found, metrics.aux), (expected, aux), tolerance=FLOAT32)


def test_masks_that_1f1b_counts_for_the_batch_are_those_that_it_applies():
    """Drawn in the loss, for tokens and for examples whose weights are returned."""

    def loss_fn(params, batch):
        mask = jax.random.bernoulli(jax.random.key(1), 0.3, batch["tokens"].shape)
        weights = jax.random.uniform(jax.random.key(2), (len(mask), 1))
        x = params["embed"][jnp.where(mask, 0, batch["tokens"])]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["w"])
        losses = jnp.square(x @ params["head"]).mean(-1)
        return (losses * mask * weights).sum() / mask.sum(), {"weights": weights}

    found, metrics = one_step(loss_fn, mesh=zero.make_mesh(pipe=2), stage=2, pipeline="1f1b")
    expected, aux = on_one_device(loss_fn)
    assert_close((found, metrics.aux), (expected, aux), tolerance=FLOAT32)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_layers_take_what_those_of_another_loop_add_up(pipeline):
    """Simulated devices run more collectives at once here than they have threads for: this is traced alone."""
    config = make_config(stage=2, num_microbatches=4, pipeline=pipeline)
    report = zero.pipeline_report(of_an_encoder, PARAMS, BATCH, mesh=zero.make_mesh(pipe=2), config=config)
    assert ([loop.num_layers for loop in report.loops], report.left) == ([LAYERS, LAYERS], ())
    # What is made of the first chain waits, in order and mixed, and gradients of it: those of 4 examples on a device.
    waiting = [(("float32[16,4,32]",) * 2, 2 * 2 * 4 * 4 * 32 * 4)] if pipeline == "1f1b" else [((), 0)]
    assert [(loop.waiting, loop.waiting_bytes) for loop in report.loops][1:] == waiting
    assert ("outside of the loop, in each stage" in str(report)) == (pipeline == "1f1b")


@pytest.mark.filterwarnings("ignore:pipe=2. the layers at .*whole_batch.* are not cut into stages, .* may be mixed")
def test_examples_that_another_tower_mixes_within_its_layers_are_those_of_the_batch():
    """No param has a part in them, but a microbatch of that tower would mix its own."""

    def loss_fn(params, batch):
        mixing = lambda x, w: (x + jnp.tanh(x @ w) * batch["images"][::-1], None)  # noqa: E731
        other, _ = jax.lax.scan(mixing, params["embed"][batch["tokens"]], params["w"][:2])
        loss, aux = plain(params, batch)
        return loss + jnp.square(other).mean(), aux

    found, _ = one_step(loss_fn, mesh=zero.make_mesh(pipe=2), stage=2, pipeline="1f1b")
    assert_close(found, on_one_device(loss_fn)[0], tolerance=FLOAT32)


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_a_maximum_that_the_loss_reads_is_refused(pipeline):
    def loss_fn(params, batch):
        loss, aux = of_batch_statistics({**params, "embed": jnp.ones_like(params["embed"])}, batch)
        return loss + aux["most"].sum(), aux

    with pytest.raises(ValueError, match="what its layers make is the largest value of all examples, and the loss may"):
        one_step(loss_fn, mesh=zero.make_mesh(pipe=2), stage=2, pipeline=pipeline)


def test_derivatives_of_what_the_loss_does_not_read_may_be_infinite():
    """Of a root at zero, in a stack and in a carry; another carry is read by the next layer alone. JAX derives all that
    a `jax.checkpoint` returns."""

    def loss_fn(params, batch):
        def layer(carry, w):
            x, before, norm = carry
            zero = jnp.sqrt(x - x)
            return (x + jnp.tanh((x + before) @ w), 0.5 * x, norm + zero.mean()), zero[:, 0]

        x = params["embed"][batch["tokens"]]
        (x, _, norm), roots = jax.lax.scan(jax.checkpoint(layer), (x, x, 0.0), params["w"])
        return jnp.square(x @ params["head"]).mean(), {"norm": norm, "roots": roots}

    found, metrics = one_step(loss_fn, mesh=zero.make_mesh(pipe=2), stage=2, pipeline="1f1b")
    expected, aux = on_one_device(loss_fn)
    assert_close((found, metrics.aux), (expected, aux), tolerance=FLOAT32)


def plain(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), params["embed"][batch["tokens"]], params["w"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["tokens"]).mean(), {}


@functools.cache
def size_of_shares(num_shares):
    """Returns the mean of the squared norms of the gradients of equal shares of the batch."""
    grad = jax.jit(jax.grad(lambda *args: plain(*args)[0]))
    shares = (jax.tree.map(lambda x, i=i: np.split(x, num_shares)[i], BATCH) for i in range(num_shares))
    return np.mean([float(optax.tree.norm(grad(PARAMS, share), squared=True)) for share in shares])


@pytest.mark.parametrize(
    ("stage", "sizes", "pipeline", "num_shares"),
    [
        (1, {"pipe": 2}, "1f1b", 4),
        pytest.param(0, {"pipe": 2, "model": 2}, "circular:2", 2, marks=pytest.mark.slow),
        pytest.param(3, {"pipe": 2, "replica": 2}, "gpipe", 2, marks=pytest.mark.slow),
    ],
)
def test_the_noise_scale_is_of_what_devices_and_replicas_have(stage, sizes, pipeline, num_shares):
    mesh = zero.make_mesh(**sizes)
    _, metrics = one_step(plain, mesh=mesh, stage=stage, pipeline=pipeline, noise_scale=True)
    assert int(metrics.num_small_grads) == num_shares
    np.testing.assert_allclose(metrics.small_grad_norm_sq, size_of_shares(num_shares), rtol=FLOAT32)


def check_coded(quantize, **fields):
    """Checks that gradients are within what eight bits leave of them, and no nearer where something is quantized."""
    (loss, found), _ = one_step(plain, quantize=quantize, **fields)
    (expected_loss, expected), _ = on_one_device(plain)
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), found, expected)
    assert all(1e-4 < error < 0.03 for error in jax.tree.leaves(errors)), errors


@pytest.mark.parametrize(
    ("stage", "sizes", "pipeline", "fields"),
    [
        (1, {"pipe": 2}, "1f1b", {"grads": "int8", "error_feedback": True}),
        pytest.param(1, {"pipe": 2, "model": 2}, "circular:2", {"grads": "int8"}, marks=pytest.mark.slow),
        pytest.param(3, {"pipe": 2}, "1f1b", {"gathers": "int8"}, marks=pytest.mark.slow),
        pytest.param(
            3, {"pipe": 2, "replica": 2}, "gpipe", {"grads": "int8", "grads_over": "replica"}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_devices_send_of_a_stage_may_be_quantized(stage, sizes, pipeline, fields):
    quantize = zero.Quantize(block_size=4, **fields)
    check_coded(quantize, mesh=zero.make_mesh(**sizes), stage=stage, pipeline=pipeline)


def test_what_stage_3_does_not_have_is_restored_at_stage_1(tmp_path):
    """Arrays are read as shards of stage 3, which sends gradients of a pipeline in every tick."""
    mesh, tx = zero.make_mesh(pipe=2), optax.sgd(0.1)
    quantize = zero.Quantize(grads="int8", block_size=4, error_feedback=True)
    config = make_config(stage=1, num_microbatches=4, noise_scale=True, quantize=quantize)
    state = zero.init_state(PARAMS, tx, jax.random.key(0), mesh=mesh, config=config)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    restored = restore(tmp_path, init_fn=lambda key: PARAMS, tx=tx, mesh=mesh, config=config)
    assert_close(restored.state.params, PARAMS, tolerance=0)
    assert jax.tree.map(jnp.shape, restored.state.grad_errors) == jax.tree.map(jnp.shape, state.grad_errors)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_params_of_stages_may_be_in_host_memory(pipeline):
    found, _ = one_step(plain, mesh=zero.make_mesh(pipe=2), stage=3, pipeline=pipeline, offload="all")
    assert_close(found, on_one_device(plain)[0], tolerance=FLOAT32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 2, "quantize": zero.Quantize(grads="int8")}, "grads='int8' with pipe: at stage=2 .*give stage=1"),
        ({"stage": 1, "quantize": zero.Quantize(grads="int8", grads_over="pipe")}, "not summed over 'pipe'"),
        (
            {"stage": 1, "pipeline": "1f1b:2", "quantize": zero.Quantize(grads="int8", error_feedback=True)},
            "error_feedback with pipeline='1f1b:2'.*give pipeline='gpipe' or '1f1b'",
        ),
        ({"stage": 2, "noise_scale": True}, "noise_scale with pipe: .*give stage=1 and data=2 or more, or replica=2"),
        ({"stage": 3, "secondary": ("data",)}, r"secondary with 2 stages \(pipe\) is not supported: leave secondary"),
    ],
)
def test_what_stages_do_not_have_alone_is_refused_with_what_does(fields, message):
    with pytest.raises(ValueError, match=message):
        one_step(plain, mesh=zero.make_mesh(pipe=2), **fields)
