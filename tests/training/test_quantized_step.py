"""Train steps that send params and gradients quantized: what they compute, what they send, and what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zero_jax as zero

FEATURES, VOCAB, LAYERS, BATCH, TOKENS = 256, 512, 2, 32, 4
BOTH = zero.Quantize(gathers="int8", grads="int8")


def init(key):
    embed, up, down = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (VOCAB, FEATURES)) * 0.3,
        "layers": {
            "up": jax.random.normal(up, (LAYERS, FEATURES, 2 * FEATURES)) / 16,
            "down": jax.random.normal(down, (LAYERS, 2 * FEATURES, FEATURES)) / 22,
            "bias": jnp.zeros((LAYERS, FEATURES)),
        },
        "gain": jnp.ones(FEATURES),  # too small to be sharded
    }


def loss_fn(params, batch, *, scan=True, decay=0.0, masked=False):
    """A tied embedding, a stack of layers, and a penalty on the params themselves."""

    def layer(h, each):
        return h + jnp.tanh(h @ each["up"] + 0.1) @ each["down"] + each["bias"], None

    h = params["embed"][batch["inputs"]]
    if scan:
        h, _ = jax.lax.scan(layer, h, params["layers"])
    else:
        for i in range(LAYERS):
            h, _ = layer(h, jax.tree.map(lambda x, i=i: x[i], params["layers"]))
    logits = ((h * params["gain"]) @ params["embed"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    loss = (losses * batch["weights"]).sum() / batch["weights"].sum() if masked else losses.mean()
    if decay:
        loss += decay * sum(jnp.square(x).sum() for x in jax.tree.leaves(params))
    return loss, {"per_example": losses.mean(1)}


def make_batch(*, weights=None):
    inputs = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, VOCAB)
    batch = {"inputs": inputs, "targets": (inputs * 5 + 1) % VOCAB}
    return batch if weights is None else {**batch, "weights": weights}


def grads_of(config, *, mesh, batch=None, loss=loss_fn, tx=None):
    tx = optax.sgd(0.1) if tx is None else tx
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
    found, grads = step.grads(state, make_batch() if batch is None else batch)
    return float(found), jax.tree.map(np.asarray, grads)


def plain(loss=loss_fn, batch=None):
    (found, _), grads = jax.value_and_grad(loss, has_aux=True)(init(jax.random.key(0)), batch or make_batch())
    return float(found), grads


def check_close(found, expected, *, error, exact=()):
    """Checks gradients by the norm of their error; those that are not quantized to the rounding of float32."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        off = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-12)
        assert off < (2e-5 if name in exact else error), (name, off)


SPLIT = dict(data=8, data_layout=(4, 2))  # data_1 stands for the network between two slices
MASTERS = zero.Precision(param="float32", compute="float32", master="float32")
CASES = {
    "stage 3": (dict(stage=3), dict(data=8), {}),
    "stage 2": (dict(stage=2), dict(data=8), {}),
    "stage 1, microbatches": (dict(stage=1, num_microbatches=2), dict(data=8), {}),
    "stage 3, remat, microbatches": (dict(stage=3, num_microbatches=2, remat="full"), dict(data=8), {}),
    "replicas": (dict(stage=3), dict(replica=2, data=4), {}),
    "two axes of data": (dict(stage=3), dict(data=8, data_layout=(2, 4)), {}),
    "a loop of layers": (dict(stage=3), dict(data=8), dict(scan=False)),
    "a penalty on params": (dict(stage=3), dict(data=8), dict(decay=0.01)),
    "a penalty on params, stage 1": (dict(stage=1), dict(data=8), dict(decay=0.01, scan=False)),
    "keep_gathered": (dict(stage=3, keep_gathered=True), dict(data=8), {}),
    "model": (
        dict(stage=3, param_specs={"layers/up": PartitionSpec(None, None, "model")}),
        dict(data=4, model=2),
        {},
    ),
    "between replicas": (dict(stage=3, grads_over="replica"), dict(replica=2, data=4), {}),
    "between four replicas, microbatches": (
        dict(stage=2, num_microbatches=2, grads_over=("replica",)),
        dict(replica=4, data=2),
        {},
    ),
    "between replicas, stage 1, microbatches": (
        dict(stage=1, num_microbatches=2, grads_over="replica"),
        dict(replica=2, data=4),
        {},
    ),
    "replicas and data": (dict(stage=3, grads_over=("replica", "data")), dict(replica=2, data=4), {}),
    "one of two axes of data": (dict(stage=3, grads_over="data_1"), SPLIT, {}),
    "secondary": (dict(stage=3, secondary=("data_0",)), SPLIT, {}),
    "secondary, between slices": (dict(stage=3, secondary=("data_0",), grads_over="data_1", remat="full"), SPLIT, {}),
    "params on the host": (dict(stage=3, offload="all"), dict(data=8), {}),
    "params on the host, remat, microbatches": (
        dict(stage=3, offload="all", num_microbatches=2, remat="full"),
        dict(data=8),
        {},
    ),
    "masters on the host": (dict(stage=2, precision=MASTERS, offload="state"), dict(data=8), {}),
}


