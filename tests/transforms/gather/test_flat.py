"""Weights of several input or output dims: the same values, and gradients that are reduce-scattered as matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gathering import check, normal
from jax.sharding import NamedSharding, PartitionSpec
from reference import mesh_of

import zero_jax as zero
from zero_jax import comms
from zero_jax.program.jaxprs import open_jaxpr
from zero_jax.transforms.gather.deferred import Lazy, Value
from zero_jax.transforms.gather.products import flat_product

P = PartitionSpec
BATCH, LENGTH, FEATURES, HEADS, DEPTH = 16, 4, 32, 4, 8
X, HEADS_FIRST = normal(BATCH, LENGTH, FEATURES), normal(BATCH, HEADS, LENGTH, DEPTH)
Y = normal(BATCH, LENGTH, HEADS, DEPTH)
INTO, OUT_OF, MIDDLE = (FEATURES, HEADS, DEPTH), (HEADS, DEPTH, FEATURES), (HEADS, FEATURES, DEPTH)

# The product, the other factor, the weight's shape and how it is cut; then the shape of the matrix, None if it is none.
PRODUCTS = {
    "into heads": ("btd,dhk->bthk", X, INTO, P("data"), (FEATURES, HEADS * DEPTH)),
    "out of heads": ("bthk,hkd->btd", Y, OUT_OF, P(None, None, "data"), (HEADS * DEPTH, FEATURES)),
    "results in another order": ("btd,dhk->bhtk", X, INTO, P("data"), (FEATURES, HEADS * DEPTH)),
    "summed dims last": ("btd,hkd->bthk", X, OUT_OF, P(None, None, "data"), (HEADS * DEPTH, FEATURES)),
    "two and two": ("bthk,hkde->btde", Y, (HEADS, DEPTH, 16, 2), P(None, None, "data"), (HEADS * DEPTH, 32)),
    "the major dim of a group": ("btd,dhk->bthk", X, (FEATURES, 8, 4), P(None, "data"), (FEATURES, 32)),
    "another dim of a group": ("btd,dhk->bthk", X, INTO, P(None, None, "data"), None),
    "features in the middle": ("btd,hdk->bthk", X, MIDDLE, P(None, "data"), (FEATURES, HEADS * DEPTH)),
    "heads are cut": ("btd,hdk->bthk", X, (8, FEATURES, 4), P("data"), (32, FEATURES)),
    "keys and values": ("btd,shdk->sbthk", X, (2, *MIDDLE), P(None, None, "data"), (FEATURES, 2 * HEADS * DEPTH)),
    "examples with heads first": ("bhtk,hkd->btd", HEADS_FIRST, OUT_OF, P(None, None, "data"), (32, FEATURES)),
    "heads first and features in the middle": ("bhtk,hdk->btd", HEADS_FIRST, MIDDLE, P(None, "data"), (FEATURES, 32)),
    "summed dims not side by side": ("bthk,hdk->btd", Y, MIDDLE, P(None, "data"), (FEATURES, HEADS * DEPTH)),
    "summed dims in another order": ("bthk,khd->btd", Y, (DEPTH, HEADS, FEATURES), P(None, None, "data"), (32, 32)),
    "a weight for each head": ("bthk,hkd->bthd", Y, OUT_OF, P(None, None, "data"), None),
    "heads of whole lanes": ("btd,dhk->bthk", X, (FEATURES, 2, 128), P("data"), None),
    "one head of whole lanes": ("btd,dhk->bthk", X, (FEATURES, 1, 128), P("data"), (FEATURES, 128)),
    "features between heads": ("btd,hdk->bthk", X, (2, FEATURES, 128), P(None, "data"), (FEATURES, 2 * 128)),
    "out of heads of lanes": ("bthk,hkd->btd", Y.repeat(16, -1), (HEADS, 128, 16), P(None, None, "data"), (512, 16)),
    "a matrix already": ("btd,df->btf", X, (FEATURES, 16), P("data"), None),
}


def product(equation, weight, x):
    return jnp.mean(jnp.square(jnp.tanh(jnp.einsum(equation, x, weight))))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_same_as_a_matrix(name):
    equation, x, shape, spec, matrix = PRODUCTS[name]
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(functools.partial(jnp.einsum, equation))(x, jnp.zeros(shape)))
    (eqn,) = (one for one in jaxpr.eqns if one.primitive.name == "dot_general")
    dims = tuple(() if entry is None else (entry,) for entry in (*spec, *(None,) * (len(shape) - len(spec))))
    params = [len(dims) == var.aval.ndim and var.aval.shape == shape for var in eqn.invars]
    values = [
        Lazy((var,), lambda array: array, var.aval, "w", dims) if is_param else Value(var, params_only=False)
        for var, is_param in zip(eqn.invars, params, strict=True)
    ]
    inputs, _ = flat_product(eqn, values)
    (weight,) = (value for value in inputs if isinstance(value, Lazy))
    assert weight.aval.shape == (matrix or shape)

    sharding = NamedSharding(mesh_of("8"), spec)
    report = check(functools.partial(product, equation), normal(*shape), x, mesh=mesh_of("8"), specs=sharding)
    assert math.prod(shape) * 4 == sum(event.gathered_bytes for event in report.events)


def test_a_product_keeps_its_precision():
    def loss(weight, x):
        options = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        return jnp.mean(jnp.square(jnp.einsum("btd,dhk->bthk", x.astype(jnp.bfloat16), weight, **options)))

    weight = jnp.asarray(normal(*INTO), jnp.bfloat16)
    spec = NamedSharding(mesh_of("8"), P("data"))
    gathered = zero.gather_on_use(loss, spec, mesh=mesh_of("8"))
    text = str(jax.make_jaxpr(gathered)(weight, X))
    assert "preferred_element_type=float32" in text
    assert "Precision.HIGHEST" in text
    np.testing.assert_allclose(jax.jit(gathered)(weight, X), jax.jit(loss)(weight, X), rtol=1e-6)


def as_in_flax(w, x):
    y = jnp.tanh(jnp.einsum("btd,dhk->bthk", x, w["query"]))
    return jnp.einsum("bthk,hkd->btd", y, w["out"])


def as_in_gemma(w, x):
    q = jnp.tanh(jnp.einsum("btd,hdk->bthk", x, w["query"]))
    y = jnp.einsum("btd,shdk->sbthk", x, w["key_value"])
    return jnp.einsum("bthk,hkd->btd", q * y[0] + y[1], w["out"])


def heads_before_time(w, x):
    y = jnp.tanh(jnp.einsum("btd,hdk->bhtk", x, w["query"]))
    return jnp.einsum("bhtk,hkd->btd", y, w["out"])


KERNELS = {
    as_in_flax: {"query": (768, 12, 64), "out": (12, 64, 768)},
    as_in_gemma: {"query": (12, 768, 64), "key_value": (2, 12, 768, 64), "out": (12, 64, 768)},
    heads_before_time: {"query": (12, 768, 64), "out": (12, 64, 768)},
}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("attention", "topology"),
    [
        (as_in_flax, "v5p:2x2x4"),
        (as_in_gemma, "v5p:2x2x4"),
        pytest.param(heads_before_time, "v5p:2x2x4", marks=pytest.mark.slow),
        pytest.param(as_in_flax, "v5e:4x4", marks=pytest.mark.slow),
        pytest.param(as_in_gemma, "v5e:4x4", marks=pytest.mark.slow),
        pytest.param(heads_before_time, "v5e:4x4", marks=pytest.mark.slow),
    ],
)
def test_attention_kernels_are_reduce_scattered(attention, topology):
    """Left as they are, XLA:TPU all-reduces the gradients of all."""
    pytest.importorskip("libtpu")

    def loss(params, x):
        return jnp.mean(jnp.square(attention(params, x.astype(params["out"].dtype)).astype(jnp.float32)))

    mesh, tx, config = (
        zero.make_mesh(topology=topology),
        optax.sgd(0.1),
        zero.ZeroConfig(stage=2, precision="bf16", overlap=False),
    )
    shapes = KERNELS[attention]
    state = zero.abstract_state(
        lambda _: jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple)), tx, mesh=mesh, config=config
    )
    step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
    report = comms.measure(step.lower(state, jax.ShapeDtypeStruct((mesh.size, 128, 768), jnp.float32)).compile())
    num_params = sum(math.prod(shape) for shape in shapes.values())
    assert report.by_phase["backward"] == pytest.approx(2 * num_params * 15 / 16, rel=0.02)
    assert not report.findings
