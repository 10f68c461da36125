"""The loop over ticks: in each of them all stages run, each on another microbatch.

A stage is a part of an array along a leading dim over the mesh axes `pipe`. What a microbatch carries moves from stage
to stage, and round again where stages have several groups of layers: with V of them on each of S stages, stage s is in
the tick t at number `u = t - s` of what it does, and that is group `u // S % V` of its own for microbatch
`u // (S V) * S + u % S`. `ring` has what is outside of the stages. Microbatches 0 to 5 with S = 3, through the groups
a and b of each stage if V = 2::

    tick      0  1  2  3  4  5  6  7             0  1  2  3  4  5  6  7  8  9  10 11 12 13
    stage 0   0  1  2  3  4  5                   0a 1a 2a 0b 1b 2b 3a 4a 5a 3b 4b 5b
    stage 1      0  1  2  3  4  5                   0a 1a 2a 0b 1b 2b 3a 4a 5a 3b 4b 5b
    stage 2         0  1  2  3  4  5                   0a 1a 2a 0b 1b 2b 3a 4a 5a 3b 4b 5b
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from zero_jax.core.tree import is_key, key_numbers
from zero_jax.dims import EXTREMA, Kind, Relation, is_float
from zero_jax.sharding.precision import wide
from zero_jax.transforms.grad_sums import added_to, sum_of
from zero_jax.transforms.pipeline.cut import LAYER_INPUT, LayerLoop
from zero_jax.transforms.pipeline.place import at_stages, extremum_of_none, is_never_kept
from zero_jax.transforms.pipeline.ring import Moves, Ring, loops_of_ticks

# The most layers of a stage that are compiled one by one, if they keep more than their inputs.
UNROLLED_LAYERS = 16

# From the number of a microbatch, constants, carries and a layer's slices (several arrays of each) to carries and ys.
Layer = Callable[[Any, list[Any], list[Any], list[Any]], Sequence[Any]]

# The number of a stage, that of its group of layers, that of a microbatch, and whether there is one.
Work = tuple[Any, Any, Any, Any]


def run_stages(
    loop: LayerLoop,
    operands: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    layer: Layer,
    shardings: Sequence[NamedSharding | None] = (),
) -> list[jax.Array]:
    """Runs a scan over layers on all microbatches, and returns its results for the batch.

    Args:
      loop: the scan.
      operands: its constants and its carries, those that have examples of the whole batch; and what it takes slices of,
        each one or several arrays `[stages, layers / stages, ...]`.
      layer: evaluates a layer of a microbatch.
      shardings: those of the gradients of what it takes slices of, while they are summed; None leaves them open.
    """
    (consts, carry, stacks), place = operands, loop.place
    travelling = [(role, x) for role, x in zip(loop.consts, consts, strict=True) if role.is_rows]
    travelling += [*zip(loop.carry, map(jnp.asarray, carry), strict=True)]  # literals are numbers
    # Keys travel, and are stacked, as numbers.
    kinds, kinds_of_ys = [_kind(x) for _, x in travelling], list[Any]()
    travelling = [(role, key_numbers(x)) for role, x in travelling]
    ticks, layers = _Ticks(loop, travelling, shardings), LayersOfStage(loop, layer)
    # The gradient of a stack is that of its sum: the loop would make one for all layers of a stage in each tick.
    sums = [sum_of(x) if is_float(x) else None for x in stacks]
    stacks = [lax.stop_gradient(x) for x in stacks]
    shared = [jnp.asarray(x) for role, x in zip(loop.consts, consts, strict=True) if not role.is_rows]
    # Their gradients are summed over ticks in the dtype of what all of them read.
    dtypes, roles, num_consts = [x.dtype for x in shared], ticks.roles, ticks.num_consts
    shared = [place.pinned(jnp.broadcast_to(x, (loop.num_stages, *x.shape)), place.pipe) for x in map(widened, shared)]

    def stage(work: Work, travelled: list[Any], sums: list[Any], stacks: list[Any], shared: list[Any]) -> Any:
        """Returns what travels on, what layers stack, and the sums of gradients; `work` is as `Ticks.work` has it."""
        *_, is_own = work
        # Of no microbatch there is no gradient: derivatives of what a stage has then may be infinite.
        travelled, shared = ([differentiated_at(is_own, x) for x in xs] for xs in (travelled, shared))
        # Between stages the dim of examples is in front; layers have it where the model does.
        values = [_moved(role, x, 0, role.dim) for role, x in zip(roles, travelled, strict=True)]
        values = [*map(_with_kind, values, kinds)]
        with_examples, without = iter(values[:num_consts]), map(cast, shared, dtypes)
        consts = [next(with_examples if role.is_rows else without) for role in loop.consts]
        after, ys, sums = layers(work, consts, values[num_consts:], stacks, sums)
        after = [_moved(role, key_numbers(x), role.dim, 0) for role, x in zip(loop.carry, after, strict=True)]
        kinds_of_ys[:] = map(_kind, ys)
        return [*travelled[:num_consts], *after], [*map(key_numbers, ys)], sums

    run: Any = jax.checkpoint(stage, prevent_cse=False, policy=loop.policy) if loop.recompute else stage
    mapped = jax.vmap(run, spmd_axis_name=place.pipe)
    results = ticks.run(lambda work, state, sums: mapped(work, state, sums, stacks, shared), sums)
    return [*map(_with_kind, results, [*kinds[num_consts:], *kinds_of_ys])]


def _kind(x: Any) -> Any:
    """Returns the kind of keys; None for other values."""
    return jax.random.key_impl(x) if is_key(x) else None


def _with_kind(x: jax.Array, kind: Any) -> jax.Array:
    """Returns keys of a kind from their numbers; other values, whose kind is None, as they are."""
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)


class LayersOfStage:
    """The layers of a stage, on a microbatch.

    Args:
      loop: the scan over layers.
      layer: evaluates a layer of a microbatch.
    """

    def __init__(self, loop: LayerLoop, layer: Layer):
        self.loop, self.layer = loop, layer

    def begin(self, work: Work) -> Any:
        """Returns the place of the first of these layers among those of the model."""
        stage, group, *_ = work
        return (group * self.loop.num_stages + stage) * self.loop.group_size

    def __call__(
        self,
        work: Work,
        consts: list[Any],
        carry: list[Any],
        stacks: Sequence[Any],
        sums: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns carries, what is stacked, and sums, of a group of layers of a stage.

        Args:
          work: as `Ticks.work` has it.
          consts: what all layers read.
          carry: what the first layer reads.
          stacks: the params of the stage, `[layers, ...]`, which have no gradients of their own.
          sums: for each of them the sum of its gradients (`added_to`), None where it has none.
        """
        (_, group, number, is_own), size = work, self.loop.group_size
        begin, first = self.begin(work), group * size if self.loop.num_groups > 1 else 0
        has_idle = self.loop.num_places > self.loop.num_layers

        def body(before: Any, sliced: Any) -> tuple[Any, list[Any]]:
            (carry, sums), (slices, i) = before, sliced
            if slices is None:
                slices = [self.loop.place.taken(x, first + i) for x in stacks]
            is_here = is_own & (begin + i < self.loop.num_layers) if has_idle else is_own
            if self.loop.policy is not None:
                carry = [checkpoint_name(x, LAYER_INPUT) if is_float(x) else x for x in carry]
            pairs = zip(sums, slices, strict=True)
            add = functools.partial(added_to, number=first + i, is_own=is_here, of_each=self.loop.place.of_each)
            summed = [(None, x) if total is None else add(total, x)[:2] for total, x in pairs]
            read, own = ([differentiated_at(is_here, x) if has_idle else x for x in xs] for xs in (consts, carry))
            made = [*self.layer(number, read, own, [x for _, x in summed])]
            if has_idle:  # an idle place passes on what it gets
                made[: len(carry)] = [jnp.where(is_here, x, y) for x, y in zip(made, carry, strict=False)]
            return (made[: len(carry)], [total for total, _ in summed]), made[len(carry) :]

        run, layers = body, (stacks, jnp.arange(size, dtype=jnp.int32))
        if self.loop.num_groups > 1:
            # Of a group the params of a layer are taken where it uses them, again in the backward pass: a slice of the
            # group would be a copy, and so would be those that are kept. If a policy keeps values, it has all others.
            policy = None if self.loop.policy is not None else lambda *xs, **params: not is_never_kept(*xs, **params)
            run, layers = jax.checkpoint(body, prevent_cse=False, policy=policy), (None, layers[1])
        if self.loop.keeps_values and size <= max(UNROLLED_LAYERS, self.loop.unroll):
            # What layers keep becomes part of what all ticks keep. What a scan over layers keeps is copied there.
            made, state = [], (carry, [*sums])
            for i in range(size):
                state, stacked = run(state, jax.tree.map(lambda x, i=i: x[i], layers))
                made.append(stacked)
            (carry, sums), ys = state, [jnp.stack(x) for x in zip(*made, strict=True)]
        else:
            (carry, sums), ys = lax.scan(run, (carry, [*sums]), layers, unroll=min(self.loop.unroll, size))
        return carry, ys, [*sums]


