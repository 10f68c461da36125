"""A model, its batches, and comparisons with one device, for the tests of pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, make_config, run_zero

import zero_jax as zero
from zero_jax.models import gpt

# As in test_parity.py: sums in another order, and Adam's division by a gradient's own size.
FLOAT32 = 1e-5
LAYERS, FEATURES, VOCAB, LENGTH, BATCH_SIZE = 8, 16, 24, 4, 16


def optimizer():
    return optax.chain(reference.keep_grads(), optax.adam(1e-2))


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


def ends_in(loss):
    """Returns a loss with another end: `loss(logits, batch, params)`."""

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["w"]), None), x, params["layers"])[0]
        return loss(x @ params["head"], batch, params)

    return loss_fn


def with_gradients_of_steps(params, batch):
    """Layers whose gradients are a function of those of the loss of the whole batch that is not linear."""
    stepped = jax.custom_vjp(lambda x: x)
    stepped.defvjp(lambda x: (x, None), lambda _, dot: (jnp.tanh(100 * dot) + 0.1,))
    layer = lambda x, w: (x + stepped(jnp.tanh(x @ w["w"])), None)  # noqa: E731
    return jnp.square(jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])[0]).mean()


def by_experts(x, w):
    """Tokens `[tokens, features]` that are sorted by their experts: two, which are the halves of a matrix."""
    experts = w["w"].reshape(2, FEATURES // 2, FEATURES)
    chosen = jnp.argmax(x[:, :2], axis=1)
    order = jnp.argsort(chosen)
    rows = jax.lax.ragged_dot(x[order, : FEATURES // 2], experts, jnp.bincount(chosen, length=2).astype(jnp.int32))
    return jnp.tanh(rows[jnp.argsort(order)] + w["bias"])


def lowered(loss_fn, *, params=None, batch=None, mesh=None, **fields):
    mesh, config = mesh or zero.make_mesh(pipe=4), make_config(**{"stage": 2, "num_microbatches": 4, **fields})
    params, batch = params or init_params(), batch or make_batches(1)[0]
    state = zero.abstract_state(lambda _: params, optax.sgd(0.1), mesh=mesh, config=config)
    return zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config).lower(state, batch)


def assert_stages(loss_fn, pipeline, num_microbatches, num_layers):
    """Asserts that all layers of a loss are stages."""
    config, mesh = make_config(stage=1, num_microbatches=num_microbatches, pipeline=pipeline), zero.make_mesh(pipe=4)
    report = zero.pipeline_report(loss_fn, init_params(), make_batches(1, size=48)[0], mesh=mesh, config=config)
    assert [loop.num_layers for loop in report.loops] == num_layers
    assert not report.left


def assert_form_of_one_device(loss_fn, pipeline, num_microbatches, num_layers):
    """Asserts that a form of layers trains as on one device: with 6 microbatches in 4 stages, too, in 1F1B."""
    params, batch = init_params(), make_batches(1, size=48)[0]
    fields = {"mesh": zero.make_mesh(pipe=4), "stage": 1, "num_microbatches": num_microbatches, "pipeline": pipeline}
    assert_step_of_one_device(loss_fn, params, batch, **fields)


def form_tests(forms, *, trained_elsewhere=()):
    """Returns the tests of losses with layers in forms of their own: that they are stages, and train as one device.

    `forms` has the arguments of `assert_stages` for each loss; those that are `trained_elsewhere` have further tests.
    """

    @pytest.mark.parametrize("loss_fn", forms)
    @pytest.mark.filterwarnings("ignore:pipe. blocks? .* of . of a Python loop, at .*test_pipeline")
    def are_stages(loss_fn):
        assert_stages(loss_fn, *forms[loss_fn])

    @pytest.mark.slow
    @pytest.mark.parametrize("loss_fn", [x for x in forms if x not in trained_elsewhere])
    @pytest.mark.filterwarnings(
        "ignore:gradients are summed across devices in every tick of the pipeline, not once a step"
    )
    @pytest.mark.filterwarnings("ignore:pipe. blocks? .* of . of a Python loop, at .*test_pipeline")
    def train_as_one_device(loss_fn):
        assert_form_of_one_device(loss_fn, *forms[loss_fn])

    return are_stages, train_as_one_device
