"""The rules for operations on shards: what they give is what the operation gives, and no device asks another for it."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from reference import mesh_of

from zero_jax import hlo
from zero_jax.dims import is_contraction, narrows, passthrough
from zero_jax.sharding.spec import named

WHOLE, D = (), ("data",)


def zeros(shapes):
    """Returns floats, and an index where the shape is one's."""
    return [np.zeros(shape, np.int32 if shape in ((), (1,)) else np.float32) for shape in shapes]


def equation(fn, *shapes):
    """Returns the equation of a function that is one, but for what JAX does to an index before it."""
    return jax.make_jaxpr(fn)(*zeros(shapes)).eqns[-1]


def apply_rule(eqn, *dims_in, sizes=None):
    def shards(dims, i):
        return int(np.prod([(sizes or {"data": 8})[axis] for axis in dims[i]]))

    return passthrough(eqn, dims_in, shards)


def pad_index(x, i):
    """Takes `x[i]` as a `gather`, as indexing with a traced number does."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, i, numbers, slice_sizes=(1, x.shape[1]), mode="clip")


# function, shapes, dims of each input (None: not a param), dims of the result (None: gathered)
RULES = {
    "cast to narrower": (lambda x: x.astype(jnp.bfloat16), [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "cast to wider": (lambda x: x.astype(jnp.complex64), [(16, 8)], [(D, WHOLE)], None),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(16, 8, 4)], [(D, WHOLE, WHOLE)], (WHOLE, D, WHOLE)),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), [(1, 16)], [(WHOLE, D)], (D,)),
    "expand_dims": (lambda x: lax.broadcast_in_dim(x, (16, 1, 8), (0, 2)), [(16, 8)], [(D, WHOLE)], (D, WHOLE, WHOLE)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 16), (1,)), [(16,)], [(D,)], None),
    "split of a whole dim": (lambda x: lax.slice(x, (0, 2), (16, 4)), [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "slice of a whole dim, strided": (lambda x: x[:, ::2], [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "slice of a sharded dim": (lambda x: lax.slice(x, (8, 0), (16, 8)), [(16, 8)], [(D, WHOLE)], None),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i, np.int32(0)), (1, 16)),
        [(4, 16), ()],
        [(WHOLE, D), None],
        (WHOLE, D),
    ),
    "index": (pad_index, [(4, 16), (1,)], [(WHOLE, D), None], (D,)),
    "index of the sharded dim": (pad_index, [(16, 4), (1,)], [(D, WHOLE), None], None),
    "split": (lambda x: lax.split(x, (2, 6), 1)[0], [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "split of the sharded dim": (lambda x: lax.split(x, (8, 8), 0)[0], [(16, 8)], [(D, WHOLE)], None),
    "concatenate": (
        lambda x, y: lax.concatenate([x, y], 1),
        [(16, 8), (16, 4)],
        [(D, WHOLE), (D, WHOLE)],
        (D, WHOLE),
    ),
    "concatenate the sharded dim": (lambda x, y: lax.concatenate([x, y], 0), [(16, 8)] * 2, [(D, WHOLE)] * 2, None),
    "concatenate otherwise sharded": (
        lambda x, y: lax.concatenate([x, y], 1),
        [(16, 8)] * 2,
        [(D, WHOLE), (WHOLE, D)],
        None,
    ),
    "concatenate with no param": (lambda x, y: lax.concatenate([x, y], 1), [(16, 8)] * 2, [(D, WHOLE), None], None),
    "stack": (lambda x, y: jnp.stack([x, y], axis=1), [(16, 8)] * 2, [(D, WHOLE)] * 2, (D, WHOLE, WHOLE)),
    "stack otherwise sharded": (lambda x, y: jnp.stack([x, y]), [(16, 8)] * 2, [(D, WHOLE), (WHOLE, D)], None),
    "reverse": (lambda x: lax.rev(x, (1,)), [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "reverse the sharded dim": (lambda x: lax.rev(x, (0,)), [(16, 8)], [(D, WHOLE)], None),
    "sum": (lambda x: lax.reduce_sum(x, (1,)), [(16, 8)], [(D, WHOLE)], (D,)),
    "sum of the sharded dim": (lambda x: lax.reduce_sum(x, (0,)), [(16, 8)], [(D, WHOLE)], None),
    "largest index": (lambda x: lax.argmax(x, 1, jnp.int32), [(16, 8)], [(D, WHOLE)], (D,)),
    "unary": (jnp.sin, [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "binary": (lax.mul, [(16, 8)] * 2, [(D, WHOLE)] * 2, (D, WHOLE)),
    "binary otherwise sharded": (lax.mul, [(16, 8)] * 2, [(D, WHOLE), (WHOLE, D)], None),
    "with a scalar": (lambda x: x * 2, [(16, 8)], [(D, WHOLE)], (D, WHOLE)),
    "with another of its shape": (lax.add, [(16, 8)] * 2, [None, (D, WHOLE)], (D, WHOLE)),
    "with a larger one": (lax.mul, [(1, 16), (8, 16)], [(WHOLE, D), None], None),
    "matmul": (jnp.matmul, [(16, 8), (8, 4)], [(D, WHOLE), None], None),
    "sort": (lambda x: lax.sort(x, dimension=1), [(16, 8)], [(D, WHOLE)], None),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    fn, shapes, dims_in, expected = RULES[name]
    assert apply_rule(equation(fn, *shapes), *dims_in) == expected


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule[3] is not None])
def test_shards_give_the_shard(name):
    """The compiled operation, with inputs and result sharded as the rule says, sends nothing."""
    fn, shapes, dims_in, expected = RULES[name]
    mesh = mesh_of("8")
    shardings = [named(mesh, dims or ()) if dims else NamedSharding(mesh, jax.P()) for dims in dims_in]
    if name == "with another of its shape":
        shardings[0] = shardings[1]
    jitted = jax.jit(fn, in_shardings=tuple(shardings), out_shardings=named(mesh, expected))
    program = jitted.lower(*zeros(shapes)).compile()
    assert hlo.collectives(program.as_text()) == ()


def test_select():
    eqn = jax.make_jaxpr(lambda c, x, y: lax.select_n(c, x, y))(True, *[np.zeros((16, 8), np.float32)] * 2).eqns[0]
    assert apply_rule(eqn, None, (D, WHOLE), (D, WHOLE)) == (D, WHOLE)
    assert apply_rule(eqn, None, None, (WHOLE, D)) == (WHOLE, D)


def test_unstack():
    eqn = jax.make_jaxpr(lambda x: jnp.unstack(x))(np.zeros((3, 16), np.float32)).eqns[0]
    if eqn.primitive.name == "unstack":  # slices in releases that have no such primitive
        assert apply_rule(eqn, (WHOLE, D)) == (D,)
        assert apply_rule(eqn, (D, WHOLE)) is None


def test_which_equations_are_what():
    assert is_contraction(equation(jnp.matmul, (4, 4), (4, 4)))
    assert not is_contraction(equation(lax.add, (4, 4), (4, 4)))
    assert narrows(equation(lambda x: lax.slice(x, (0, 0), (1, 4)), (4, 4)))
    assert not narrows(equation(lambda x: lax.slice(x, (0, 0), (4, 4)), (4, 4)))
    assert not narrows(equation(jnp.sin, (4, 4)))


# --- reshapes --------------------------------------------------------------------------------------------------------


def reshape(old, new, dims, **sizes):
    return apply_rule(equation(lambda x: lax.reshape(x, new), old), dims, sizes=sizes or None)


@pytest.mark.parametrize(
    ("old", "new", "dims", "expected"),
    [
        ((16, 4), (64,), (D, WHOLE), (D,)),
        ((16, 4), (64,), (WHOLE, D), None),  # the minor of two dims that are merged
        ((64,), (16, 4), (D,), (D, WHOLE)),
        ((64,), (4, 16), (D,), None),  # 4 are not divisible by 8
        ((16, 4, 6), (16, 24), (D, WHOLE, WHOLE), (D, WHOLE)),
        ((6, 16, 4), (6, 64), (WHOLE, D, WHOLE), (WHOLE, D)),
        ((6, 16, 4), (96, 4), (WHOLE, D, WHOLE), None),
        ((16, 6), (2, 8, 6), (D, WHOLE), None),
        ((16, 6), (8, 2, 6), (D, WHOLE), (D, WHOLE, WHOLE)),
        ((16, 1), (16,), (D, WHOLE), (D,)),
        ((1, 16, 1), (16, 1, 1), (WHOLE, D, WHOLE), (D, WHOLE, WHOLE)),
        ((16,), (1, 1, 16), (D,), (WHOLE, WHOLE, D)),
        ((16, 4), (8, 8), (D, WHOLE), (D, WHOLE)),
        ((24, 4), (8, 12), (D, WHOLE), (D, WHOLE)),
        ((4, 16), (16, 4), (WHOLE, D), None),
    ],
)
def test_reshape(old, new, dims, expected):
    assert reshape(old, new, dims) == expected


def test_reshape_of_two_sharded_dims():
    a, b = ("a",), ("b",)
    sizes = {"a": 2, "b": 4}
    assert reshape((8, 8, 6), (8, 48), (a, b, WHOLE), **sizes) == (a, b)
    assert reshape((8, 8, 6), (64, 6), (a, b, WHOLE), **sizes) is None
    assert reshape((8, 6), (4, 2, 6), (("a", "b"), WHOLE), **sizes) is None
    assert reshape((16, 6), (8, 2, 6), (("a", "b"), WHOLE), **sizes) == (("a", "b"), WHOLE, WHOLE)


def factorizations(number, rng):
    """Returns a random shape of that many elements."""
    shape = []
    while number > 1:
        divisor = rng.choice([d for d in range(2, number + 1) if number % d == 0])
        shape.append(divisor)
        number //= divisor
    for _ in range(rng.randrange(3)):
        shape.insert(rng.randrange(len(shape) + 1), 1)
    return tuple(shape)


def blocks(x, dims, sizes):
    """Returns the shard of each device, by its place on each axis."""
    shards = {}
    for place in itertools.product(*(range(size) for size in sizes.values())):
        at = dict(zip(sizes, place, strict=True))
        index = []
        for extent, axes in zip(x.shape, dims, strict=True):
            number, count = 0, 1
            for axis in axes:
                number, count = number * sizes[axis] + at[axis], count * sizes[axis]
            size = extent // count
            index.append(slice(number * size, (number + 1) * size))
        shards[place] = x[tuple(index)]
    return shards


def test_any_reshape_of_shards_gives_the_shards():
    rng, num_passed, sizes = random.Random(0), 0, {"a": 2, "b": 3}
    for _ in range(600):
        number = rng.choice([12, 24, 36, 72, 144])
        old, new = factorizations(number, rng), factorizations(number, rng)
        dims = [()] * len(old) if old != new else []
        for axis in rng.sample(sorted(sizes), rng.choice([1, 1, 2])):
            fits = [i for i, d in enumerate(dims) if old[i] % (sizes[axis] * int(np.prod([sizes[a] for a in d]))) == 0]
            if fits:
                i = rng.choice(fits)
                dims[i] = (*dims[i], axis)
        result = reshape(old, new, tuple(dims), **sizes) if any(dims) else None
        if result is None:
            continue
        num_passed += 1
        x = np.arange(number).reshape(old)
        expected = blocks(x.reshape(new), result, sizes)
        for place, shard in blocks(x, dims, sizes).items():
            np.testing.assert_array_equal(shard.reshape(expected[place].shape), expected[place])
    assert num_passed > 50, num_passed
