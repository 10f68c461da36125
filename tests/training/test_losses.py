"""The chunked cross-entropy against optax's on whole logits: values, gradients, placement, and no whole logits."""

import functools

import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gathering import assert_close, check, early
from jax.sharding import NamedSharding, PartitionSpec
from reference import mesh_of

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.program import jaxprs
from zero_jax.training import losses

chunked = losses.softmax_cross_entropy_with_integer_labels
FEATURES = 16


def whole(hidden, head, labels, where=None, soft_cap=None):
    logits = (hidden @ head).astype(jnp.float32)
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    losses_ = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses_ if where is None else jnp.where(where, losses_, 0.0)


def arrays(lead, vocab_size, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng([vocab_size, *lead])
    hidden = (scale * rng.standard_normal((*lead, FEATURES))).astype(dtype)
    head = (0.5 * rng.standard_normal((FEATURES, vocab_size))).astype(dtype)
    return hidden, head, rng.integers(0, vocab_size, lead, dtype=np.int32)


def values_and_grads(fn, hidden, head, labels):
    weights = np.random.default_rng(0).standard_normal(labels.shape).astype(np.float32)

    def weighed(hidden, head):
        each = fn(hidden, head, labels)
        return (each * weights).sum(), each

    (_, each), grads = jax.jit(jax.value_and_grad(weighed, (0, 1), has_aux=True))(hidden, head)
    return each, grads


@pytest.mark.parametrize(
    ("lead", "vocab_size", "chunk_size"),
    # Chunks that divide the vocabulary, that do not, by a lot and by one, of one entry, and one that is larger.
    [((3, 5), 64, 16), ((3, 5), 50, 7), ((7,), 33, 32), ((), 9, 5), ((2, 3, 4), 5, 1), ((3, 5), 12, 100), ((2,), 1, 1)],
)
def test_equals_optax(lead, vocab_size, chunk_size):
    args = arrays(lead, vocab_size)
    got = values_and_grads(functools.partial(chunked, mesh=None, chunk_size=chunk_size), *args)
    assert got[0].dtype == jnp.float32
    assert_close(got, values_and_grads(whole, *args))


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_large_and_small_logits(scale):
    """Logits in the thousands: their exponentials overflow, relative to the largest they do not."""
    args = arrays((4, 6), 40, scale=scale)
    got = values_and_grads(functools.partial(chunked, mesh=None, chunk_size=7), *args)
    assert np.isfinite(got[0]).all()
    assert_close(got, values_and_grads(whole, *args))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 3.0])
def test_a_soft_cap(scale):
    """The last chunk repeats logits of the one before, whose slope is none."""
    args = arrays((4, 6), 40, scale=scale)
    got = values_and_grads(functools.partial(chunked, mesh=None, chunk_size=7, soft_cap=3.0), *args)
    assert_close(got, values_and_grads(functools.partial(whole, soft_cap=3.0), *args))


def test_bfloat16_is_summed_in_float32():
    """Closer to float32 than whole logits in bfloat16 are; gradients have the dtypes of what they are of."""
    args = arrays((4, 32), 96, jnp.bfloat16)
    exact = values_and_grads(whole, *(x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in args))
    each, grads = values_and_grads(functools.partial(chunked, mesh=None, chunk_size=10), *args)
    rounded, _ = values_and_grads(whole, *args)
    assert each.dtype == jnp.float32
    assert np.abs(each - exact[0]).max() < 1e-5 < 1e-3 < np.abs(rounded - exact[0]).max()
    for grad, want in zip(grads, exact[1], strict=True):
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_allclose(grad.astype(np.float32), want, atol=0.02 * np.abs(want).max())


def test_where():
    hidden, head, labels = arrays((4, 6), 20)
    where = np.arange(24).reshape(4, 6) % 3 > 0
    outside = np.where(where, labels, -1)  # padding has no label
    got = values_and_grads(functools.partial(chunked, mesh=None, where=where, chunk_size=6), hidden, head, outside)
    assert_close(got, values_and_grads(functools.partial(whole, where=where), hidden, head, labels))
    assert not np.any(np.asarray(got[0])[~where])


def test_under_vmap():
    hidden, head, labels = arrays((4, 6), 20)
    fn = functools.partial(chunked, mesh=mesh_of("8"), chunk_size=6)
    mapped = lambda hidden, head, labels: jax.vmap(fn, in_axes=(0, None, 0))(hidden, head, labels)  # noqa: E731
    assert_close(values_and_grads(mapped, hidden, head, labels), values_and_grads(whole, hidden, head, labels))


def sizes_of(jaxpr):
    for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns:
        yield from (var.aval.size for var in eqn.outvars)
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from sizes_of(inner)


