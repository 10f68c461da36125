"""Features split into heads, and heads merged, by tiles of a TPU's memory.

Attention's kernel on TPUs takes queries, keys and values head by head, `[B, N, T, H]`. A product makes features
`[B, T, N * H]`. Of a reshape between the two XLA:TPU makes a transposition of all elements: the product writes the
sequence along its lanes. In terms of tiles, 8 places by 128 features, heads are another order of the same tiles. So
each such reshape is written as one to tiles, a transposition of these, and one back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zero_jax.attention import PRIMITIVES
from zero_jax.program.jaxprs import bind
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.subcalls import MANUAL, equations
from zero_jax.program.walk import Rewriting

_PLACES, _LANES = 8, 128  # of a tile


def heads_by_tiles(loss_fn: Callable[..., Any], *, mesh: Mesh) -> LossProgram:
    """Transforms `loss_fn(params, batch, ...)` so that TPUs make heads for a fused attention tile by tile.

    The result computes the same values and has the same derivatives. Only reshapes between `[..., T, N * H]` and
    `[..., T, N, H]` change, with sizes of an attention's operands, T of whole tiles and H a multiple of 128.
    """

    def tiled(traced: Traced) -> Traced:
        return traced.rewritten(_HeadTiles(_heads(traced.closed)).rewritten(traced.closed))

    program = LossProgram.of(loss_fn)
    return program.then(tiled) if mesh.devices.flat[0].platform == "tpu" else program


def _heads(closed: Any) -> set[tuple[int, ...]]:
    """Returns the sizes `(T, N, H)` of what the attentions of a program read and make."""
    eqns = (eqn for eqn in equations(closed, skip=MANUAL) if eqn.primitive in PRIMITIVES)
    arrays = [atom.aval.shape[1:] for eqn in eqns for atom in (*eqn.invars, *eqn.outvars) if atom.aval.ndim == 4]
    return {sizes for sizes in arrays if sizes[0] % _PLACES == 0 and sizes[-1] % _LANES == 0}


class _HeadTiles(Rewriting):
    """Evaluates equations, those that make or merge heads by tiles."""

    def __init__(self, heads: set[tuple[int, ...]]):
        super().__init__()
        self.heads = heads

    def changes(self, eqn: Any) -> bool:
        if eqn.primitive.name != "reshape":
            return False
        few, many = sorted((eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape), key=len)
        return len(few) > 1 and many[-3:] in self.heads and few == (*many[:-2], many[-2] * many[-1])

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        if not self.changes(eqn):
            return bind(eqn, values)
        is_split = eqn.outvars[0].aval.ndim > eqn.invars[0].aval.ndim
        return [(_split if is_split else _merged)(*values, *(eqn.outvars if is_split else eqn.invars)[0].aval.shape)]


def _split(x: jax.Array, *shape: int) -> jax.Array:
    """Returns heads `[..., T, N, H]` of features."""
    *before, places, num_heads, size = shape
    tiles = x.reshape(*before, places // _PLACES, _PLACES, num_heads, size)
    by_head = jax.numpy.moveaxis(tiles, -2, -4).reshape(*before, num_heads, places, size)
    return jax.numpy.swapaxes(by_head, -2, -3)


def _merged(x: jax.Array, *shape: int) -> jax.Array:
    """Returns features `[..., T, N * H]` of heads."""
    *before, places, num_heads, size = shape
    tiles = jax.numpy.swapaxes(x, -2, -3).reshape(*before, num_heads, places // _PLACES, _PLACES, size)
    return jax.numpy.moveaxis(tiles, -4, -2).reshape(*before, places, num_heads * size)
