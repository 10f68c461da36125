"""A loss function as data: its program for arguments of some shapes, traced once, and the passes over it.

A pass takes the program of a function and returns another one, which computes the same or what is made of it. It gives
a new jaxpr (`Traced.rewritten`), or says how the old one is evaluated (`Traced.evaluated`): on the arrays of a call, or
on shapes where a later pass asks for the jaxpr. What a report shows is what a pass notes when it is evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.tree import eval_shapes
from zero_jax.program.evaluation import evaluate, inlining, trace_flat
from zero_jax.program.jaxprs import open_jaxpr
from zero_jax.program.subcalls import MANUAL, primitives_in

Pass = Callable[["Traced"], "Traced"]
# From the leaves of the arguments to those of the result. What it does is noted in a list, if one is given.
Run = Callable[[Sequence[Any], list[Any] | None], Sequence[Any]]
_Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Traced:
    """The program of a function of params and further arguments, for arguments of some shapes.

    The inputs of its jaxpr are the leaves of the params (`Variables`: params, then model state), and then the arrays
    among the further arguments: those of the batch, and the key. `out_shape` has the shapes of the result.
    """

    def __init__(self, closed: Any, params_tree: Any, out_shape: Any, run: Run | None = None):
        self.params_tree, self.out_shape, self._before, self._run = params_tree, out_shape, closed, run

    @functools.cached_property
    def closed(self) -> Any:
        """The closed jaxpr; traced when it is first asked for, where a pass has said how it is evaluated."""
        if self._run is None:
            return self._before
        return trace_flat(lambda *leaves: [*self(leaves)], [var.aval for var in open_jaxpr(self._before)[0].invars])

    @functools.cached_property
    def primitives(self) -> frozenset[str]:
        """The names of the primitives in the jaxpr, but for those in a `jax.shard_map`."""
        return primitives_in(self.closed, skip=MANUAL)

    @property
    def num_params(self) -> int:
        """The number of inputs that are params or model state."""
        return self.params_tree.num_leaves

    def rewritten(self, closed: Any, out_shape: Any = None) -> Traced:
        """Returns the program of another jaxpr of the same inputs; itself if that is its own."""
        if self._run is None and closed is self._before and out_shape is None:
            return self
        return Traced(closed, self.params_tree, self.out_shape if out_shape is None else out_shape)

    def evaluated(self, run: Run) -> Traced:
        """Returns the program that `run` evaluates."""
        return Traced(self.closed, self.params_tree, self.out_shape, run)

    def __call__(self, leaves: Sequence[Any], notes: list[Any] | None = None) -> list[jax.Array]:
        """Returns the leaves of the result; adds what the pass did to `notes`."""
        if self._run is not None:
            results = self._run(leaves, notes)
        else:
            results = evaluate(*open_jaxpr(self._before), leaves, inlining())
        # Literals are Python's or numpy's numbers.
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]

    def result(self, leaves: Sequence[Any]) -> Any:
        """Returns the result as the pytree that the function returns."""
        return jax.tree.unflatten(jax.tree.structure(self.out_shape), self(leaves))


class LossProgram:
    """A function of params and further arguments that is traced once for arguments of the same shapes, and its passes.

    It belongs to one trace of a step, and is dropped with it: what the function closes over may be other values in the
    next. `before` is the program that the last pass is applied to; None for the function itself.
    """

    def __init__(self, fn: Callable[..., Any], before: LossProgram | None = None, last: Pass | None = None):
        functools.update_wrapper(self, fn)  # JAX's errors name the function
        self.fn, self.before, self.last = fn, before, last
        self.traces: dict[Any, Traced] = {}

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> LossProgram:
        """Returns a function as a program, and a program as it is."""
        return fn if isinstance(fn, LossProgram) else cls(fn)

    def then(self, last: Pass) -> LossProgram:
        """Returns the program after one more pass; both share the trace of the function."""
        return LossProgram(self.fn, self, last)

    def __call__(self, *args: Any) -> Any:
        """Calls the function; after a pass, evaluates its program."""
        return self.fn(*args) if self.last is None else self.trace(*args).result(jax.tree.leaves(args))

    def trace(self, *args: Any) -> Traced:
        """Returns the program for arguments of these shapes."""
        leaves, tree = jax.tree.flatten(args)
        key = tree, *map(_described, leaves)
        if key not in self.traces:
            self.traces[key] = self.made(*args)
        return self.traces[key]

    def made(self, *args: Any) -> Traced:
        """Returns the program for arguments of these shapes, made anew."""
        if self.before is not None and self.last is not None:
            return self.last(self.before.trace(*args))
        closed, out_shape = jax.make_jaxpr(self.fn, return_shape=True)(*jax.tree.map(_used, args))
        return Traced(closed, jax.tree.structure(args[0]), out_shape)

    def notes(self, *args: Any) -> list[Any]:
        """Returns what the last pass notes for arrays or shapes, and other values, which stay what they are."""
        notes: list[Any] = []

        def run(params: Any, *args: Any) -> Any:
            assert self.before is not None and self.last is not None
            traced, arrays = trace_call(self.before, params, args, {})
            return self.last(traced)([*jax.tree.leaves(params), *arrays], notes)

        eval_shapes(run, *args)
        return notes


def with_pass(fn: Callable[..., Any], last: Pass, context: _Context = contextlib.nullcontext) -> Callable[..., Any]:
    """Returns `fn(params, *args, **kwargs)` after a pass, traced anew in each call; a `LossProgram` remains one."""
    if isinstance(fn, LossProgram):
        return fn.then(last)

    @functools.wraps(fn)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        if not args:  # params by keyword, whatever the function calls them
            bound = inspect.signature(fn).bind(**kwargs)
            args, kwargs = bound.args, bound.kwargs
        with context():
            traced, arrays = trace_call(fn, args[0], args[1:], kwargs)
            return last(traced).result([*jax.tree.leaves(args[0]), *arrays])

    return transformed


def trace_call(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> tuple[Traced, list[jax.Array]]:
    """Traces `fn(params, *args, **kwargs)`; Python and numpy values stay what they are, as with `jax.grad`.

    Returns:
      The program of the leaves of the params and of the arrays among the arguments; those arrays.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = tree.unflatten([leaf if isinstance(leaf, jax.Array) else None for leaf in leaves])

    @functools.wraps(fn)  # JAX's errors name the function that is traced, and its arguments
    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        traced = tree.flatten_up_to((args, kwargs))  # arrays; None for what stays what it is
        args, kwargs = tree.unflatten([leaf if x is None else x for leaf, x in zip(leaves, traced, strict=True)])
        return fn(params, *args, **kwargs)

    shapes = jax.tree.map(_used, params)
    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(shapes, *arrays[0], **arrays[1])
    return Traced(closed, jax.tree.structure(params), out_shape), jax.tree.leaves(arrays)


def _used(x: Any) -> Any:
    """Returns an argument, or the shape that it is used in if it is not an array yet (a param in host memory)."""
    return getattr(x, "used_shape", x)


def _described(x: Any) -> Any:
    """Returns what a trace depends on: shape, dtype, and the mesh and the axes of a sharding."""
    x = _used(x)
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(getattr(sharding, "mesh", None), "abstract_mesh", None)
    axes = tuple((i, entry) for i, entry in enumerate(getattr(sharding, "spec", ())) if entry is not None)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), mesh, axes
