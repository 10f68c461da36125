"""The loop over ticks in which a stage goes forward on one microbatch and backward on another: 1F1B.

Microbatch m goes forward through stage s in the tick m + s, and backward in the tick m + 2 (S - 1) - s: in the last
stage in the tick in which it arrives. Of the microbatches that are between the two, at most 2 S - 1, a stage keeps what
the backward pass of its layers reads: their inputs if they are recomputed, else what their own remat says. The first
S - 1 ticks only go forward, the last S - 1 only backward. So activations are sent once forward and once backward, and
nothing grows with the number of microbatches.

What is before and behind the layers runs in each stage, on its own microbatch: only that of the first and of the last
stage counts. What is before them runs in both directions, and so are residuals made again that nothing which arrives in
a stage is a part of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.dims import Kind, is_float
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate
from zero_jax.program.passes import Dependence
from zero_jax.sharding.precision import wide
from zero_jax.transforms.grad_sums import put_at
from zero_jax.transforms.pipeline.cut import Role
from zero_jax.transforms.pipeline.loop import (
    Layer,
    LayersOfStage,
    added_at,
    cast,
    differentiated_at,
    of_sum,
    widened,
)
from zero_jax.transforms.pipeline.microbatch import MicrobatchProgram, layers_p
from zero_jax.transforms.pipeline.place import at_stages
from zero_jax.transforms.pipeline.schedule import Schedule
from zero_jax.transforms.pipeline.stage_passes import StagePasses

# As JAX names what it transposes: nothing else tells the backward pass in the name stack of one loop for both.
_BACKWARD = "transpose(jvp())"


def run_1f1b(
    program: MicrobatchProgram,
    operands: Sequence[Any],
    layer: Layer,
    shardings: Sequence[NamedSharding | None] = (),
) -> list[jax.Array]:
    """Returns the results of a loss for the batch; its gradient is taken in the same loop.

    Args:
      program: the loss on a microbatch.
      operands: those of the equation of the loss (`by_microbatch`); what layers take slices of is `[stages, layers /
        stages, ...]`.
      layer: evaluates a layer of a microbatch.
      shardings: those of the gradients of operands, while they are summed; None leaves them open.
    """
    num_seeds = len(program.summed)
    seeds, operands, shardings = operands[:num_seeds], operands[num_seeds:], shardings[num_seeds:]
    ticks = _InterleavedTicks(program, layer, operands, shardings)

    def with_loss(seeds: Sequence[Any], results: list[jax.Array]) -> list[jax.Array]:
        loss = sum(jnp.vdot(x, results[i].astype(x.dtype)) for x, i in zip(seeds, program.summed, strict=True))
        return [jnp.asarray(loss), jnp.asarray(loss), *results]

    @jax.custom_vjp
    def run(seeds: list[Any], operands: list[Any]) -> list[jax.Array]:
        return with_loss(seeds, ticks.run(seeds, operands, [False] * len(operands))[0])

    def forward(seeds: list[Any], operands: list[Any]) -> tuple[list[jax.Array], list[Any]]:
        seeds, wanted = [x.value for x in seeds], [x.perturbed for x in operands]
        results, grads = ticks.run(seeds, [x.value for x in operands], wanted)
        return with_loss(seeds, results), grads

    def backward(grads: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        loss = cotangents[0]  # the others are not differentiated
        if not isinstance(loss, jax.Array):
            return None, [None] * len(grads)
        return None, [None if x is None else (x * loss).astype(x.dtype) for x in grads]

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(seeds), list(operands))


# Over ticks: the gradients of what is shared, those of layers, and results.
_Sums = tuple[list[Any], list[Any], list[Any]]


class _InterleavedTicks:
    """The loop over ticks of a loss."""

    def __init__(
        self,
        program: MicrobatchProgram,
        layer: Layer,
        operands: Sequence[Any],
        shardings: Sequence[NamedSharding | None],
    ):
        self.program, self.place, self.loop = program, program.loop.place, program.loop
        self.num_stages, self.num_microbatches = self.loop.num_stages, self.loop.num_microbatches
        self.stage = jnp.arange(self.num_stages, dtype=jnp.int32)
        self.jaxpr, self.consts = jaxprs.open_jaxpr(program.jaxpr)
        self.num_shared, self.first_stack = program.num_shared, program.num_shared + program.num_rows
        self.dtypes = [x.dtype for x in operands]
        self.layers: Any = LayersOfStage(self.loop, layer)
        if self.loop.recompute:
            self.layers = jax.checkpoint(self.layers, prevent_cse=False)
        # What goes from stage to stage: carries, and what layers stack.
        self.avals = [var.aval for var in program.layers.outvars]
        self.floats = [i for i, aval in enumerate(self.avals) if is_float(aval)]
        self.num_kept = Schedule(is_interleaved=True).num_kept(self.num_stages, self.num_microbatches)
        self.pairs = [(s, s + 1) for s in range(self.num_stages - 1)]
        self.shardings = shardings or [None] * len(operands)

    def run(
        self, seeds: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Returns the results, and the gradients of the loss by the operands that they are wanted of.

        `seeds` are the derivatives of the loss by the results that it is a sum of.
        """
        if any(wanted[self.num_shared : self.first_stack]):
            raise ValueError("pipeline='1f1b' has no gradient by the batch: leave pipeline out (pipeline='gpipe')")
        rows = operands[self.num_shared : self.first_stack]
        self.rows = [self.microbatches(x) for x in rows]
        # Gradients are summed over layers in the dtype of what all of them read.
        shared, stacks = operands[: self.num_shared], operands[self.first_stack :]
        self.operands = [*map(widened, shared), *[None] * len(rows), *stacks]
        self.axes = [*[None] * self.first_stack, *[0] * len(stacks)]
        self.seeds = [x * self.part(i) for x, i in zip(seeds, self.program.summed, strict=True)]
        self.wanted = [i for i, flag in enumerate(wanted) if flag]
        self.of_layers = [i for i in self.wanted if i >= self.first_stack]
        self.others = self.wanted[: len(self.wanted) - len(self.of_layers)]
        s, m = self.num_stages, self.num_microbatches
        state = [self.pin(i, jnp.zeros((s, *x.shape), x.dtype)) for i, x in enumerate(self.avals)]
        self.passes = self.layer_passes()
        kept = [self.pin_kept(jnp.zeros((self.num_kept, s, *x.shape), x.dtype)) for x in self.passes.kept_avals]
        roles = [*zip(self.program.results, (x.aval for x in self.jaxpr.outvars), strict=True)]
        with jax.named_scope(_BACKWARD):
            grads_before = [[*map(self.no_grad, some)] for some in (self.others, self.of_layers)]
        sums = *grads_before, [self.nothing(*each) for each in roles]
        carry = state, [state[i] for i in self.floats], kept, sums
        for start, stop, directions in ((0, s - 1, "f"), (s - 1, m + s - 1, "fb"), (m + s - 1, m + 2 * s - 2, "b")):
            numbers = jnp.arange(start, stop, dtype=jnp.int32)
            tick = lambda carry, t, directions=directions: (self.tick(carry, t, directions), None)  # noqa: E731
            carry, _ = lax.scan(tick, carry, numbers)
        *summed, made = carry[-1]
        results = [self.result(*each, x) for each, x in zip(roles, made, strict=True)]
        with jax.named_scope(_BACKWARD):
            grads = dict(zip(self.wanted, map(self.grad, self.wanted, itertools.chain(*summed)), strict=True))
        return results, [grads.get(i) for i in range(len(operands))]

    # --- a tick ------------------------------------------------------------------------------------------------------

    def tick(self, carry: Any, t: jax.Array, directions: str) -> Any:
        """Returns what there is after a tick."""
        state, cotangents, kept, sums = carry
        made = after = state
        if "f" in directions:
            numbers = t - self.stage
            mapped = jax.vmap(self.forward, in_axes=(0, 0, 0, 0, self.axes), spmd_axis_name=self.place.pipe)
            made, new = mapped(self.stage, numbers, state, self.rows_of(numbers), self.operands)
            made = [self.pin(i, x) for i, x in enumerate(made)]
            after = [self.place.sent(x, self.pairs) for x in made]
            kept = [self.pin_kept(put_at(old, x, t % self.num_kept, 0)) for old, x in zip(kept, new, strict=True)]
        if "b" in directions:
            with jax.named_scope(_BACKWARD):
                cotangents, sums = self.backward_tick(t, made, kept, cotangents, sums)
        return after, cotangents, kept, sums

    def backward_tick(
        self, t: jax.Array, made: list[Any], kept: list[Any], cotangents: list[Any], sums: _Sums
    ) -> tuple[list[Any], _Sums]:
        """Returns the cotangents that arrive in the next tick, and the sums.

        `made` is what stages send forward in this tick: in the last one, of the microbatch that goes backward.
        """
        numbers = t - (2 * (self.num_stages - 1) - self.stage)
        is_own = self.is_own(numbers)
        slots = (t - 2 * (self.num_stages - 1 - self.stage)) % self.num_kept
        own = [self.at_slots(x, slots) for x in kept]
        mapped = jax.vmap(self.backward, in_axes=(0, 0, 0, 0, 0, 0, 0, self.axes), spmd_axis_name=self.place.pipe)
        rows = self.rows_of(numbers)
        results, before, grads, of_layers = mapped(
            self.stage, numbers, made, own, rows, cotangents, sums[1], self.operands
        )
        before = [
            self.pin(i, at_stages(is_own, x, jnp.zeros_like(x))) for i, x in zip(self.floats, before, strict=True)
        ]
        each = zip(self.others, sums[0], grads, strict=True)
        summed = [self.pin_grad(i, added_at(is_own, old, new)) for i, old, new in each]
        of_layers = [*map(self.pin_grad, self.of_layers, of_layers)]
        is_last = is_own & (self.stage == self.num_stages - 1)
        each = zip(self.program.results, sums[2], results, strict=True)
        results = [self.added(role, old, new, t, is_last) for role, old, new in each]
        back = [(s + 1, s) for s, _ in self.pairs]
        return [self.place.sent(x, back) for x in before], (summed, of_layers, results)

    def forward(
        self, stage: Any, number: Any, arrived: list[Any], rows: list[Any], operands: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what a stage sends to the next one, of its microbatch, and what it keeps for the backward pass."""
        kept, stacks = [], operands[self.first_stack :]

        def layers(values: list[Any]) -> list[Any]:
            sent, own = self.passes.forward(stage, number, values, arrived, self.no_sums(operands), stacks)
            kept.extend(own)
            return sent

        return self.stage_of(stage, number, rows, operands, layers)[0], kept

    def backward(
        self,
        stage: Any,
        number: Any,
        made: list[Any],
        kept: list[Any],
        rows: list[Any],
        cotangents: list[Any],
        grads_of_layers: list[Any],
        operands: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Returns results, cotangents of what has arrived, and gradients: of what is shared, and the sums of layers."""
        is_last, stacks = stage == self.num_stages - 1, operands[self.first_stack :]

        def value(arrived: list[Any], some: list[Any], sums: list[Any]) -> tuple[Any, list[Any]]:
            all_of, after = dict(enumerate(operands)) | dict(zip(self.others, some, strict=True)), []

            def layers(values: list[Any]) -> list[Any]:
                sent, own = self.passes.linear(stage, number, (values, arrived, sums, stacks), made, kept)
                after.extend(own)
                return sent

            sent, results = self.stage_of(stage, number, rows, [*all_of.values()], layers)
            return ([sent[i] for i in self.floats], after, [results[i] for i in self.program.summed]), results

        # Of what has arrived and of sums only the derivative is wanted, not the value.
        zeros = [jnp.zeros_like(made[i]) for i in self.floats]
        given = zeros, [operands[i] for i in self.others], self.no_sums(operands)
        (_, _, summed), pullback, results = jax.vjp(value, *given, has_aux=True)
        # Behind the last stage is the rest of the loss.
        seeds = [seed.astype(x.dtype) for seed, x in zip(self.seeds, summed, strict=True)]
        cotangents = [jnp.where(is_last, jnp.zeros_like(x), x) for x in cotangents]
        return results, *pullback((cotangents, grads_of_layers, seeds))

    def no_sums(self, operands: list[Any]) -> list[jax.Array]:
        """Returns the sums of the gradients of layers before a tick, of which only the derivative is of account."""
        return [jnp.zeros(operands[i].shape, wide(operands[i].dtype)) for i in self.of_layers]

    def stage_of(
        self, stage: Any, number: Any, rows: list[Any], operands: list[Any], layers: Callable[..., list[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what a stage sends to the next one, and the results as if it was the last one.

        `layers` returns what is sent, from what the first layer reads. Results are differentiated in the last stage
        alone: elsewhere they are of values that no loss is meant for, and their derivatives may be infinite.
        """
        sent, behind = [], set[Any]()
        is_last = stage == self.num_stages - 1

        def equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
            if eqn.primitive is layers_p:
                behind.update(eqn.outvars)
                sent.extend(layers(values))
                return [differentiated_at(is_last, x) for x in sent]
            if behind.isdisjoint(jaxprs.variables(eqn)):
                return jaxprs.bind(eqn, values)
            is_behind = [jaxprs.is_literal(atom) or atom in behind for atom in eqn.invars]
            behind.update(eqn.outvars)
            pairs = zip(is_behind, values, strict=True)
            return jaxprs.bind(eqn, [x if known else differentiated_at(is_last, x) for known, x in pairs])

        narrow = [cast(x, dtype) for x, dtype in zip(operands[: self.num_shared], self.dtypes, strict=False)]
        results = evaluate(self.jaxpr, self.consts, [number, *narrow, *rows], equation)
        return sent, [*map(jnp.asarray, results)]

    def layers_of(
        self, stage: Any, number: Any, values: list[Any], arrived: list[Any], sums: list[Any], stacks: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns carries and stacks behind the layers of a stage, and sums; the first layer reads `values`."""
        num_carry, size = len(self.loop.carry), self.loop.group_size
        consts, own = values[: len(self.loop.consts)], values[len(self.loop.consts) :]
        is_own, of_layers = self.is_own(number), dict(zip(self.of_layers, sums, strict=True))
        # What no microbatch has reached goes through the layers as if it was the first stage: it may divide by zeros.
        begins = (stage == 0) | ~is_own
        carry = [jnp.where(begins, jnp.asarray(x, y.dtype), y) for x, y in zip(own, arrived, strict=False)]
        sums = [of_layers.get(i) for i in range(self.first_stack, self.first_stack + len(stacks))]
        after, ys, sums = self.layers((stage * size, 0, number, is_own), consts, carry, stacks, sums)
        stacks = [self.stacked(stage * size, *each) for each in zip(arrived[num_carry:], ys, strict=True)]
        return [*after, *stacks], [x for x in sums if x is not None]

    def stacked(self, begin: Any, stack: jax.Array, own: jax.Array) -> jax.Array:
        """Returns what layers stack with that of a stage, whose first layer is given."""
        idle = jnp.zeros((self.loop.num_places - self.loop.num_layers, *stack.shape[1:]), stack.dtype)
        stack = jnp.concatenate([stack, idle]) if idle.size else stack
        return lax.dynamic_update_slice_in_dim(stack, own, begin, 0)[: self.loop.num_layers]

    def layer_passes(self) -> StagePasses:
        """Returns the layers of a stage forward and backward."""
        env = dict[Any, frozenset[int]]()
        marks = [frozenset({0} if i - 1 in self.wanted else ()) for i in range(len(self.jaxpr.invars))]
        Dependence().run(self.jaxpr, marks, env)
        values = self.program.layers.invars
        has_grad = [not jaxprs.is_literal(x) and bool(env[x]) and is_float(x.aval) for x in values]
        of_stage = lambda x, dtype: jax.ShapeDtypeStruct(x.shape[1:], dtype)  # noqa: E731
        sums = [of_stage(self.operands[i], wide(self.operands[i].dtype)) for i in self.of_layers]
        stacks = [of_stage(x, x.dtype) for x in self.operands[self.first_stack :]]
        return StagePasses(self.layers_of, ([x.aval for x in values], self.avals, sums, stacks), has_grad)

    # --- microbatches ------------------------------------------------------------------------------------------------

    def is_own(self, numbers: jax.Array) -> jax.Array:
        """Tells which numbers are those of microbatches."""
        return (numbers >= 0) & (numbers < self.num_microbatches)

    def in_range(self, numbers: jax.Array) -> jax.Array:
        """Returns the numbers of microbatches, and some of these where there is none."""
        return jnp.clip(numbers, 0, self.num_microbatches - 1)

    def microbatches(self, x: jax.Array) -> jax.Array:
        """Returns a leaf of the batch as `[microbatches, examples, ...]`, on all stages."""
        n, m = self.place.num_shards, self.num_microbatches
        x = self.place.pinned(x, self.place.batch)
        x = x.reshape(n, m, x.shape[0] // (n * m), *x.shape[1:]).swapaxes(0, 1)
        return self.place.pinned(lax.collapse(x, 1, 3), (), self.place.batch)

    def of_microbatches(self, role: Role, x: jax.Array) -> jax.Array:
        """Returns a result of the batch from those of all microbatches, `[microbatches, ...]`."""
        n, m = self.place.num_shards, self.num_microbatches
        x = jnp.moveaxis(x, role.dim + 1, 1)
        x = x.reshape(m, n, x.shape[1] // n, *x.shape[2:]).swapaxes(0, 1)
        return jnp.moveaxis(lax.collapse(x, 0, 3), 0, role.dim)

    def rows_of(self, numbers: jax.Array) -> list[jax.Array]:
        """Returns the examples of a microbatch for each stage."""
        taken = (jnp.take(x, self.in_range(numbers), axis=0) for x in self.rows)
        return [self.place.pinned(x, self.place.pipe, self.place.batch) for x in taken]

    # --- what goes from stage to stage -------------------------------------------------------------------------------

    def dims(self, i: int) -> list[tuple[str, ...]]:
        """Returns the mesh axes of the dims of what goes from stage to stage, up to that of examples."""
        role = (*self.loop.carry, *self.loop.ys)[i]
        return [*[()] * role.dim, self.place.batch] if role.is_rows else []

    def pin(self, i: int, x: jax.Array) -> jax.Array:
        """Returns what stages have, sharded by stage and by examples."""
        return self.place.pinned(x, self.place.pipe, *self.dims(i))

    def pin_kept(self, x: jax.Array) -> jax.Array:
        """Returns what stages keep, sharded by stage."""
        return self.place.pinned(x, (), self.place.pipe)

    def at_slots(self, kept: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns for each stage what it keeps in a slot."""
        take = lambda x, slot: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False)  # noqa: E731
        taken = jax.vmap(take, in_axes=(1, 0), spmd_axis_name=self.place.pipe)(kept, slots)
        return self.place.pinned(taken, self.place.pipe)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def no_grad(self, i: int) -> jax.Array:
        """Returns the gradient of an operand before the first tick, for each stage."""
        x = self.operands[i]
        shape = x.shape if i >= self.first_stack else (self.num_stages, *x.shape)
        return self.pin_grad(i, jnp.zeros(shape, wide(x.dtype)))

    def pin_grad(self, i: int, x: jax.Array) -> jax.Array:
        """Returns a gradient sharded by stage, and as it is to be."""
        return self.place.pinned_to(x, self.shardings[i])

    def grad(self, i: int, x: jax.Array) -> jax.Array:
        """Returns the gradient of an operand from those of the stages."""
        x = x.astype(self.dtypes[i])
        return x if i >= self.first_stack else lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (0,))

    def part(self, i: int) -> float:
        """Returns what a result of the batch grows by with that of a microbatch."""
        role = self.program.results[i]
        return self.num_microbatches ** -(float(role.power) if role.kind is Kind.SUM else 1.0)

    # --- results -----------------------------------------------------------------------------------------------------

    def nothing(self, role: Role, aval: Any) -> jax.Array:
        """Returns what there is of a result before the first tick, for each stage."""
        dtype = wide(aval.dtype) if role.kind is Kind.SUM and is_float(aval) else aval.dtype
        shape = (self.num_microbatches, *aval.shape) if role.is_rows else aval.shape
        return self.place.pinned(jnp.zeros((self.num_stages, *shape), dtype), self.place.pipe)

    def added(self, role: Role, old: jax.Array, new: jax.Array, t: jax.Array, is_last: jax.Array) -> jax.Array:
        """Returns what there is of a result after a tick, to which the last stage adds."""
        if role.kind is Kind.SUM:
            return added_at(is_last, old, new)
        if role.kind is Kind.SAME:
            return at_stages(is_last, new, old)
        number = self.in_range(t - self.num_stages + 1)
        before = lax.dynamic_index_in_dim(old, number, 1, keepdims=False)
        return put_at(old, at_stages(is_last, new, before), number, 1)

    def result(self, role: Role, aval: Any, x: jax.Array) -> jax.Array:
        """Returns a result of the batch."""
        x = x[-1]
        if role.is_rows:
            return self.of_microbatches(role, x)
        return of_sum(role, x, aval.dtype, self.num_microbatches)
