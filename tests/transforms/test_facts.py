"""Facts of a jaxpr's values."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zero_jax.program import jaxprs
from zero_jax.transforms.facts import Facts

X, W, B = jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones(3)
KINDS = ["value", "param", "param"]
SCALAR, ARRAY = jnp.float32(2), jnp.ones(3)


def facts_of(fn, *args, kinds=KINDS):
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(fn)(*args))
    return Facts(jaxpr, kinds)


def printed(x):
    jax.debug.callback(lambda x: None, x, ordered=True)
    return x


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x, w, b: w.T + b, "param"),
        (lambda x, w, b: w * SCALAR, "param"),
        (lambda x, w, b: w * ARRAY, "value"),  # an array that the function closes over may be its batch
        (lambda x, w, b: x @ w, "value"),
        (lambda x, w, b: x, "value"),
        (lambda x, w, b: jnp.arange(3) * 2, "const"),
        (lambda x, w, b: lax.cond(b[0] > 0, lambda: w, lambda: w.T), "param"),
        (lambda x, w, b: lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0], "value"),
        (lambda x, w, b: lax.scan(lambda c, _: (c @ w, None), w, None, length=2)[0], "param"),
        (lambda x, w, b: jax.jit(printed)(w), "value"),  # what has effects is no constant
        (lambda x, w, b: 1.0, "const"),
    ],
)
def test_what_a_value_is_made_of(fn, kind):
    facts = facts_of(fn, X, W, B)
    assert facts.kind(facts.jaxpr.outvars[0]) == kind
    eqn = facts.jaxpr.eqns[-1] if facts.jaxpr.eqns else None
    assert eqn is None or facts.only_params(eqn) == (kind != "value")


def test_constants_among_the_inputs():
    facts = facts_of(lambda x, w, b: (w * 2, w + b, w + x), X[:1, :1], W, B, kinds=["value", "const", "param"])
    assert [facts.kind(var) for var in facts.jaxpr.outvars] == ["const", "param", "value"]


def test_which_params_and_which_parts():
    facts = facts_of(lambda x, w, b: (w[0] + b, w.T, w.T * 2, w[1]), X, W, B)
    both, moved, scaled, part = (facts.origins[var] for var in facts.jaxpr.outvars)
    assert (both.params, moved.params, part.params) == ({1, 2}, {1}, {1})
    assert moved.part == scaled.part != part.part


def test_the_uses_of_params():
    def fn(x, w, b):
        y = x @ (w * b)  # a product of params is no use of them
        return jnp.tanh(y + b).sum() * SCALAR

    facts = facts_of(fn, X, W, B)
    used = [(facts.jaxpr.eqns[i].primitive.name, params) for i, params in facts.uses.items()]
    assert used == [("dot_general", {1, 2}), ("add", {2})]
    assert facts_of(lambda x, w, b: (x, w * b), X, W, B).uses == {}


def test_the_last_reads():
    facts = facts_of(lambda x, w, b: (jnp.sin(jnp.cos(x) * 2), x), X, W, B)
    cosine, double, sine = (eqn.outvars[0] for eqn in facts.jaxpr.eqns)
    assert facts.last_read == {facts.jaxpr.invars[0]: 3, cosine: 1, double: 2, sine: 3}
