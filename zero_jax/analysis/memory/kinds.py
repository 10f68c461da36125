"""Classifies the temporaries of a program by names and shapes: gradients, gathered params, residuals and others."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from zero_jax.analysis.leaves import ArgumentLeaf, dims_key, group_of, path_of
from zero_jax.hlo import COLLECTIVES, Buffer, Heap, arrays, gathered_path, parse_shape, phase_of, split_opcode

TEMPORARIES = ("grads", "gathered params", "residuals", "copied params", "collective buffers", "other temporaries")
# The gradient of a param's gather, not the gather that is repeated in the backward pass.
_GRAD_OF_GATHER = re.compile(r"transpose\([^/]*gather:")
# The groups that a loss function uses, and that are gathered for it.
_PARAMS = ("params", "master", "model_state")
# Dims of smaller arrays are ambiguous.
_SMALLEST_PARAM = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temporary:
    """A buffer that is alive at the peak, and which of `TEMPORARIES` it is."""

    kind: str
    buffer: Buffer


def classify(heap: Heap, leaves: Sequence[ArgumentLeaf]) -> tuple[Temporary, ...]:
    """Returns the kind of each temporary at the peak, by its name, its readers and its shape."""
    params = [leaf for leaf in leaves if leaf.group in _PARAMS]
    local = {dims for leaf in params for dims in _dims_of_grads(leaf.dims)}
    gathered = {dims for leaf in params for dims in _dims_of_grads(leaf.global_dims)}

    def is_gathered(buffer: Buffer, dims: tuple[int, ...]) -> bool:
        gathers = bool(gathered_path(buffer.op_name)) or buffer.op_name.endswith("sharding_constraint")
        scoped = (gathers or buffer.opcode.startswith("all-gather")) and not _GRAD_OF_GATHER.search(buffer.op_name)
        return dims in gathered and (dims not in local or buffer.opcode.startswith("all-gather")) and scoped

    def is_grad(buffer: Buffer, dims: tuple[int, ...]) -> bool:
        written = phase_of(buffer.op_name) in ("backward", "") and "rematted_computation" not in buffer.op_name
        return dims in gathered | local and written and phase_of(buffer.last_read_by) != "forward"

    def is_copied(buffer: Buffer, dims: tuple[int, ...]) -> bool:
        is_argument = "(" not in buffer.op_name and group_of(path_of(buffer.op_name)) in _PARAMS
        cast = (
            buffer.op_name.endswith("convert_element_type") and phase_of(buffer.op_name) == "update" and dims in local
        )
        # A loop over stacked layers takes the params of one layer out of the stack.
        sliced = "dynamic_index_in_dim" in buffer.op_name and dims in gathered | local
        return is_argument or cast or sliced

    def is_residual(buffer: Buffer, _: tuple[int, ...]) -> bool:
        return phase_of(buffer.op_name) == "forward" and phase_of(buffer.last_read_by) == "backward"

    rules: tuple[tuple[str, Callable[[Buffer, tuple[int, ...]], bool]], ...] = (
        ("copied params", is_copied),
        ("gathered params", is_gathered),
        ("grads", is_grad),
        ("residuals", is_residual),
        ("collective buffers", lambda buffer, _: split_opcode(buffer.opcode)[0] in COLLECTIVES),
        ("other temporaries", lambda buffer, dims: True),
    )

    def kind_of(buffer: Buffer) -> str:
        (array,) = arrays(parse_shape(buffer.shape))
        return next(kind for kind, holds in rules if holds(buffer, dims_key(array.dims)))

    return tuple(Temporary(kind=kind_of(buffer), buffer=buffer) for buffer in heap.live)


def _dims_of_grads(dims: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Returns the dims of a param, and of one layer of it if it may be a stack of layers."""
    shapes = [dims, dims[1:]] if len(dims) >= 3 else [dims]
    return {dims_key(shape) for shape in shapes if math.prod(shape) >= _SMALLEST_PARAM}
