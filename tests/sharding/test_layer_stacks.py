"""Which params are stacks of layers, and their sharding over the stages of a pipeline."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax as zero
from zero_jax.sharding.rules import stacked_layers


def shapes(**leaves):
    return {name.replace("__", "/"): shape for name, shape in leaves.items()}


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        (shapes(embed=(100, 16), layers__w=(4, 16, 16), layers__norm=(4, 16), layers__scale=(4,)), 3),
        (shapes(layers__w=(4, 16, 16), head=(16, 100)), 1),
        (shapes(layers__norm=(4, 16), head=(16, 100)), 0),  # one leaf of two dims may be any matrix
        (shapes(mlp__w=(16, 16), mlp__b=(16,)), 0),
        (
            shapes(attention__query=(64, 4, 16), attention__out=(4, 16, 64)),
            1,
        ),  # heads: a stack of 4 for all that is known
        (shapes(w=(4, 16, 16), b=(4, 16)), 2),
        (shapes(step=()), 0),
        ({}, 0),
    ],
)
def test_stacks_are_subtrees_of_one_leading_dim(leaves, expected):
    assert len(stacked_layers(leaves)) == expected


PARAMS = {"embed": (96, 16), "layers": {"w": (4, 16, 32), "norm": (4, 16)}}
TREE = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), PARAMS, is_leaf=lambda x: type(x) is tuple)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stacks_are_over_stages_at_every_stage_of_zero(stage):
    mesh = zero.make_mesh(pipe=2)
    config = zero.ZeroConfig(stage=stage, num_microbatches=2, min_shard_size=8)
    state = zero.abstract_state(lambda _: TREE, optax.adafactor(1e-2), mesh=mesh, config=config)
    layers = state.params["layers"]
    assert layers["w"].sharding.spec == (P("pipe", None, "data") if stage == 3 else P("pipe"))
    assert layers["norm"].sharding.spec[0] == "pipe"
    assert state.params["embed"].sharding.spec == (P("data", "pipe") if stage == 3 else P())
    # What an optimizer keeps of layers is with them, whatever its shape.
    kept = [x for x in jax.tree.leaves(state.opt_state) if x.ndim and x.shape[0] == 4]
    assert kept
    assert all(x.sharding.spec[0] == "pipe" for x in kept)


def test_specs_that_are_given_come_first():
    mesh = zero.make_mesh(pipe=2, model=2)
    specs = {"layers/w": P(None, "model", None), "layers/norm": P(None, "pipe")}
    config = zero.ZeroConfig(num_microbatches=2, min_shard_size=8, param_specs=specs)
    state = zero.abstract_state(lambda _: TREE, optax.sgd(1e-2), mesh=mesh, config=config)
    assert state.params["layers"]["w"].sharding.spec == P("pipe", "model", "data")
    assert "pipe" in state.params["layers"]["norm"].sharding.spec[1]
    odd = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype), TREE)
    odd = zero.abstract_state(lambda _: odd, optax.sgd(1e-2), mesh=mesh, config=config.__class__(num_microbatches=2))
    assert "pipe" not in str(odd.params["layers"]["norm"].sharding.spec)


@pytest.mark.parametrize("features", [16, 17])  # of 17 all shards are along the rows
def test_gradients_outside_of_the_layers_are_summed_where_their_shards_are(features):
    """Not brought to the order of shards before: that would send each device's own sum once more."""
    mesh, config = zero.make_mesh(pipe=2), zero.ZeroConfig(stage=1, num_microbatches=2, min_shard_size=8)
    init_fn = lambda _: {"embed": jnp.ones((4096, features)), "layers": jnp.ones((4, features, features))}  # noqa: E731
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(layer, params["embed"][batch], params["layers"])
        return jnp.square(x @ params["embed"].T).mean()

    tx = optax.sgd(1e-2)
    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    compiled = step.lower(state, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()
    rows = [row for row in zero.comms.measure(compiled, mesh=mesh).rows if set(row.axes) == {"data", "pipe"}]
    assert sum(row.sent_bytes for row in rows) <= 1.1 * state.params["embed"].size * 4 / 8
