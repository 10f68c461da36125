"""Batches behind one another, as what is preferred and what is not, go through a pipeline together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_cases import (
    FLOAT32,
    LAYERS,
    LENGTH,
    VOCAB,
    form_tests,
    init_params,
    lowered,
    make_batches,
    optimizer,
)
from reference import assert_close, make_config, run_plain, run_zero

import zero_jax as zero


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


FORMS = {
    of_pairs: ("1f1b", 4, [LAYERS]),
    of_two_views: ("gpipe", 4, [LAYERS]),
}
test_layers_in_other_forms_are_stages, test_layers_in_other_forms_train_as_one_device = form_tests(FORMS)


@functools.cache
def preferred_on_one_device(size):
    """Returns the run of `run_plain`, and the aux of its first step."""
    batches = make_batches(size=size)
    run = run_plain(lambda *args: preferred(*args)[0], optimizer(), batches, params=init_params())
    return run, jax.jit(preferred)(init_params(), batches[0])[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "pipe", "size", "pipeline"),
    [
        (3, 4, 16, "gpipe"),
        (2, 4, 16, "1f1b"),
        (2, 2, 32, "circular:2"),
        (3, 2, 32, "1f1b:2"),
        (0, 4, 16, "1f1b"),
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
    (params, opt_state, losses), aux = preferred_on_one_device(size)
    assert_close([x.loss for x in history], losses, tolerance=FLOAT32)
    assert_close(state.opt_state[0], opt_state[0], tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
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
        keys = jax.random.split(key, LAYERS)
        places = np.arange(32).reshape(2, k, -1)
        if pipeline == "gpipe":
            places = places.reshape(2, pipe, k // pipe, -1).swapaxes(1, 2).reshape(places.shape)
        places = jnp.asarray(places.swapaxes(0, 1))

        def of_microbatch(number):
            tokens = batch["tokens"][places[number]]
            tokens = jnp.stack([tokens, tokens[..., ::-1]], 1).reshape(-1, LENGTH)
            x = loss(params, tokens, jax.vmap(lambda key: jax.random.fold_in(key, number))(keys))
            x = x.reshape(2, 2, -1, LENGTH, VOCAB)
            return jnp.square(x[:, 0] - 0.5 * x[:, 1]).mean()

        return jax.lax.map(of_microbatch, jnp.arange(k)).mean()

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
