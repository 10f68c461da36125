"""Models that cannot be called on each device's own examples: at every stage microbatches mean the same."""

import contextlib
import functools

import fuzz_separable
import jax
import jax.numpy as jnp
import mixing_losses
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import axes_of
from zero_jax.training.loss.function import key_parameter
from zero_jax.transforms.separable.separability import BatchParts, separability, shards_over

MESH = "model2"
AXES = ("replica", "data")
CHUNKED = functools.partial(zero.losses.softmax_cross_entropy_with_integer_labels, mesh=None, chunk_size=8)


def pinned_loss(params, batch):
    """The reference loss with its outputs laid over the batch axes, as many models do."""
    out = reference.predict(params, batch["tokens"])
    out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh_of(MESH), P("data", None)))
    return jnp.square(out - batch["targets"]).mean()


def ragged_loss(params, batch):
    """The reference loss with its outputs through an operation that `jax.vmap` has no rule for."""
    out = reference.predict(params, batch["tokens"])
    experts = jnp.ones((2, reference.OUTPUTS, reference.OUTPUTS)) / 8
    sizes = jnp.array([1, out.shape[0] - 1])
    return jnp.square(out + jax.lax.ragged_dot(out, experts, sizes) * 0 - batch["targets"]).mean()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("loss_fn", "stage"),
    [
        (pinned_loss, 1),
        pytest.param(pinned_loss, 0, marks=SLOW),
        pytest.param(pinned_loss, 3, marks=SLOW),
        pytest.param(ragged_loss, 1, marks=SLOW),
    ],
)
def test_models_that_cannot_be_mapped_over_devices(loss_fn, stage):
    tx, batches = optax.sgd(0.1), reference.make_batches(2)
    warns = pytest.warns(UserWarning, match="each of the 2 microbatches") if stage < 2 else contextlib.nullcontext()
    with warns:
        state, _ = reference.run_zero(loss_fn, tx, batches, mesh=mesh_of(MESH), stage=stage, num_microbatches=2)
    params, _, _ = reference.run_plain(reference.loss_fn, tx, batches)
    reference.assert_close(state.params, params, tolerance=1e-5)


def placed(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(MESH), P("data")))


def over(axis):
    def fn(x):
        return jax.shard_map(jnp.tanh, mesh=mesh_of(MESH), in_specs=P(axis), out_specs=P(axis))(x)

    return fn


@pytest.mark.parametrize(
    ("fn", "lays"),
    [
        (placed, True),
        (jax.checkpoint(placed), True),
        (lambda x: jax.lax.scan(lambda x, _: (placed(x), None), x, length=2)[0], True),
        (jax.jit(jnp.tanh, out_shardings=NamedSharding(mesh_of(MESH), P("data"))), True),
        (over("data"), True),
        (over("model"), False),
        (zero.sequence_parallel(mesh_of(MESH), dim=0), False),
        (jnp.tanh, False),
    ],
)
def test_what_lays_values_over_data_is_seen(fn, lays):
    args = (np.ones(8, np.float32),) if "sequence" not in fn.__qualname__ else (np.ones(8, np.float32), "residual")
    assert shards_over(jax.make_jaxpr(lambda x: fn(x, *args[1:]))(*args[:1]), AXES) == lays


def contrastive_loss(params, batch):
    """A loss in which every example is compared with all others."""
    out = jnp.tanh(reference.predict(params, batch["tokens"]))
    return optax.softmax_cross_entropy_with_integer_labels(out @ batch["targets"].T, jnp.arange(len(out))).mean()


def normalized_loss(params, batch):
    """A loss with statistics of the batch."""
    out = reference.predict(params, batch["tokens"])
    return jnp.square((out - out.mean(0)) / (out.std(0) + 1) - batch["targets"]).mean()


def mixed_loss(params, batch):
    """A loss of examples mixed with others, in the order of the batch from behind."""
    targets = 0.7 * batch["targets"] + 0.3 * batch["targets"][::-1]
    return jnp.square(reference.predict(params, batch["tokens"]) - targets).mean()


def masked_loss(params, batch):
    """A mean over the examples that count."""
    error = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
    counts = batch["tokens"][:, 0] > 3
    return (error * counts).sum() / counts.sum()


def labelled_loss(params, batch):
    """A loss that looks its labels up by the examples' own positions."""
    scores = jax.nn.log_softmax(reference.predict(params, batch["tokens"]))
    return -scores[jnp.arange(len(scores)), batch["tokens"][:, 0] % scores.shape[1]].mean()