@pytest.mark.slow
def test_aux_of_examples_is_in_their_order_where_copies_of_the_params_are_mapped_too():
    config = zero.ZeroConfig(num_microbatches=2, secondary=("data_0",), quantize=zero.Quantize(grads="int8"))
    mesh, tx = zero.make_mesh(**SPLIT), optax.sgd(0.1)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    _, expected = loss_fn(init(jax.random.key(0)), make_batch())
    _, metrics = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, make_batch())
    np.testing.assert_allclose(metrics.aux["per_example"], expected["per_example"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name):
    """A gradient that is summed twice, or not at all, is off by a factor; what is not quantized is exact."""
    settings, sizes, options = CASES[name]
    over, settings = settings.get("grads_over"), {key: x for key, x in settings.items() if key != "grads_over"}
    loss = functools.partial(loss_fn, **options)
    mesh = zero.make_mesh(**sizes)
    expected = plain(loss)
    quantize = zero.Quantize(grads={"layers/(up|bias)": "int8", "embed": None}, grads_over=over)
    config = zero.ZeroConfig(quantize=quantize, **settings)
    found = grads_of(config, mesh=mesh, loss=loss)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    check_close(found[1], expected[1], error=0.015, exact=("embed", "layers/down", "gain"))
    assert not np.array_equal(found[1]["layers"]["up"], expected[1]["layers"]["up"])


@pytest.mark.slow
@pytest.mark.parametrize(("grads", "error"), [("int8", 0.01), ("int4", 0.2)])
def test_gathered_params_are_rounded_and_gradients_are_those_at_them(grads, error):
    config = zero.ZeroConfig(stage=3, quantize=zero.Quantize(gathers="int8", grads=grads))
    loss, found = grads_of(config, mesh=zero.make_mesh(data=8))
    expected, exact = plain()
    assert loss == pytest.approx(expected, rel=2e-3) and loss != expected
    check_close(found, exact, error=error + 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_microbatches", "sizes", "num_empty"),
    [
        (1, dict(data=8), 8),
        (2, dict(data=8), 8),
        (1, dict(replica=2, data=4), 16),
    ],
)
def test_a_device_whose_examples_weigh_nothing(num_microbatches, sizes, num_empty):
    """Its own loss is 0 / 0; the other devices' gradients are those of the whole batch all the same."""
    weights = jnp.arange(BATCH * TOKENS, dtype=jnp.float32).reshape(BATCH, TOKENS).at[:num_empty].set(0)
    batch, loss = make_batch(weights=weights), functools.partial(loss_fn, masked=True)
    quantize = zero.Quantize(grads={"layers/up": "int8"})
    config = zero.ZeroConfig(stage=3, quantize=quantize, num_microbatches=num_microbatches)
    found = grads_of(config, mesh=zero.make_mesh(**sizes), batch=batch, loss=loss)
    expected = plain(loss, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    check_close(found[1], expected[1], error=0.015, exact=("embed", "layers/down", "gain"))


@pytest.mark.slow
def test_frozen_params_stay_and_masters_lose_nothing():
    """At stage 2 the gathered copy is rounded; the master params are what plain optax makes of the gradients."""
    tx = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "freeze" if "embed" in jax.tree_util.keystr(path) else "train", params
        ),
    )
    mesh = zero.make_mesh(data=8)
    config = zero.ZeroConfig(stage=2, precision="bf16", quantize=BOTH)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    before = jax.tree.map(np.asarray, (state.master, state.params))
    _, grads = step.grads(state, make_batch())
    grads = jax.tree.map(np.asarray, grads)
    state, metrics = step(state, make_batch())
    assert np.isfinite(metrics.loss) and metrics.aux["per_example"].shape == (BATCH,)
    np.testing.assert_array_equal(state.params["embed"], before[1]["embed"])
    np.testing.assert_array_equal(state.master["embed"], before[0]["embed"])
    up = before[0]["layers"]["up"] - np.float32(0.1) * grads["layers"]["up"]
    np.testing.assert_allclose(state.master["layers"]["up"], up, rtol=1e-6, atol=1e-7)
    copy = np.asarray(state.params["layers"]["up"], np.float32)
    off = np.abs(copy - np.asarray(state.master["layers"]["up"])).max()
    assert 0 < off <= np.abs(up).max() * (0.51 / 127 + 2**-8)
    shards = [np.asarray(shard.data) for shard in state.params["layers"]["up"].addressable_shards]
    assert len(shards) == 8 and all((shard == shards[0]).all() for shard in shards)


