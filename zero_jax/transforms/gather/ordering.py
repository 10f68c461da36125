"""The order of gathers and of gradients in the blocks of a Python loop, so that few params are whole at a time.

XLA's scheduler sees all blocks at once. It puts the gradients of params off to the end of the backward pass, where all
that they are made of waits for them, and gathers params of later blocks early. So where a block begins, its activations
are tied to the shards of the next block's params in the forward pass: these are gathered no earlier, one block ahead of
their use. In the backward pass, which is where memory peaks, the cotangents of what entered a block are tied to those
of its own params: the block before waits until they are on their shards, as it does in a scan.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, batching

from zero_jax.dims import ELEMENTWISE, REDUCTIONS, SHAPES, is_float, is_made_of, moves_elements
from zero_jax.program import jaxprs
from zero_jax.program.walk import Packed
from zero_jax.transforms.blocks import find_blocks
from zero_jax.transforms.eqn_sequence import EqnSequence
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.deferred import Copies, Lazy, Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
    """A block, or what is between two runs of blocks or after the last of them."""

    start: int  # the index of its first equation
    reads: tuple[Any, ...]  # what it takes from before
    writes: frozenset[Any]  # what it makes
    params: frozenset[Any]  # the params that meet activations in it, and what is made of them on the way; no scalars
    users: tuple[int, ...]  # the indices of the equations that read these


class Ordering:
    """The ties of one jaxpr that is being walked; none if it is not mostly repeated blocks."""

    def __init__(self, facts: Facts, values: Sequence[Lazy | Value]):
        self.jaxpr, self.reads = facts.jaxpr, facts.reads
        self.evaluated: set[int] = set()
        self.places: dict[int, tuple[_Segment, _Segment | None, frozenset[Any]]] = {}
        if not any(value.is_deferred for value in values):
            return
        sequence = EqnSequence(facts)
        blocks = find_blocks(sequence)
        if not sequence.are_most(blocks):
            return
        pairs = zip(self.jaxpr.invars, values, strict=True)
        params = {
            i for i, (var, x) in enumerate(pairs) if isinstance(x, Lazy) or (x.params_only and is_float(var.aval))
        }
        # For what is made of params and constants alone, the numbers of these params.
        made_of = {var: origin.params & params for var, origin in facts.origins.items()}
        self.of_params = {var: numbers for var, numbers in made_of.items() if numbers}
        bounds = {i for block in blocks for i in (block.start, block.stop)}
        cuts = sorted({self.cut(sequence, index) for index in bounds} | {len(self.jaxpr.eqns)})
        segments = [self.segment(start, stop) for start, stop in itertools.pairwise(cuts)]
        written = [frozenset(), *(segment.writes for segment in segments)]
        for segment, following, before in zip(segments, [*segments[1:], None], written[:-1], strict=True):
            self.places[segment.start] = segment, following, before
        # Only what one segment alone has is tied. So these count the segments that read a variable, those that use a
        # param, by its number, and the values that an array is a root of.
        self.num_readers = collections.Counter(
            var
            for segment in segments
            for var in (*segment.params, *(var for var in segment.reads if var not in self.of_params))
        )
        self.num_users = collections.Counter(
            param
            for segment in segments
            for param in frozenset().union(*(self.of_params[var] for var in segment.params))
        )
        self.num_holders = collections.Counter(
            id(root) for value in values if isinstance(value, Lazy) for root in value.roots
        )

    def cut(self, sequence: EqnSequence, index: int) -> int:
        """Returns where a segment begins for a bound of a block: before the elementwise work and norms that lead to it.

        What is tied is an array of its own. An activation function's result, or a norm's, would be one beside its
        operand, which the backward pass keeps and from which XLA else computes the result where it is read.
        """
        place = bisect.bisect_left(sequence.eqns, index)
        cut, least_bytes = index, sequence.crossing[place]
        while place and is_made_of(self.jaxpr.eqns[sequence.eqns[place - 1]], _CHEAP):
            place -= 1
            if sequence.crossing[place] <= least_bytes:
                cut, least_bytes = sequence.eqns[place], sequence.crossing[place]
        return cut

    def segment(self, start: int, stop: int) -> _Segment:
        """Returns the equations between two indices as a segment."""
        eqns = self.jaxpr.eqns[start:stop]
        writes = frozenset(var for eqn in eqns for var in eqn.outvars)
        read_by = self.reads[start:stop]
        params: set[Any] = set()
        # Backwards from what activations meet: what that is made of, step by step, is read of params, too.
        for eqn, variables in zip(reversed(eqns), reversed(read_by), strict=True):
            inputs = {var for var in variables if var in self.of_params}
            if not all(var in self.of_params for var in eqn.outvars):
                params |= {var for var in inputs if var.aval.size > 1}  # a scalar is a regularizer's, of all params
            elif not params.isdisjoint(eqn.outvars):
                params |= inputs
        reads = tuple(var for var in dict.fromkeys(itertools.chain(*read_by)) if var not in writes)
        users = tuple(i for i, variables in enumerate(read_by, start) if not params.isdisjoint(variables))
        return _Segment(start=start, reads=reads, writes=writes, params=frozenset(params), users=users)

    def enter(self, index: int, env: dict[Any, Any], evaluate: Callable[[int], None]) -> None:
        """Ties params and activations where the equation at `index` begins a segment; `evaluate` fills `env`."""
        if index not in self.places:
            return
        segment, following, before = self.places[index]
        activations = [
            var
            for var in segment.reads
            if isinstance(value := env.get(var), Value) and not isinstance(value, Copies) and not value.params_only
            if is_float(var.aval) and (self.num_readers[var] == 1 or var in before)
        ]
        directions = [(segment, {"forward": False, "backward": True})]
        if following is not None:
            directions.append((following, {"forward": True, "backward": False}))
        for tied, which in directions:
            params = self.params(tied, env, evaluate)
            if activations and params:
                packed = Packed([*(env[var] for var in activations), *params.values()])
                arrays = order(*packed.arrays, **which)
                env.update(zip((*activations, *params), packed.values_of(arrays), strict=True))

    def params(self, segment: _Segment, env: dict[Any, Any], evaluate: Callable[[int], None]) -> dict[Any, Any]:
        """Returns what a segment reads of params, in the form in which it is to be tied."""
        # A slice of a stack is tied, and not the stack, of which later segments have slices.
        for i in segment.users:
            if i in self.evaluated:  # what it made is tied already
                continue
            eqn = self.jaxpr.eqns[i]
            is_moved = eqn.outvars[0] in segment.params and moves_elements(eqn)
            if is_moved and all(var in env for var in self.reads[i]):
                evaluate(i)
                self.evaluated.add(i)
        rest = [self.reads[i] for i in segment.users if i not in self.evaluated]
        params = {}
        for var in dict.fromkeys(itertools.chain(*rest)):
            if var in segment.params and self.num_readers[var] == 1 and (value := self.tied(var, env.get(var))):
                params[var] = value
        return params

    def tied(self, var: Any, value: Any) -> Lazy | Value | None:
        """Returns a value so that its arrays are of one segment alone, or None if that cannot be."""
        if not isinstance(value, Lazy):
            return value if isinstance(value, Value) and not isinstance(value, Copies) else None
        is_own = all(self.num_users[param] == 1 for param in self.of_params[var])
        if is_own and all(self.num_holders[id(root)] <= 1 for root in value.roots):
            return value
        return None if value.dims is None else value.as_root()  # a shard, built now, is an array of its own


# What XLA computes where it is read: activation functions and norms.
_CHEAP = ELEMENTWISE | SHAPES | REDUCTIONS | {"broadcast_in_dim"}


# An `optimization_barrier` over values, over their cotangents, or over both. JAX has one over both, which in some
# releases makes zeros for cotangents that there are none of, and so gradients for params that are frozen.


def order(*arrays: jax.Array, forward: bool = True, backward: bool = True) -> list[jax.Array]:
    """Returns the arrays as they are, none before all are there; their cotangents likewise, if `backward`."""
    if len(arrays) < 2 or not (forward or backward):
        return list(arrays)
    return order_p.bind(*arrays, forward=forward, backward=backward)


def _apply_order(*arrays: jax.Array, forward: bool, backward: bool) -> list[jax.Array]:
    del backward
    return lax.optimization_barrier(list(arrays)) if forward else list(arrays)


def _order_present(values: Sequence[Any], **directions: bool) -> list[Any]:
    present = [value for value in values if not isinstance(value, ad.Zero)]
    ordered = iter(order(*present, **directions))
    return [value if isinstance(value, ad.Zero) else next(ordered) for value in values]


order_p = jaxprs.new_primitive("zero_order", _apply_order, aval=lambda *avals, **_: avals, several=True)
jaxprs.define_tangents(
    order_p,
    lambda *xs, forward, backward: order(*xs, backward=backward) if forward else list(xs),
    lambda *dots, forward, backward: _order_present(dots, forward=False, backward=backward),
)
ad.primitive_transposes[order_p] = lambda cotangents, *_, forward, backward: _order_present(
    cotangents, forward=backward, backward=forward
)
batching.primitive_batchers[order_p] = lambda arrays, dims, **directions: (order(*arrays, **directions), dims)
