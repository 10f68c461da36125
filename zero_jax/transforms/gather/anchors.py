"""Values that XLA is told the sharding of, because it sends more where it may choose (docs/gather_on_use.md).

Carries of loops that begin as constants and become activations are sharded over the batch in every iteration: nobody
says how `S = jnp.zeros((batch, heads, k, v))` is sharded. Where a gradient is asked for a shard of features, XLA takes
up that sharding for the carry of a recurrence, against the batch of all else, and reshards activations in every
iteration. A sum over examples is one of each device's own sum, and rows that are chosen of all examples are sharded as
these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import Mesh

from zero_jax.dims import ELEMENTWISE, LOOPS, Examples, MixedSharding, State, is_float
from zero_jax.program.evaluation import evaluate, trace_flat
from zero_jax.program.jaxprs import bind, bind_mapped, of_some, open_jaxpr, source_context, variables
from zero_jax.program.subcalls import Subcall, equations, subcall
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.chains import OF_ALL, Chain, copies_of_rows, cut_axes, reshard
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.spec import named_along
from zero_jax.transforms.gather.per_device import split_dim

_AS_IT_IS = ELEMENTWISE | {"transpose"}


def anchored(
    closed: Any, states: Sequence[State], *, mesh: Mesh, axes: Axes, loops_only: bool = False
) -> tuple[Any, Examples]:
    """Shards the carries of loops by the examples that they have, where they begin without, and what mixes examples.

    Returns the closed jaxpr, itself if nothing of it changes, and how its values depend on the examples, from the
    states of its inputs. With `loops_only` what mixes examples is left alone, as a gradient does.
    """
    avals = [var.aval for var in open_jaxpr(closed)[0].invars]
    sizes = frozenset(x.shape[dim] for x, dim in zip(avals, states, strict=True) if isinstance(dim, int))
    examples = Examples(mesh, axes, sizes)
    examples.run(closed, states)
    if not examples.loops and not any(examples.moves.values()):  # nothing mixes examples, or follows what does
        return closed, examples
    anchors = _Anchors(closed, mesh, axes, examples, loops_only=loops_only)
    if (rewritten := anchors.rewritten(closed)) is not closed:
        examples = Examples(mesh, axes, sizes)
        examples.run(rewritten, states)
    return rewritten, examples


class _Anchors(Rewriting):
    """Evaluates equations with the carries of their loops sharded by examples."""

    entered = Rewriting.entered | {"custom_vjp", "while"}
    traces_all = True  # `copies` are of several lookups

    def __init__(self, closed: Any, mesh: Mesh, axes: Axes, examples: Examples, *, loops_only: bool):
        super().__init__()
        self.closed, self.mesh, self.axes, self.examples, self.loops_only = closed, mesh, axes, examples, loops_only
        self.handlers["custom_vjp"] = self.with_derivatives
        self.copies: dict[int, tuple[jax.Array, jax.Array]] = {}  # of what is looked up in all examples

    @functools.cached_property
    def returned_sums(self) -> frozenset[int]:
        """The `id`s of the products that are returned but for elementwise work, as sums of a model state are."""
        jaxpr, _ = open_jaxpr(self.closed)
        returned, sums = {id(var) for var in jaxpr.outvars}, set[int]()
        for eqn in reversed(jaxpr.eqns):
            if returned.isdisjoint(map(id, eqn.outvars)):
                continue
            if eqn.primitive.name == "dot_general":
                sums.add(id(eqn))
            elif subcall(eqn) or eqn.primitive.name in _AS_IT_IS:
                returned.update(map(id, variables(eqn)))
        return frozenset(sums)

    def changes(self, eqn: Any) -> bool:
        """Tells whether an equation is one to anchor, or may have some in its derivatives."""
        sub = subcall(eqn)
        if sub is None:
            return self.move(eqn) is not None
        if sub.kind not in ("custom_vjp", *LOOPS):
            return False
        if sub.kind == "custom_vjp":
            is_known = id(eqn) in self.examples.operands and all(is_float(var.aval) for var in eqn.outvars)
            return is_known and any(each.primitive.name in LOOPS for each in equations(sub.jaxpr))
        return bool(self.examples.carries(eqn))

    def move(self, eqn: Any) -> MixedSharding | None:
        """Returns how an operation that mixes examples is to be sharded."""
        move = None if self.loops_only else self.examples.moves.get(id(eqn))
        return None if move is not None and move.summed and id(eqn) not in self.returned_sums else move

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        return self.move(eqn) is None and super().enters(eqn, sub, values, frame)

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        move = self.move(eqn)
        assert move is not None  # loops are entered
        if move.dim is None:
            return [self.summed(eqn, move.summed, *values)]
        if move.places is not None:
            return [self.exchanged(eqn, move, values)]
        if move.operand is not None:  # or XLA shards the cotangent as the gradient of a weight, and gathers it for that
            values = [self.sharded(values[0], move.operand), *values[1:]]
        if move.chunks:
            return [self.in_chunks(bind(eqn, values)[0], move.chunks)]
        return [self.sharded(x, move.dim) for x in bind(eqn, values)]

    def inner(self, eqn: Any, jaxpr: Any, values: Sequence[Any], frame: None) -> list[Any]:
        outer, self.copies = self.copies, {**self.copies}  # what a region makes is not there outside of it
        try:
            return super().inner(eqn, jaxpr, values, frame)
        finally:
            self.copies = outer

    def carried(self, eqn: Any, carry: list[Any]) -> list[Any]:
        dims = self.examples.carries(eqn)
        return [self.sharded(x, dims[i]) if i in dims else x for i, x in enumerate(carry)]

    def sharded(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns a value, and takes its cotangent, sharded by examples along a dim; others are as XLA has them."""
        chain = Chain((named_along(self.mesh, x.ndim, {dim: self.axes.batch}),))
        return reshard(x, forward=chain, backward=chain)

    def in_chunks(self, x: jax.Array, num_chunks: int) -> jax.Array:
        """Shards chunks `[chunks, tokens of each, ...]` of the batch within each chunk.

        First they are where their examples are, some chunks on some devices: XLA knows no way from there that sends
        less than all examples to each device, unless it is said so.
        """
        forward = [named_along(self.mesh, x.ndim, {1: self.axes.batch})]
        if cut := cut_axes(self.mesh, self.axes.batch, math.gcd(num_chunks, self.examples.num_shards)):
            mesh, major, minor = cut
            forward.insert(0, named_along(mesh, x.ndim, {0: major, 1: minor}))
        return reshard(x, forward=Chain(tuple(forward)), backward=Chain(tuple(reversed(forward))))

    def exchanged(self, eqn: Any, move: MixedSharding, values: list[Any]) -> jax.Array:
        """Looks examples up of all, or adds to them; each device does it for its share of the places."""
        assert move.dim is not None and move.places is not None
        (rows, index, *updates), out, num_shards = values, eqn.outvars[0].aval, self.examples.num_shards
        copied = functools.partial(copies_of_rows, mesh=self.mesh, axes=self.axes)
        places = split_dim(index, move.places, num_shards)
        with source_context(eqn), jax.named_scope(OF_ALL):
            if updates:
                split = split_dim(updates[0], move.rows, num_shards)
                stack = bind_mapped(eqn, [jnp.zeros_like(rows), places, split], (None, move.places, move.rows))
                return rows + jax.linear_transpose(copied, out)(self.sharded(stack, 0))[0]
            if id(rows) not in self.copies:  # it is gathered once, and the gradients of its lookups are summed at once
                self.copies[id(rows)] = rows, copied(rows)
            made = bind_mapped(eqn, [self.copies[id(rows)][1], places], (0, move.places), move.dim)
            return self.sharded(made.reshape(out.shape), move.dim)

    def summed(self, eqn: Any, dims: tuple[int, ...], *factors: jax.Array) -> jax.Array:
        """Returns a product that sums over examples, as the sum of each device's own."""
        parts = [split_dim(x, dim, self.examples.num_shards) for x, dim in zip(factors, dims, strict=True)]
        with source_context(eqn):
            stack = self.sharded(bind_mapped(eqn, parts, dims), 0)
            return lax.reduce(stack, jnp.zeros((), stack.dtype), lax.add, (0,))

    def with_derivatives(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> Sequence[Any]:
        """Evaluates a function with derivatives of its own, in which loops are anchored, too.

        It has derivatives by what is derived alone: not by constants that it closes over.
        """
        states, num_outs = self.examples.operands[id(eqn)], len(eqn.outvars)
        within = functools.partial(anchored, mesh=self.mesh, axes=self.axes, loops_only=True)

        # The rules of the user's function are traced, each as a jaxpr, so that the loops in them can be anchored.
        @functools.cache
        def derivatives(moving: tuple[int, ...]) -> tuple[Any, Any]:
            def linearized(*args: Any) -> tuple[list[Any], Any]:
                return jax.vjp(of_some(lambda *xs: bind(eqn, xs), args, moving), *(args[i] for i in moving))

            closed, (_, pullback) = jax.make_jaxpr(linearized, return_shape=True)(*(x.aval for x in eqn.invars))
            forward, examples = within(closed, states)
            # A pullback is a pytree of its residuals. A cotangent has the shape, and the examples, of its result.
            avals, tree = [x.aval for x in open_jaxpr(forward)[0].outvars], jax.tree.structure(pullback)
            backward = trace_flat(lambda *xs: tree.unflatten(xs[num_outs:])(list(xs[:num_outs])), avals)
            return forward, within(backward, examples.run(forward, states))[0]

        @jax.custom_vjp
        def call(*args: Any) -> list[Any]:
            return self.run(sub.jaxpr, args, frame)

        def forward(*args: CustomVJPPrimal) -> tuple[list[Any], tuple[list[Any], dict[int, None]]]:
            moving = tuple(i for i, x in enumerate(args) if x.perturbed and is_float(eqn.invars[i].aval))
            made = evaluate(*open_jaxpr(derivatives(moving)[0]), [x.value for x in args])
            return made[:num_outs], (made[num_outs:], dict.fromkeys(moving))  # numbers that are keys are static

        def backward(residuals: tuple[list[Any], dict[int, None]], cotangents: list[Any]) -> tuple[Any, ...]:
            arrays, moving = residuals[0], tuple(residuals[1])
            pairs = zip(cotangents, (var.aval for var in eqn.outvars), strict=True)
            cotangents = [jnp.zeros(y.shape, y.dtype) if isinstance(x, SymbolicZero) else x for x, y in pairs]
            grads = evaluate(*open_jaxpr(derivatives(moving)[1]), [*cotangents, *arrays])
            by_number = dict(zip(moving, grads, strict=True))
            return tuple(by_number.get(i) for i in range(len(eqn.invars)))

        call.defvjp(forward, backward, symbolic_zeros=True)
        with source_context(eqn):
            return call(*values)
