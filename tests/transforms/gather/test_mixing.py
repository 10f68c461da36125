"""Mixtures of experts and other mixing of examples: the same values, and no activations sent beyond stage 0's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import quick_by_turns
from gathering import activations, check, compiled_step, compiled_traffic, normal
from jax import lax
from reference import mesh_of

import zero_jax as zero
from zero_jax.dims import FREE, UNKNOWN, Examples

D, F, E = 128, 256, 8


def init(_=None, d=D, f=F):
    shapes = {"into": (d, d), "router": (d, E), "up": (E, d, f), "down": (E, f, d)}
    return {name: normal(*shape) for name, shape in shapes.items()}


def route(params, x):
    weights = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    weight, expert = lax.top_k(weights, 2)
    return weight.astype(x.dtype), expert


def ragged(params, x):
    """Top-2 of the experts, by a sort over the tokens of all examples."""
    weight, expert = route(params, x)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=E)
    h = jax.nn.relu(lax.ragged_dot(x[order // 2], params["up"], sizes))
    h = lax.ragged_dot(h, params["down"], sizes)[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
    return jnp.einsum("tkd,tk->td", h, weight)


def one_hot(params, x):
    """The first expert, with a capacity for all examples together."""
    weight, expert = route(params, x)
    chosen = jax.nn.one_hot(expert[:, 0], E, dtype=jnp.int32)
    dispatch = jax.nn.one_hot(jnp.cumsum(chosen, 0) * chosen - 1, 2 * len(x) // E, dtype=x.dtype)
    h = jnp.einsum("td,tec->ecd", x, dispatch)
    h = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", h, params["up"])), params["down"])
    return jnp.einsum("ecd,tec->td", h, dispatch) * weight[:, :1]


def slots(params, x):
    """The same by a scatter into the experts' slots."""
    weight, expert = route(params, x)
    chosen = jax.nn.one_hot(expert[:, 0], E, dtype=jnp.int32)
    size = 2 * len(x) // E
    slot = expert[:, 0] * size + jnp.minimum((jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1, size - 1)
    h = jnp.zeros((E * size, x.shape[-1]), x.dtype).at[slot].add(x).reshape(E, size, -1)
    h = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", h, params["up"])), params["down"])
    return h.reshape(E * size, -1)[slot] * weight[:, :1]


def sorted_rows(params, x):
    """A dense layer on the tokens of all examples in another order."""
    order = jnp.argsort(x[:, 0])
    return (jax.nn.relu(x[order] @ params["up"][0]) @ params["down"][0])[jnp.argsort(order)]


def expert_choice(params, x):
    """The experts choose among the tokens of all examples."""
    weight, chosen = lax.top_k((x @ params["router"]).T, len(x) // E)
    h = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", x[chosen], params["up"])), params["down"])
    return jnp.zeros_like(x).at[chosen.reshape(-1)].add((h * weight[..., None]).reshape(-1, x.shape[-1]))


def by_example(params, x):
    """The experts of each example's own tokens: nothing is mixed."""
    examples = x.reshape(-1, 16, x.shape[-1])
    weight, chosen = lax.top_k(jnp.swapaxes(examples @ params["router"], 1, 2), 16 // E)
    h = jax.vmap(lambda x, i: x[i])(examples, chosen)
    h = jnp.einsum("becf,efd->becd", jax.nn.relu(jnp.einsum("becd,edf->becf", h, params["up"])), params["down"])
    return jax.vmap(lambda h, i: jnp.zeros((16, x.shape[-1]), h.dtype).at[i].add(h))(h * weight[..., None], chosen)


def loss(layer, params, batch):
    x = jnp.tanh(batch @ params["into"])
    y = layer(params, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return jnp.mean(jnp.square((x + y).astype(jnp.float32)))


@pytest.mark.parametrize(
    ("layer", "reduce_dtype"),
    quick_by_turns([ragged, one_hot, slots, sorted_rows, expert_choice, by_example], [None, jnp.float32]),
)
def test_mixing_keeps_values_and_gradients(layer, reduce_dtype):
    params = init(d=16, f=32)
    check(functools.partial(loss, layer), params, normal(16, 16, 16), mesh=mesh_of("8"), reduce_dtype=reduce_dtype)


WIDE = 512  # products over groups of rows are computed in shares


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_shares_of_the_rows_keep_values_and_gradients(reduce_dtype):
    """Groups of rows begin and end within the shares of devices, share one, or are empty."""
    sizes = jnp.array([0, 1000, 24, 0, 512, 500, 0, 12], jnp.int32)

    def loss(params, x):
        h = jnp.tanh(lax.ragged_dot(x, params["up"], sizes))
        return jnp.mean(jnp.square(lax.ragged_dot(h, params["down"], sizes)))

    check(loss, init(d=WIDE, f=WIDE), normal(2048, WIDE), mesh=mesh_of("8"), reduce_dtype=reduce_dtype)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, 3])
def test_each_device_keeps_its_share_of_the_rows(stage):
    pytest.importorskip("libtpu")
    batch, size = (32, 64, WIDE), 2 * 32 * 64 * 2  # bytes of a feature of all rows
    compiled = compiled_step(functools.partial(loss, ragged), functools.partial(init, d=WIDE, f=WIDE), batch, stage)
    assert zero.memory.measure(compiled).residual_bytes < size * WIDE / 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_train_step_of_a_mixture_is_the_same_at_each_stage(stage):
    mesh, tx = mesh_of("8"), optax.sgd(1.0)
    config = zero.ZeroConfig(stage=stage, min_shard_size=1)
    params, batch = init(d=16, f=32), normal(16, 16, 16)
    want, grads = jax.value_and_grad(functools.partial(loss, ragged))(params, batch)
    state = zero.init_state(
        lambda _: jax.tree.map(jnp.asarray, params), tx, jax.random.key(0), mesh=mesh, config=config
    )
    state, metrics = zero.make_train_step(functools.partial(loss, ragged), tx, mesh=mesh, config=config)(state, batch)
    assert metrics.loss == pytest.approx(float(want), rel=1e-5)
    for name, grad in grads.items():
        assert jnp.allclose(state.params[name], params[name] - grad, atol=1e-6), name


def measured(layer, stage):
    return compiled_traffic(functools.partial(loss, layer), init, (32, 16, D), stage)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("layer", "stage"),
    [
        *((layer, 2) for layer in (ragged, one_hot, slots, sorted_rows, expert_choice)),
        *((layer, 3) for layer in (ragged, one_hot, slots, expert_choice)),
    ],
)
def test_no_stage_sends_more_activations_than_the_tokens_there_and_back(layer, stage):
    """Stage 0 all-reduces the tokens that the experts take, and their cotangents."""
    pytest.importorskip("libtpu")
    report = measured(layer, stage)
    tokens = {ragged: 2, one_hot: 2, slots: 2, sorted_rows: 1, expert_choice: 2}[layer] * 32 * 16 * D * 2
    assert activations(report) < 1.05 * 2 * 2 * tokens * 15 / 16
    for finding in report.findings:
        assert finding.kind == "moved activations"
        # The experts' rows are gathered for a reshape, which XLA names, or (JAX 0.12) for their sharding.
        if layer is not expert_choice:
            assert "examples are mixed there" in finding.message
            assert "test_mixing.py" in finding.message


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_gradients_of_a_mixture_by_example_are_reduce_scattered():
    pytest.importorskip("libtpu")
    reduced = [row for row in measured(by_example, 2).rows if row.kind == "all-reduce" and row.full_bytes > D * D]
    assert not reduced


def graph_init(d=D):
    return {name: normal(*shape) for name, shape in {"message": (2, 2 * d, d), "update": (2, 2 * d, d)}.items()}


def messages(params, nodes, edges, *, add=jax.ops.segment_sum):
    """A graph network over all nodes: each layer looks up the two ends of each edge, and adds its message to one."""
    source, target = edges[:, 0], edges[:, 1]

    def layer(x, weights):
        ends = jnp.concatenate([x[source], x[target]], -1)
        added = add(jax.nn.relu(ends @ weights["message"]), target, len(x))
        return x + jax.nn.relu(jnp.concatenate([x, added], -1) @ weights["update"]), None

    return jnp.square(jax.lax.scan(layer, nodes, params)[0]).mean()


def graph(num_nodes=32, num_edges=64, d=D):
    edges = np.random.default_rng(0).integers(0, num_nodes, (num_edges, 2), dtype=np.int32)
    return normal(num_nodes, d, seed=1), edges


def first_nodes(params, nodes, edges):
    """Looks the same examples up before a loop, in each of its turns, in a branch of these, and after it."""
    before = nodes[edges[:, 0]]

    def layer(x, weights):
        x = lax.cond(x[0, 0] < 9, lambda x: x + nodes[edges[:, 1]], lambda x: x, x)
        return jnp.tanh(x @ weights["update"][: len(x.T)]) + nodes[edges[:, 0]], None

    x = jax.checkpoint(lambda x: x + nodes[edges[:, 0]])(lax.scan(layer, before, params)[0])
    numbers = jax.ops.segment_sum(edges[:, 1], edges[:, 0], len(nodes))  # integers, of one dim
    x += numbers.at[edges[:, 1]].get()[:, None] + jax.ops.segment_sum(x[:, 0], edges[:, 0], len(nodes))[edges[:, :1]]
    return jnp.square(x + nodes[edges[:, 0]]).mean()


def last_nodes(params, nodes, edges):
    """Looks the same examples up in a loop, in a branch of it, and in another, and only then outside of these."""

    def layer(x, weights):
        x = lax.cond(x[0, 0] < 9, lambda x: x + nodes[edges[:, 1]], lambda x: x, x)
        return jnp.tanh(x @ weights["update"][: len(x.T)]) + nodes[edges[:, 0]], None

    x = lax.scan(layer, jnp.ones((len(edges), nodes.shape[1])), params)[0]
    x = lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x) + nodes[edges[:, 0]], x)
    return jnp.square(x + nodes[edges[:, 1]]).mean()