def shuffled_loss(params, batch):
    """A loss that looks other examples up."""
    out = reference.predict(params, batch["tokens"])
    return jnp.square(out[batch["tokens"][:, 0] % len(out)] - batch["targets"]).mean()


def error_of(params, batch):
    return jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)


def root_loss(params, batch):
    """A loss that is no mean, but the root of one."""
    return jnp.sqrt(error_of(params, batch).mean())


def scaled_loss(params, batch):
    """A loss of what the batch was scaled by."""
    scale = batch["targets"].std()
    return (error_of(params, batch) / scale).mean()


def largest_loss(params, batch):
    """A loss of the example that is worst off."""
    return error_of(params, batch).max()


def mined_loss(params, batch):
    """A mean over the examples that are worse than a bound: how many these are depends on the params."""
    error = error_of(params, batch)
    hard = error > 0.5
    return (error * hard).sum() / jnp.maximum(hard.sum(), 1)


def reciprocal_loss(params, batch):
    """A mean over the examples that count, by a factor."""
    counts = batch["tokens"][:, 0] > 3
    return (error_of(params, batch) * counts).sum() * (1 / counts.sum())


def summed_loss(params, batch):
    """Means over examples that are stacked, weighed by params and added up, with a penalty on the params."""
    error = error_of(params, batch)
    means = jnp.stack([error.mean(), (error * batch["tokens"][:, 0]).mean()])
    bias = jax.tree.leaves(params)[0].mean()
    return 0.5 * -(-means @ jnp.array([0.3, 0.7])) * jnp.exp(-bias) + jnp.where(bias > 0, bias, 0)


def looped_loss(params, batch):
    """A sum of means over parts of the features."""
    error = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"])
    return jax.lax.scan(lambda total, column: (total + column.mean(), None), 0.0, error.T)[0]


def gpt_loss(*, token_losses=gpt.whole_logits, **fields):
    config = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=2, d_model=16, num_heads=2, **fields)
    params = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    return (lambda params, batch: gpt.loss_fn(config, token_losses=token_losses)(params, batch)[0]), params, batch


@pytest.mark.parametrize(
    ("make", "separable"),
    [
        (lambda: contrastive_loss, False),
        (lambda: normalized_loss, False),
        (lambda: mixed_loss, False),
        (lambda: pinned_loss, False),
        (lambda: masked_loss, True),
        (lambda: labelled_loss, True),
        (lambda: shuffled_loss, False),
        (lambda: root_loss, False),
        (lambda: scaled_loss, False),
        (lambda: largest_loss, False),
        (lambda: mined_loss, False),
        (lambda: reciprocal_loss, True),
        (lambda: summed_loss, True),
        (lambda: looped_loss, True),
        (lambda: reference.loss_fn, True),
        (lambda: gpt_loss(scan=True, remat=True), True),
        (lambda: gpt_loss(scan=False), True),
        (lambda: gpt_loss(token_losses=CHUNKED), True),
    ],
)
def test_what_couples_examples_is_seen(make, separable):
    made = make()
    params, batch = reference.host_params(), reference.make_batch(0)
    loss_fn, params, batch = made if isinstance(made, tuple) else (made, params, batch)
    mesh = mesh_of("replica")
    found = separability(
        fuzz_separable.program_of(loss_fn),
        (params, batch, jax.random.key(0)),
        BatchParts(mesh=mesh_of(MESH) if loss_fn is pinned_loss else mesh, axes=axes_of(mesh), num_microbatches=2),
    )
    assert (not found.not_local) == separable
    assert (not found.another_loss) == (separable or loss_fn is pinned_loss)


@pytest.mark.parametrize(
    "loss_fn", [pytest.param(contrastive_loss, marks=SLOW), scaled_loss, pytest.param(root_loss, marks=SLOW)]
)
def test_examples_meet_in_the_whole_microbatch_at_every_stage(loss_fn):
    batch, losses = reference.make_batch(0), []
    for stage in (1, 2):
        fields = dict(mesh=mesh_of("2"), stage=stage, num_microbatches=2)
        where = rf"test_separable.py:[\d:]+ \({loss_fn.__name__}\)"
        with pytest.warns(UserWarning, match=f"the loss on microbatches may be another one.*{where}") as warned:
            _, (metrics,) = reference.run_zero(loss_fn, optax.sgd(0.1), [batch], **fields)
        losses.append(float(metrics.loss))
        assert len(warned) == 1
        assert ("in each of the 2 microbatches" in str(warned[0].message)) == (stage < 2)
    np.testing.assert_allclose(*losses, rtol=1e-6)


