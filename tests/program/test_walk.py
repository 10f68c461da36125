"""A walk evaluates every equation that runs other jaxprs, with values deferred into it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import bind, open_jaxpr
from zero_jax.program.walk import Deferred, Packed, Rewriting, Walk


@dataclasses.dataclass(frozen=True)
class Halved(Deferred):
    """Twice an array."""

    array: jax.Array


class Doubling(Walk[tuple[str, ...]]):
    """Makes deferred values where operations use them, and notes the kinds of regions around each of these."""

    def __init__(self):
        super().__init__()
        self.uses = []

    def enters(self, eqn, sub, values, frame):
        return True

    def inner_frame(self, eqn, sub, frame):
        return (*frame, sub.kind)

    def materialize(self, value, eqn, frame):
        return 2 * value.array if isinstance(value, Halved) else value

    def operation(self, eqn, values, frame):
        if any(isinstance(value, Halved) for value in values):
            self.uses.append((eqn.primitive.name, frame))
        return bind(eqn, [self.materialize(value, eqn, frame) for value in values])


# A function, and the kinds of regions around each operation on a deferred value.
CASES = {
    "call": (jax.jit(lambda x, w: x @ w), {()}),
    "remat": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), {("remat",)}),
    "scan": (lambda x, w: jax.lax.scan(lambda c, y: (jnp.sin(c @ w + y), y), x, x[None])[0], {("scan",)}),
    "slices": (lambda x, w: jax.lax.scan(lambda c, w: (c + w, c), x[0], w)[0], {("scan",)}),
    "cond": (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x - w, w), {("cond",)}),
    "while": (lambda x, w: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(w), x), set()),
    "whiles": (
        jax.vmap(lambda x, w: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(w[0]), x), (0, None)),
        set(),
    ),
    "nested": (
        lambda x, w: jax.lax.cond(x[0, 0] > 0, jax.checkpoint(jnp.dot), jnp.add, x, w),
        {("cond",), ("cond", "remat")},
    ),
    "returned": (jax.checkpoint(lambda x, w: (x, w)), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_region_is_evaluated_with_what_is_deferred_made_inside_it(name):
    fn, places = CASES[name]
    x, w = jnp.eye(3), jnp.arange(9.0).reshape(3, 3) / 8
    walk = Doubling()
    closed = jax.make_jaxpr(fn)(x, w)

    def walked(x, half):
        outs = walk.run(closed, [x, Halved(half)], ())
        return [walk.materialize(out, None, ()) for out in outs]

    expected = jax.tree.leaves(fn(x, w))
    got = jax.jit(walked)(x, w / 2)
    assert all(jnp.allclose(a, b) for a, b in zip(got, expected, strict=True))
    assert {frame for _, frame in walk.uses} == places
    if not name.startswith("while"):  # in whose body nothing is differentiated in reverse mode
        gradient = jax.grad(lambda x, w: sum(map(jnp.sum, jax.tree.leaves(fn(x, w)))), 1)(x, w)
        own = jax.grad(lambda x, half: sum(map(jnp.sum, walked(x, half))), 1)(x, w / 2)
        assert jnp.allclose(own, 2 * gradient)


def test_an_array_is_passed_once_with_the_flags_of_all_values_that_have_it():
    x, y = jnp.zeros(2), jnp.ones(2)
    packed = Packed([x, Halved(y), y, x])
    assert len(packed.arrays) == 2
    assert packed.spread((False, True, False, False)) == (False, True) and packed.spread(True) is True
    first, half, second, third = packed.values_of(["a", "b"])
    assert (first, half, second, third) == ("a", Halved("b"), "b", "a")


class DoubledSines(Rewriting):
    """Doubles sines."""

    def changes(self, eqn):
        return eqn.primitive.name == "sin"

    def changed(self, eqn, values):
        return [2 * x for x in bind(eqn, values)]


def test_what_is_not_rewritten_stays_the_same_equation():
    def fn(x, y):
        sine, cosine = jnp.sin(x), jax.jit(jnp.cos)(y)
        return sine, cosine * sine, jax.checkpoint(jnp.sin)(y) + 1

    x, y = jnp.ones(2), jnp.arange(2.0)
    closed = jax.make_jaxpr(fn)(x, y)
    rewritten = DoubledSines().rewritten(closed)
    before, after = (open_jaxpr(each)[0].eqns for each in (closed, rewritten))
    (cosine,) = (eqn for eqn in before if eqn.primitive.name == "jit")
    assert any(eqn is cosine for eqn in after)
    results, doubled = evaluate(*open_jaxpr(rewritten), [x, y]), 2 * jnp.sin(x)
    chex.assert_trees_all_close(results, [doubled, jnp.cos(y) * doubled, 2 * jnp.sin(y) + 1])
    unchanged = jax.make_jaxpr(jnp.cos)(x)
    assert DoubledSines().rewritten(unchanged) is unchanged


@pytest.mark.parametrize("made", [lambda x: x, lambda x: jnp.float32(5), lambda x: x * np.arange(3.0, dtype="f")])
def test_a_rewritten_equation_may_return_an_operand_a_number_or_what_is_made_of_a_constant(made):
    class Other(DoubledSines):
        def changed(self, eqn, values):
            return [made(*values)]

    x = jnp.full(3, 2.0) if made(jnp.ones(3)).ndim else jnp.float32(2)
    rewritten = Other().rewritten(jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.sin(x) + x))(x))
    chex.assert_trees_all_close(evaluate(*open_jaxpr(rewritten), [x]), [made(x), made(x) + x])
