"""Losses that 1F1B takes by microbatch, several chains of layers, and what it refuses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
import reference
from pipeline_cases import (
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
    with_gradients_of_steps,
)
from reference import assert_close, make_config

import zero_jax as zero
from zero_jax import hlo


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

    refused = {
        contrasted: "the loss is not made of those of microbatches: .* at .*test_pipeline",
        quotient: "the loss is a function of several sums over the examples",
    }
    for loss, message in refused.items():
        with pytest.raises(ValueError, match=f"pipeline='1f1b'.*{message}.*give pipeline='gpipe'; or leave pipe out"):
            lowered(ends_in(loss), pipeline="1f1b")
        lowered(ends_in(loss), pipeline="gpipe")
    with pytest.raises(ValueError, match=r"pipeline='1f1b'.*there are several that have to be.*give pipeline='gpipe'"):
        lowered(of_columns, pipeline="1f1b")
    with pytest.raises(ValueError, match=r"derivatives that are defined at .*pipeline_cases.*give pipeline='gpipe'"):
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


@functools.cache
def two_chains_on_one_device(kind):
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(two_chains, kind=kind)))
    return value_and_grad(init_params(), make_batches(1)[0])


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
    loss_fn, batch = functools.partial(two_chains, kind=kind), make_batches(1)[0]
    fields = {"mesh": zero.make_mesh(pipe=2), "stage": 1, "num_microbatches": 4, "pipeline": pipeline}
    tx = optax.chain(reference.keep_grads(), optax.sgd(0.1))
    state, step = reference.make_trainer(loss_fn, tx, params=init_params(), **fields)
    program = hlo.parse(step.lower(state, batch).compile())
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
    state, metrics = step(state, batch)  # the same program, which is kept
    assert_close((metrics.loss, state.opt_state[0]), two_chains_on_one_device(kind), tolerance=FLOAT32)


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
