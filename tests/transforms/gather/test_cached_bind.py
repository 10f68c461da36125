"""Equations that are evaluated together compute what they do one by one, derivatives to the bit."""

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.program.evaluation import evaluate, flattened
from zero_jax.program.jaxprs import is_literal, open_jaxpr
from zero_jax.transforms.gather.cached_bind import CachedBind, can_be_nested


def layer(x, scale):
    """Uses its input in several places, as the sum of cotangents of a residual stream does."""
    y = x * x + jnp.float32(0.1)
    return x + jnp.sin(x * jax.lax.rsqrt(y)) * scale - y * x


def loss(x):
    return layer(layer(x, x[::-1]), x).sum()


def in_runs(x, bind, length):
    """Evaluates the loss with runs of so many equations at once."""
    jaxpr = jax.make_jaxpr(loss)(x).jaxpr
    env = dict(zip(jaxpr.invars, [x], strict=True))
    for start in range(0, len(jaxpr.eqns), length):
        eqns = jaxpr.eqns[start : start + length]
        assert all(map(can_be_nested, eqns))
        wanted = [var for eqn in eqns for var in eqn.outvars]
        read = lambda atom: atom.val if is_literal(atom) else env[atom]  # noqa: E731
        env.update(zip(wanted, bind.evaluate(eqns, read, wanted), strict=True))
    return env[jaxpr.outvars[0]]


def gradient(fn, x):
    """Returns what a gradient is computed by, in which order sums are made: releases differ in where they stand."""
    jaxpr, _ = open_jaxpr(flattened(open_jaxpr(jax.make_jaxpr(jax.grad(fn))(x))[0]))
    made = {jaxpr.invars[0]: 0}
    for eqn in jaxpr.eqns:
        operands = [hash(str(atom)) if is_literal(atom) else made[atom] for atom in eqn.invars]
        operands = tuple(sorted(operands) if eqn.primitive.name in ("add", "add_any", "mul") else operands)
        made.update((var, hash((eqn.primitive.name, str(eqn.params), operands))) for var in eqn.outvars)
    return made[jaxpr.outvars[0]]


def test_runs_have_the_gradients_of_single_equations():
    x = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
    jaxpr = jax.make_jaxpr(loss)(x).jaxpr
    alone = gradient(lambda x: evaluate(jaxpr, (), [x], CachedBind())[0], x)
    for length in (2, 5, len(jaxpr.eqns)):
        assert gradient(lambda x, length=length: in_runs(x, CachedBind(), length), x) == alone


def test_equal_layers_share_a_function():
    x = jnp.ones(8)
    num_eqns = len(jax.make_jaxpr(layer)(x, x).eqns)

    def layers(x):
        for _ in range(6):
            x = layer(x, x)
        return x

    jaxpr, bind = jax.make_jaxpr(layers)(x).jaxpr, CachedBind()
    assert len(jaxpr.eqns) == 6 * num_eqns

    def run(x):
        env = {jaxpr.invars[0]: x}
        for i in range(0, len(jaxpr.eqns), num_eqns):
            eqns = jaxpr.eqns[i : i + num_eqns]
            wanted = [eqns[-1].outvars[0]]
            read = lambda atom: atom.val if is_literal(atom) else env[atom]  # noqa: E731
            env.update(zip(wanted, bind.evaluate(eqns, read, wanted), strict=True))
        return env[jaxpr.outvars[0]].sum()

    jax.make_jaxpr(jax.grad(run))(x)
    assert len(bind.jitted) == 1