def judged(loss_fn, size=64, *, mesh=None, loss_weight="auto"):
    return separability(
        fuzz_separable.program_of(loss_fn),
        (*mixing_losses.make_inputs(size), jax.random.key(0)),
        BatchParts(mesh=mesh or mesh_of("4"), axes=axes_of(mesh_of("4")), num_microbatches=2),
        loss_weight=loss_weight,
    )


def convolved_loss(params, batch):
    x = batch["targets"].reshape(-1, 2, 2, 2)
    for kernel in params:
        x = jnp.tanh(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jnp.square(x).mean()


@pytest.mark.parametrize(
    ("mesh", "batch_size"),
    [("8", 16), ("staged24", 32), ("replica", 16), pytest.param(MESH, 16, marks=SLOW)],
    ids=lambda x: str(x),
)
def test_each_device_convolves_its_own_examples(mesh, batch_size):
    """XLA partitions the gradients of mapped kernels wrongly: 1 x 1 kernels, and any with one example a device."""
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in ((1, 1, 2, 4), (3, 3, 4, 8))]
    tx, batches = optax.sgd(1.0), [reference.make_batch(0, batch_size)]
    warns = pytest.warns(UserWarning, match="own convolutions wrongly") if mesh == MESH else contextlib.nullcontext()
    with warns:
        fields = {"params": params, "mesh": mesh_of(mesh), "stage": 1, "num_microbatches": 2}
        state, _ = reference.run_zero(convolved_loss, tx, batches, **fields)
    expected, *_ = reference.run_plain(convolved_loss, tx, batches, params=params)
    reference.assert_close(state.params, expected, tolerance=1e-5)


def test_what_mixes_examples_is_another_loss():
    found = {name: judged(loss_fn) for name, loss_fn in mixing_losses.MIXING.items()}
    assert not [name for name, one in found.items() if not (one.not_local and one.another_loss)]
    for name in ("svd", "sort", "normalized", "pure_callback", "positions", "other operations"):
        assert "mixing_losses.py:" in found[name].another_loss


def test_means_over_examples_are_known_for_such():
    found = {name: judged(loss_fn) for name, loss_fn in mixing_losses.SEPARABLE.items()}
    assert not {name: one for name, one in found.items() if one.not_local or one.another_loss}


@pytest.mark.parametrize("loss_fn", [mixing_losses.masked, mixing_losses.SEPARABLE["mean"]])
def test_one_example_a_device_is_no_less_separable(loss_fn):
    assert not judged(loss_fn, size=8).not_local


@pytest.mark.parametrize(("size", "sizes"), [(64, {64, 8}), (8, {8, 2, 1})])
def test_a_loss_is_traced_at_no_more_sizes_than_are_compared(size, sizes):
    traced = set()

    def loss_fn(params, batch):
        traced.add(len(batch["x"]))
        return mixing_losses.SEPARABLE["mean"](params, batch)

    assert not judged(loss_fn, size=size).not_local
    assert traced == sizes


def test_one_example_is_not_taken_for_several():
    def odd(params, batch):
        error = mixing_losses.error_of(params, batch)
        return (jnp.tanh(error) if len(error) == 1 else error).mean()

    assert not judged(odd).not_local
    assert "one example" in judged(odd, size=8).not_local


