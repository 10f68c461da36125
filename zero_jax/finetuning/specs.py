"""How adapters and a quantized base are sharded over the model's own mesh axes: as the plain params are."""

from __future__ import annotations

from jax.sharding import Mesh

from zero_jax.finetuning.quantization import QuantizedWeight
from zero_jax.finetuning.targets import Target
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import Dims


def adapter_dims(target: Target, dims: Dims) -> dict[str, Dims]:
    """Returns the axes of the dims of an adapter's arrays: those of the weight's dims, and none of the rank."""
    stack, ins, outs = (
        tuple(axes for axes, label in zip(dims, target.labels, strict=True) if label == side) for side in "sio"
    )
    return {"a": (*stack, *ins, ()), "b": (*stack, (), *outs), "magnitude": (*stack, *outs)}


def quantized_dims(target: Target, dims: Dims, stored: QuantizedWeight, mesh: Mesh) -> dict[str, Dims]:
    """Returns the axes of the dims of a quantized weight's arrays.

    Several dims of a weight are one of the matrix that is stored, which can have the axes of the first of them. Rows
    are left unsharded where the axes do not divide the blocks, and those of NF4 always: the two rows of a code are far
    from each other.
    """
    num_stack, num_rows = target.num_stack, target.num_first
    stack, rows, columns = dims[:num_stack], dims[num_stack:][:num_rows], dims[num_stack:][num_rows:]
    row, column = (first if not any(rest) else () for first, *rest in (rows, columns))
    row = row if stored.format == "int8" and stored.scales.shape[-2] % axis_size(mesh, row) == 0 else ()
    found = {"codes": (*stack, row, column), "scales": (*stack, row, column)}
    if stored.steps is not None:
        divides = stored.steps.shape[-1] % axis_size(mesh, column) == 0
        found["steps"] = (*stack, row, column if divides else ())
    return found
