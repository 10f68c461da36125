"""What the temporaries of a program are: gradients, gathered params, residuals, as far as names and shapes tell."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from zero_jax.analysis.memory.leaves import ArgumentLeaf, group_of
from zero_jax.hlo import KINDS, Array, Buffer, Heap, arrays, gathered_path, parse_shape, phase_of

TEMPORARIES = ("grads", "gathered params", "residuals", "copied params", "collective buffers", "other temporaries")
# A gradient of the gather of a param, in contrast to a gather that is done again in the backward pass.
_GRAD_OF_GATHER = re.compile(r"transpose\([^/]*gather:")
# The groups that a loss function uses, and that are gathered for it.
_PARAMS = ("params", "master", "model_state")
# Smaller arrays than these share their dims with too much.
_SMALLEST_PARAM = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temporary:
    """A buffer that is alive at the peak, and which of `TEMPORARIES` it is."""

    kind: str
    buffer: Buffer


def classify(heap: Heap, leaves: Sequence[ArgumentLeaf]) -> tuple[Temporary, ...]:
    """Says of each temporary at the peak what it is, as far as its name, its readers and its shape tell."""
    params = [leaf for leaf in leaves if leaf.group in _PARAMS]
    local = {dims for leaf in params for dims in _dims_of_grads(leaf.dims)}
    whole = {dims for leaf in params for dims in _dims_of_grads(leaf.whole_dims or leaf.dims)}
    is_collective = re.compile(rf"({KINDS})(-start|-done)?")

    def is_gathered(one: Buffer, dims: tuple[int, ...]) -> bool:
        gathers = bool(gathered_path(one.op_name)) or one.op_name.endswith("sharding_constraint")
        scoped = (gathers or one.opcode.startswith("all-gather")) and not _GRAD_OF_GATHER.search(one.op_name)
        return dims in whole and (dims not in local or one.opcode.startswith("all-gather")) and scoped

    def is_grad(one: Buffer, dims: tuple[int, ...]) -> bool:
        written = phase_of(one.op_name) in ("backward", "") and "rematted_computation" not in one.op_name
        return dims in whole | local and written and phase_of(one.last_read_by) != "forward"

    def is_copied(one: Buffer, dims: tuple[int, ...]) -> bool:
        path = "/".join(re.findall(r"[^.\[\]'\"\\]+", one.op_name))
        is_argument = "(" not in one.op_name and group_of(path) in _PARAMS
        cast = one.op_name.endswith("convert_element_type") and phase_of(one.op_name) == "update" and dims in local
        # A loop over stacked layers takes the params of one layer out of the stack.
        sliced = "dynamic_index_in_dim" in one.op_name and dims in whole | local
        return is_argument or cast or sliced

    def is_residual(one: Buffer, _: tuple[int, ...]) -> bool:
        return phase_of(one.op_name) == "forward" and phase_of(one.last_read_by) == "backward"

    def is_collective_buffer(one: Buffer, _: tuple[int, ...]) -> bool:
        return bool(is_collective.fullmatch(one.opcode))

    rules: tuple[tuple[str, Callable[[Buffer, tuple[int, ...]], bool]], ...] = (
        ("copied params", is_copied),
        ("gathered params", is_gathered),
        ("grads", is_grad),
        ("residuals", is_residual),
        ("collective buffers", is_collective_buffer),
        ("other temporaries", lambda one, dims: True),
    )

    def kind_of(one: Buffer) -> str:
        (array,) = arrays(parse_shape(one.shape))
        return next(kind for kind, holds in rules if holds(one, _dims(array.dims)))

    return tuple(Temporary(kind=kind_of(one), buffer=one) for one in heap.live)


def _dims(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims without those of 1, in any order: XLA transposes and reshapes gradients as it likes."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def _dims_of_grads(dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The dims of a param, and of one layer of it if it may be a stack of layers."""
    found = [dims, dims[1:]] if len(dims) >= 3 else [dims]
    return {_dims(one) for one in found if Array("f32", one, "", 0, 0).unpadded_bytes >= 4 * _SMALLEST_PARAM}
