"""Batches behind one another along the dim of examples, as of `jnp.concatenate([chosen, rejected])`.

What is on rows alone has them in any order. So a program may have a block of each batch, then the next block of each:
these are examples like others, of several rows each, and a device has all of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
from jax import lax

from zero_jax.dims.parts.relations import Kind, Pair, Relation, check, rows
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import trace_flat, values_of

# Of each equation, the relations of its operands and of its results.
Found = Sequence[tuple[Sequence[Relation], Sequence[Relation]]]


def of_batches(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    """Returns the relations where batches are put behind one another, or taken from one another; empty if not so.

    A part has its own examples of each of them, in the same order. Batches are of one size: a dim of `batches` is as
    many times as large.
    """
    name = pair.whole.primitive.name
    if name not in ("concatenate", "tile", "slice", "split", "reshape") or inputs[0].kind is not Kind.ROWS:
        return []
    x = inputs[0]
    sizes = [[shape[x.dim] for shape in pair.shapes(i)] for i in range(len(inputs))]
    if name == "concatenate":
        of_one = {
            (size // max(each.batches, 1), part // max(each.batches, 1))
            for each, (size, part) in zip(inputs, sizes, strict=True)
        }
        is_plain = all(each.kind is Kind.ROWS and each.is_plain and each.dim == x.dim for each in inputs)
        if pair.params["dimension"] != x.dim or not is_plain or len(of_one) > 1:
            return []
        return [dataclasses.replace(rows(x.dim), batches=sum(max(each.batches, 1) for each in inputs))]
    if name == "tile":
        reps = {eqn.params["reps"][x.dim] for eqn in (pair.whole, pair.part)}
        return [dataclasses.replace(x, batches=max(x.batches, 1) * min(reps))] if len(reps) == 1 and reps != {1} else []
    n = x.batches
    if name == "reshape" and n < 2 and x.dim:  # `[n, examples]` to `[n * examples]`
        merged = [(*s[: x.dim - 1], s[x.dim - 1] * s[x.dim], *s[x.dim + 1 :]) for s in pair.shapes(0)]
        to = dataclasses.replace(rows(x.dim - 1, x.power), batches=pair.shapes(0)[0][x.dim - 1])
        return [to] if list(pair.results()) == merged else []
    if n < 2:
        return []
    if name == "reshape":  # and back
        wanted = [(*s[: x.dim], n, s[x.dim] // n, *s[x.dim + 1 :]) for s in pair.shapes(0)]
        return [rows(x.dim + 1, x.power)] if list(pair.results()) == wanted else []
    if name == "split":
        if pair.params["axis"] != x.dim:
            return []
        ends = [list(itertools.accumulate(eqn.params["sizes"], initial=0)) for eqn in (pair.whole, pair.part)]
        bounds = [[*itertools.pairwise(each)] for each in ends]
    else:
        fields = [
            (p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(p["start_indices"]))
            for p in (pair.whole.params, pair.part.params)
        ]
        slices = [list(zip(*each, strict=True)) for each in fields]
        bounds = [[each.pop(x.dim)] for each in slices]
        if slices[0] != slices[1] or any(step != 1 for ((_, _, step),) in bounds):
            return []
    # Bounds in batches: slices have to begin and end where batches do, and be of the same ones on a part.
    by_batch = [
        [(Fraction(a * n, s), Fraction(b * n, s)) for a, b, *_ in each]
        for each, s in zip(bounds, sizes[0], strict=True)
    ]
    check(by_batch[0] == by_batch[1] and all(a.denominator == b.denominator == 1 for a, b in by_batch[0]))
    return [dataclasses.replace(x, batches=int(b - a)) for a, b in by_batch[0]]


def in_blocks(closed: Any, found: Found, num_blocks: int, own: Callable[[Any], bool | None]) -> tuple[Any, list[Any]]:
    """Returns a jaxpr in which batches that are behind one another are so block by block.

    Args:
      closed: the jaxpr.
      found: the relations of its equations.
      num_blocks: the blocks of its examples.
      own: tells for the number of an equation whether it puts batches behind one another, or takes them from one
        another (`of_batches`); None if one within it does.

    Returns:
      The jaxpr, and for each of its results a function that puts what is so in the order of the batches, or None.
    """
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    several = dict[Any, Relation]()

    def run(*leaves: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *leaves), strict=True))
        for i, (eqn, (operands, results)) in enumerate(zip(jaxpr.eqns, found, strict=True)):
            # What is not known of may depend on the order, as a product of all examples with all.
            is_own, values = own(i), values_of(eqn.invars, env)
            is_known = is_own is not None and all(x.kind is not Kind.UNKNOWN for x in results)
            with jaxprs.source_context(eqn):
                for n, (atom, x) in enumerate(zip(eqn.invars, operands, strict=True)):
                    if x.batches > 1 and is_known != (atom in several):
                        values[n] = _reordered(values[n], x, num_blocks, is_known)
                made = is_own and is_known and _by_block(eqn, values, operands[0].dim, results[0].dim, num_blocks)
            env.update(zip(eqn.outvars, made or jaxprs.bind(eqn, values), strict=True))
            if is_known:
                several.update((var, x) for var, x in zip(eqn.outvars, results, strict=True) if x.batches > 1)
        return values_of(jaxpr.outvars, env)

    closed = trace_flat(run, [var.aval for var in jaxpr.invars])
    ends = [None if jaxprs.is_literal(x) else several.get(x) for x in jaxpr.outvars]
    return closed, [x and (lambda array, x=x: _reordered(array, x, num_blocks, False)) for x in ends]


def _reordered(array: jax.Array, x: Relation, num_blocks: int, is_in_blocks: bool) -> jax.Array:
    """Returns rows of batches behind one another in blocks, or from blocks."""
    dim, sizes = x.dim, (x.batches, num_blocks) if is_in_blocks else (num_blocks, x.batches)
    apart = array.reshape(*array.shape[:dim], *sizes, -1, *array.shape[dim + 1 :])
    return lax.collapse(lax.collapse(apart.swapaxes(dim, dim + 1), dim + 1, dim + 3), dim, dim + 2)


def _by_block(eqn: Any, values: Sequence[jax.Array], dim: int, to: int, num_blocks: int) -> list[jax.Array]:
    """Evaluates an operation of `of_batches` on each block, from examples along a dim to those along another one."""
    params = dict(eqn.params)
    for name in {"start_indices", "limit_indices", "new_sizes"} & params.keys():
        params[name] = tuple(n // num_blocks if i == to else n for i, n in enumerate(params[name]))
    if "sizes" in params:
        params["sizes"] = tuple(n // num_blocks for n in params["sizes"])
    apart = (x.reshape(*x.shape[:dim], num_blocks, -1, *x.shape[dim + 1 :]) for x in values)
    block = jax.vmap(lambda *xs: jaxprs.bind(eqn.replace(params=params), xs), in_axes=dim, out_axes=to)
    return [lax.collapse(x, to, to + 2) for x in block(*apart)]
