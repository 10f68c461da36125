"""Experts that stay sharded: activations are sent to the shards of their params, with the numbers of one device."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax import hlo
from zero_jax.models import decoder
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms import features_in_rows

EXPERTS, FEATURES, HIDDEN, TOKENS = 8, 16, 64, 8


def init(key, hidden=HIDDEN, experts=EXPERTS):
    keys = jax.random.split(key, 4)
    shapes = {
        "router": (2, FEATURES, experts),
        "gate": (2, experts, FEATURES, hidden),
        "up": (2, experts, FEATURES, hidden),
        "down": (2, experts, hidden, FEATURES),
    }
    return {
        name: jax.random.normal(k, shape) / np.sqrt(shape[-2])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def layer(x, weights, activate):
    """Each expert takes the tokens of a sequence that want it most (expert choice)."""
    shares = jnp.swapaxes(jax.nn.softmax(x @ weights["router"]), 1, 2)
    chosen = jax.lax.top_k(shares, 2 * TOKENS // EXPERTS)[1]
    taken = jax.vmap(lambda x, i: x[i])(x, chosen)
    hidden = activate(jnp.einsum("becd,edf->becf", taken, weights["gate"]))
    hidden *= jnp.einsum("becd,edf->becf", taken, weights["up"])
    made = jnp.einsum("becf,efd->becd", hidden, weights["down"])
    made *= jnp.take_along_axis(shares, chosen, axis=2)[..., None]
    add = jax.vmap(lambda x, i, y: x.at[i.reshape(-1)].add(y.reshape(-1, FEATURES)))
    return add(x, chosen, made), None


def make_loss(activate=jax.nn.silu, checkpoint=False):
    body = lambda x, weights: layer(x, weights, activate)  # noqa: E731

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(jax.checkpoint(body) if checkpoint else body, batch["x"], params)
        return jnp.square(x - batch["y"]).mean()

    return loss_fn


def make_batch():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((16, TOKENS, FEATURES), np.float32) for name in "xy"}


def setup(loss_fn, axes=None, **fields):
    """Returns a state, its step, and the step compiled: experts are sharded over `data`."""
    mesh, tx = zero.make_mesh(**(axes or {})), optax.sgd(0.1, momentum=0.9)
    sizes = {name: fields.pop(name) for name in ("hidden", "num_experts") if name in fields}
    sizes = {"experts": sizes.pop("num_experts", EXPERTS), **sizes}
    experts = None if "overrides" in fields else "gate|up|down"
    config = zero.ZeroConfig(**{"stage": 3, "experts": experts, **fields}, min_shard_size=0)
    state = zero.init_state(lambda key: init(key, **sizes), tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    batch = zero.shard_batch(make_batch(), mesh=mesh)
    return state, step, batch, mesh, config


def sent_bytes(state, step, batch):
    found = collections.defaultdict[str, float](float)
    for each in hlo.collectives(step.lower(state, batch).compile().as_text()):
        found[each.kind] += each.total_sent_bytes
    return found


@pytest.mark.parametrize(
    ("fields", "axes", "activate", "checkpoint"),
    [
        ({}, {}, jax.nn.silu, True),
        pytest.param({"num_microbatches": 2}, {}, jax.nn.relu, False, marks=pytest.mark.slow),
        pytest.param({}, {"replica": 2}, jax.nn.gelu, True, marks=pytest.mark.slow),
        pytest.param({}, {"data_layout": (2, 4)}, jnp.tanh, False, marks=pytest.mark.slow),
        pytest.param({"num_experts": 4}, {"data_layout": (2, 4)}, jnp.tanh, True, marks=pytest.mark.slow),
        pytest.param({"remat": "full"}, {"model": 2}, jax.nn.silu, False, marks=pytest.mark.slow),
        pytest.param({"keep_gathered": True}, {}, jax.nn.silu, False, marks=pytest.mark.slow),
        pytest.param({"offload": "all"}, {}, jax.nn.silu, False, marks=pytest.mark.slow),
        pytest.param({"stage": 2}, {}, jax.nn.silu, True, marks=pytest.mark.slow),
        pytest.param({"stage": 1, "num_microbatches": 2}, {}, jax.nn.silu, True, marks=pytest.mark.slow),
        pytest.param({"num_microbatches": 2}, {"pipe": 2}, jax.nn.silu, True, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_one_device(fields, axes, activate, checkpoint):
    loss_fn, tx = make_loss(activate, checkpoint), optax.sgd(0.1, momentum=0.9)
    if "pipe" in axes:
        fields = {**fields, "overrides": {"gate|up|down": jax.P("pipe", "data")}}
    state, step, batch, _, _ = setup(loss_fn, axes, **fields)
    params = init(jax.random.key(0), experts=fields.get("num_experts", EXPERTS))
    opt_state = tx.init(params)
    for _ in range(2):
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, make_batch())
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), state.params, params)


@pytest.mark.slow
def test_less_is_sent_and_the_report_says_what():
    loss_fn = make_loss(checkpoint=True)
    state, step, batch, mesh, config = setup(loss_fn)
    sent = sent_bytes(state, step, batch)
    other, other_step, *_ = setup(loss_fn, overrides={"gate|up|down": jax.P(None, None, "data")})
    assert sent["all-to-all"] > 0 and sum(sent.values()) < 0.3 * sum(sent_bytes(other, other_step, batch).values())
    specs = zero.state_shardings(state, mesh=mesh, config=config).params
    report = zero.gather_report(loss_fn, specs, state.params, batch, mesh=mesh)
    assert str(report).count("activations sent to its 8 shards") == 3
    # There and back twice, for the forward and the backward pass, and for what is recomputed.
    size = 16 * EXPERTS * (2 * TOKENS // EXPERTS) * FEATURES * 4 // 8
    assert sent["all-to-all"] == 2 * 6 * size * 7 // 8


@pytest.mark.slow
def test_what_was_sent_is_laid_out_in_rows_where_it_is():
    """Features in rows (`features_in_rows`) keep no product from what was sent to its experts."""
    loss_fn = make_loss(checkpoint=True)
    state, step, batch, mesh, config = setup(loss_fn, hidden=128)
    in_rows = features_in_rows(loss_fn, mesh=mesh, axes=axes_of(mesh))
    assert str(jax.make_jaxpr(in_rows)(state.params, batch)).count("zero_rows[") == 2
    rows = zero.make_train_step(in_rows, optax.sgd(0.1, momentum=0.9), mesh=mesh, config=config)
    assert sent_bytes(state, rows, batch) == sent_bytes(state, step, batch)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params := init(jax.random.key(0), hidden=128), make_batch())
    state, metrics = rows(state, batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    expected = jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), state.params, expected)


@pytest.mark.parametrize(("layout", "num_microbatches"), [(None, 2), ((2, 4), 1)])
def test_the_estimate_is_what_is_sent(layout, num_microbatches):
    fields = {"num_microbatches": num_microbatches, "remat": "full", "num_experts": 4 if layout else EXPERTS}
    loss_fn = make_loss()
    state, step, batch, mesh, config = setup(loss_fn, {"data_layout": layout}, **fields)
    traced = zero.trace_loss(loss_fn, state.params, batch, mesh=mesh, config=config)
    estimated = zero.comms.estimate(state, mesh=mesh, config=config, traced=traced)
    rows = [row for row in estimated.rows if row.kind == "all-to-all"]
    assert sum(row.total_sent_bytes for row in rows) == sent_bytes(state, step, batch)["all-to-all"]
    measured = zero.comms.measure(step.lower(state, batch).compile(), mesh=mesh, param_shapes=state.params)
    assert not [x for x in measured.findings if "all-to-all" in x.message]  # which are meant to be
    axes = ("data_1",) if layout else ("data",)
    assert {(row.axes, row.phase) for row in rows} == {(axes, "forward"), (axes, "backward")}
    assert estimated.num_params == sum(x.size for x in jax.tree.leaves(state.params))


def test_experts_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match=r"'down' of shape .*: 6 experts .* the 8 devices of 'data'.*data_layout"):
        setup(make_loss(), num_experts=6)
    with pytest.raises(ValueError, match=r"'gates' matches the path of no leaf"):
        setup(make_loss(), experts="gates")


def test_params_smaller_than_the_activations_are_gathered():
    loss_fn = make_loss()
    state, _, batch, mesh, config = setup(loss_fn, hidden=4)
    specs = zero.state_shardings(state, mesh=mesh, config=config).params
    report = str(zero.gather_report(loss_fn, specs, state.params, batch, mesh=mesh))
    assert "activations sent" not in report and report.startswith("4 gathers, 0 of them early")


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v6e:4x4"])
def test_a_decoder_s_experts_on_tpus(topology):
    """The decoder's experts are found as they are, and all that is sent for them are native all-to-alls."""
    mesh, tx = zero.make_mesh(topology=topology), optax.sgd(0.1)
    decoder_config = DecoderConfig(
        vocab_size=256, seq_len=256, num_layers=2, d_model=256, num_heads=2, num_kv_heads=2, d_hidden=1024,
        num_experts=16, experts_per_token=2, expert_capacity=1.0,
    )  # fmt: skip
    data = tuple(axis for axis in mesh.axis_names if axis.startswith("data"))
    config = zero.ZeroConfig(
        stage=3, precision="bf16", overrides={"blocks/(gate|up|down)": jax.P(None, data)}, overlap=False
    )
    state = zero.abstract_state(lambda key: decoder.init(decoder_config, key), tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32)
    step = zero.make_train_step(decoder.loss_fn(decoder_config), tx, mesh=mesh, config=config)
    text = step.lower(state, {"inputs": tokens, "targets": tokens}).compile().as_text()
    of_experts = 16 * 256 * 1024 * 2
    sent = {(each.kind, each.total_sent_bytes) for each in hlo.collectives(text)}
    assert not [x for x in sent if x[1] >= of_experts // 2], sent
    assert sum(size for kind, size in sent if kind == "all-to-all") > 0
