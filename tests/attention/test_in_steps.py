"""Fused attention in train steps: every transform of a step takes it for one operation of each example."""

import collections
import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
import reference

import zero_jax as zero
from zero_jax.program.loss import LossProgram
from zero_jax.program.subcalls import equations
from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms import BatchParts, separability

L, D, N, K, H, T, B = 2, 16, 4, 2, 8, 6, 16
SETTINGS = [
    pytest.param({"stage": 3}, {"data": 8}, marks=pytest.mark.slow),
    pytest.param({"stage": 0, "remat": "full"}, {"data": 4, "model": 2}, marks=pytest.mark.slow),
    pytest.param({"stage": 1, "num_microbatches": 2, "remat": "attention"}, {"data": 8}, marks=pytest.mark.slow),
    pytest.param(
        {"stage": 2, "num_microbatches": 2, "remat": "dots"},
        {"replica": 2, "data": 2, "model": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"stage": 1, "num_microbatches": 2, "pipeline": "1f1b"},
        {"data": 2, "pipe": 2, "model": 2},
        marks=pytest.mark.slow,
    ),
    ({"stage": 3, "remat": "attention_sharded"}, {"data": 2, "model": 4}),  # more devices than heads of keys
]


def init(key):
    draw = lambda i, *shape: 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)  # noqa: E731
    sizes = {"query": N, "key": K, "value": K}
    blocks = {name: draw(i, L, D, n, H) for i, (name, n) in enumerate(sizes.items())}
    return {"blocks": blocks | {"out": draw(3, L, N, H, D)}, "table": draw(4, 32, D)}


def make_loss(implementation):
    def block(x, p):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in ("query", "key", "value"))
        y = zero.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return x + jnp.einsum("btnh,nhd->btd", y, p["out"])

    def loss(params, batch):
        x = params["table"][batch["x"]]
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, params["blocks"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, batch["y"]).mean()

    return loss


def make_batch():
    return {name: jax.random.randint(jax.random.key(i), (B, T), 0, 32) for i, name in enumerate("xy")}


@functools.cache
def plain_run():
    """Returns params and loss after two steps of plain optax without the kernel."""
    params, _, losses = reference.run_plain(
        make_loss("xla"), optax.sgd(0.1), [make_batch()] * 2, params=jax.jit(init)(jax.random.key(0))
    )
    return jax.device_get(params), losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "sizes"), SETTINGS)
def test_steps_with_the_kernel_are_those_of_one_device_without(options, sizes):
    mesh, config, tx = zero.make_mesh(**sizes), zero.ZeroConfig(**options, min_shard_size=1), optax.sgd(0.1)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(make_loss("splash"), tx, mesh=mesh, config=config)
    for _ in range(2):
        state, metrics = step(state, make_batch())
    params, loss = plain_run()
    chex.assert_trees_all_close(metrics.loss, loss, rtol=1e-6)
    chex.assert_trees_all_close(jax.device_get(state.params), params, atol=1e-6)  # float32, sums in another order


@pytest.mark.parametrize("local", [True, False])
def test_attention_mixes_no_examples(local):
    def loss(params, batch, key):
        del key
        return make_loss("splash")(params, batch), (None, None)

    mesh = zero.make_mesh(data=4, model=2)
    found = separability(
        LossProgram(loss), (jax.eval_shape(init, jax.random.key(0)), make_batch(), jax.random.key(0)),
        BatchParts(mesh=mesh, axes=axes_of(mesh), num_microbatches=2, local=local),
    )  # fmt: skip
    assert not found.another_loss and not found.not_local


@pytest.mark.parametrize(
    ("remat", "num_forward"), [("full", 2), ("dots", 1), ("attention", 1), ("none", 1), ("names:zero_attention", 1)]
)
def test_what_remat_keeps_of_the_kernel_runs_once(remat, num_forward):
    loss = zero.rematerialize(make_loss("splash"), remat, mesh=zero.make_mesh(data=8))
    grads = jax.make_jaxpr(jax.grad(loss))(init(jax.random.key(0)), make_batch())
    names = [eqn.primitive.name for eqn in equations(grads)]
    assert names.count("zero_attention") == num_forward and names.count("zero_attention_cotangents") == 1


def sent_by_step(implementation, **options):
    """Returns the bytes that a device sends in a step with two stages of layers, by kind and mesh axes."""
    mesh, config = zero.make_mesh(data_layout=(2, 2), pipe=2), zero.ZeroConfig(num_microbatches=2, **options)
    state = zero.abstract_state(init, optax.sgd(0.1), mesh=mesh, config=config)
    step = zero.make_train_step(make_loss(implementation), optax.sgd(0.1), mesh=mesh, config=config)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    sent = collections.defaultdict(float)
    for row in zero.comms.measure(step.lower(state, batch).compile(), mesh=mesh).rows:
        sent[row.kind, row.axes] += row.total_sent_bytes
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stage": 1, "pipeline": "1f1b"}, {"stage": 3, "pipeline": "gpipe"}], ids=str)
def test_the_kernel_takes_examples_from_the_devices_of_a_pipeline_that_have_them(options):
    assert sent_by_step("splash", **options) == sent_by_step("xla", **options)