@pytest.mark.slow
@pytest.mark.parametrize("over", [None, "replica"])
def test_an_overflow_of_one_device_is_seen_by_all(over):
    config = zero.ZeroConfig(stage=3, precision="bf16", quantize=dataclasses.replace(BOTH, grads_over=over))
    mesh, tx = zero.make_mesh(replica=2, data=4) if over else zero.make_mesh(data=8), optax.sgd(0.1)
    weights = jnp.ones((BATCH, TOKENS)).at[5, 1].set(jnp.inf)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(functools.partial(loss_fn, masked=True), tx, mesh=mesh, config=config)
    state, metrics = step(state, make_batch(weights=weights))
    assert bool(metrics.skipped) and np.isfinite(state.params["layers"]["up"]).all()


def test_sent_bytes_are_about_half_and_as_estimated():
    """XLA:CPU sends bfloat16 as float32: scales are counted twice there, and codes are what is on the wire."""
    mesh, tx = zero.make_mesh(data=8), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=3, precision="bf16", quantize=zero.Quantize(gathers="fp8", grads="int4"))
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    report = zero.comms.measure(
        zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, shapes).compile()
    )
    estimate = zero.comms.estimate(state, mesh=mesh, config=config)
    sizes = {dtype: report.by_dtype[dtype] / estimate.by_dtype[dtype] for dtype in ("s8", "u8")}
    # The tied table, a fifth of the params, has gradients from two uses; the last one gathers it once for both passes.
    assert sizes == pytest.approx({"s8": 1.0, "u8": 1.2}, rel=0.01)
    plain_config = zero.ZeroConfig(stage=3, precision="bf16")
    whole = zero.comms.estimate(state, mesh=mesh, config=plain_config)
    assert estimate.by_phase["forward"] <= 0.55 * whole.by_phase["forward"]
    assert estimate.by_kind["all-to-all"] <= 0.28 * whole.by_kind["reduce-scatter"] * 1.02


def contrastive(params, batch):
    loss, aux = loss_fn(params, batch)
    return loss + jnp.std(aux["per_example"]), aux


def test_losses_that_mix_examples_are_refused():
    config = zero.ZeroConfig(stage=3, quantize=BOTH)
    with pytest.raises(ValueError, match=r"no gradients of their own to send quantized, because .*leave grads out"):
        grads_of(config, mesh=zero.make_mesh(data=8), loss=contrastive)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(secondary=("data_0",)), dict(offload="all", precision="bf16")])
def test_quantized_gathers_go_with_secondary_shards_and_with_params_on_the_host(settings):
    mesh = zero.make_mesh(data=8, data_layout=(4, 2))
    expected = plain()
    config = zero.ZeroConfig(stage=3, quantize=zero.Quantize(gathers="int8"), **settings)
    found = grads_of(config, mesh=mesh)
    assert found[0] == pytest.approx(expected[0], rel=0.02)
    assert abs(found[0] - expected[0]) > 0  # it is the loss of rounded params
    check_close(found[1], expected[1], error=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sizes", "kinds"),
    [
        (dict(num_microbatches=2), dict(replica=2, data=4), {"all-to-all", "all-gather"}),
        (dict(secondary=("data_0",)), SPLIT, {"all-to-all"}),
    ],
)
def test_between_copies_alone_gradients_are_quantized_once_a_step(settings, sizes, kinds):
    """Codes cross the axis of the copies and no other, as many as estimated; all copies decode the same ones."""
    mesh, tx = zero.make_mesh(**sizes), optax.sgd(0.1)
    over = "replica" if "replica" in sizes else "data_1"
    quantize = zero.Quantize(grads="int8", grads_over=over)
    config = zero.ZeroConfig(stage=3, quantize=quantize, **settings)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

    def codes(report):
        found = {}
        for row in (row for row in report.rows if row.dtype == "s8"):
            found[row.kind, row.axes] = found.get((row.kind, row.axes), 0) + row.total_sent_bytes
        return found

    estimated = codes(zero.comms.estimate(state, mesh=mesh, config=config))
    assert codes(zero.comms.measure(step.lower(state, make_batch()).compile(), mesh=mesh)) == estimated
    assert set(estimated) == {(kind, (over,)) for kind in kinds}
    state, _ = step(state, make_batch())
    by_place = {}
    for shard in state.params["layers"]["up"].addressable_shards:
        np.testing.assert_array_equal(shard.data, by_place.setdefault(str(shard.index), shard.data))


