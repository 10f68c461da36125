"""Recurrences, and sums over the examples of all devices: the same values, and no activations sent."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import recurrences
from gathering import activations, check, compiled_traffic, normal
from jax import lax
from recurrences import FORMS, loss
from reference import mesh_of

import zero_jax as zero
from zero_jax.dims import FREE
from zero_jax.program.subcalls import equations
from zero_jax.transforms.gather.anchors import anchored

QUICK = (recurrences.scanned, recurrences.own_derivative)
each_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in FORMS]
)


@each_form
@pytest.mark.parametrize("mesh", ["8", pytest.param("model", marks=pytest.mark.slow)])
def test_a_recurrence_keeps_values_and_gradients(form, mesh):
    mesh = zero.make_mesh(data=4, model=2) if mesh == "model" else mesh_of(mesh)
    params, x = recurrences.init(32, 2), normal(16, 4, 32, scale=1.0)
    check(functools.partial(loss, form), params, x, mesh=mesh)


def num_anchored(fn, *args):
    """Returns how many values are anchored of a function of `[batch, ...]`."""
    mesh = mesh_of("8")
    axes = zero.ZeroConfig(stage=3).axes_of(mesh)
    states = [FREE, *(0 for _ in args[1:])]
    closed, _ = anchored(jax.make_jaxpr(fn)(*args), states, mesh=mesh, axes=axes)
    return sum(eqn.primitive.name == "zero_reshard" for eqn in equations(closed))


def until_done(w, x):
    count, h = lax.while_loop(lambda carry: carry[0] < 3, lambda c: (c[0] + 1, c[1] * w + x), (0, jnp.zeros_like(x)))
    return h + count


def dropped(w, x):
    """A recurrence behind a mask of random numbers."""
    kept = x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return lax.scan(lambda h, x: (h * w + x, None), jnp.zeros(x.shape[::2]), kept.swapaxes(0, 1))[0]


def over_layers(w, x):
    return lax.scan(lambda x, w: (x * w, None), x, jnp.stack([w, w]))[0]


def over_examples(w, x):
    return lax.scan(lambda h, x: (h * w + x, None), jnp.zeros_like(x[0]), x)[0]


@pytest.mark.parametrize(("fn", "expected"), [(until_done, 1), (dropped, 1), (over_layers, 0), (over_examples, 0)])
def test_a_carry_is_anchored_where_its_examples_are_known(fn, expected):
    assert num_anchored(fn, jnp.ones(()), jnp.ones((16, 4, 8))) == expected


@pytest.mark.tpu_compiler
@each_form
@pytest.mark.slow
def test_a_recurrence_sends_no_activations(form):
    pytest.importorskip("libtpu")
    init = functools.partial(recurrences.init, 1024, 2)
    assert activations(compiled_traffic(functools.partial(loss, form), init, (32, 4, 1024), stage=2)) < 1e5


def codes(params, x, *, model_state):
    """A quantized autoencoder whose codebook is a mean over time of what was encoded as each code."""
    z = x @ params["encode"]
    chosen = jax.nn.one_hot((z @ model_state["codes"].T).argmax(-1), len(model_state["codes"]), dtype=z.dtype)
    sums = 0.99 * model_state["codes"] + 0.01 * (chosen.T @ lax.stop_gradient(z))
    q = z + lax.stop_gradient(chosen @ model_state["codes"].astype(z.dtype) - z)
    return jnp.mean(jnp.square((q @ params["decode"] - x).astype(jnp.float32))), None, {"codes": sums}


def init_codes():
    params = {"encode": normal(64, 256), "decode": normal(256, 64)}
    return zero.Variables(params=params, model_state={"codes": normal(512, 256)})


@pytest.mark.slow
def test_sums_over_examples_are_those_of_one_device():
    mesh, tx, config = mesh_of("8"), optax.sgd(0.1), zero.ZeroConfig(stage=3, min_shard_size=1)
    variables, x = init_codes(), normal(64, 64, scale=1.0)
    want = jax.jit(codes)(variables.params, x, model_state=variables.model_state)[2]["codes"]
    state = zero.init_state(
        lambda _: jax.tree.map(jnp.asarray, variables), tx, jax.random.key(0), mesh=mesh, config=config
    )
    state, _ = zero.make_train_step(codes, tx, mesh=mesh, config=config)(state, x)
    assert jnp.allclose(state.model_state["codes"], want, atol=1e-6)


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_sums_over_examples_are_reduced_at_stage_3_too():
    pytest.importorskip("libtpu")
    rows = compiled_traffic(codes, init_codes, (4096, 64), stage=3).rows
    assert not [row for row in rows if row.kind == "all-gather" and not row.param and row.full_bytes > 512 * 256]
    summed = [row for row in rows if row.kind == "all-reduce" and row.full_bytes >= 512 * 256 * 2]
    assert len(summed) == 1
    assert "test_anchors.py" in summed[0].source