class Ticks:
    """A loop over ticks: what stages do in each, and what is made.

    Args:
      loop: the scan.
      shardings: those of sums of gradients; None leaves them open.
    """

    def __init__(self, loop: LayerLoop, shardings: Sequence[NamedSharding | None]):
        self.loop, self.place, self.shardings = loop, loop.place, shardings
        self.num_stages, self.num_microbatches = loop.num_stages, loop.num_microbatches
        self.stage = jnp.arange(self.num_stages, dtype=jnp.int32)
        # From the last stage to the first one, if it has another group for what arrives.
        chain = [(s, s + 1) for s in range(self.num_stages - 1)]
        self.pairs = [*chain, *([(self.num_stages - 1, 0)] if loop.num_groups > 1 else [])]

    def work(self, number: jax.Array) -> Work:
        """Returns what stages do, by the numbers of what they do; where there is no microbatch it is of some one."""
        s, v, m = self.num_stages, self.loop.num_groups, self.num_microbatches
        microbatch = jnp.clip(number // (s * v) * s + number % s, 0, m - 1) if v > 1 else jnp.clip(number, 0, m - 1)
        return self.stage, self.group(number), microbatch, (number >= 0) & (number < m * v)

    def group(self, number: jax.Array) -> jax.Array:
        """Returns which group of its layers a stage runs."""
        return number // self.num_stages % self.loop.num_groups

    def is_last(self, stage: Any, group: Any) -> Any:
        """Tells whether a microbatch leaves behind a group of a stage."""
        return (stage == self.num_stages - 1) & (group == self.loop.num_groups - 1)

    def pin(self, role: Relation, x: jax.Array, dim: int = 0) -> jax.Array:
        """Returns what stages have, sharded by stage and by examples, which are in a dim of it."""
        return self.place.pinned(x, self.place.pipe, *([*[()] * dim, self.place.batch] if role.is_rows else []))

    def pin_grad(self, i: int, x: jax.Array) -> jax.Array:
        """Returns the sum of a gradient sharded by stage, and as it is to be."""
        return self.place.pinned_to(x, self.shardings[i] if self.shardings else None)

    # --- what enters and is made ------------------------------------------------------------------------------------

    def begun(self, role: Relation, x: Any, is_first: jax.Array) -> jax.Array:
        """Returns what a microbatch, the first or another one, begins with of a carry that has no examples."""
        if role.kind is not Kind.SUM:
            return x
        # Whole numbers have no equal parts: a sum of them begins with the first microbatch.
        return x * self.num_microbatches ** (float(role.power) - 1) if is_float(x) else jnp.where(is_first, x, 0)

    def nothing(self, role: Relation, like: Any, num_groups: int = 1) -> jax.Array | None:
        """Returns what there is of a value before the first tick; None for examples, which each tick has others of."""
        if role.is_rows:
            return None
        dtype = wide(like.dtype) if role.kind is Kind.SUM and is_float(like) else like.dtype
        shape = like.shape if num_groups == 1 else (self.num_stages, num_groups, *like.shape[1:])
        nothing = extremum_of_none(role.kind, dtype) if role.kind in EXTREMA else 0
        return self.place.pinned(jnp.full(shape, nothing, dtype), self.place.pipe)

    def added(self, role: Relation, old: Any, new: jax.Array, is_own: jax.Array) -> Any:
        """Returns what there is of a value after a tick, to which some stages add."""
        if role.is_rows:
            return None
        if role.kind in EXTREMA:
            new = (jnp.maximum if role.kind is Kind.MAX else jnp.minimum)(old, new)
        return added_at(is_own, old, new) if role.kind is Kind.SUM else at_stages(is_own, new, old)

    def of_batch(self, role: Relation, x: jax.Array, dtype: Any) -> jax.Array:
        """Returns a value of the batch, from what was made of it."""
        x = x * self.num_microbatches ** -float(role.power) if role.power else x
        return x.astype(dtype)


class _Ticks(Ticks):
    """The loop over ticks of one scan.

    Args:
      loop: the scan.
      travelling: what a microbatch has, by its role and for the batch: constants with examples, and carries.
      shardings: those of sums; None leaves them open.
    """

    def __init__(
        self, loop: LayerLoop, travelling: Sequence[tuple[Relation, Any]], shardings: Sequence[NamedSharding | None]
    ):
        super().__init__(loop, shardings)
        self.roles, self.values = [role for role, _ in travelling], [x for _, x in travelling]
        self.num_consts = len(travelling) - len(loop.carry)
        self.rings = [
            Ring(loop, role, x.shape, leaves=i >= self.num_consts) if role.is_rows else None
            for i, (role, x) in enumerate(travelling)
        ]

    def run(self, stages: Callable[..., Any], sums: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Runs all ticks, and returns the carries and what is stacked; `sums` go with stages from tick to tick."""
        loop, roles, rings, first = self.loop, self.roles, self.rings, self.num_consts
        pairs = zip(rings, self.values, strict=True)
        # What has examples waits and enters by its ring; of other values all microbatches begin with the same.
        waiting, entered = zip(*((None, None) if ring is None else ring.entered(x) for ring, x in pairs), strict=True)
        of_stages = lambda x: jnp.broadcast_to(x, (self.num_stages, *jnp.shape(x)))  # noqa: E731
        begun = [None if role.is_rows else of_stages(x) for role, x in zip(roles, self.values, strict=True)]
        # Stages that no microbatch has reached run on examples of the batch: on nothing, a layer may divide by zero.
        after = [
            begun[i] if ring is None else lax.stop_gradient(x)
            for i, (ring, x) in enumerate(zip(rings, entered, strict=True))
        ]
        shapes = jax.eval_shape(stages, self.work(self.stage), after, sums)
        made = [self.nothing(role, x) for role, x in zip(loop.carry, after[first:], strict=True)]
        stacked = [self.nothing(role, x, loop.num_groups) for role, x in zip(loop.ys, shapes[1], strict=True)]

        def tick(before: Any, t: jax.Array, moves: Moves) -> tuple[Any, list[Any]]:
            after, waiting, made, stacked, sums = before
            turns = [
                (None, self.begun(role, x, t == 0)) if ring is None else ring.tick(own, old, t, moves)
                for role, ring, own, x, old in zip(roles, rings, waiting, begun, after, strict=True)
            ]
            waiting, is_turn = [own for own, _ in turns], (self.stage == 0) & (self.group(t) == 0)
            # The first stage takes what enters, in the turns of its first group; else it is what the stage before made.
            arrived = [self.place.sent(x, self.pairs) for x in after]
            state = [at_stages(is_turn, new, x) for (_, new), x in zip(turns, arrived, strict=True)]
            state = [self.pin(role, x) for role, x in zip(roles, state, strict=True)]
            _, groups, _, is_own = work = self.work(t - self.stage)
            after, ys, sums = stages(work, state, sums)
            sums = self.pinned_sums(sums)
            after = [self.pin(role, x) for role, x in zip(roles, after, strict=True)]
            is_done = is_own & self.is_last(self.stage, groups)
            done = zip(loop.carry, made, after[first:], strict=True)
            made = [self.added(role, old, new, is_done) for role, old, new in done]
            stacked = [self.added_to_group(*each, groups, is_own) for each in zip(loop.ys, stacked, ys, strict=True)]
            rows = [x for role, x in zip(loop.ys, ys, strict=True) if role.is_rows]
            return (after, waiting, made, stacked, sums), rows

        carry: Any = (after, [*waiting], made, stacked, self.pinned_sums(sums))
        loops = []
        for ticks, moves in loops_of_ticks(loop):
            numbers = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
            carry, rows = lax.scan(functools.partial(tick, moves=moves), carry, numbers)
            loops.append(rows)
        after, waiting, made, stacked, _ = carry
        results, remaining = [], (jnp.concatenate(rows) for rows in zip(*loops, strict=True))
        ends = zip(loop.carry, rings[first:], waiting[first:], made, after[first:], strict=True)
        for role, ring, own, x, last in ends:
            results.append(self.of_batch(role, x[-1], last.dtype) if ring is None else ring.left(own, last))
        for role, x, like in zip(loop.ys, stacked, shapes[1], strict=True):
            results.append(self.rows_of_layers(role, next(remaining)) if role.is_rows else self.of_all(role, x, like))
        return results

    # --- what is made -----------------------------------------------------------------------------------------------

    def pinned_sums(self, sums: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns sums sharded by stage, and as they are to be."""
        return [None if x is None else self.pin_grad(i, x) for i, x in enumerate(sums)]

    def added_to_group(self, role: Relation, old: Any, new: jax.Array, groups: jax.Array, is_own: jax.Array) -> Any:
        """Returns what there is of a stack after a tick, to which stages add that of a group."""
        if role.is_rows or self.loop.num_groups == 1:
            return self.added(role, old, new, is_own)
        each = [self.added(role, old[:, i], new, is_own & (groups == i)) for i in range(self.loop.num_groups)]
        return jnp.stack(each, 1)

    def of_all(self, role: Relation, x: jax.Array, like: Any) -> jax.Array:
        """Returns a stack without examples, of all layers."""
        x = self.of_batch(role, x, like.dtype)
        x = x if self.loop.num_groups == 1 else x.swapaxes(0, 1)
        return x.reshape(-1, *like.shape[2:])[: self.loop.num_layers]

    def rows_of_layers(self, role: Relation, ticks: jax.Array) -> jax.Array:
        """Returns a stack of all layers for the batch, from those of each tick, `[ticks, stages, layers, ...]`."""
        s, v, m = self.num_stages, self.loop.num_groups, self.num_microbatches
        n, j = self.place.num_shards, m // s
        x = jnp.moveaxis(ticks, 2 + role.dim, 3)  # [ticks, stages, layers of a group, examples, ...]
        # Stage s begins in tick s. Its ticks from there on are `[slots, groups, homes]`.
        x = jax.vmap(lambda x, stage: lax.dynamic_slice_in_dim(x, stage, m * v, 0), in_axes=(1, 0))(x, self.stage)
        layers, size, *shape = x.shape[2:]
        x = x.reshape(s, j, v, s, layers, n, size // n, *shape)
        # To layers `[groups, stages, layers]`, and a batch `[shards, homes, slots, examples]` as it entered (`Ring`).
        x = x.transpose(2, 0, 4, 5, 3, 1, 6, *range(7, x.ndim)).reshape(v * s * layers, j * s * size, *shape)
        return jnp.moveaxis(x[: self.loop.num_layers], 1, role.dim)


def _moved(role: Relation, x: jax.Array, dim: int, to: int) -> jax.Array:
    """Returns an array with its dim of examples, if it has one, elsewhere."""
    return jnp.moveaxis(x, dim, to) if role.is_rows else x


def differentiated_at(is_here: jax.Array, x: Any) -> Any:
    """Returns a value that has a gradient in one place alone; elsewhere it is 0, not 0 times what may be infinite."""
    return _differentiated_at(is_here, x) if is_float(x) else x


# The choice is made in the backward pass alone: what is chosen by the tick would be kept in each one. Under `jax.vmap`
# both arguments are to be mapped: the cotangent of another `x` is a sum over all places.
@jax.custom_vjp
def _differentiated_at(is_here: jax.Array, x: jax.Array) -> jax.Array:
    return x


_differentiated_at.defvjp(
    lambda is_here, x: (x, is_here),
    lambda is_here, cotangent: (None, jnp.where(is_here, cotangent, jnp.zeros_like(cotangent))),
)


def added_at(stages: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns a sum to which some stages add."""
    return old + at_stages(stages, new, jnp.zeros_like(new)).astype(old.dtype)


def widened(x: Any) -> jax.Array:
    """Returns an array in a dtype that sums can be made in."""
    x = jnp.asarray(x)
    return x.astype(wide(x.dtype)) if is_float(x) else x


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in a dtype."""
    return x if x.dtype == dtype else x.astype(dtype)
