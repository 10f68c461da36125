"""Memory of a device: `estimate` by formula, `measure` on a compiled program or on live arrays, `compare`.

Arguments are summed by group of the train state (`groups`), temporaries by what they are (`measured`).
"""

from zero_jax.analysis.leaves import ArgumentLeaf
from zero_jax.analysis.memory.arrays import ArraysReport, ComparisonRow, MemoryComparison, compare, measure_arrays
from zero_jax.analysis.memory.estimated import MemoryEstimate, estimate
from zero_jax.analysis.memory.measured import MemoryReport, Temporary, measure
from zero_jax.analysis.memory.residuals import TransformerResiduals, transformer_residuals
from zero_jax.analysis.memory.stages import StageEstimates, estimate_stages
from zero_jax.hlo import Buffer, HeapLayout, layout_options, read_layout

# As they are called from outside: `zero.memory.Comparison`, `zero.memory.Residuals`.
Comparison, Residuals = MemoryComparison, TransformerResiduals

__all__ = [
    "ArgumentLeaf",
    "ArraysReport",
    "Buffer",
    "Comparison",
    "ComparisonRow",
    "HeapLayout",
    "MemoryComparison",
    "MemoryEstimate",
    "MemoryReport",
    "Residuals",
    "StageEstimates",
    "Temporary",
    "TransformerResiduals",
    "compare",
    "estimate",
    "estimate_stages",
    "layout_options",
    "measure",
    "measure_arrays",
    "read_layout",
    "transformer_residuals",
]
