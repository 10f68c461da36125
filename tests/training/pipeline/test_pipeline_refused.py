"""What cannot be cut into stages is refused with its line and what to change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from pipeline_cases import (
    BATCH_SIZE,
    FEATURES,
    LAYERS,
    assert_step_of_one_device,
    by_experts,
    init_params,
    loss_fn,
    lowered,
    make_batches,
)
from reference import make_config

import zero_jax as zero
from zero_jax.transforms.pipeline.scans import layers_outside


def with_curvature(grads, state, params, *, value_fn):
    curvature = jax.jvp(jax.grad(value_fn), (params,), (grads,))[1]
    return jax.tree.map(lambda g, c: -0.1 * g - 0.1 * c, grads, curvature), state


def test_few_threads_for_simulated_devices_are_warned_of(monkeypatch):
    fields = {"mesh": zero.make_mesh(pipe=2), "config": make_config(num_microbatches=4)}
    monkeypatch.setenv("NPROC", "8")
    with pytest.warns(UserWarning, match=r"a pipeline on 8 simulated devices may stop for good.*NPROC=32"):
        zero.make_train_step(loss_fn, optax.sgd(0.1), **fields)
    monkeypatch.setenv("NPROC", "32")
    zero.make_train_step(loss_fn, optax.sgd(0.1), **fields)


def smoothed(x, padding):
    """Returns the mean of three places, each feature by itself."""
    kernel, fields = jnp.ones((3, 1, FEATURES)) / 3, {"feature_group_count": FEATURES}
    return jax.lax.conv_general_dilated(x, kernel, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC"), **fields)


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


def test_microbatches_too_small_for_a_remat_that_offloads_are_refused_with_that_reason():
    config = make_config(stage=2, num_microbatches=4, remat="full_offloaded")
    arguments = replaced(lambda x, w: x @ w["w"]), init_params(), make_batches(1)[0]
    report = zero.pipeline_report(*arguments, mesh=zero.make_mesh(pipe=4), config=config)
    assert "values of a microbatch are too small for that: give fewer microbatches, or remat='full'" in report.why_none


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


def by_pattern(x, w):
    """Every fourth example has the same weight, and a run of them has two examples."""
    return jnp.tanh(x * jnp.tile(jnp.arange(4.0), len(x) // 4)[:, None, None] @ w["w"])


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
        r"examples of a batch are sorted together at .*pipeline_cases.*; sort what each example has by itself, by jax.",
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
        replaced(lambda x, w: x @ w["w"] * jnp.cos(jnp.arange(len(x)))[:, None, None]),
        "may depend on the places of examples in a batch; make these a leaf of the batch, as jnp.arange",
    ),
    "kernels": (replaced(by_kernel), "XLA does not partition the kernel at .*test_pipeline.* over stages"),
    "a pattern": (replaced(by_pattern), "examples of a batch may be mixed at .*test_pipeline"),
    "batches": (in_layers, "examples are put behind others at .*test_pipeline"),
    "mapped": (mapped, "what is in the jax.shard_map at .*test_pipeline.* is not looked into"),
}


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


@pytest.mark.parametrize(("in_layers", "pipeline"), [(True, "gpipe"), (False, "1f1b")])
def test_a_number_that_is_another_of_one_example_is_that_of_the_batch_in_layers_alone(in_layers, pipeline):
    """Of more examples it is their number."""

    def loss_fn(params, batch):
        x, size = params["embed"][batch["tokens"]], max(len(batch["tokens"]), 2)
        sum_of = lambda x, is_here: jnp.square(x).sum() / size if is_here else jnp.square(x).mean()  # noqa: E731
        layer = lambda c, w: ((x := c[0] + jnp.tanh(c[0] @ w["w"]), c[1] + sum_of(x, in_layers)), None)  # noqa: E731
        (x, total), _ = jax.lax.scan(layer, (x, 0.0), params["layers"])
        return sum_of(x @ params["head"], not in_layers) + total

    mesh = zero.make_mesh(pipe=4, devices=jax.devices()[:4])
    fields = {"mesh": mesh, "pipeline": pipeline, "stage": 2}
    if in_layers:
        arguments = loss_fn, init_params(), make_batches(1)[0]
        return assert_step_of_one_device(*arguments, num_microbatches=BATCH_SIZE, **fields)
    with pytest.raises(ValueError, match="on a microbatch of one example than on several: give fewer microbatches"):
        lowered(loss_fn, num_microbatches=BATCH_SIZE, **fields)
    lowered(loss_fn, num_microbatches=4, **fields)


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
