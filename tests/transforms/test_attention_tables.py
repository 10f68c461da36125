"""What `fuse_attention` knows of values that depend on no input is what JAX computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.transforms.attention.dims import all_leaves
from zero_jax.transforms.attention.prove import Prover
from zero_jax.transforms.attention.tables import Table
from zero_jax.transforms.attention.walk import flatten

UNARY = [
    jnp.abs, jnp.sign, jnp.negative, jnp.square, lambda x: x + 3, lambda x: x * 2, lambda x: 5 - x, lambda x: x // 2,
    lambda x: jax.lax.rem(x, 3), lambda x: jnp.clip(x, -1, 2), lambda x: x**3, lambda x: (x > 1).astype(jnp.int32),
    lambda x: ~(x >= 0) * 1, lambda x: x.astype(jnp.float32).astype(jnp.int8).astype(jnp.int32),
    lambda x: jnp.where(x == 2, 7, x), lambda x: jnp.cumsum(x, 0), lambda x: jnp.flip(x, 1),
    lambda x: x[::2].repeat(2, 0),
    jnp.transpose, lambda x: jax.lax.dynamic_slice(jnp.pad(x, 2), (1, 3), (6, 6)),
    lambda x: jax.lax.dynamic_slice(x, (1, 2), (4, 4)).repeat(2, 0)[:6, jnp.array([0, 1, 2, 3, 0, 1])],
    lambda x: x.reshape(2, 3, 6).reshape(6, 6), lambda x: x.reshape(36).reshape(6, 6),
    lambda x: jnp.broadcast_to(x[None], (2, 6, 6)).reshape(12, 6)[3:9], lambda x: x[:, :3].reshape(3, 6).repeat(2, 0),
]  # fmt: skip
BINARY = [
    jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda x, y: (x >= y) * 1, lambda x, y: (x != y) * 1,
    lambda x, y: ((x < y) | (x == 3)) * 1, lambda x, y: jnp.where(x <= y, x, y), lambda x, y: x ^ y,
]  # fmt: skip


def random_values(seed):
    """Returns a function of no input: ranges of two dims under random operations; all of its values."""
    rng = np.random.default_rng(seed)
    picks = [(rng.random() < 0.5, rng.integers(100, size=3)) for _ in range(8)]

    def values():
        rows, columns = jnp.arange(6)[:, None], jnp.arange(6)[None]
        made = [
            jnp.broadcast_to(rows, (6, 6)),
            jnp.broadcast_to(columns, (6, 6)),
            rows - columns + 0 * rows,
            rows >= columns,
        ]
        made[3] = made[3].astype(jnp.int32)
        for is_unary, (which, i, j) in picks:
            x, y = made[i % len(made)], made[j % len(made)]
            made.append(UNARY[which % len(UNARY)](x) if is_unary else BINARY[which % len(BINARY)](x, y))
        return made

    return values


def known_values(function):
    """Returns what is known of the results of a function of no input."""
    jaxpr, consts = flatten(jax.make_jaxpr(function)())
    prover = Prover(jaxpr, consts, [])
    for atom in jaxpr.outvars:
        (table,) = prover.of_atoms([atom], prover.known)
        assert isinstance(table, Table), atom
        indices = all_leaves(table.indices)
        array = table.split().along(indices)
        assert array is not None
        yield np.broadcast_to(array, [index.size for index in indices]).reshape(atom.aval.shape)


@pytest.mark.parametrize("seed", range(6))
def test_tables_have_the_values_that_jax_computes(seed):
    functions = [random_values(10 * seed + i) for i in range(4)]
    function = functools.partial(lambda each: [x for values in each for x in values()], functions)
    for known, expected in zip(known_values(function), jax.jit(function)(), strict=True):
        np.testing.assert_array_equal(known, expected)
