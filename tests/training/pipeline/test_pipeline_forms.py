"""Layers that are scanned in any form are stages, and train as on one device."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from pipeline_cases import (
    FEATURES,
    FLOAT32,
    LAYERS,
    VOCAB,
    assert_step_of_one_device,
    by_experts,
    form_tests,
    init_params,
    make_batches,
    optimizer,
    with_gradients_of_steps,
)
from reference import assert_close, make_config, run_plain, run_zero

import zero_jax as zero


def in_a_checkpoint(params, batch):
    """A `jax.checkpoint` around all layers and the head."""

    def run(params, x):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])[0]
        return x @ params["head"]

    return jnp.square(jax.checkpoint(run)(params, params["embed"][batch["tokens"]])).mean()


def with_skips(params, batch):
    """Layers that read what those of another chain have made, the last one first."""
    layer = lambda x, w: x + jnp.tanh(x @ w["w"])  # noqa: E731
    x, skips = jax.lax.scan(lambda x, w: (layer(x, w), x), params["embed"][batch["tokens"]], params["layers"])
    slices = params["layers"], jnp.arange(LAYERS)
    x = jax.lax.scan(lambda x, w: (layer(x + skips[LAYERS - 1 - w[1]], w[0]), None), x, slices)[0]
    return jnp.square(x @ params["head"]).mean()


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


def of_complex_numbers(params, batch):
    """Layers that turn features by an angle and multiply them by complex params, which `jax.checkpoint` cannot keep."""

    def layer(x, w):
        turned = (x * jnp.exp(1j * w["bias"])) @ (w["w"] + 1j * w["w"].T)
        return x + jnp.tanh(turned.real + jnp.abs(turned)), None

    return jnp.square(jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0]).mean()


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


def beside_a_reference(params, batch):
    """Layers, and others without a gradient, as of a reference model, whose logits are larger than what they make."""

    def hidden(layers):
        layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["bias"]), None)  # noqa: E731
        return jax.lax.scan(layer, params["embed"][batch["tokens"]], layers)[0]

    frozen = jax.lax.stop_gradient(jax.nn.softmax(hidden(jax.tree.map(jnp.sin, params["layers"])) @ params["head"]))
    logps = jax.nn.log_softmax(hidden(params["layers"]) @ params["head"])
    return -((frozen * logps).sum(-1) * batch["mask"]).mean()


def with_sorted_tokens(params, batch):
    """A mixture of experts without capacities, which sorts the tokens of each example by itself."""
    x = params["embed"][batch["tokens"]]
    layer = lambda x, w: (x + jax.lax.map(lambda row: by_experts(row, w), x), None)  # noqa: E731
    return jnp.square(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]).mean()


FORMS = {
    with_sorted_tokens: ("1f1b", 4, [LAYERS]),
    beside_a_reference: ("1f1b", 4, [LAYERS] * 2),
    of_one_set_in_reverse: ("gpipe", 4, [LAYERS]),
    of_one_set: ("circular:2", 4, [LAYERS]),
    of_one_set_in_a_loop: ("1f1b", 6, [LAYERS]),
    with_an_early_exit: ("1f1b", 4, [LAYERS // 2] * 2),
    with_an_encoder: ("1f1b", 4, [LAYERS // 2] * 2),
    in_reverse: ("gpipe", 4, [LAYERS - 1, LAYERS, LAYERS]),
    in_a_checkpoint: ("1f1b", 6, [LAYERS]),
    with_skips: ("gpipe", 4, [LAYERS] * 2),
    one_in_a_checkpoint: ("gpipe", 8, [LAYERS] * 2),
    with_returned_keys: ("circular:2", 8, [LAYERS]),
    with_examples: ("1f1b", 6, [LAYERS]),
    with_convolutions: ("1f1b", 4, [LAYERS]),
    of_complex_numbers: ("1f1b:2", 4, [LAYERS]),
    with_gradients_of_steps: ("circular:2", 4, [LAYERS]),
    with_a_token: ("gpipe", 4, [LAYERS]),
    over_examples: ("1f1b", 4, [LAYERS]),
    with_a_mean: ("circular:2", 4, [LAYERS]),
}
# They train in tests of their own, at more stages.
OF_OWN_TESTS = {of_one_set, of_one_set_in_a_loop, with_an_encoder}
test_layers_in_other_forms_are_stages, test_layers_in_other_forms_train_as_one_device = form_tests(
    FORMS, trained_elsewhere=OF_OWN_TESTS
)


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


@functools.cache
def encoder_on_one_device():
    return run_plain(with_an_encoder, optimizer(), make_batches(), params=init_params())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pipe", "pipeline"), [(0, 4, "1f1b"), (2, 2, "1f1b:2"), (3, 4, "1f1b")])
def test_an_encoder_before_the_layers_of_1f1b_trains_as_one_device(stage, pipe, pipeline):
    fields = {"params": init_params(), "stage": stage, "num_microbatches": 4, "pipeline": pipeline}
    batches, mesh = make_batches(), zero.make_mesh(pipe=pipe)
    state, history = run_zero(with_an_encoder, optimizer(), batches, mesh=mesh, **fields)
    params, opt_state, losses = encoder_on_one_device()
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], opt_state[0], tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
