"""Evaluation of jaxprs, and functions that are traced once for arguments of the same shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.jaxprs import bind, is_literal, open_jaxpr, source_context
from zero_jax.core.subcalls import scan_of, subcall

Equation = Callable[[Any, list[Any]], Sequence[Any]]
# From a closed jaxpr, the shape of its results, and the arguments as pytrees to another jaxpr and shape.
Rewrite = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any]]


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    equation: Equation = bind,
    env: dict[Any, Any] | None = None,
) -> list[Any]:
    """Evaluates an open jaxpr on values and returns its results.

    `equation` returns the values of the results of an equation, from it and the values of its inputs; `env` gets the
    values of all variables.
    """
    env = {} if env is None else env
    env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    read = lambda atom: atom.val if is_literal(atom) else env[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inlining(kinds: Collection[str] = ("call",)) -> Equation:
    """Returns an evaluation of equations that runs the jaxprs of these kinds of `Subcall` in place."""

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        sub = subcall(eqn)
        if sub is None or sub.kind not in kinds:
            return bind(eqn, values)
        with source_context(eqn):
            return evaluate(*open_jaxpr(sub.jaxpr), values, equation)

    return equation


def run_scan(
    eqn: Any, body: Callable[[list[Any], list[Any]], list[Any]], carry: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Evaluates a `scan` equation with another body.

    `body` takes the carry and the slices of an iteration, and returns all results of it, the new carry first.
    """
    scan = scan_of(eqn)

    def iteration(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(carry, x)
        return outs[: scan.num_carry], outs[scan.num_carry :]

    options = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
    with source_context(eqn):
        carry, ys = lax.scan(iteration, list(carry), list(xs), **options)
    return [*carry, *ys]


def run_region(eqn: Any, calls: Sequence[Callable[..., list[Any]]], values: Sequence[Any]) -> list[Any]:
    """Evaluates a `scan`, `cond` or `jax.checkpoint` equation with these functions in place of its jaxprs."""
    if eqn.primitive.name == "scan":
        consts, carry, xs = scan_of(eqn).split(values)
        return run_scan(eqn, lambda carry, x: calls[0](*consts, *carry, *x), carry, xs)
    with source_context(eqn):
        if eqn.primitive.name == "cond":
            return list(lax.switch(values[0], calls, *values[1:]))
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        return list(jax.checkpoint(calls[0], policy=policy, prevent_cse=prevent_cse)(*values))


def trace_flat(function: Callable[..., list[Any]], avals: Sequence[Any]) -> Any:
    """Traces a function of arrays, such as one that evaluates a jaxpr; returns its closed jaxpr."""
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals
    ]
    return jax.make_jaxpr(function)(*shapes)


def flattened(jaxpr: Any, consts: Sequence[Any] = (), kinds: Collection[str] = ("call",)) -> Any:
    """Returns a closed jaxpr of what an open one computes, with the jaxprs of these kinds of `Subcall` in place."""
    equation = inlining(kinds)
    return trace_flat(lambda *xs: evaluate(jaxpr, consts, xs, equation), [var.aval for var in jaxpr.invars])


class TracedFunction:
    """A function of pytrees of arrays that is traced once for arguments of the same shapes, and rewritten by its jaxpr.

    Transforms that ask for a function's jaxpr share one trace. It belongs to one trace of a step, and is dropped with
    it: what the function closes over may be other values in the next.

    Args:
      fn: the function; or another `TracedFunction`, if there is a `rewrite`.
      rewrite: makes the jaxpr of this function of that of `fn`.
    """

    def __init__(self, fn: Callable[..., Any], rewrite: Rewrite | None = None):
        functools.update_wrapper(self, fn)  # JAX's errors name the function
        self.fn, self.rewrite = fn, rewrite
        self.traces: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the function; if it is rewritten, evaluates its jaxpr."""
        if self.rewrite is None:
            return self.fn(*args)
        closed, out_shape = self.trace(*args)
        results = evaluate(*open_jaxpr(closed), jax.tree.leaves(args), inlining())
        # Literals are Python's or numpy's numbers.
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        return jax.tree.unflatten(jax.tree.structure(out_shape), arrays)

    def trace(self, *args: Any) -> tuple[Any, Any]:
        """Returns the closed jaxpr of the leaves of arguments, and the shape of the result."""
        leaves, tree = jax.tree.flatten(args)
        key = tree, *map(_described, leaves)
        if key not in self.traces:
            if self.rewrite is None:
                self.traces[key] = jax.make_jaxpr(self.fn, return_shape=True)(*args)
            else:
                closed, out_shape = self.fn.trace(*args)  # type: ignore[attr-defined]
                self.traces[key] = self.rewrite(closed, out_shape, args)
        return self.traces[key]


def trace_call(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[jax.Array]]:
    """Traces `fn(params, *args, **kwargs)`; Python and numpy values stay what they are, as with `jax.grad`.

    Returns:
      The closed jaxpr of the leaves of the params and of the arrays among the arguments; the shape of the result; those
      arrays.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    if isinstance(fn, TracedFunction) and not kwargs and all(isinstance(leaf, jax.Array) for leaf in leaves):
        return *fn.trace(params, *args), leaves
    arrays = tree.unflatten([leaf if isinstance(leaf, jax.Array) else None for leaf in leaves])

    @functools.wraps(fn)  # JAX's errors name the function that is traced, and its arguments
    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        traced = tree.flatten_up_to((args, kwargs))
        full = [leaf if value is None else value for leaf, value in zip(leaves, traced, strict=True)]
        args, kwargs = tree.unflatten(full)
        return fn(params, *args, **kwargs)

    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(params, *arrays[0], **arrays[1])
    return closed, out_shape, jax.tree.leaves(arrays)


def _described(x: Any) -> Any:
    """Returns what a trace depends on: shape, dtype, and the mesh and the axes of a sharding."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(getattr(sharding, "mesh", None), "abstract_mesh", None)
    axes = tuple((i, entry) for i, entry in enumerate(getattr(sharding, "spec", ())) if entry is not None)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), mesh, axes
