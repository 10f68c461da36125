"""Experts that sort the tokens of all examples: devices sort their own where that is the same, and send none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gathering import check, compiled_step, normal
from jax import lax
from reference import mesh_of

import zero_jax as zero
from zero_jax.dims import FREE
from zero_jax.program.subcalls import MANUAL, equations
from zero_jax.transforms.gather.sorted_rows import sorted_by_device

D, F, E, K = 16, 32, 8, 2


def init(d=D, f=F):
    shapes = {"router": (d, E), "gate": (E, d, f), "up": (E, d, f), "down": (E, f, d)}
    return {name: normal(*shape) for name, shape in shapes.items()}


def route(params, x):
    """Returns the weight and the number of each expert, and all numbers in one row."""
    weight, expert = lax.top_k(jax.nn.softmax((x @ params["router"]).astype(jnp.float32)), K)
    return weight.astype(x.dtype), expert.reshape(-1)


def experts(params, rows, sizes):
    h = jax.nn.silu(lax.ragged_dot(rows, params["gate"], sizes)) * lax.ragged_dot(rows, params["up"], sizes)
    return lax.ragged_dot(h, params["down"], sizes)


def added(params, x):
    weight, expert = route(params, x)
    order = jnp.argsort(expert)
    y = experts(params, x[order // K], jnp.bincount(expert, length=E)) * weight.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(y)


def summed(params, x):
    """As `added`, by functions in the place of indexing, with the tokens' numbers beside the keys."""
    weight, expert = route(params, x)
    keys, order = lax.sort([expert, lax.iota(jnp.int32, len(expert))], num_keys=1)
    sizes = jax.nn.one_hot(keys, E, dtype=jnp.int32).sum(0)
    y = experts(params, jnp.take(x, order // K, axis=0), sizes) * jnp.take(weight.reshape(-1), order)[:, None]
    return jax.ops.segment_sum(y, order // K, len(x))


def inverted(params, x):
    weight, expert = route(params, x)
    order = jnp.argsort(expert)
    y = jax.checkpoint(experts)(params, jnp.repeat(x, K, axis=0)[order], jnp.bincount(expert[order], length=E))
    return jnp.einsum("tkd,tk->td", y[jnp.argsort(order)].reshape(-1, K, x.shape[-1]), weight)


def scattered(params, x):
    """The inverse order by a scatter, experts with a bias of their own, and a loss that counts the sorted rows."""
    weight, expert = route(params, x)
    order = jnp.argsort(expert, stable=False)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    rows = x[order // K] + params["down"][:, 0][expert[order]]
    y = jnp.where(rows > 0, experts(params, rows, (expert[:, None] == jnp.arange(E)).sum(0)), 0)
    shares = jnp.zeros(E).at[expert[order]].add(1) / len(order)
    return (y[places.reshape(-1, K)] * weight[..., None]).sum(1) + shares.max() * (y * y).mean()


def written(params, x):
    weight, expert = route(params, x)
    order = jnp.argsort(expert)
    y = experts(params, x[order // K], jnp.bincount(expert, length=E))
    return (jnp.zeros_like(y).at[order].set(y).reshape(-1, K, x.shape[-1]) * weight[..., None]).sum(1)


def descending(params, x):
    """Groups of other sizes than the experts have, the last first."""
    weight, expert = route(params, x)
    order = jnp.argsort(-expert)
    sizes = jnp.array([0, 37, 1, 90, 0, 61, 5, 6], jnp.int32)
    y = experts(params, x[order // K], sizes * len(order) // 200)
    return jnp.zeros_like(x).at[order // K].add(y * weight.reshape(-1)[order][:, None])


def noised(params, x):
    """A key that is made in the loss is no number that is known when it is traced."""
    return added(params, x + jax.random.normal(jax.random.key(3), x.shape) / 10)


def positions(params, x):
    """The first tokens of each expert alone, by their places in the order of all."""
    weight, expert = route(params, x)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=E)
    place = jnp.arange(len(order)) - (jnp.cumsum(sizes) - sizes)[expert[order]]
    y = experts(params, x[order // K], sizes) * (place < 4)[:, None]
    return jnp.zeros_like(x).at[order // K].add(y * weight.reshape(-1)[order][:, None])


def promised(params, x):
    """What is sorted is said to be."""
    _, expert = route(params, x)
    order = jnp.argsort(expert)
    y = experts(params, x[order // K], jnp.bincount(expert, length=E))
    means = jax.ops.segment_sum(y, expert[order], E, indices_are_sorted=True)
    return jnp.zeros_like(x).at[order // K].add(y) + means.mean(0)


def neighbours(params, x):
    """Rows that are next to one another in the order of all are added."""
    weight, expert = route(params, x)
    order = jnp.argsort(expert)
    y = jnp.cumsum(experts(params, x[order // K], jnp.bincount(expert, length=E)), 0)
    return jnp.zeros_like(x).at[order // K].add(y * weight.reshape(-1)[order][:, None])


def left_sorted(params, x):
    """The results of experts are added to tokens in their own order."""
    _, expert = route(params, x)
    order = jnp.argsort(expert)
    return x + experts(params, x[order // K], jnp.bincount(expert, length=E))[: len(x)]


def places_as_numbers(params, x):
    """Where a token is in the order of all is a feature of it."""
    order = jnp.argsort(x[:, 0])
    return x * jnp.argsort(order)[:, None] / len(order)


def routed_apart(params, x):
    """Tokens are sorted in a region of their own, and multiplied outside of it."""

    @jax.checkpoint
    def routed(router, x):
        _, expert = route({"router": router}, x)
        order = jnp.argsort(expert)
        return order, x[order // K], jnp.bincount(expert, length=E)

    order, rows, sizes = routed(params["router"], x)
    return jnp.zeros_like(x).at[order // K].add(experts(params, rows, sizes))


def other_rows(params, x):
    """Sorted rows meet those of another sort."""
    _, expert = route(params, x)
    order, other = jnp.argsort(expert), jnp.argsort(expert[::-1])
    y = experts(params, x[order // K] + x[other // K], jnp.bincount(expert, length=E))
    return jnp.zeros_like(x).at[order // K].add(y)


def at_other_places(params, x, places):
    """Rows are looked up at places that are made of where they are in the order of all."""
    _, expert = route(params, x)
    order = jnp.argsort(expert)
    y = experts(params, x[order // K], jnp.bincount(expert, length=E))
    return y[places(jnp.argsort(order))].reshape(-1, K, x.shape[-1]).sum(1)


def at_least(params, x):
    return at_other_places(params, x, lambda places: jnp.maximum(places, np.arange(len(places))))


def shuffled(params, x):
    """What leads back to the numbers of rows does not lead back to their places."""

    def places(own):
        half = len(own) // 2
        turned = own.reshape(2, half).T.reshape(-1)
        return turned % half * 2 + turned // half

    return at_other_places(params, x, places)


def shifted(params, x):
    """Rows go to the token after the one that they are of."""
    _, expert = route(params, x)
    order = jnp.argsort(expert)
    y = experts(params, x[order // K], jnp.bincount(expert, length=E))
    return jnp.zeros_like(x).at[(order // K + 1) % len(x)].add(y)


def overwritten(params, x):
    """Of the rows of a token the last in the order of all is written."""
    _, expert = route(params, x)
    order = jnp.argsort(expert)
    return jnp.zeros_like(x).at[order // K].set(experts(params, x[order // K], jnp.bincount(expert, length=E)))


def loss(layer, params, batch):
    x = jnp.tanh(batch.reshape(-1, batch.shape[-1]))
    y = layer(params, x)
    return jnp.mean(jnp.square((x + y).astype(jnp.float32)))


SAME = [added, summed, inverted, scattered, written, descending, noised]
OTHERS = [
    *(promised, routed_apart, positions, neighbours, left_sorted, places_as_numbers, other_rows, overwritten),
    *(at_least, shuffled),
]


def changed(layer, mesh):
    """Returns the jaxpr of a loss, as it is and changed."""
    params, batch = init(), normal(16, 6, D, scale=1.0)
    closed = jax.make_jaxpr(functools.partial(loss, layer))(params, batch)
    axes = zero.ZeroConfig(stage=3).axes_of(mesh)
    states = [*(FREE for _ in params), 0]
    return closed, sorted_by_device(closed, states, mesh=mesh, axes=axes)


def is_changed(layer, mesh):
    before, after = changed(layer, mesh)
    return before is not after


@pytest.mark.parametrize("layer", [*SAME, *OTHERS, shifted])
def test_devices_sort_their_own_rows_where_that_is_the_same(layer):
    mesh = mesh_of("8")
    assert is_changed(layer, mesh) == (layer not in OTHERS)
    check(functools.partial(loss, layer), init(), normal(16, 6, D, scale=1.0), mesh=mesh)


@pytest.mark.parametrize("layer", SAME)
def test_devices_look_up_and_write_their_own_rows_alone(layer):
    """But for what is looked up by expert."""
    of_rows = ("gather", "scatter", "scatter-add", "ragged_dot_general")
    eqns = [eqn for eqn in equations(changed(layer, mesh_of("8"))[1], skip=MANUAL) if eqn.primitive.name in of_rows]
    large = [eqn for eqn in eqns if eqn.invars[0].aval.shape[0] >= 16 * 6]
    assert not [eqn for eqn in large if not eqn.params["dimension_numbers"].operand_batching_dims]


@pytest.mark.parametrize("mesh", ["replica", "staged222", "model2"])
def test_rows_are_sorted_on_meshes_of_several_axes(mesh):
    assert is_changed(inverted, mesh_of(mesh)) == (mesh != "model2")
    batch = normal(16, 6, D, scale=1.0)
    check(functools.partial(loss, inverted), init(), batch, mesh=mesh_of(mesh), reduce_dtype=jnp.float32)


@pytest.mark.parametrize(("stage", "min_shard_size"), [(0, 1), (3, 1), (3, 10**9)])
def test_gradients_of_experts_are_summed_in_the_reduce_dtype(stage, min_shard_size):
    """Of experts that are unsharded, too."""
    mesh, tx, dtypes = mesh_of("8"), optax.sgd(0.1), {"compute": jnp.bfloat16, "reduce": jnp.float32}
    config = zero.ZeroConfig(stage=stage, precision=zero.Precision(**dtypes), min_shard_size=min_shard_size)
    state = zero.abstract_state(lambda _: jax.tree.map(jnp.asarray, init()), tx, mesh=mesh, config=config)
    step = zero.make_train_step(functools.partial(loss, added), tx, mesh=mesh, config=config)
    program = jax.make_jaxpr(step)(state, jax.ShapeDtypeStruct((16, 6, D), jnp.float32))
    sums = [eqn.outvars[0].aval for eqn in equations(program) if eqn.primitive.name == "psum"]
    dtypes = [x.dtype for x in sums if x.shape[-3:] in ((E, D, F), (E, F, D))]
    assert dtypes == [jnp.float32] * 3


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("layer", "stage"), [(added, 3), (inverted, 1)])
def test_sorted_experts_send_their_params_alone(layer, stage):
    pytest.importorskip("libtpu")
    size = sum(x.size * 2 for x in init(256, 512).values())
    compiled = compiled_step(functools.partial(loss, layer), functools.partial(init, 256, 512), (32, 64, 256), stage)
    ideal = {1: 2, 3: 3}[stage] * size * 15 / 16
    assert zero.comms.measure(compiled).sent_bytes < 1.02 * ideal
