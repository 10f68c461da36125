"""What `jaxprs.py` hides: how JAX's releases spell their jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gathering import assert_close
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened
from zero_jax.program.subcalls import scan_of

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
TABLE = np.ones(4, np.float32)


def named_equation(fn, *args, name):
    """Returns the one equation of a primitive in the trace of a function."""
    (eqn,) = (eqn for eqn in jax.make_jaxpr(fn)(*args).eqns if eqn.primitive.name == name)
    return eqn


def test_open_jaxpr():
    closed = jax.make_jaxpr(lambda x: x * TABLE + jnp.float32(2))(X)
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    assert len(jaxpr.constvars) == len(consts) == 1
    assert [v.aval.shape for v in jaxpr.invars] == [(3, 4)]
    again, no_consts = jaxprs.open_jaxpr(jaxpr)
    assert again is jaxpr and len(no_consts) in (0, len(consts))


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def tripled(x):
    return 3 * x


tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (3 * g,))

HIGHER_ORDER = {
    "jit": (lambda x: jax.jit(jnp.sin)(x), "jit", 1),
    "remat": (lambda x: jax.checkpoint(jnp.sin)(x), None, 1),
    "scan": (lambda x: lax.scan(lambda c, x: (c + x.sum(), x * c), 0.0, x)[1], "scan", 1),
    "while": (lambda x: lax.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x), "while", 2),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "cond", 2),
    "switch": (lambda x: lax.switch(x[0].astype(int)[0], [jnp.sin, jnp.cos, jnp.tan], x), "cond", 3),
    "custom_jvp": (doubled, "custom_jvp_call", 1),
    "custom_vjp": (tripled, None, 1),
    "reduce": (lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,)), "reduce", 1),
    "linear_solve": (lambda x: jnp.linalg.solve(x[:, :3] + jnp.eye(3), x), None, None),
    "first_order": (lambda x: jnp.sin(x) @ x.T, None, None),
    "sort": (lambda x: lax.sort((x, -x), dimension=1, num_keys=1), "sort", 0),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), None, None),
    "shard_map": (
        lambda x: jax.shard_map(jnp.sin, mesh=mesh_of("8"), in_specs=P(), out_specs=P())(x),
        "shard_map",
        1,
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, primitive, _) in HIGHER_ORDER.items() if primitive])
def test_inner_jaxprs(name):
    fn, primitive, num_inner = HIGHER_ORDER[name]
    inner = jaxprs.inner_jaxprs(named_equation(fn, X, name=primitive))
    assert len(inner) == num_inner
    for jaxpr in inner:
        assert jaxprs.open_jaxpr(jaxpr)[0].eqns


@pytest.mark.parametrize("name", HIGHER_ORDER)
@pytest.mark.parametrize("transform", [None, jax.grad], ids=["value", "gradient"])
def test_bind_evaluates_every_equation(name, transform):
    original, _, _ = HIGHER_ORDER[name]

    def scalar(x):
        return sum(jnp.sum(out * out) for out in jax.tree.leaves(original(x)))

    if name == "while" and transform:
        pytest.skip("no reverse mode")
    fn = transform(scalar) if transform else original

    @jax.jit
    def by_equation(x):
        closed = jax.make_jaxpr(fn)(x)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, x), strict=True))

        def read(atom):
            return atom.val if jaxprs.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            results = jaxprs.bind(eqn, [read(atom) for atom in eqn.invars])
            assert isinstance(results, list)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    assert_close(by_equation(X), jax.tree.leaves(jax.jit(fn)(X)))


def test_bind_keeps_the_derivative_of_custom_functions():
    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, g: (42 * g,))

    @jax.custom_jvp
    def wrong_too(x):
        return x

    wrong_too.defjvp(lambda primals, tangents: (primals[0], 43 * tangents[0]))
    for fn, factor in ((wrong, 42), (wrong_too, 43)):
        (eqn,) = jax.make_jaxpr(fn)(1.0).eqns
        assert jax.grad(lambda x, eqn=eqn: jaxprs.bind(eqn, [x])[0])(1.0) == factor


def test_bind_keeps_name_and_source():
    def inner(x):
        with jax.named_scope("scope"):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(inner)(1.0).eqns
    (again,) = jax.make_jaxpr(lambda x: jaxprs.bind(eqn, [x]))(1.0).eqns
    assert str(again.source_info.name_stack) == "scope"
    for each in (eqn, again):
        assert "test_jaxprs.py" in jaxprs.source_line(each) and "inner" in jaxprs.source_line(each)


def test_bind_keeps_the_settings_of_the_trace():
    with jax.default_matmul_precision("highest"):
        (eqn,) = jax.make_jaxpr(jnp.matmul)(X, X.T).eqns
    (again,) = jax.make_jaxpr(lambda x, y: jaxprs.bind(eqn, [x, y]))(X, X.T).eqns
    assert again.params["precision"] == eqn.params["precision"] is not None


@pytest.mark.parametrize(("reverse", "unroll"), [(False, 1), (True, 2)])
def test_scan_of(reverse, unroll):
    def fn(x, a, b):
        def body(carry, x):
            i, total = carry
            return (i + 1, total + a @ x + b), (x * i, total)

        return lax.scan(body, (0, jnp.zeros(2)), x, reverse=reverse, unroll=unroll)

    args = np.zeros((5, 4), np.float32), np.zeros((2, 4), np.float32), np.zeros(2, np.float32)
    parts = scan_of(named_equation(fn, *args, name="scan"))
    assert (parts.num_consts, parts.num_carry, parts.length) == (2, 2, 5)
    assert (parts.reverse, parts.unroll) == (reverse, unroll)
    jaxpr, _ = jaxprs.open_jaxpr(parts.jaxpr)
    assert [v.aval.shape for v in jaxpr.invars] == [(2, 4), (2,), (), (2,), (4,)]


def test_scan_of_without_inputs_or_carry():
    eqn = named_equation(lambda x: lax.fori_loop(0, 3, lambda i, x: x + i, x), X, name="scan")
    assert scan_of(eqn).length == 3
    parts = scan_of(named_equation(lambda x: lax.map(jnp.sin, x), X, name="scan"))
    assert (parts.num_consts, parts.num_carry, parts.length) == (0, 0, 3)


def test_has_explicit_shardings():
    sharding = NamedSharding(mesh_of("8"), P())
    for options, expected in (({}, False), ({"in_shardings": sharding}, True), ({"out_shardings": sharding}, True)):
        eqn = named_equation(jax.jit(lambda x: x + 1, **options), X, name="jit")
        assert jaxprs.has_explicit_shardings(eqn) is expected


def test_used_inputs():
    def fn(args):
        a, b, c, d = args
        loop, _ = lax.scan(lambda carry, x: (carry + x, None), a, jnp.ones(3))
        return {"out": loop + 0 * b.sum(), "zeros": jnp.zeros_like(d), "shape": c.shape[0]}

    avals = [jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((4,), jnp.float32)] * 3]
    assert jaxprs.used_inputs(jax.make_jaxpr(fn)(avals)) == [True, True, False, False]


def test_rules_of_custom_derivatives_are_given_arrays_of_jax():
    """JAX keeps constants in jaxprs as numpy's, which a rule that indexes them by a traced number cannot take."""

    @jax.custom_vjp
    def weighted(x, table):
        return x * table.sum()

    def backward(table, cotangent):
        total = jax.lax.fori_loop(0, 2, lambda i, total: total + table[i], 0.0)
        return cotangent * total, jnp.zeros(2)

    weighted.defvjp(lambda x, table: (weighted(x, table), table), backward)

    @jax.jit
    def slope(x):
        jaxpr, consts = jaxprs.open_jaxpr(jax.make_jaxpr(lambda x: weighted(x, jnp.array([1.0, 2.0])))(x))
        return jax.grad(lambda x: evaluate(jaxpr, consts, [x])[0])(x)

    assert slope(1.0) == 3


def test_calls_are_written_out_as_often_as_they_are_made():
    @jax.jit
    def layer(x, w):
        with jax.named_scope("inner"):
            return jax.nn.relu(x @ w), x

    def fn(x, w):
        for _ in range(2):
            with jax.named_scope("outer"):
                x, _ = jax.jit(lambda x: layer(x, w))(x)
        return x, jax.jit(lambda x: x)(w)

    x = jnp.arange(9.0).reshape(3, 3) - 4
    closed = jax.make_jaxpr(fn)(x, x)
    flat = jaxprs.open_jaxpr(flattened(closed))[0]
    assert [eqn.primitive.name for eqn in flat.eqns] == ["dot_general", "custom_jvp_call"] * 2
    first, second = flat.eqns[1::2]
    assert first.params == second.params and first.outvars != second.outvars
    assert (
        "outer" in jaxprs.name_stack(first)
        and "inner" in jaxprs.name_stack(first)
        and jaxprs.source_line(first) == jaxprs.source_line(second)
    )
    for got, expected in zip(evaluate(flat, (), [x, x]), fn(x, x), strict=True):
        assert (got == expected).all()