def test_a_param_of_the_shape_of_one_example_is_gathered_before_activations_are_added():
    """With one example a device, what an example adds to it is no part of a param that all devices have."""

    def init_positions(key):
        return {"position": jax.random.normal(key, (1, 32, FEATURES)), "w": jnp.eye(FEATURES)}

    def loss(params, batch):
        return jnp.square(jnp.tanh((batch + params["position"]) @ params["w"])).mean()

    batch = jax.random.normal(jax.random.key(1), (8, 32, FEATURES))
    expected = jax.grad(loss)(init_positions(jax.random.key(0)), batch)
    config, tx = zero.ZeroConfig(quantize=zero.Quantize(grads={"w": "int8"})), optax.sgd(0.1)
    state = zero.init_state(init_positions, tx, jax.random.key(0), mesh=zero.make_mesh(data=8), config=config)
    _, found = zero.make_train_step(loss, tx, mesh=zero.make_mesh(data=8), config=config).grads(state, batch)
    check_close(jax.tree.map(np.asarray, found), expected, error=0.015, exact=("position",))


def mixing_halves(params, batch):
    """Examples of each half of the batch are mixed: those of a copy of the params, if there are two copies."""
    loss, aux = loss_fn(params, batch)
    return loss + jnp.std(aux["per_example"].reshape(2, -1), axis=1).mean(), aux


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("model", r"grads_over='model': gradients are not summed over 'model', but over \{'replica': 2, 'data': 4\}"),
        ("replica", r"no gradients of their own to send quantized, because .*leave grads out"),
        (None, r"no gradients of their own to send quantized, because .*leave grads out"),
    ],
)
def test_axes_that_gradients_cannot_be_quantized_over(over, message):
    loss = contrastive if over else mixing_halves
    config = zero.ZeroConfig(stage=3, quantize=zero.Quantize(grads="int8", grads_over=over))
    with pytest.raises(ValueError, match=message):
        grads_of(config, mesh=zero.make_mesh(replica=2, data=4), loss=loss)


EVERY, TIMES = 64, 100.0  # of the features of each layer, so many times as large as the others


@functools.cache
def outlier_batch(step):
    inputs = jax.random.normal(jax.random.key(step), (64, 256))
    outputs = jnp.tanh(inputs @ jax.random.normal(jax.random.key(99), (256, 256)) / 16)
    return {"x": np.asarray(inputs), "y": np.asarray(outputs)}


def outlier_model():
    """A model of two layers whose activations, params and gradients have outliers; without them it is a plain one.

    Returns init, loss function, and an optimizer whose updates are as large as its params.
    """
    x, hidden = (jnp.ones(n).at[::EVERY].set(TIMES) for n in (256, 512))
    scales = {"up": hidden[None] / x[:, None], "down": x[None] / hidden[:, None]}

    def init(key):
        up, down = jax.random.split(key)
        params = {"up": jax.random.normal(up, (256, 512)) / 16, "down": jax.random.normal(down, (512, 256)) / 22}
        return jax.tree.map(jnp.multiply, params, scales)

    def loss_fn(params, batch):
        h = jnp.tanh(batch["x"] * x @ params["up"] / hidden) * hidden
        return jnp.square(h @ params["down"] / x - batch["y"]).mean()

    def update(updates, params):
        return jax.tree.map(lambda u, scale: -3e-3 * u * scale, updates, scales)

    return init, loss_fn, optax.chain(optax.scale_by_adam(eps=1e-12), optax.stateless(update))


def loss_with_outliers(quantize, *, num_steps=40):
    """Returns the mean loss of the last steps."""
    init, loss_fn, tx = outlier_model()
    mesh, config = zero.make_mesh(data=8), zero.ZeroConfig(stage=3, quantize=quantize)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    losses = []
    for i in range(num_steps):
        state, metrics = step(state, outlier_batch(i))
        losses.append(float(metrics.loss))
    return np.mean(losses[-5:])


@pytest.mark.slow
def test_outlier_features_want_small_blocks_or_fp8():
    """An outlier takes the precision of its block: the more blocks have one, the larger the loss."""
    expected = loss_with_outliers(None)
    ratios = {
        size: loss_with_outliers(zero.Quantize(gathers="int8", grads="int8", block_size=size)) / expected
        for size in (16, 64, None)  # None is 128 here
    }
    assert abs(ratios[16] - 1) < 0.05 and ratios[16] < ratios[64] < ratios[None], ratios
    assert ratios[None] > 1.5, ratios  # or this is no hard case
    relative = loss_with_outliers(zero.Quantize(gathers="fp8", grads="int8")) / expected
    assert abs(relative - 1) < 0.05, relative
