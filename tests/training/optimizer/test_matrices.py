"""Optimizers that see whole matrices: the same numbers as on one device, and little traffic more than adamw's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero

WIDTH, LAYERS = 32, 6
STACKED = {
    "q": (LAYERS, WIDTH, WIDTH),
    "o": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, 128),
    "down": (LAYERS, 128, WIDTH),
}


def init_stacked(key):
    keys = jax.random.split(key, len(STACKED) + 1)
    stacks = {name: jax.random.normal(k, s) / 8 for k, (name, s) in zip(keys, STACKED.items(), strict=False)}
    return {"table": jax.random.normal(keys[-1], (64, WIDTH)), "scale": jnp.ones((LAYERS, WIDTH)), **stacks}


def init_layers(key):
    stacked = init_stacked(key)
    layers = [{name: stacked[name][i] for name in STACKED} for i in range(3)]
    return {"table": stacked["table"], "layers": layers}


def block(x, w):
    x = x + jnp.tanh(x @ w["q"]) @ w["o"]
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def loss_fn(params, batch):
    x = params["table"][batch["x"]]
    if "layers" in params:
        for layer in params["layers"]:
            x = block(x, layer)
    else:
        stacks = {name: params[name] for name in (*STACKED, "scale")}
        x, _ = jax.lax.scan(lambda x, w: (block(x, w) * w["scale"], None), x, stacks)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, batch["y"]).mean()


def matrix_dims(params):
    """Muon's matrices are the last two dims of everything but the tables and vectors."""
    numbers = optax.contrib.MuonDimensionNumbers
    is_matrix = lambda name, x: x.ndim > 1 and name[-1].key in STACKED  # noqa: E731
    return jax.tree_util.tree_map_with_path(
        lambda name, x: numbers(x.ndim - 2, x.ndim - 1) if is_matrix(name, x) else None, params
    )


def muon(**options):
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrix_dims, **options)


def shampoo():
    """An optimizer of matrices `[m, n]` as users write one: statistics of both dims, their roots by `eigh`."""

    def init(params):
        stats = lambda x: tuple(jnp.eye(n) for n in x.shape) if x.ndim == 2 else ()  # noqa: E731
        return jax.tree.map(stats, params)

    def root(x):
        values, vectors = jnp.linalg.eigh(x)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def update(grads, state, params=None):
        def one(grad, stats):
            if grad.ndim != 2:
                return grad, stats
            left, right = stats[0] + grad @ grad.T, stats[1] + grad.T @ grad
            return root(left) @ grad @ root(right), (left, right)

        leaves, tree = jax.tree.flatten(grads)
        updates, stats = zip(*map(one, leaves, tree.flatten_up_to(state)), strict=True)
        return jax.tree.map(lambda x: -1e-2 * x, tree.unflatten(updates)), tree.unflatten(stats)

    return optax.GradientTransformation(init, update)


def settled():
    """An optimizer whose matrices are iterated until each has settled, and scaled by a norm of all of them."""

    def orthogonal(x):
        x = x / jnp.linalg.norm(x)
        step = lambda carry: (carry[0] @ (1.5 * jnp.eye(len(x)) - 0.5 * carry[0].T @ carry[0]), carry[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[1] < 3, step, (x, 0))[0]

    def update(grads, state, params=None):
        square = lambda x: x.ndim == 2 and x.shape[0] == x.shape[1]  # noqa: E731
        done = jax.tree.map(lambda g: orthogonal(g) if square(g) else g, grads)
        norm = optax.tree.norm(done)
        return jax.tree.map(lambda x: -1e-2 * x / norm, done), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


BATCH = {name: np.random.default_rng(i).integers(0, 64, (16, 8)) for i, name in enumerate("xy")}
OPTIMIZERS = {
    "muon": muon,
    "schatten": lambda: muon(preconditioning="schatten"),
    "shampoo": shampoo,
    "settled": settled,
}


def on_one_device(tx, init_fn, steps=3):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_fn)(params, BATCH), state, params)
        return optax.apply_updates(params, updates), state

    params = init_fn(jax.random.key(0))
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize(
    ("optimizer", "init_fn", "stage", "axes"),
    [
        ("muon", init_stacked, 1, {}),
        ("muon", init_stacked, 3, {"replica": 2}),
        ("muon", init_layers, 3, {}),
        ("schatten", init_layers, 2, {"model": 2}),
        ("shampoo", init_layers, 3, {}),
        ("settled", init_layers, 1, {}),
    ],
)
def test_whole_matrices_are_updated_as_on_one_device(optimizer, init_fn, stage, axes):
    tx, mesh = OPTIMIZERS[optimizer](), zero.make_mesh(**axes)
    specs = {".*/up": jax.P(None, "model"), ".*/down": jax.P("model", None)} if axes.get("model") else None
    config = zero.ZeroConfig(stage=stage, param_specs=specs)
    with jax.default_matmul_precision("highest"):
        state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
        for _ in range(3):
            state, _ = step(state, BATCH)
        expected = on_one_device(tx, init_fn)
    for (name, x), y in zip(jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5, err_msg=str(name))


def test_an_update_that_is_one_branch_is_left_as_it_is():
    """`optax.MultiSteps` calls an optimizer in a `lax.cond`: no leaf is gathered for it."""
    tx = optax.MultiSteps(muon(), 2)
    whole = sent_bytes(tx, init_layers, 3)
    assert whole < 3 * sent_bytes(optax.adamw(1e-2), init_layers, 3)


def sent_bytes(tx, init_fn, stage):
    mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=stage)
    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in BATCH.items()}
    return zero.comms.measure(step.lower(state, shapes).compile()).sent_bytes


@pytest.mark.parametrize("init_fn", [init_stacked, init_layers])
def test_muon_sends_two_all_to_alls_more_than_adamw(init_fn):
    """On eight devices two all-to-alls are an eighth of a gather and a scatter; padding is a third more of that."""
    ratio = sent_bytes(muon(), init_fn, 3) / sent_bytes(optax.adamw(1e-2), init_fn, 3)
    assert 1 < ratio < 1.2  # 2.0 where each product of each iteration sends


@pytest.mark.tpu_compiler
def test_the_program_for_tpus_has_the_numbers_of_one_device():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    batch = {name: jnp.asarray(x) for name, x in BATCH.items()}
    options = {"topology": "v5p:2x2x1", "config": zero.ZeroConfig(stage=3), "own_process": False}
    found = zero.verify(loss_fn, init_stacked, muon(), batch, **options)
    assert found.ok, str(found)