def test_a_number_of_a_single_example_is_compared_too():
    """Of 8 and of 2 examples this is half of the mean; of one it is the same as of two."""

    def by_half(params, batch):
        return mixing_losses.error_of(params, batch).sum() / max(len(batch["x"]) // 2, 1)

    assert not judged(by_half).not_local
    assert "one example" in judged(by_half, size=8).not_local
    batch, fields = reference.make_batch(0, 8), {"mesh": mesh_of("4"), "stage": 1, "num_microbatches": 2}
    by_half_of = lambda p, b: reference.loss_fn(p, b) * len(b["tokens"]) / max(len(b["tokens"]) // 2, 1)  # noqa: E731
    with pytest.warns(UserWarning, match="one example"):
        _, (metrics,) = reference.run_zero(by_half_of, optax.sgd(0.1), [batch], **fields)
    np.testing.assert_allclose(metrics.loss, by_half_of(reference.host_params(), batch), rtol=1e-5)


@pytest.mark.parametrize(
    "grouped", [lambda x: x.reshape(-1, 4), lambda x: jnp.stack([x[i::4] for i in range(4)], 1)], ids=["shape", "step"]
)
def test_groups_of_examples_are_another_loss_where_microbatches_split_them(grouped):
    """A microbatch has a run of examples of each device: groups of four that are two on one and two on another."""

    def paired(params, batch):
        error = grouped(mixing_losses.error_of(params, batch))
        return jnp.square(error - error.mean(1, keepdims=True)).mean()

    found = judged(paired, size=16)  # 2 examples a device
    assert found.not_local and "mixed at" in found.another_loss
    assert not judged(paired, size=32).not_local


@pytest.mark.slow
@pytest.mark.parametrize("share", [1, 0.05])
def test_parts_below_the_bound_of_their_divisor(share):
    """As in detection: most microbatches of a device have no box, or all weights add up to less than the bound."""

    def boxes_loss(params, batch):
        return error_of(params, batch).sum() / jnp.maximum((share * (batch["tokens"][:, 0] < 5)).sum(), 1)

    batch, tx = reference.make_batch(0), optax.sgd(0.01)
    state, (metrics,) = reference.run_zero(boxes_loss, tx, [batch], mesh=mesh_of("8"), stage=1, num_microbatches=2)
    params, _, (loss,) = reference.run_plain(boxes_loss, tx, [batch])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    reference.assert_close(state.params, params, tolerance=1e-5)


def test_parts_have_their_shares_of_terms_beside_scalars_like_those_of_the_batch():
    """For `jnp.ones_like` of a scalar JAX has an equation where that has a mesh, and others in a `jax.shard_map`."""

    def loss_fn(params, batch):
        n, norm = (batch["tokens"][:, 0] < 5).sum(dtype=jnp.float32), jnp.square(params["head"]["kernel"]).sum()
        of_each = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
        return (of_each.sum() + norm * jnp.full_like(n, 2)) / jnp.maximum(n, jnp.ones_like(n))

    batch, tx = reference.make_batch(0), optax.sgd(0.01)
    state, (metrics,) = reference.run_zero(loss_fn, tx, [batch], mesh=mesh_of("replica"), stage=2)
    params, _, (loss,) = reference.run_plain(loss_fn, tx, [batch])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    reference.assert_close(state.params, params, tolerance=1e-5)


def on_shards(fn, *specs):
    def loss_fn(params, batch):
        x = jax.shard_map(fn, mesh=mesh_of(MESH), in_specs=specs, out_specs=P(*specs[0]), check_vma=False)(
            batch["x"], params["w"]
        )
        return jnp.square(x).mean()

    return loss_fn


def column_parallel(x, w):
    y = jnp.tanh(x @ w)
    return jax.lax.all_gather(y, "model", axis=1, tiled=True) + jax.lax.psum(y.sum(1, keepdims=True), "model")


@pytest.mark.parametrize("size", [64, 8])
@pytest.mark.parametrize(
    ("loss_fn", "not_local", "another_loss"),
    [
        (on_shards(column_parallel, P(), P(None, "model")), "", ""),
        (on_shards(column_parallel, P("data"), P(None, "model")), "shards values over", ""),
        (on_shards(lambda x, w: jnp.tanh(x @ w), P("data"), P()), "shards values over", ""),
        (on_shards(lambda x, w: jax.vmap(jnp.sort)(x), P("data"), P()), "shards values over", ""),
        (on_shards(lambda x, w: jnp.concatenate([x, x]), P("data"), P()), "shards values over", "mixed at"),
        (on_shards(lambda x, w: x - jax.lax.psum(x, "data"), P("data"), P()), "shards values over", "mixed at"),
        (on_shards(lambda x, w: x - x.mean(0), P("data"), P()), "shards values over", "mixed at"),
        (on_shards(lambda x, w: x * jax.lax.axis_index("data"), P("data"), P()), "shards values over", "'axis_index'"),
        (on_shards(lambda x, w: x[:, :2] * w.sum(), P("data"), P("data")), "shards values over", "mixed at"),
        (on_shards(lambda x, w: jax.lax.psum(x, "model").sum(0, keepdims=True), P(), P()), "mixed", "mixed"),
    ],
)
def test_functions_of_shards(loss_fn, not_local, another_loss, size):
    """A microbatch of 8 examples is of a single one of each device."""
    found = judged(loss_fn, size, mesh=mesh_of(MESH))
    assert not_local in found.not_local and bool(not_local) == bool(found.not_local)
    assert another_loss in found.another_loss and bool(another_loss) == bool(found.another_loss)


def test_a_weight_of_none_is_believed_of_microbatches_alone():
    found = judged(mixing_losses.masked, loss_weight=None)
    assert "loss_weight" in found.not_local and not found.another_loss


def test_a_named_weight_is_another_loss_if_the_loss_is_not_divided_by_it():
    def with_aux(loss_fn):
        return LossProgram(lambda p, b, key: (loss_fn(p, b), ({"n": b["mask"].sum(), "one": 1.0}, None)))

    parts = BatchParts(mesh=mesh_of("4"), axes=axes_of(mesh_of("4")), num_microbatches=2)
    arguments = *mixing_losses.make_inputs(64), jax.random.key(0)
    cases = [("masked", "n", False), ("mean", "n", True), ("mean", "one", False), ("masked", "one", False)]
    for name, weight, is_other in cases:
        found = separability(with_aux(mixing_losses.SEPARABLE[name]), arguments, parts, loss_weight=weight)
        assert bool(found.another_loss) == is_other, (name, weight, found)
        assert found.on_parts.by_weight == (is_other or (name, weight) == ("masked", "one")), (name, weight)


WRONG = ["svd", "qr", "fft", "reduce_window", "segment_max", "pure_callback to a number"]


@pytest.mark.parametrize("name", ["svd", *(pytest.param(name, marks=SLOW) for name in WRONG[1:])])
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SLOW)])
def test_the_loss_is_that_of_whole_microbatches(name, stage):
    loss_fn, (params, batch) = mixing_losses.MIXING[name], mixing_losses.make_inputs(32)
    take = lambda i: jax.tree.map(lambda x: x.reshape(4, 2, 4, *x.shape[1:])[:, i].reshape(16, *x.shape[1:]), batch)  # noqa: E731
    parts = [take(0), take(1)]
    fields = {"mesh": mesh_of("4"), "stage": stage, "num_microbatches": 2, "params": params}
    with pytest.warns(
        UserWarning, match=r"the loss on microbatches (is|may be) another one.*mixing_losses\.py"
    ) as warned:
        _, (metrics,) = reference.run_zero(loss_fn, optax.sgd(0.1), [batch], **fields)
    assert len(warned) == 1
    np.testing.assert_allclose(metrics.loss, np.mean([loss_fn(params, part) for part in parts]), rtol=1e-5)