@pytest.mark.parametrize("function", [first_nodes, last_nodes])
def test_examples_are_looked_up_in_loops_and_around_them(function):
    check(function, graph_init(16), *graph(d=16), mesh=mesh_of("8"))


@pytest.mark.parametrize(
    ("mesh", "add"),
    quick_by_turns(["8", "staged222", "replica", "model2"], [jax.ops.segment_sum, jax.ops.segment_max]),
)
def test_a_graph_keeps_values_and_gradients(mesh, add):
    check(functools.partial(messages, add=add), graph_init(16), *graph(d=16), mesh=mesh_of(mesh))


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "size", "expected"),
    [(32, 64, 32, 2), (32, 16, 32, 0), (36, 64, 36, 0), (32, 60, 32, 0), (32, 64, 40, 1)],
)
def test_lookups_of_examples_and_sums_of_them_are_shared_out(num_nodes, num_edges, size, expected):
    """Not lookups of few examples, sizes that do not divide, and sums that are no examples."""

    def fn(w, nodes, edges):
        return jax.ops.segment_sum(nodes[edges[:, 0]] * w, edges[:, 1], size)

    mesh, sizes = mesh_of("8"), (num_nodes, num_edges)
    found = Examples(mesh, zero.ZeroConfig(stage=3).axes_of(mesh), frozenset(sizes))
    states = [FREE, *(UNKNOWN if size % 8 else 0 for size in sizes)]
    found.run(jax.make_jaxpr(fn)(jnp.ones(()), *graph(*sizes)), states)
    assert sum(move is not None and move.places is not None for move in found.moves.values()) == expected


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v6e:4x4"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_graph_sends_each_layers_nodes_four_times(topology, stage):
    """Nodes are gathered and what is added to them reduce-scattered, and so are the cotangents of both."""
    pytest.importorskip("libtpu")
    mesh, tx = zero.make_mesh(topology=topology), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=stage, precision="bf16", overlap=False)
    state = zero.abstract_state(lambda _: jax.tree.map(jnp.asarray, graph_init()), tx, mesh=mesh, config=config)
    step = zero.make_train_step(lambda params, batch: messages(params, *batch), tx, mesh=mesh, config=config)
    num_nodes = 4096
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in graph(num_nodes, 4 * num_nodes)]
    report = zero.comms.measure(step.lower(state, shapes).compile())
    nodes, params = (2 * size * 15 / 16 for size in (num_nodes * D, sum(x.size for x in graph_init().values())))
    assert report.sent_bytes == pytest.approx(2 * 4 * nodes + {1: 2, 3: 3}[stage] * params, rel=0.01)
    assert not [row for row in report.rows if row.kind == "all-reduce" and row.full_bytes > D * D]
    assert {finding.kind for finding in report.findings} == {"moved activations"}
    assert all("test_mixing.py" in finding.message for finding in report.findings)


