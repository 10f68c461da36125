"""`gather_on_use` of models of the libraries that people use, as their users write them."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gathering import (
    BATCH_SIZE,
    FEATURES,
    HIDDEN,
    LAYERS,
    LENGTH,
    ROWS,
    check,
    examples,
    normal,
    specs_of,
    tokens,
)
from reference import mesh_of

import zero_jax as zero

eqx = pytest.importorskip("equinox", reason="pip install equinox")


slow = pytest.mark.slow


def forms(*fast):
    """Parametrizes by the form of the layers; those that are not named are slow."""
    names = {"loop": (False, False), "loop, remat": (False, True), "scan": (True, False), "scan, remat": (True, True)}
    cases = [pytest.param(*form, id=name, marks=() if name in fast else slow) for name, form in names.items()]
    return pytest.mark.parametrize(("scan", "remat"), cases)


FORMS = forms("loop", "scan, remat")
FEWER_FORMS = forms("scan, remat")


def mean_square(x):
    return jnp.mean(jnp.square(x))


def count(report, pattern):
    """Returns the number of gathers of params whose path ends in a pattern."""
    return sum(re.search(f"{pattern}$", event.path) is not None for event in report.events)


# --- Flax Linen ------------------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    attends: bool

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        if self.attends:
            y = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, name="attention")(y)
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        return x + nn.Dense(FEATURES, name="down")(nn.gelu(nn.Dense(HIDDEN, name="up")(nn.LayerNorm()(x)))), None


class LinenModel(nn.Module):
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(ROWS, FEATURES)
        x = embed(tokens) + self.param("position", nn.initializers.normal(), (64, FEATURES))[: tokens.shape[1]]
        block = nn.remat(LinenBlock, prevent_cse=not self.scan) if self.remat else LinenBlock
        if self.scan:
            rngs = {"params": True, "dropout": True}
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS)
            x, _ = stack(True, name="blocks")(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = block(False)(x)
        return embed.attend(nn.RMSNorm()(x))


@pytest.mark.slow
@FEWER_FORMS
def test_linen(scan, remat):
    model = LinenModel(scan, remat)
    params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(0)}, tokens())["params"]

    def loss_fn(params, tokens, key):
        return mean_square(model.apply({"params": params}, tokens, rngs={"dropout": key}))

    report = check(loss_fn, params, tokens(), jax.random.key(1), mesh=mesh_of("8"))
    assert not report.early
    assert count(report, "up/kernel") == (1 if scan else LAYERS)


def test_linen_batch_norm_state_comes_out():
    model = nn.Sequential([nn.Dense(HIDDEN), nn.BatchNorm(use_running_average=False), nn.relu, nn.Dense(FEATURES)])
    variables = jax.jit(model.init)(jax.random.key(0), examples())
    mesh, params = mesh_of("8"), variables["params"]

    def loss_fn(params, x):
        out, updates = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return mean_square(out), updates["batch_stats"]

    gathered = zero.gather_on_use(loss_fn, specs_of(params, mesh), mesh=mesh)
    (got, stats), _ = jax.jit(jax.value_and_grad(gathered, has_aux=True))(params, examples())
    want, want_stats = jax.jit(loss_fn)(params, examples())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(want_stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# --- Flax NNX --------------------------------------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, scan, remat, rngs):
        self.embed = nnx.Embed(ROWS, FEATURES, rngs=rngs)
        self.scan, self.remat = scan, remat
        if scan:
            make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NNXBlock, in_axes=0, out_axes=0))
            self.blocks = make(rngs)
        else:
            self.blocks = nnx.List([NNXBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        def apply(block, x):
            return block(x)

        apply = nnx.remat(apply, prevent_cse=not self.scan) if self.remat else apply
        x = self.embed(tokens)
        if self.scan:
            x = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = apply(block, x)
        return self.embed.attend(x)


@pytest.mark.slow
@FORMS
def test_nnx(scan, remat):
    graphdef, params = nnx.split(NNXModel(scan, remat, nnx.Rngs(0)))

    def loss_fn(params, tokens):
        return mean_square(nnx.merge(graphdef, params)(tokens))

    report = check(loss_fn, params, tokens(), mesh=mesh_of("8"))
    assert not report.early
    assert count(report, "up/kernel/value") == (1 if scan else LAYERS)


def test_nnx_with_dropout_and_batch_statistics():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(FEATURES, HIDDEN, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.up(x)))

    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, x):
        return mean_square(nnx.merge(graphdef, params, rest, copy=True)(x))

    assert not check(loss_fn, params, examples(), mesh=mesh_of("8")).early


# --- Equinox ---------------------------------------------------------------------------------------------------------


class EquinoxBlock(eqx.Module):
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, HIDDEN, depth=1, key=key)
        self.norm = eqx.nn.LayerNorm(FEATURES)

    def __call__(self, x):
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: eqx.Module | list[eqx.Module]
    scan: bool = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(self, scan, remat, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.embed = eqx.nn.Embedding(ROWS, FEATURES, key=keys[0])
        self.blocks = eqx.filter_vmap(EquinoxBlock)(keys[1:]) if scan else [EquinoxBlock(key) for key in keys[1:]]
        self.scan, self.remat = scan, remat

    def __call__(self, tokens):
        def apply(x, block):
            return block(x)

        apply = eqx.filter_checkpoint(apply) if self.remat else apply
        x = jax.vmap(self.embed)(tokens)
        if not self.scan:
            return functools.reduce(apply, self.blocks, x)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, arrays: (apply(x, eqx.combine(arrays, static)), None), x, arrays)[0]


@pytest.mark.slow
@FEWER_FORMS
def test_equinox(scan, remat):
    model = EquinoxModel(scan, remat, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, tokens):
        return mean_square(jax.vmap(eqx.combine(params, static))(tokens))

    report = check(loss_fn, params, tokens(), mesh=mesh_of("8"))
    assert not report.early
    assert count(report, "mlp/layers/0/weight") == (1 if scan else LAYERS)


def test_equinox_recurrent():
    cell = eqx.nn.GRUCell(FEATURES, FEATURES, key=jax.random.key(0))
    params, static = eqx.partition(cell, eqx.is_inexact_array)

    def loss_fn(params, x):
        cell = eqx.combine(params, static)

        def run(x):
            return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(FEATURES), x)[0]

        return mean_square(jax.vmap(run)(x))

    report = check(loss_fn, params, normal(BATCH_SIZE, LENGTH, FEATURES), mesh=mesh_of("8"))
    assert not report.early
    assert all(event.reason.startswith(f"once before {LENGTH} iterations") for event in report.events)


# --- Haiku -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@FEWER_FORMS
def test_haiku(scan, remat):
    hk = pytest.importorskip("haiku", reason="pip install dm-haiku")

    def block(x):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return x + hk.Linear(FEATURES, name="down")(jnp.tanh(hk.Linear(HIDDEN, name="up")(y)))

    def forward(tokens):
        embed = hk.Embed(ROWS, FEATURES)
        x, apply = embed(tokens), hk.remat(block) if remat else block
        if scan:
            x = hk.experimental.layer_stack(LAYERS)(apply)(x)
        else:
            for _ in range(LAYERS):
                x = apply(x)
        return x @ embed.embeddings.T

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), tokens())
    report = check(lambda params, tokens: mean_square(model.apply(params, tokens)), params, tokens(), mesh=mesh_of("8"))
    assert not report.early
    assert count(report, r"\bup(_\d)?/w") == (1 if scan else LAYERS)