@SLOW
@pytest.mark.parametrize("name", mixing_losses.SEPARABLE)
def test_losses_that_are_separable_are_so_by_value(name):
    assert fuzz_separable.difference(mixing_losses.SEPARABLE[name], *mixing_losses.make_inputs(32)) < 1e-4


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=SLOW)])
def test_random_losses_that_are_judged_separable_are_so(seeds):
    for seed in seeds:
        loss_fn, inputs = fuzz_separable.make_loss(seed), fuzz_separable.make_inputs(seed)
        assert fuzz_separable.judge(loss_fn, *inputs) or fuzz_separable.difference(loss_fn, *inputs) < 1e-3, seed


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 24), marks=SLOW)])
def test_random_aux_is_that_of_the_whole_batch(seeds):
    found = [
        fuzz_separable.difference_of_aux(
            fuzz_separable.make_loss(seed, with_aux=True), *fuzz_separable.make_inputs(seed)
        )
        for seed in seeds
    ]
    assert max(off for off, _ in found) < 1e-3, found
    assert sum(num for _, num in found) > 2 * len(seeds)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda params, batch: 0, None),
        (lambda params, batch, train=True: 0, None),
        (lambda params, batch, dropout_rng=None: 0, "dropout_rng"),
        (lambda params, batch, r: 0, "r"),
        (lambda params, batch, *, key: 0, "key"),
        (lambda params, batch, *, train=True, key=None: 0, "key"),
    ],
)
def test_the_parameter_for_a_key(fn, name):
    found = key_parameter(fn)
    assert (found.name if found else None) == name


def test_paths_of_flat_params_are_rules():
    params = {"in": np.zeros((8, 16), np.float32), "out": np.zeros((16, 4), np.float32)}
    config = reference.make_config(stage=0, param_specs={"in": P(None, "model")})
    shardings = zero.state_shardings({"params": params}, mesh=mesh_of(MESH), config=config)["params"]
    assert (shardings["in"].spec, shardings["out"].spec) == (P(None, "model"), P())