def compared(params, batch):
    """Two answers behind one another in one pass; then their scores beside each other."""

    @jax.checkpoint
    def layer(x, params):
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ params["query"], x).astype("f4"))
        x += scores.astype(x.dtype) @ x
        return x + jnp.tanh(x @ params["up"]) @ params["down"], None

    tokens = jnp.concatenate([batch, batch // 2])
    x, _ = lax.scan(layer, params["table"][tokens], params["layers"])
    logits = jax.nn.log_softmax((x @ params["head"]).astype("f4"))
    both = jnp.take_along_axis(logits, tokens[..., None], -1).mean((1, 2))
    return -jax.nn.log_sigmoid(both[: len(batch)] - both[len(batch) :]).mean()


def compared_init(d=D, vocabulary=2048):
    layers = {"query": normal(2, d, d), "up": normal(2, d, 4 * d), "down": normal(2, 4 * d, d)}
    return {"table": normal(vocabulary, d), "head": normal(d, vocabulary), "layers": layers}


def test_examples_behind_others_keep_values_and_gradients():
    tokens = np.random.default_rng(0).integers(0, 64, (32, 8), dtype=np.int32)
    check(compared, compared_init(16, 64), tokens, mesh=mesh_of("8"))


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_examples_behind_others_are_a_batch():
    """Where XLA chooses, devices send activations in all that follows."""
    pytest.importorskip("libtpu")
    batch, config = jax.ShapeDtypeStruct((32, 64), jnp.int32), zero.ZeroConfig(stage=3, precision="bf16")
    init_fn = lambda _: jax.tree.map(jnp.asarray, compared_init())  # noqa: E731
    plan = zero.plan(compared, init_fn, optax.sgd(0.1), batch=batch, topology="v5p:2x2x4", config=config, quick=True)
    assert plan.traffic_ratio < 1.4