def test_nothing_is_as_large_as_the_logits():
    hidden, head, labels = arrays((8, 32), 512)
    traced = jax.make_jaxpr(
        jax.value_and_grad(lambda h, w: chunked(h, w, labels, mesh=None, chunk_size=32).sum(), (0, 1))
    )
    largest = max(sizes_of(traced(hidden, head)))
    assert largest == max(256 * 32, FEATURES * 512) < 256 * 512


# --- on a mesh -------------------------------------------------------------------------------------------------------


def params(vocab_size, tied):
    rng = np.random.default_rng(1)
    table = (0.3 * rng.standard_normal((vocab_size, FEATURES))).astype(np.float32)
    head = {} if tied else {"head": (0.3 * rng.standard_normal((FEATURES, vocab_size))).astype(np.float32)}
    return {"embed": table, "w": np.eye(FEATURES, dtype=np.float32), **head}


def language_loss(params, tokens, *, mesh, chunk_size=20):
    hidden = jnp.tanh(params["embed"][tokens] @ params["w"])
    head = params["head"] if "head" in params else params["embed"].T
    return chunked(hidden, head, jnp.roll(tokens, -1, axis=1), mesh=mesh, chunk_size=chunk_size).mean()


@pytest.mark.parametrize(("vocab_size", "tied"), [(64, False), (50, True)])
def test_gathered_on_use(vocab_size, tied):
    mesh = mesh_of("8")
    tokens = np.random.default_rng(2).integers(0, vocab_size, (8, 6), dtype=np.int32)
    report = check(functools.partial(language_loss, mesh=mesh), params(vocab_size, tied), tokens, mesh=mesh)
    assert not early(report)
    # Once, and not again for the backward pass or for a chunk.
    assert len([e for e in report.events if e.path == ("embed" if tied else "head") and "custom" in e.reason]) == 1


def test_a_head_sharded_by_vocabulary_and_hidden_states_by_sequence():
    mesh = zero.make_mesh(data=2, model=4)
    hidden, head, labels = arrays((2, 8), 64)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    want = values_and_grads(whole, hidden, head, labels)
    fn = functools.partial(chunked, mesh=mesh, chunk_size=24)
    got = values_and_grads(fn, place(hidden, "data"), place(head, None, "model"), place(labels, "data"))
    assert_close(got, want)
    sequence = ("data", "model")
    got = values_and_grads(fn, place(hidden, *sequence), place(head), place(labels, *sequence))
    assert_close(got, want)


def test_features_that_do_not_divide_over_data():
    mesh = mesh_of("8")
    rng = np.random.default_rng(3)
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 4, 6), (6, 40)))
    labels = rng.integers(0, 40, (8, 4))
    fn = functools.partial(chunked, mesh=mesh, chunk_size=12)
    assert_close(values_and_grads(fn, hidden, head, labels), values_and_grads(whole, hidden, head, labels))


@pytest.mark.parametrize(
    ("stage", "num_microbatches"),
    [pytest.param(0, 1, marks=pytest.mark.slow), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow), (3, 1)],
)
def test_train_steps_equal_those_of_whole_logits(stage, num_microbatches):
    mesh, tx = mesh_of("8"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=stage, num_microbatches=num_microbatches, min_shard_size=0)
    tokens = np.random.default_rng(4).integers(0, 50, (16, 6), dtype=np.int32)

    def after(loss_fn):
        state = zero.init_state(lambda key: params(50, tied=True), tx, jax.random.key(0), mesh=mesh, config=config)
        state, metrics = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, tokens)
        return jax.device_get((state.params, metrics.loss, metrics.grad_norm))

    def reference(params, tokens):
        hidden = jnp.tanh(params["embed"][tokens] @ params["w"])
        return whole(hidden, params["embed"].T, jnp.roll(tokens, -1, axis=1)).mean()

    assert_close(after(functools.partial(language_loss, mesh=mesh)), after(reference))


