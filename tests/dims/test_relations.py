"""What is proven of a primitive holds by value; what is not known of one counts as mixing examples."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from relation_cases import PROGRAMS, random_programs
from test_primitives import of_jax_lax

from zero_jax.dims import EXTREMA, SAME, Kind, TraceComparison, known_primitives, rows
from zero_jax.dims.parts.relations import Pair
from zero_jax.program.subcalls import KINDS, equations

PARTS, SMALL, LARGE = 2, 4, 8
# Primitives with an entry that no program here reaches, and why what is said of them is right all the same.
NOT_REACHED = {
    "reshard": "of meshes with explicit axes: a value, elsewhere",
    "pvary": "inside of shard_map: a value as it is",
    "zero_reshard": "of this library: a value, elsewhere",
    "zero_order": "of this library: values in an order",
    "zero_join": "of this library: its first input",
    "sharding_constraint": "a value, elsewhere",
    "select_and_gather_add": "of second derivatives",
}
# Those without an entry that are related all the same: by their jaxprs, as made of no example, or within a shard_map.
RELATED = {
    *KINDS,
    *"custom_linear_solve empty iota platform_index rng_bit_generator".split(),
    *"psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter".split(),
}


def array(shape, what, seed):
    rng = np.random.default_rng(seed)
    if what == "k":
        return jax.random.key(0)
    if what == "m":
        x = rng.uniform(0.1, 0.9, shape)
        if shape[-1] != shape[-2]:
            return x.astype(np.float32)
        return (x @ np.swapaxes(x, -1, -2) + 2 * np.eye(shape[-1])).astype(np.float32)
    kinds = {"f": lambda: rng.uniform(0.1, 0.9, shape).astype(np.float32), "b": lambda: rng.random(shape) < 0.5}
    kinds |= {
        "i": lambda: rng.integers(0, 3, shape, dtype=np.int32),
        "u": lambda: rng.integers(0, 9, shape, dtype=np.uint32),
    }
    return kinds[what]()


def block(x, dim, i):
    return x if dim is None else np.split(x, PARTS, dim)[i]


def placements(specs):
    """Yields for each operand the dim that is the dim of examples, or None, in all ways."""
    choices = [[None, *(d for d, size in enumerate(shape) if size == SMALL)] for shape, _ in specs]
    return (dims for dims in itertools.product(*choices) if any(d is not None for d in dims))


def cases(program):
    """Yields `(inputs, parts of them, relations of the results)` for each place of the dim of examples."""
    fn, *specs = program
    for dims in placements(specs):
        grown = [[LARGE if i == d else n for i, n in enumerate(s)] for (s, _), d in zip(specs, dims, strict=True)]
        whole = [array(shape, what, i) for i, (shape, (_, what)) in enumerate(zip(grown, specs, strict=True))]
        parts = [[block(x, d, i) for x, d in zip(whole, dims, strict=True)] for i in range(PARTS)]
        try:
            traces = [jax.make_jaxpr(fn)(*args) for args in (whole, parts[0])]
        except (TypeError, ValueError, AssertionError, IndexError):
            continue  # shapes that do not go together
        inputs = [SAME if d is None else rows(d) for d in dims]
        yield dims, whole, parts, traces, TraceComparison(PARTS).run(*traces, inputs)


def test_a_mean_of_complex_numbers_is_a_mean():
    """Its divisor is complex, too, and was not compared: such losses were warned of as others on microbatches."""
    relations = [relation for *_, (relation,) in cases(PROGRAMS["complex means"])]
    assert [x.kind for x in relations] == [Kind.SUM]


def check(relation, whole, parts, label):
    """Checks a relation by values."""
    if relation.kind in (Kind.UNKNOWN, Kind.POSITIONS, Kind.COLUMNS):
        return
    scale = float(PARTS**relation.power)
    if relation.kind in EXTREMA:
        parts, wanted = [(np.max if relation.kind is Kind.MAX else np.min)(parts, 0)], [whole]
    elif relation.kind is Kind.SUM:
        parts, wanted = [sum(parts)], [scale * whole]
    else:
        blocks = [block(whole, relation.dim, i) for i in range(PARTS)]
        wanted = blocks if scale == 1 else [scale * x for x in blocks]
    for x, y in zip(parts, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2 if x.dtype.itemsize < 4 else 1e-4, atol=1e-5, err_msg=label)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_proven_holds(name):
    fn = jax.jit(lambda *args: jax.tree.leaves(PROGRAMS[name][0](*args)))
    seen = 0
    for dims, whole, parts, _, relations in cases(PROGRAMS[name]):
        seen += 1
        if all(x.kind is Kind.UNKNOWN for x in relations):
            assert all(x.why for x in relations)
            continue
        results, of_parts = fn(*whole), [fn(*part) for part in parts]
        for i, relation in enumerate(relations):
            values = [np.asarray(x[i]) for x in of_parts]
            check(relation, np.asarray(results[i]), values, f"{name} {dims} result {i}: {relation}")
    assert seen


def exercised():
    """Returns the primitives of the programs."""
    found = set()
    for program in (*PROGRAMS.values(), *random_programs().values()):
        for _, _, _, traces, _ in itertools.islice(cases(program), 1):
            found |= {eqn.primitive.name for eqn in equations(traces[0])}
    return found


@pytest.mark.slow
def test_entries_are_exercised_by_a_program():
    reached = exercised()
    missing = {name for name in known_primitives() if name in of_jax_lax() | reached} - reached - NOT_REACHED.keys()
    assert not missing


@pytest.mark.parametrize("num_operands", [0, 1])
def test_a_primitive_without_an_entry_may_mix_examples(num_operands):
    """Of what has no operand only some constants are the same on parts: no random number, no device's number."""
    aval = [types.SimpleNamespace(aval=jax.ShapeDtypeStruct((n, 3), jnp.float32)) for n in (LARGE, SMALL)]
    for name in sorted(of_jax_lax() - known_primitives().keys() - RELATED):
        whole, part = (
            types.SimpleNamespace(
                primitive=types.SimpleNamespace(name=name),
                invars=[x] * num_operands,
                outvars=[x],
                params={},
                effects=frozenset(),
            )
            for x in aval
        )
        (found,) = TraceComparison(PARTS).equation(Pair(whole=whole, part=part), [rows(0)] * num_operands)
        assert found.kind is Kind.UNKNOWN and repr(name) in found.why


@pytest.mark.parametrize("name", random_programs())
def test_draws_are_each_example_s_own(name):
    relations = [relation for *_, found in cases(random_programs()[name]) for relation in found]
    assert any(x.kind is Kind.ROWS for x in relations)
    assert all(x.kind in (Kind.ROWS, Kind.UNKNOWN) for x in relations)


def test_calls_of_equal_layers_are_compared_once():
    layer = jax.checkpoint(lambda x: jnp.tanh(x) * 2)

    def function(x):
        for _ in range(3):
            x = layer(x)
        return x

    traces = (jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.float32)) for size in (8, 4))
    comparison = TraceComparison(2)
    assert comparison.run(*traces, [rows(0)]) == [rows(0)] and len(comparison.calls) == 1
