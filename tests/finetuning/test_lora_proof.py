"""What adapters send and hold, read from programs compiled for 16 v5p chips."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero
from zero_jax import comms

pytestmark = pytest.mark.tpu_compiler
WIDTH, HIDDEN, TOKENS = 512, 2048, 64


def init_fn(num_layers, key):
    del key
    return {"up": jnp.zeros((num_layers, WIDTH, HIDDEN)), "down": jnp.zeros((num_layers, HIDDEN, WIDTH))}


def loss_fn(params, x, *, remat):
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    return jnp.square(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0]).mean()


@functools.cache
def compiled(stage, base, *, num_layers, dora, remat):
    """Returns the abstract state, and the program of a step."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="v5p:2x2x4")
    config = zero.ZeroConfig(stage=stage, precision="bf16", overlap=False)
    tx, lora = optax.adamw(1e-3), zero.Lora(rules={"*": "sio"}, rank=8, base=base, dora=dora)
    init, loss = (lambda key: lora.init(init_fn(num_layers, key), key)), functools.partial(loss_fn, remat=remat)
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    step = zero.make_train_step(lora.loss_fn(loss), tx, mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((TOKENS * mesh.size, WIDTH), jnp.bfloat16)
    return state, step.lower(state, batch).compile()


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("stage", "base"),
    [
        pytest.param(0, "nf4", marks=pytest.mark.slow),
        pytest.param(3, "nf4", marks=pytest.mark.slow),
        pytest.param(1, "int8", marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_nothing_frozen_is_reduced_and_codes_are_gathered_as_they_are_stored(stage, base):
    state, program = compiled(stage, base, num_layers=4, dora=False, remat=True)  # as below: compiled once
    report = comms.measure(program)
    adapters = 2 * sum(x.size for x in jax.tree.leaves(state.params))  # in bfloat16
    reduced = [row for row in report.rows if "reduce" in row.kind]
    # An all-reduce of what is small may stand for a reduce-scatter: twice the bytes.
    assert 0 < sum(row.total_sent_bytes for row in reduced) <= 2.02 * adapters * 15 / 16
    moved = [row for row in report.rows if row.param.startswith("model_state/")]
    assert bool(moved) == (stage == 3)
    assert all(row.kind == "all-gather" and row.dtype in ("u8", "f32") for row in moved)
    if stage == 3:  # in the forward and in the backward pass
        assert sum(row.total_sent_bytes for row in moved) == pytest.approx(
            2 * num_bytes(state.model_state) * 15 / 16, rel=0.1
        )
    # Two moments of each adapter and a count: the optimizer has nothing for the base.
    assert len(jax.tree.leaves(state.opt_state)) == 2 * len(jax.tree.leaves(state.params)) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "dora", "remat", "stage"),
    [
        ("nf4", False, True, 3),
        ("nf4", True, True, 3),
        ("nf4", False, False, 0),
        ("int8", True, False, 0),
    ],
)
def test_a_weight_is_made_for_one_layer_at_a_time(base, dora, remat, stage):
    """Four layers more keep their activations and nothing of their weights, which would be 4 MB each in bfloat16."""
    few, many = (
        compiled(stage, base, num_layers=n, dora=dora, remat=remat)[1].memory_analysis().temp_size_in_bytes
        for n in (4, 8)
    )
    activations = TOKENS * 2 * (WIDTH if remat else 2 * WIDTH + 2 * HIDDEN)
    adapters = 4 * 2 * 8 * (WIDTH + HIDDEN)  # gradients, float32
    assert many - few <= 4 * (2 * activations + 2 * adapters) + 100_000 < 4 * 2 * WIDTH * HIDDEN
