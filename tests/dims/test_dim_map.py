"""Dims of results that are dims of operands: what an operation makes at a place is of what they have at that place."""

import jax
import numpy as np
import pytest
from jax import lax
from relation_cases import PROGRAMS
from test_relations import array

from zero_jax.dims import dim_map, known_primitives
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened

QUICK = {"transposes and sums", "reshapes", "dot by a middle dim", "take along rows", "gather its own"}
MORE = {
    "transposes and sums": (lambda x: (x.transpose(2, 0, 1).sum(1), x.max((0, 2)), x[None, :, 1:]), ((2, 4, 3), "f")),
    "one negative padding": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), ((4, 3), "f")),
    "reshapes": (
        lambda x: (x.reshape(4, 6), x.reshape(2, 6, 2), x.reshape(1, 2, 4, 3), x.reshape(2, 2, 6), x.reshape(24)),
        ((2, 4, 3), "f"),
    ),
    "grouped convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=2),
        ((2, 4, 3), "f"),
        ((4, 2, 1), "f"),
    ),
}
ALL = PROGRAMS | MORE


def taken(values, dims, index):
    """Returns operands with the places along some of their dims in another order, or again."""
    values = list(values)
    for operand, dim in dims:
        values[operand] = np.take(values[operand], index, dim)
    return values


def check(eqn, values):
    """Checks what is said of an equation by its values in another order, and with one place like another."""
    results = [np.asarray(x) for x in jaxprs.bind(eqn, values)]
    for i, result in enumerate(results):
        found = dim_map(eqn, i)
        assert len(found.kept) == result.ndim
        for dim, sources in enumerate(found.kept):
            size = result.shape[dim]
            assert all(eqn.invars[operand].aval.shape[d] == size for operand, d in sources), eqn
            for index in (np.roll(np.arange(size), 1), np.zeros(size, int)) if sources else ():
                got = jaxprs.bind(eqn, taken(values, sources, index))[i]
                np.testing.assert_allclose(got, np.take(result, index, dim), rtol=1e-5, atol=1e-6, err_msg=str(eqn))
        if eqn.primitive.name.startswith("arg"):  # of several that are largest it is the first
            continue
        for dim, sources in enumerate(found.blocks):
            for operand, d in sources:
                num = np.gcd(result.shape[dim], values[operand].shape[d])
                half = np.split(values[operand], num, d)[-1]
                np.testing.assert_array_equal(
                    np.ravel(half), np.ravel(np.split(result, num, dim)[-1]), err_msg=str(eqn)
                )
        for sources in found.reduced:
            size = eqn.invars[sources[0][0]].aval.shape[sources[0][1]]
            got = jaxprs.bind(eqn, taken(values, sources, np.roll(np.arange(size), 1)))[i]
            np.testing.assert_allclose(got, result, rtol=1e-4, atol=1e-5, err_msg=str(eqn))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ALL)]
)
def test_what_is_said_of_dims_holds(name):
    fn, *specs = ALL[name]
    values = [array(shape, what, i) for i, (shape, what) in enumerate(specs)]
    seen = []

    def equation(eqn, values):
        is_plain = (
            all(hasattr(x, "dtype") and x.dtype.kind in "fiub" for x in values)
            and eqn.primitive.name in known_primitives()
        )
        if is_plain and not any(jax.numpy.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in eqn.outvars):
            check(eqn, [np.asarray(x) for x in values])
            seen.append(eqn.primitive.name)
        return jaxprs.bind(eqn, values)

    flat = flattened(jax.make_jaxpr(fn)(*values))
    evaluate(*jaxprs.open_jaxpr(flat), values, equation)
    assert seen or name not in QUICK
