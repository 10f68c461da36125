"""Memory of a device: `estimate` by formula, `measure` on a compiled program or on live arrays, `compare`.

Arguments are read by group of the train state (`leaves`, `groups`), temporaries by what they are (`kinds`).
"""

from zero_jax.analysis.memory.arrays import ArraysReport, measure_arrays
from zero_jax.analysis.memory.compared import Comparison, ComparisonRow, compare
from zero_jax.analysis.memory.estimated import MemoryEstimate, Residuals, estimate, transformer_residuals
from zero_jax.analysis.memory.kinds import Temporary
from zero_jax.analysis.memory.leaves import ArgumentLeaf
from zero_jax.analysis.memory.measured import MemoryReport, measure
from zero_jax.hlo import Buffer, HeapLayout, layout_options, read_layout

__all__ = [
    "ArgumentLeaf",
    "ArraysReport",
    "Buffer",
    "Comparison",
    "ComparisonRow",
    "HeapLayout",
    "MemoryEstimate",
    "MemoryReport",
    "Residuals",
    "Temporary",
    "compare",
    "estimate",
    "layout_options",
    "measure",
    "measure_arrays",
    "read_layout",
    "transformer_residuals",
]
