"""The loop over ticks in which a stage goes forward on one microbatch and backward on another: 1F1B."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.dims import Kind, Relation, is_float
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of
from zero_jax.program.evaluation import evaluate
from zero_jax.sharding.precision import wide
from zero_jax.transforms.grad_sums import put_at, updated_at
from zero_jax.transforms.pipeline.interleaved.microbatch import MicrobatchProgram, layers_p
from zero_jax.transforms.pipeline.interleaved.shared_reads import SharedReads
from zero_jax.transforms.pipeline.interleaved.stage_passes import StagePasses
from zero_jax.transforms.pipeline.loop import (
    Layer,
    LayersOfStage,
    Ticks,
    Work,
    added_at,
    cast,
    differentiated_at,
    widened,
)
from zero_jax.transforms.pipeline.place import at_stages
from zero_jax.transforms.weight_grads import rounded

# As JAX names what it transposes: nothing else tells the backward pass in the name stack of one loop for both.
_BACKWARD = "transpose(jvp())"

# Over ticks: the gradients of what is shared, those of layers, and results.
_Sums = tuple[list[Any], list[Any], list[Any]]


class InterleavedTicks(Ticks):
    """The loop over ticks of a loss, for some operands of `run_1f1b`; `wanted` says which of them have a gradient."""

    def __init__(
        self,
        program: MicrobatchProgram,
        layer: Layer,
        shardings: Sequence[NamedSharding | None],
        seeds: Sequence[Any],
        operands: Sequence[Any],
        wanted: Sequence[bool],
    ):
        super().__init__(program.loop, shardings)
        self.program = program
        self.jaxpr, self.consts = jaxprs.open_jaxpr(program.jaxpr)
        self.num_shared, self.first_stack = program.num_shared, program.num_shared + program.num_rows
        self.dtypes = [x.dtype for x in operands]
        self.shared = SharedReads(program, shardings)
        self.of_stage = LayersOfStage(self.loop, layer)
        self.layers: Any = self.of_stage
        if self.loop.recompute:
            self.layers = jax.checkpoint(self.of_stage, prevent_cse=False, policy=self.loop.policy)
        # What goes from stage to stage: carries, and what layers stack.
        self.avals, self.roles = [var.aval for var in program.layers.outvars], (*self.loop.carry, *self.loop.ys)
        self.floats = [i for i, aval in enumerate(self.avals) if is_float(aval)]
        self.num_kept = self.loop.schedule.num_kept(self.num_stages, self.num_microbatches)
        self.back = [(target, source) for source, target in self.pairs]
        self.rows = [self.microbatches(x) for x in operands[self.num_shared : self.first_stack]]
        # Gradients are summed over layers in the dtype of what all of them read.
        shared, stacks = operands[: self.num_shared], operands[self.first_stack :]
        self.operands = [*map(widened, shared), *[None] * len(self.rows), *stacks]
        self.axes = [*[None] * self.first_stack, *[0] * len(stacks)]  # over which stages are mapped
        self.seeds = [x * self.part(i) for x, i in zip(seeds, self.program.summed, strict=True)]
        self.wanted = [i for i, flag in enumerate(wanted) if flag]
        self.of_layers = [i for i in self.wanted if i >= self.first_stack]
        self.others = self.wanted[: len(self.wanted) - len(self.of_layers)]
        self.passes = self.layer_passes()

    def run(self) -> tuple[list[jax.Array], list[Any]]:
        """Returns the results, and for each operand the gradient of the loss by it, None where it is not wanted."""
        of_stages = lambda x: jax.ShapeDtypeStruct((self.num_stages, *x.shape), x.dtype)  # noqa: E731
        state = self.pinned([jnp.zeros(x.shape, x.dtype) for x in map(of_stages, self.avals)])
        kept = [jnp.zeros((self.num_kept, *x.shape), x.dtype) for x in map(of_stages, self.passes.kept_avals)]
        roles = [*zip(self.program.results, (x.aval for x in self.jaxpr.outvars), strict=True)]
        with jax.named_scope(_BACKWARD):
            no_grads = [[*map(self.no_grad, numbers)] for numbers in (self.others, self.of_layers)]
        sums = *no_grads, [self.nothing(role, of_stages(x)) for role, x in roles]
        # What stages have: activations, cotangents of the floating ones, what the backward pass reads, and sums.
        carry = state, [state[i] for i in self.floats], [*map(self.pin_kept, kept)], sums
        (*summed, made), rows = self.all_ticks(carry)
        rows = iter(rows)
        results = [
            self.of_microbatches(role, next(rows)) if role.is_rows else self.of_batch(role, x[-1], aval.dtype)
            for (role, aval), x in zip(roles, made, strict=True)
        ]
        with jax.named_scope(_BACKWARD):
            grads = dict(zip(self.wanted, map(self.grad, self.wanted, itertools.chain(*summed)), strict=True))
        return results, [grads.get(i) for i in range(len(self.operands))]

    def all_ticks(self, carry: Any) -> tuple[_Sums, list[jax.Array]]:
        """Returns the sums behind all ticks, and the examples of the results of microbatches, one after another."""
        s, period, num_ticks = self.num_stages, self.loop.num_stage_groups, self.loop.num_ticks

        def ticks(carry: Any, start: Any, length: int, directions: str) -> tuple[Any, list[Any]]:
            numbers = start + jnp.arange(length, dtype=jnp.int32)
            return lax.scan(functools.partial(self.tick, directions=directions), carry, numbers)

        def block(carry: Any, start: jax.Array) -> tuple[Any, list[Any]]:
            carry, rows = ticks(carry, start, s, "fbe")
            return ticks(carry, start + s, period - s, "fb")[0], rows

        # As many microbatches as stages end one after another, then none while these run their other groups.
        size = s if period > s else self.num_microbatches
        starts = jnp.arange(period - 1, num_ticks - size, period, dtype=jnp.int32)
        carry, _ = ticks(carry, 0, period - 1, "f")
        carry, rows = lax.scan(block, carry, starts) if len(starts) else (carry, [])
        # The last of them, behind which none run their other groups forward.
        carry, last = ticks(carry, num_ticks - size, size, "fbe")
        carry, _ = ticks(carry, num_ticks, period - 1, "b")
        rows = [jnp.concatenate([lax.collapse(x, 0, 2), y]) for x, y in zip(rows, last, strict=True)] if rows else last
        return carry[-1], rows

    # --- a tick ------------------------------------------------------------------------------------------------------

    def tick(self, carry: Any, t: jax.Array, directions: str) -> tuple[Any, list[Any]]:
        """Returns what there is after a tick, and the examples of results.

        `directions` has `f` and `b` where stages go forward and backward, `e` where a microbatch reaches the end.
        """
        state, cotangents, kept, sums = carry
        made, after, rows = state, state, []
        if "f" in directions:
            work = self.work(t - self.stage)
            mapped = jax.vmap(self.forward, in_axes=(0, 0, 0, self.axes), spmd_axis_name=self.place.pipe)
            made, new = mapped(work, state, self.rows_of(work), self.operands)
            made = self.pinned(made)
            after = [self.place.sent(x, self.pairs) for x in made]
            kept = [self.pin_kept(put_at(old, x, t % self.num_kept, 0)) for old, x in zip(kept, new, strict=True)]
        if "b" in directions:
            with jax.named_scope(_BACKWARD):
                ends = "e" in directions
                cotangents, sums, rows = self.backward_tick(t, made, kept, cotangents, sums, ends)
        return (after, cotangents, kept, sums), rows

    def backward_tick(
        self, t: jax.Array, made: list[Any], kept: list[Any], cotangents: list[Any], sums: _Sums, ends: bool
    ) -> tuple[list[Any], _Sums, list[Any]]:
        """Returns the cotangents that arrive in the next tick, the sums, and the examples of results.

        `made` is what stages send forward in this tick: in the last one, if it is the end of a microbatch (`ends`), of
        the one that goes backward.
        """
        s, last = self.num_stages, self.loop.num_groups - 1
        # Number `t - (S V - 1) - (S - 1 - s)`; of the groups, which go in reverse, it is the turn.
        stage, turn, number, is_own = self.work(t - s * last - 2 * (s - 1) + self.stage)
        work = stage, last - turn, number, is_own
        # It went forward `2 (S turn + S - 1 - s)` ticks before, in the slot of that tick.
        residuals = [self.at_slots(x, (t - 2 * (s * turn + s - 1 - stage)) % self.num_kept) for x in kept]
        backward, axes = functools.partial(self.backward, ends=ends), (0, 0, 0, 0, 0, 0, self.axes)
        mapped, rows = jax.vmap(backward, in_axes=axes, spmd_axis_name=self.place.pipe), self.rows_of(work)
        results, before, grads, of_layers = mapped(work, made, residuals, rows, cotangents, sums[1], self.operands)
        before = [at_stages(is_own, x, jnp.zeros_like(x)) for x in before]
        before = self.pinned(before, self.floats)
        of_others = zip(self.others, sums[0], grads, strict=True)
        summed = [self.grad_after(i, old, new, number, is_own) for i, old, new in of_others]
        of_layers = [*map(self.pin_grad, self.of_layers, of_layers)]
        is_end, made = is_own & self.is_last(stage, work[1]), sums[2]
        of_results = zip(self.program.results, made, results, strict=False)
        made = [self.added(role, old, new, is_end) for role, old, new in of_results] if ends else made
        ended = [x for role, x in zip(self.program.results, results, strict=False) if role.is_rows]
        return [self.place.sent(x, self.back) for x in before], (summed, of_layers, made), ended

    def forward(
        self, work: Work, arrived: list[Any], rows: list[Any], operands: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what a stage sends to the next one, of its microbatch, and what it keeps for the backward pass."""
        kept, stacks = [], operands[self.first_stack :]

        def layers(values: list[Any]) -> list[Any]:
            sent, own = self.passes.forward(work, values, arrived, self.no_sums(operands), stacks)
            kept.extend(own)
            return sent

        return self.stage_of(work, rows, operands, layers)[0], kept

    def backward(
        self,
        work: Work,
        made: list[Any],
        kept: list[Any],
        rows: list[Any],
        cotangents: list[Any],
        grads_of_layers: list[Any],
        operands: list[Any],
        *,
        ends: bool,
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Returns results, cotangents of what has arrived, and gradients: of what is shared, and the sums of layers."""
        is_last, stacks = self.is_last(*work[:2]), operands[self.first_stack :]
        of_microbatch = [*operands[: self.num_shared], *rows, *stacks]

        def value(arrived: list[Any], others: list[Any], sums: list[Any]) -> tuple[Any, list[Any]]:
            by_number = dict(enumerate(of_microbatch)) | dict(zip(self.others, others, strict=True))
            rows, sums_after = [by_number[i] for i in range(self.num_shared, self.first_stack)], []

            def layers(values: list[Any]) -> list[Any]:
                sent, own = self.passes.linear(work, (values, arrived, sums, stacks), made, kept)
                sums_after.extend(own)
                return sent

            sent, results = self.stage_of(work, rows, [*by_number.values()], layers)
            summed = [results[i] for i in self.program.summed] if ends else []
            return ([sent[i] for i in self.floats], sums_after, summed), results if ends else []

        # Of what has arrived and of sums only the derivative is wanted, not the value.
        zeros = [jnp.zeros_like(made[i]) for i in self.floats]
        primals = zeros, [of_microbatch[i] for i in self.others], self.no_sums(operands)
        (_, _, summed), pullback, results = jax.vjp(value, *primals, has_aux=True)
        # Behind the last stage is the rest of the loss: no cotangents arrive there, but the loss's derivatives.
        seeds = [seed.astype(x.dtype) for seed, x in zip(self.seeds, summed, strict=False)]
        cotangents = [jnp.where(is_last, jnp.zeros_like(x), x) for x in cotangents]
        return results, *pullback((cotangents, grads_of_layers, seeds))

    def no_sums(self, operands: list[Any]) -> list[jax.Array]:
        """Returns the sums of the gradients of layers before a tick, of which only the derivative is of account."""
        return [jnp.zeros(operands[i].shape, wide(operands[i].dtype)) for i in self.of_layers]

    def stage_of(
        self, work: Work, rows: list[Any], operands: list[Any], layers: Callable[..., list[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """Returns what a stage sends to the next one, and the results as if it was the last one.

        `layers` returns what is sent, from what the first layer reads. Results are differentiated in the last stage
        alone: elsewhere they are of values that no loss is meant for, and their derivatives may be infinite.
        """
        sent, behind = [], set[Any]()
        is_last = self.is_last(*work[:2])

        def equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
            if eqn.primitive is layers_p:
                behind.update(eqn.outvars)
                read = zip(eqn.invars, values, strict=True)
                sent.extend(layers([self.shared.scattered(eqn, *each) for each in read]))
                return [differentiated_at(is_last, x) for x in sent]
            if not behind.isdisjoint(jaxprs.variables(eqn)):
                is_behind = [jaxprs.is_literal(atom) or atom in behind for atom in eqn.invars]
                behind.update(eqn.outvars)
                pairs = zip(is_behind, values, strict=True)
                values = [x if known else differentiated_at(is_last, x) for known, x in pairs]
            return self.shared.bind(eqn, values)

        shared = [cast(x, dtype) for x, dtype in zip(operands[: self.num_shared], self.dtypes, strict=False)]
        results = evaluate(self.jaxpr, self.consts, [work[2], *shared, *rows], equation)
        return sent, [*map(jnp.asarray, results)]

    def layers_of(
        self, work: Work, values: list[Any], arrived: list[Any], sums: list[Any], stacks: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns carries and stacks behind the layers of a stage, and sums; the first layer reads `values`."""
        (stage, group, number, is_own), num_carry = work, len(self.loop.carry)
        consts, begun = values[: len(self.loop.consts)], values[len(self.loop.consts) :]
        begun = [self.begun(role, x, number == 0) for role, x in zip(self.loop.carry, begun, strict=True)]
        of_layers = dict(zip(self.of_layers, sums, strict=True))
        # What no microbatch has reached goes through the layers as if it was the first stage: it may divide by zeros.
        begins = (stage == 0) & (group == 0) | ~is_own
        carry = [jnp.where(begins, jnp.asarray(x, y.dtype), y) for x, y in zip(begun, arrived, strict=False)]
        sums = [of_layers.get(i) for i in range(self.first_stack, self.first_stack + len(stacks))]
        after, ys, sums = self.layers(work, consts, carry, stacks, sums)
        stacks = [self.stacked(self.of_stage.begin(work), *each) for each in zip(arrived[num_carry:], ys, strict=True)]
        return [*after, *stacks], [x for x in sums if x is not None]

    def stacked(self, begin: Any, stack: jax.Array, own: jax.Array) -> jax.Array:
        """Returns what layers stack with that of a stage, whose first layer is `begin`."""
        # Beyond the last place, XLA would move the update to where it fits.
        idle = jnp.zeros((self.loop.num_places - self.loop.num_layers, *stack.shape[1:]), stack.dtype)
        stack = jnp.concatenate([stack, idle]) if idle.size else stack
        return lax.dynamic_update_slice_in_dim(stack, own, begin, 0)[: self.loop.num_layers]

    def layer_passes(self) -> StagePasses:
        """Returns the layers of a stage forward and backward."""
        differentiated = made_of((self.jaxpr.invars[1 + i] for i in self.others), self.jaxpr.eqns)
        values = self.program.layers.invars
        has_grad = [not jaxprs.is_literal(x) and x in differentiated and is_float(x.aval) for x in values]
        of_one = lambda x, dtype: jax.ShapeDtypeStruct(x.shape[1:], dtype)  # noqa: E731
        sums = [of_one(self.operands[i], wide(self.operands[i].dtype)) for i in self.of_layers]
        stacks = [of_one(x, x.dtype) for x in self.operands[self.first_stack :]]
        return StagePasses(
            self.layers_of, self.work(self.stage), ([x.aval for x in values], self.avals, sums, stacks), has_grad
        )

    # --- microbatches ------------------------------------------------------------------------------------------------

    def microbatches(self, x: jax.Array) -> jax.Array:
        """Returns a leaf of the batch as `[microbatches, examples, ...]`, on all stages."""
        n, m = self.place.num_shards, self.num_microbatches
        x = self.place.pinned(x, self.place.batch)
        x = x.reshape(n, m, x.shape[0] // (n * m), *x.shape[1:]).swapaxes(0, 1)
        return self.place.pinned(lax.collapse(x, 1, 3), (), self.place.batch)

    def of_microbatches(self, role: Relation, x: jax.Array) -> jax.Array:
        """Returns a result of the batch from those of microbatches in all stages, `[microbatches, stages, ...]`."""
        return jnp.moveaxis(self.of_all_microbatches(jnp.moveaxis(x[:, -1], role.dim + 1, 1)), 0, role.dim)

    def of_all_microbatches(self, x: jax.Array) -> jax.Array:
        """Returns an array of the batch from `[microbatches, examples, ...]`."""
        n, m = self.place.num_shards, self.num_microbatches
        return lax.collapse(x.reshape(m, n, x.shape[1] // n, *x.shape[2:]).swapaxes(0, 1), 0, 3)

    def rows_of(self, work: Work) -> list[jax.Array]:
        """Returns the examples of a microbatch for each stage."""
        taken = (jnp.take(x, work[2], axis=0) for x in self.rows)
        return [self.place.pinned(x, self.place.pipe, self.place.batch) for x in taken]

    # --- what goes from stage to stage -------------------------------------------------------------------------------

    def pinned(self, xs: Sequence[jax.Array], which: Sequence[int] | None = None) -> list[jax.Array]:
        """Returns what goes from stage to stage, or some of it, sharded by stage and by examples."""
        roles = self.roles if which is None else [self.roles[i] for i in which]
        return [self.pin(role, x, role.dim) for role, x in zip(roles, xs, strict=True)]

    def pin_kept(self, x: jax.Array) -> jax.Array:
        """Returns what stages keep, sharded by stage."""
        return self.place.pinned(x, (), self.place.pipe)

    def pin_rows(self, x: jax.Array) -> jax.Array:
        """Returns what stages have of the examples of all microbatches, sharded by stage and by examples."""
        return self.place.pinned(x, self.place.pipe, (), self.place.batch)

    def at_slots(self, kept: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns for each stage what it keeps in a slot."""
        take = lambda x, slot: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False)  # noqa: E731
        taken = jax.vmap(take, in_axes=(1, 0), spmd_axis_name=self.place.pipe)(kept, slots)
        return self.place.pinned(taken, self.place.pipe)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def is_of_examples(self, i: int) -> bool:
        """Tells whether an operand has examples, which other layers have made before if it has a gradient."""
        return self.num_shared <= i < self.first_stack

    def no_grad(self, i: int) -> jax.Array:
        """Returns the gradient of an operand before the first tick, for each stage."""
        if self.is_of_examples(i):
            x = self.rows[i - self.num_shared]
            return self.pin_rows(jnp.zeros((self.num_stages, *x.shape), wide(x.dtype)))
        x = self.operands[i]
        shape = x.shape if i >= self.first_stack else (self.num_stages, *x.shape)
        return self.pin_grad(i, jnp.zeros(shape, wide(x.dtype)))

    def grad(self, i: int, x: jax.Array) -> jax.Array:
        """Returns the gradient of an operand from those of the stages."""
        dtype = self.dtypes[i]
        if i >= self.first_stack:
            return x.astype(dtype)
        x = x.astype(dtype if self.is_of_examples(i) else self.loop.reduce_dtype or dtype)
        x = rounded(lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (0,)), dtype)
        return self.of_all_microbatches(x) if self.is_of_examples(i) else x

    def grad_after(self, i: int, old: jax.Array, new: jax.Array, numbers: jax.Array, is_own: jax.Array) -> jax.Array:
        """Returns the gradient of an operand after a tick; each stage has that of the examples of its microbatch."""
        if not self.is_of_examples(i):
            return self.pin_grad(i, added_at(is_own, old, new))
        new = at_stages(is_own, new, jnp.zeros_like(new)).astype(old.dtype)
        return self.pin_rows(jax.vmap(updated_at(0, adds=True, of_each=self.place.of_each))(old, new, numbers))

    def part(self, i: int) -> float:
        """Returns what a result of the batch grows by with that of a microbatch."""
        role = self.program.results[i]
        return self.num_microbatches ** -(float(role.power) if role.kind is Kind.SUM else 1.0)
