"""How microbatches enter the first stage and leave the last one, from and to the devices that have their examples.

Outside of the loop over ticks the examples are sharded over `pipe`, too: microbatch `slot * stages + home` is on the
stage `home`, in an array `[stages, slots, ...]` of as many parts as there are ticks between the turns of a home. In
each tick every home sends a part of its next microbatch to the first stage, and gets a part of its last one from the
last stage. Both have places for a microbatch of each home, `[stages, homes, parts]`, as a square whose rows and columns
are lines: a microbatch that is taken, or that went away, leaves a line, which a part of each home fills, or the next
microbatch. So the next ones are the columns if the last ones were the rows, no place is free, and none is waited for.

Three stages, of one group each; microbatches A B C are at the homes 0 1 2, behind them D E F, then G H I. The places of
the first stage before each tick, part p of the microbatch X as Xp::

    tick 0        tick 1        tick 2        tick 3        tick 4
    A0 A1 A2 <-   D0 E0 F0      D0 E0 F0      D0 E0 F0      G0 E0 F0
    B0 B1 B2      B0 B1 B2 <-   D1 E1 F1      D1 E1 F1      H0 E1 F1
    C0 C1 C2      C0 C1 C2      C0 C1 C2 <-   D2 E2 F2      I0 E2 F2
                                              ^                ^
    A enters      B enters      C enters      D enters      E enters

and of the last one, before each tick, where A has gone through all stages in tick 2::

    tick 3        tick 4        tick 5        tick 6        tick 7        tick 8
    -- -- --      A0 -- --      A0 B0 --      A0 B0 C0 ->   D0 D1 D2      D0 D1 D2
    -- -- --      A1 -- --      A1 B1 --      A1 B1 C1      A1 B1 C1 ->   E0 E1 E2
    -- -- --      A2 -- --      A2 B2 --      A2 B2 C2      A2 B2 C2      A2 B2 C2 ->
    ^                ^                ^
    A leaves      B leaves      C leaves      D leaves, and the parts 0 go to their homes, then 1, then 2

Parts move only in the ticks in which there are some: with more microbatches than stages these are loops of their own
(`loops_of_ticks`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.dims import Relation, is_float
from zero_jax.transforms.grad_sums import put_at
from zero_jax.transforms.pipeline.cut import LayerLoop
from zero_jax.transforms.pipeline.place import at_stages

# A tile of a TPU's memory has as many rows, of features: 8 of float32, 16 of bfloat16, 32 of int8.
TILE_ROWS = 32

Waiting = tuple[jax.Array, jax.Array]  # at their homes, and in places of the first and of the last stage
Moves = tuple[bool, bool]  # whether parts go to the first stage, and from the last one
Line = tuple[Any, Any]  # the number of a line of places, and whether it is a row


class Ring:
    """The microbatches of a value that has examples.

    Args:
      loop: the layers.
      role: what the value is to a microbatch.
      shape: its shape for the batch.
      leaves: whether it comes back behind the last stage.
    """

    def __init__(self, loop: LayerLoop, role: Relation, shape: Sequence[int], *, leaves: bool):
        self.loop, self.place, self.role, self.leaves = loop, loop.place, role, leaves
        # Of a microbatch, its examples first.
        self.shape = shape[role.dim] // loop.num_microbatches, *shape[: role.dim], *shape[role.dim + 1 :]
        self.num_stages, self.num_parts = loop.num_stages, loop.num_stage_groups
        self.cut = Cut.of(loop, self.shape)
        self.num_slots = loop.num_microbatches // loop.num_stages
        self.stage, self.ends = np.arange(self.num_stages, dtype=np.int32), (0, self.num_stages - 1)

    # --- outside of the loop -----------------------------------------------------------------------------------------

    def entered(self, x: jax.Array) -> tuple[Waiting, jax.Array]:
        """Returns an array of the batch as it waits, its first slot at the first stage; and that slot."""
        s, j, n = self.num_stages, self.num_slots, self.place.num_shards
        # A batch is `[shards, homes, slots, examples]`: each device has the examples of its own microbatches already.
        x = jnp.moveaxis(x, self.role.dim, 0)
        x = self.place.pinned(x, (*self.place.batch, *self.place.pipe))
        x = x.reshape(n, s, j, x.shape[0] // (n * s * j), *x.shape[1:])
        x = self.place.pinned(x, self.place.batch, self.place.pipe, ())
        x = x.transpose(1, 2, 0, *range(3, x.ndim))
        x = self.pin(lax.collapse(self.place.pinned(x, self.place.pipe, (), self.place.batch), 2, 4), 2)
        homes = self.parts(x)  # [homes, slots, parts, ...]
        first = homes[:, 0]
        here = at_stages(self.stage == 0, first, jnp.zeros_like(first))
        places = jnp.stack([here, *(self.place.sent(first, [(k, 0)]) for k in range(1, s))], 1)
        # The place of the first slot is free: what is read in no tick has no cotangent in any.
        homes = lax.collapse(jnp.concatenate([jnp.zeros_like(homes[:, :1]), homes[:, 1:]], 1), 1, 3)
        # To rows of homes, whose parts are columns, as many in each as a stage has groups.
        return (self.pin(homes, 2), self.pin(places.reshape(s, s, s, -1, *places.shape[3:]), 4)), x[:, 0]

    def left(self, waiting: Waiting, after: jax.Array) -> jax.Array:
        """Returns the array of the batch, where `after` is what stages have made in the last tick."""
        s, j, n = self.num_stages, self.num_slots, self.place.num_shards
        homes, places, _ = self.turned(waiting, after, jnp.int32(self.loop.num_ticks), self.ends, (False, j > 1))
        homes, last = homes.reshape(s, j, self.num_parts, *homes.shape[2:]), jnp.zeros_like(homes[:, : self.num_parts])
        for k in range(s):
            x = _line(places, (k, j % 2 == 0)).reshape(last.shape)
            last = at_stages(self.stage == k, x if k == s - 1 else self.place.sent(x, [(s - 1, k)]), last)
        # Those of a slot came back to the second one after it.
        x = jnp.concatenate([homes[:, 2:], homes[:, : min(j - 1, 1)], last[:, None]], 1)
        x = self.pin(self.whole(x), 2)
        x = x.reshape(s, j, n, x.shape[2] // n, *x.shape[3:])
        x = self.place.pinned(x, self.place.pipe, (), self.place.batch)
        x = x.transpose(2, 0, 1, *range(3, x.ndim))
        x = lax.collapse(self.place.pinned(x, self.place.batch, self.place.pipe, ()), 0, 4)
        return jnp.moveaxis(self.place.pinned(x, (*self.place.batch, *self.place.pipe)), 0, self.role.dim)

    def pin(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns an array sharded by stage and by examples, which are in a dim of it."""
        return self.place.pinned(x, self.place.pipe, *[()] * (dim - 1), self.place.batch)

    # --- a tick ------------------------------------------------------------------------------------------------------

    def tick(self, waiting: Waiting, after: jax.Array, t: jax.Array, moves: Moves) -> tuple[Waiting, jax.Array]:
        """Returns what waits after a tick has begun, and what enters the first stage in it.

        `after` is what stages have made in the tick before, and the last one of them what leaves.
        """

        def forward(homes: jax.Array, places: jax.Array, after: jax.Array, t: jax.Array) -> tuple[jax.Array, ...]:
            return self.turned((homes, places), after, t, self.ends, moves)

        def backward(t: jax.Array, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
            # The other way round; what was moved is not read again, so that its cotangent is of no account.
            homes, places, after = self.turned((cotangents[0], cotangents[1]), cotangents[2], t, self.ends[::-1], moves)
            is_own = (self.stage == self.ends[1]) & self.is_turn(t) & self.leaves
            return homes, places, at_stages(is_own, after, jnp.zeros_like(after)), None

        turned: Any = forward
        if is_float(after):
            turned = jax.custom_vjp(forward)
            turned.defvjp(lambda *arguments: (forward(*arguments), arguments[-1]), backward)
        homes, places, entering = turned(*waiting, after, t)
        return (self.pin(homes, 2), self.pin(places, 4)), entering

    def is_turn(self, t: jax.Array) -> jax.Array:
        """Tells whether a microbatch enters in a tick, and one leaves before it."""
        return t % self.num_parts < self.num_stages

    def turned(
        self, waiting: Waiting, new: jax.Array, t: jax.Array, ends: Sequence[int], moves: Moves
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Takes what enters, puts what leaves, and moves parts: a linear function of arrays.

        A microbatch is taken, and parts of others arrive, at the first of two `ends`; `new` is put, and parts go away,
        at the last of them.
        """
        (homes, places), s, period = waiting, self.num_stages, self.num_parts
        # Lines are rows in one period and columns in the next: a microbatch leaves one, and parts of all homes fill it.
        line = jnp.minimum(t % period, s - 1), t // period % 2 == 0
        taken = self.whole(lax.collapse(_line(places, line), 1, 3))
        arrives, goes = (flag & (self.leaves | (end == 0)) for flag, end in zip(moves, self.ends, strict=True))
        arrives, goes = (arrives, goes) if ends[0] == 0 else (goes, arrives)
        if arrives or goes:
            (number, into, sub_into), (back, source, sub) = (self.turn_of(end, t, homes.shape[1]) for end in ends)
            next_part = lax.dynamic_index_in_dim(homes, number, 1, keepdims=False)
            leaving = lax.dynamic_index_in_dim(_line(places, source), sub, 2, keepdims=False)  # [stages, homes, ...]
            at_home, arrived = next_part, []
            for k in range(s):
                # One permute has both: the part of home k to the first end, and the one that is its from the last end.
                pairs = [(k, ends[0])] * (arrives and k != ends[0]) + [(ends[1], k)] * (goes and k != ends[1])
                moved = next_part if k == ends[1] else at_stages(self.stage == ends[1], leaving[:, k], next_part)
                moved = self.place.sent(self.pin(moved, 1), pairs) if pairs else moved
                arrived.append(next_part if k == ends[0] else moved)
                at_home = at_stages(self.stage == k, leaving[:, k] if k == ends[1] else moved, at_home)
            if goes:
                homes = put_at(homes, at_home, back, 1)
            if arrives:
                parts = put_at(_line(places, into), jnp.stack(arrived, 1), sub_into, 2)
                places = _with_line(places, into, self.stage == ends[0], parts)
        if self.leaves or ends[1] == 0:
            parts = self.parts(new).reshape(s, s, -1, *places.shape[4:])
            places = _with_line(places, line, (self.stage == ends[1]) & self.is_turn(t), parts)
        return homes, places, taken

    def turn_of(self, end: int, t: jax.Array, num_parts: int) -> tuple[jax.Array, Line, jax.Array]:
        """Returns what goes to or from an end in a tick: the part of all homes, the line, and where in each of it."""
        # What left in the turns of a period goes home `num_stages` ticks after these began, when all lines are there.
        number, groups = t - self.num_stages * (end > 0), self.loop.num_groups
        line = number % self.num_parts // groups, (number // self.num_parts + (end > 0)) % 2 == 0
        return (number + self.num_parts) % num_parts, line, number % groups

    # --- parts -------------------------------------------------------------------------------------------------------

    def parts(self, x: jax.Array) -> jax.Array:
        """Returns arrays `[..., examples, ...]` of microbatches as `[..., parts, examples, ...]`."""
        cut = self.cut
        x = x.reshape(*x.shape[: x.ndim - len(self.shape)], *cut.shape)
        dim, size = x.ndim + cut.dim, cut.part_size * self.num_parts
        widths = [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths).reshape(*x.shape[:dim], self.num_parts, cut.part_size, *x.shape[dim + 1 :])
        # Whole over other axes: XLA partitions lines of parts that are sharded over `model` wrongly (docs/xla_faults).
        to = x.ndim - 1 - len(cut.shape)
        return self.pin(jnp.moveaxis(x, dim, to), to + 1)

    def whole(self, x: jax.Array) -> jax.Array:
        """Returns arrays of microbatches from their parts."""
        cut, at = self.cut, x.ndim - 1 - len(self.cut.shape)
        x = jnp.moveaxis(self.pin(x, at + 1), at, cut.dim - 1)
        x = lax.collapse(x, x.ndim + cut.dim - 1, x.ndim + cut.dim + 1)
        x = lax.slice_in_dim(x, 0, cut.shape[cut.dim], axis=cut.dim)
        return x.reshape(*x.shape[:at], *self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a microbatch is cut into equal parts."""

    shape: tuple[int, ...]  # the shape that it is cut in, its examples, or the devices that have them, first
    dim: int  # the dim that is cut, counted from the end; the last part may have padding
    part_size: int  # the size of a part along it

    @classmethod
    def of(cls, loop: LayerLoop, shape: Sequence[int]) -> Cut:
        """Returns how a microbatch of some shape, its examples first, is cut into as many parts as a turn has ticks."""
        place, num_parts = loop.place, loop.num_stage_groups
        rows, is_alone = math.prod(shape[:-1]) // place.num_shards, loop.axes.size_beside_batch(place.mesh) == 1
        if is_alone and len(shape) > 2 and shape[-2] % TILE_ROWS == 0 and rows % (num_parts * TILE_ROWS) == 0:
            # Rows of features one after another: parts are what a device has in memory. Of parts along another dim
            # XLA:TPU copies all that waits, several times in each tick. Rows that are sharded over others are not so.
            return cls(shape=(place.num_shards, rows, shape[-1]), dim=-2, part_size=rows // num_parts)
        shape = (*shape, 1) if len(shape) == 1 else (*shape,)
        dim = max(range(1 - len(shape), 0), key=shape.__getitem__)
        return cls(shape=shape, dim=dim, part_size=-(-shape[dim] // num_parts))


def _line(places: jax.Array, line: Line) -> jax.Array:
    """Returns a line of places `[stages, rows, columns, ...]`."""
    row, column = (lax.dynamic_index_in_dim(places, line[0], axis, keepdims=False) for axis in (1, 2))
    return jnp.where(line[1], row, column)


def _with_line(places: jax.Array, line: Line, stages: Any, new: jax.Array) -> jax.Array:
    """Returns places with another line at some stages."""
    for axis, is_own in ((1, line[1]), (2, ~line[1])):
        old = lax.dynamic_index_in_dim(places, line[0], axis, keepdims=False)
        places = put_at(places, at_stages(stages & is_own, new, old), line[0], axis)
    return places


def loops_of_ticks(loop: LayerLoop) -> Iterator[tuple[range, Moves]]:
    """Yields the ticks that are one loop each, and what moves in them."""
    period = loop.num_stage_groups
    last_in, first_out = loop.num_microbatches * loop.num_groups - period, loop.num_stages + period
    edges = sorted({0, loop.num_ticks, last_in, min(first_out, loop.num_ticks)})
    for start, stop in itertools.pairwise(edges):
        yield range(start, stop), (start < last_in, start >= first_out)


def num_moved(loop: LayerLoop, shape: Sequence[int], dim: int) -> float:
    """Returns how many microbatches come from their homes, or go there, where `dim` is that of examples."""
    cut = Cut.of(loop, (shape[dim], *shape[:dim], *shape[dim + 1 :]))
    return loop.num_microbatches * loop.num_stage_groups * cut.part_size / max(cut.shape[cut.dim], 1)