@pytest.mark.parametrize(  # every pair of two of these
    ("axes", "spec", "tied", "stage"),
    [
        ({"data_layout": (2, 2, 2)}, None, False, 2),
        ({"data": 4, "model": 2}, "model", False, 3),
        ({"data_layout": (2, 2), "model": 2}, "model", True, 3),
        pytest.param({"data_layout": (2, 2, 2)}, None, True, 3, marks=pytest.mark.slow),
        pytest.param({"data": 4, "model": 2}, "model", True, 2, marks=pytest.mark.slow),
        pytest.param({"data_layout": (2, 2), "model": 2}, "model", False, 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_move_to_the_shards_of_the_head(axes, spec, tied, stage):
    """From shards of features, over one axis or several, beside a model that shards the vocabulary."""
    mesh = zero.make_mesh(devices=jax.devices(), **axes)
    tables = {"embed": PartitionSpec(spec, None), "w": PartitionSpec()}
    specs = tables if tied else tables | {"head": PartitionSpec(None, spec)}
    config = zero.ZeroConfig(stage=stage, min_shard_size=0, param_specs=specs)
    tokens = np.random.default_rng(6).integers(0, 64, (16, 6), dtype=np.int32)
    state = zero.init_state(params(64, tied), optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(functools.partial(language_loss, mesh=mesh), optax.sgd(0.1), mesh=mesh, config=config)
    expected = jax.value_and_grad(functools.partial(language_loss, mesh=None))(params(64, tied), tokens)
    assert_close(step.grads(state, tokens), expected)


@pytest.mark.parametrize("features", [12, 16])
def test_gradients_of_a_head_that_the_model_shards_by_features_are_not_gathered(features):
    """12 features are shards over `data`, 4 devices, but not over these and the 2 of `model`."""
    mesh = zero.make_mesh(devices=jax.devices(), data=4, model=2)
    specs = {"embed": PartitionSpec(), "head": PartitionSpec("model", None)}
    config = zero.ZeroConfig(stage=3, min_shard_size=0, param_specs=specs)
    shapes = {"embed": (64, features), "head": (features, 64)}
    init = lambda key: {name: jax.random.normal(key, shape) for name, shape in shapes.items()}  # noqa: E731

    def loss_fn(params, tokens, mesh=mesh):
        return chunked(params["embed"][tokens], params["head"], tokens, mesh=mesh, chunk_size=16).mean()

    state = zero.init_state(init, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    tokens = np.random.default_rng(7).integers(0, 64, (16, 6), dtype=np.int32)
    rows = zero.comms.measure(step.lower(state, tokens).compile(), mesh=mesh).rows
    assert [row.phase for row in rows if row.kind == "all-gather" and row.param == "head"] == ["forward"]
    assert_close(step.grads(state, tokens), jax.value_and_grad(loss_fn)(init(jax.random.key(0)), tokens, None))


def test_gradients_within_copies_of_a_secondary_shard():
    """The loss is mapped over the copies by `jax.shard_map`, within which their axis shards nothing."""
    mesh = zero.make_mesh(devices=jax.devices(), data_layout=(4, 2))
    config = zero.ZeroConfig(stage=3, secondary=("data_0",), min_shard_size=1)
    _, head, labels = arrays((16, 4), 48)
    params = {"table": arrays((48,), 8)[0], "head": head}

    def loss_fn(params, batch):
        return chunked(params["table"][batch], params["head"], batch, mesh=mesh, chunk_size=16).mean()

    expected = jax.jit(jax.value_and_grad(loss_fn))(params, labels)
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    assert "manual" in step.lower(state, labels).as_text()
    assert_close(step.grads(state, labels), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [gpt_linen.make, gpt_nnx.make, lambda c, **kw: (functools.partial(gpt.init, c), gpt.loss_fn(c, **kw))]
)
def test_the_reference_models_take_it(make):
    config = gpt.GPTConfig(vocab_size=50, seq_len=8, num_layers=2, d_model=16, num_heads=2)
    rng = np.random.default_rng(5)
    batch = {name: jnp.asarray(rng.integers(0, 50, (4, 8))) for name in ("inputs", "targets")}
    init_fn, loss_fn = make(config)
    _, in_chunks = make(config, token_losses=functools.partial(chunked, mesh=None, chunk_size=16))
    state = init_fn(jax.random.key(0))
    grad = lambda fn: jax.jit(jax.value_and_grad(fn, has_aux=True))(state, batch)  # noqa: E731
    assert_close(grad(in_chunks), grad(loss_fn))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"head": np.ones((9, FEATURES))}, "transpose of a tied table"),
        ({"head": np.ones(FEATURES)}, "cannot be multiplied"),
        ({"labels": np.zeros((4, 5), int)}, r"give labels of shape \(4, 6\)"),
        ({"labels": np.zeros((4, 6))}, "give integers between 0 and 8"),
        ({"where": np.ones(4, bool)}, "give both the same"),
        ({"hidden": np.ones((4, 6, FEATURES), int)}, "hidden is int"),
        ({"chunk_size": 0}, "not a positive integer"),
        ({"chunk_size": 2.5}, "not a positive integer"),
        ({"soft_cap": 0.0}, "not a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(changed, match):
    hidden, head, labels = arrays((4, 6), 9)
    given = {"hidden": hidden, "head": head, "labels": labels, "mesh": None, **changed}
    with pytest.raises(ValueError, match=match):
        chunked(given.pop("hidden"), given.pop("head"), given.pop("labels"), **given)
