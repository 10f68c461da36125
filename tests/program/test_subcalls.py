"""The table of equations that run other jaxprs, on equations that this JAX release makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of
from test_jaxprs import TABLE, X, doubled, tripled

from zero_jax.program import jaxprs, subcalls
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.subcalls import equations, subcall


@jax.custom_batching.custom_vmap
def mapped(x):
    return jnp.sin(x)


mapped.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def kept_in_a_loop(x):
    """The gradient of a loop in a `jax.checkpoint` with a policy: JAX wraps the loop into a call of its own."""

    def loop(x):
        return lax.scan(lambda c, row: (jnp.sin(c * row), None), x[0], x)[0].sum()

    return jax.grad(jax.checkpoint(loop, policy=jax.checkpoint_policies.dots_saveable))(x)


def shard_mapped(x):
    return jax.shard_map(jnp.sin, mesh=mesh_of("8"), in_specs=P(), out_specs=P())(x)


CALLS = {
    "jit": (jax.jit(lambda x: x + TABLE), "call"),
    "jit with shardings": (jax.jit(jnp.sin, in_shardings=NamedSharding(mesh_of("8"), P())), "sharded_call"),
    "loop in a remat": (kept_in_a_loop, "call"),
    "remat": (jax.checkpoint(jnp.sin), "remat"),
    "gradient of remat": (jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()), "remat"),
    "custom_jvp": (doubled, "custom_jvp"),
    "relu": (jax.nn.relu, "custom_jvp"),
    "custom_vjp": (tripled, "custom_vjp"),
    "vmap of custom_vjp": (jax.vmap(tripled), "custom_vjp"),
    "custom_vmap": (mapped, "custom_vmap"),
    "shard_map": (shard_mapped, "shard_map"),
}


def first(fn, *args, kind):
    """Returns the first equation of a kind in the trace of a function, and its subcall."""
    pairs = [(eqn, subcall(eqn)) for eqn in jax.make_jaxpr(fn)(*args).eqns]
    return next((eqn, sub) for eqn, sub in pairs if sub is not None and sub.kind == kind)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_all_operands(name):
    fn, kind = CALLS[name]
    eqn, sub = first(fn, X, kind=kind)
    opened, _ = jaxprs.open_jaxpr(sub.jaxpr)
    assert [v.aval.shape for v in opened.outvars] == [v.aval.shape for v in eqn.outvars]
    if kind != "shard_map":
        assert [v.aval.shape for v in opened.invars] == [v.aval.shape for v in eqn.invars]


def test_every_call_of_the_table_is_made_by_this_release():
    """But for one that has a name by release."""
    made = {first(fn, X, kind=kind)[0].primitive.name for fn, kind in CALLS.values()}
    renamed = {"closed_call", "eval_jaxpr"}
    assert made - renamed == subcalls.KINDS.keys() - renamed - {"scan", "while", "cond"}
    assert len(made & renamed) == 1


def test_scan():
    def fn(x, scale, carry):
        return lax.scan(lambda c, row: (c + scale, (2 * row, row[0])), carry, x, reverse=True)

    eqn, sub = first(fn, X, 2 * X[0], X[0], kind="scan")
    consts, carry, slices = sub.split(eqn.invars)
    shapes = [[v.aval.shape for v in part] for part in (consts, carry, slices)]
    assert shapes == [[(4,)], [(4,)], [(3, 4)]]
    assert (sub.length, sub.reverse, sub.num_consts, sub.num_carry) == (3, True, 1, 1)
    body, _ = jaxprs.open_jaxpr(sub.jaxpr)
    assert [v.aval.shape for v in body.invars] == [(4,), (4,), (4,)]
    assert len(body.outvars) == len(eqn.outvars) == 3


def test_while():
    def fn(x, limit, step, i):
        return lax.while_loop(lambda c: c[0].sum() < limit, lambda c: (c[0] + step, c[1] + 1), (x, i))

    eqn, sub = first(fn, X, np.float32(9), TABLE, 0, kind="while")
    consts, carry, slices = sub.split(eqn.invars)
    assert [v.aval.shape for v in consts] == [(4,)] and not slices
    assert [v.aval.shape for v in carry] == [(3, 4), ()] == [v.aval.shape for v in eqn.outvars]
    test, _ = jaxprs.open_jaxpr(sub.test)
    assert [v.aval.shape for v in test.invars] == [(), (3, 4), ()]
    assert [v.aval.shape for v in eqn.invars[: sub.num_test_consts]] == [()]
    assert [v.aval.shape for v in jaxprs.open_jaxpr(sub.jaxpr)[0].invars] == [(4,), (3, 4), ()]


def test_branches():
    eqn, sub = first(lambda x, i: lax.switch(i, [jnp.sin, lambda x: x * TABLE, jnp.tan], x), X, 1, kind="cond")
    assert len(sub.branches) == 3
    for branch in sub.branches:
        opened, _ = jaxprs.open_jaxpr(branch)
        assert [v.aval.shape for v in opened.invars] == [v.aval.shape for v in eqn.invars[1:]]


def test_an_operation_that_holds_a_jaxpr_runs_none():
    fns = [
        lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,)),
        lambda x: x.at[0].add(1.0),
        lambda x: lax.composite(lambda x: 2 * x, "some.name")(x),
        lambda x: jnp.sin(x),
    ]
    for fn in fns:
        assert all(subcall(eqn) is None for eqn in jax.make_jaxpr(fn)(X).eqns)


def test_equations_are_those_of_jaxprs_within_too():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda x: jax.checkpoint(jnp.sin)(x) + 1)(x))(X)
    assert [eqn.primitive.name for eqn in equations(jaxpr)] == ["jit", "remat2", "sin", "add"]
    assert [eqn.primitive.name for eqn in equations(jaxpr, skip=["remat2"])] == ["jit", "add"]


class Sources(Dataflow[frozenset[str]]):
    """Which inputs a value is made of."""

    enters = frozenset({"call", "remat", "scan", "cond"})

    def constant(self, atom):
        return frozenset()

    def operation(self, eqn, operands):
        return [frozenset().union(*operands)] * len(eqn.outvars)

    def join(self, first, second):
        return first | second


def sources(fn, *args):
    names = [frozenset(name) for name in "abcd"[: len(args)]]
    return ["".join(sorted(x)) for x in Sources().run(jax.make_jaxpr(fn)(*args), names)]


def test_a_pass_goes_through_calls_loops_and_branches():
    assert sources(jax.jit(lambda a, b: (a + TABLE, b, 2.0)), 1.0, 2.0) == ["a", "b", ""]
    assert sources(jax.checkpoint(lambda a, b: (a + b, jnp.sin(a))), 1.0, 2.0) == ["ab", "a"]
    # What a carry is made of in the third iteration: the second takes `b`'s carry, which the first took from `c`.
    shifts = lambda a, b, c: lax.scan(lambda x, _: ((x[1], x[2], x[2]), None), (a, b, c), length=3)[0]  # noqa: E731
    assert sources(shifts, 1.0, 2.0, 3.0) == ["abc", "bc", "c"]
    chosen = lambda a, b, c: lax.cond(a > 0, lambda b, c: (jnp.sin(b), c + 1), lambda b, c: (2 * b, 3 * b), b, c)  # noqa: E731
    assert sources(chosen, 1.0, 2.0, 3.0) == ["ab", "abc"]


def test_a_pass_returns_what_is_known_of_each_variable():
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(lambda a, b: jnp.sin(a) * b)(1.0, 2.0))
    env = {}
    Sources().run(jaxpr, [frozenset("a"), frozenset("b")], env)
    assert [env[eqn.outvars[0]] for eqn in jaxpr.eqns] == [frozenset("a"), frozenset("ab")]
