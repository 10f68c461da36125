"""How microbatches enter the first stage and leave the last one, from and to the devices that have their examples.

Outside of the loop over ticks the examples are sharded over `pipe`, too: microbatch `slot * stages + home` is on the
stage `home`, in an array `[stages, slots, examples, ...]`. The first stage has a place for the next microbatch of each
home, and the last one for the last of each: `[stages, homes, examples, ...]`. Home and place exchange a part in each
tick, so that a microbatch is there when it is its turn. So a home sends no more than its microbatches, and nothing
waits for a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.dims import is_float
from zero_jax.sharding.mesh import axis_size
from zero_jax.transforms.pipeline.cut import LayerLoop, Role
from zero_jax.transforms.pipeline.place import Pairs, StagePlace, at_stages

Waiting = tuple[jax.Array, jax.Array]  # at their homes, and in places of the first and of the last stage


class Ring:
    """The microbatches of a value that has examples.

    Args:
      loop: the layers.
      place: where they run.
      role: what the value is to a microbatch.
      shape: its shape for a microbatch.
      leaves: whether it comes back behind the last stage.
    """

    def __init__(self, loop: LayerLoop, place: StagePlace, role: Role, shape: Sequence[int], *, leaves: bool):
        self.place, self.role, self.leaves = place, role, leaves
        self.shape = shape[role.dim], *shape[: role.dim], *shape[role.dim + 1 :]
        self.num_stages, self.period = loop.num_stages, loop.num_stages * loop.num_groups
        self.dim, self.part_size, self.num_parts = _parts(self.shape, self.period)
        self.num_slots = loop.num_microbatches // loop.num_stages
        self.stage = np.arange(self.num_stages, dtype=np.int32)
        self.turned = jax.custom_vjp(self._turned)
        self.turned.defvjp(self._turned_forward, self._turned_backward)

    # --- outside of the loop -----------------------------------------------------------------------------------------

    def entered(self, x: jax.Array) -> Waiting:
        """Returns an array of the batch at its homes, and the first slot of it at the first stage."""
        s, j, n = self.num_stages, self.num_slots, axis_size(self.place.mesh, self.place.batch)
        x = jnp.moveaxis(x, self.role.dim, 0)
        x = self.place.pinned(x, (*self.place.batch, *self.place.pipe))
        x = x.reshape(n, s, j, x.shape[0] // (n * s * j), *x.shape[1:])
        x = self.place.pinned(x, self.place.batch, self.place.pipe, ())
        x = x.transpose(1, 2, 0, *range(3, x.ndim))
        x = self.pin(lax.collapse(self.place.pinned(x, self.place.pipe, (), self.place.batch), 2, 4))
        homes = self.pin(self.padded(x))
        first = homes[:, 0]
        here = at_stages(self.stage == 0, first, jnp.zeros_like(first))
        places = [here, *(self.place.sent(first, [(k, 0)]) for k in range(1, s))]
        return homes, self.pin(jnp.stack(places, 1))

    def left(self, waiting: Waiting, after: jax.Array) -> jax.Array:
        """Returns the array of the batch, where `after` is what stages have made in the last tick."""
        s, j, n = self.num_stages, self.num_slots, axis_size(self.place.mesh, self.place.batch)
        homes, places = waiting
        places, _ = self.swapped(places, self.padded(after), s - 1, True, (0, s - 1))
        # Those of a slot came back to the second one after it; the last of them are in their places.
        last, end = (j + 1) % j, s - 1
        for k in range(s):
            x = places[:, k] if k == end else self.place.sent(places[:, k], [(end, k)])
            homes = homes.at[:, last].set(at_stages(self.stage == k, x, homes[:, last]))
        x = self.pin(self.unpadded(jnp.concatenate([homes[:, 2 % j :], homes[:, : 2 % j]], 1)))
        x = x.reshape(s, j, n, x.shape[2] // n, *x.shape[3:])
        x = self.place.pinned(x, self.place.pipe, (), self.place.batch)
        x = x.transpose(2, 0, 1, *range(3, x.ndim))
        x = lax.collapse(self.place.pinned(x, self.place.batch, self.place.pipe, ()), 0, 4)
        return jnp.moveaxis(self.place.pinned(x, (*self.place.batch, *self.place.pipe)), 0, self.role.dim)

    def pin(self, x: jax.Array) -> jax.Array:
        """Returns what waits, sharded by stage and by examples."""
        return self.place.pinned(x, self.place.pipe, (), self.place.batch)

    # --- a tick ------------------------------------------------------------------------------------------------------

    def tick(self, waiting: Waiting, after: jax.Array, t: jax.Array) -> tuple[Waiting, jax.Array]:
        """Returns what waits after a tick has begun, and what enters the first stage in it.

        `after` is what stages have made in the tick before, and the last one of them what leaves.
        """
        turned = self.turned if is_float(after) else self._turned
        homes, places, entering = turned(*waiting, self.padded(after), t)
        return (self.pin(homes), self.pin(places)), self.unpadded(entering)

    def _turned(self, homes: jax.Array, places: jax.Array, after: jax.Array, t: jax.Array) -> tuple[jax.Array, ...]:
        """Takes what enters, puts what leaves, and exchanges parts: a linear function of arrays."""
        ends = 0, self.num_stages - 1
        places, entering = self.swapped(places, after, t % self.num_stages, self.is_turn(t), ends)
        homes, places = self.exchanged(homes, places, t, ends)
        return homes, places, entering

    def _turned_forward(self, *arguments: jax.Array) -> tuple[Any, jax.Array]:
        return self._turned(*arguments), arguments[-1]

    def _turned_backward(self, t: jax.Array, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        """The same the other way round; what was moved is not read again, so that its cotangent is of no account."""
        homes, places, entering = cotangents
        ends = self.num_stages - 1, 0
        homes, places = self.exchanged(homes, places, t, ends)
        places, after = self.swapped(places, entering, t % self.num_stages, self.is_turn(t), ends)
        return homes, places, at_stages((self.stage == ends[0]) & self.is_turn(t), after, jnp.zeros_like(after)), None

    def is_turn(self, t: jax.Array) -> jax.Array:
        """Tells whether a microbatch enters in a tick, and one leaves before it."""
        return t % self.period < self.num_stages

    def swapped(
        self, places: jax.Array, new: jax.Array, k: Any, is_turn: Any, ends: tuple[int, int]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns places with `new` in that of a home at the last of two `ends`, and what was in it."""
        old = lax.dynamic_index_in_dim(places, k, 1, keepdims=False)
        put = at_stages((self.stage == ends[1]) & is_turn, new, old)
        return lax.dynamic_update_index_in_dim(places, put, k, 1), old

    def exchanged(self, homes: jax.Array, places: jax.Array, t: jax.Array, ends: tuple[int, int]) -> Waiting:
        """Moves a part from each home to the first of two `ends`, and one from the last of them to each home.

        Nothing of a single slot, which is there before the first tick and returns behind the last one.
        """
        if self.num_slots == 1:
            return homes, places
        dim = homes.ndim + self.dim
        sizes = [1 if i == 1 else self.part_size if i == dim else size for i, size in enumerate(homes.shape)]
        for k in range(self.num_stages):
            window, part = (t - k) // self.period, (t - k) % self.period
            is_home = self.stage == k
            is_live = (t >= k) & (window < self.num_slots) & (part < self.num_parts)
            start = jnp.minimum(part, self.num_parts - 1) * self.part_size
            starts = [start if i == dim else 0 * t for i in range(homes.ndim)]  # all of one dtype
            at_home = [*starts[:1], (window + 1) % self.num_slots, *starts[2:]]
            in_place = [*starts[:1], self.stage[k], *starts[2:]]
            own, held = lax.dynamic_slice(homes, at_home, sizes), lax.dynamic_slice(places, in_place, sizes)
            moved, pairs = self.pin(at_stages(is_home, own, held)), self.pairs(k, ends)
            moved = self.place.sent(moved, pairs) if pairs else moved
            to_place, to_home = own if k == ends[0] else moved, held if k == ends[1] else moved
            held = at_stages((self.stage == ends[0]) & is_live, to_place, held)
            homes = lax.dynamic_update_slice(homes, at_stages(is_home & is_live, to_home, own), at_home)
            places = lax.dynamic_update_slice(places, held, in_place)
        return homes, places

    def pairs(self, k: int, ends: tuple[int, int]) -> Pairs:
        """Returns the stages that a home sends to and receives from."""
        pairs = ((k, ends[0]), (ends[1], k))
        if not self.leaves:
            pairs = pairs[:1] if ends[0] == 0 else pairs[1:]
        return tuple((source, target) for source, target in pairs if source != target)

    # --- parts -------------------------------------------------------------------------------------------------------

    def padded(self, x: jax.Array) -> jax.Array:
        """Returns arrays of microbatches with as many elements along the dim that they are cut along as all parts."""
        x = x if len(self.shape) > 1 else x[..., None]
        added, widths = self.part_size * self.num_parts - x.shape[self.dim], [(0, 0)] * x.ndim
        widths[self.dim] = (0, added)
        return jnp.pad(x, widths) if added else x

    def unpadded(self, x: jax.Array) -> jax.Array:
        """Returns arrays of microbatches without what was added to them."""
        if len(self.shape) == 1:
            return x[..., 0]
        return lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)


def part_share(shape: Sequence[int], dim: int, num_ticks: int) -> float:
    """Returns how much of a microbatch moves in a tick, where `dim` is that of examples."""
    rest = (*shape[:dim], *shape[dim + 1 :]) or (1,)
    return _parts((1, *rest), num_ticks)[1] / max(*rest, 1)


def _parts(shape: Sequence[int], num_ticks: int) -> tuple[int, int, int]:
    """Returns how a microbatch is cut for so many ticks: the dim, counted from the end, its size and that of a part.

    A microbatch of one number for each example is a part.
    """
    rest = shape[1:] or (1,)
    size = max(rest)
    part_size = max(-(-size // num_ticks), 1)
    return rest.index(size) - len(rest), part_size, max(-(-size // part_size), 1)
