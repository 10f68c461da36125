"""Communication of a train step: `estimate` by formula, `measure` on the compiled program, `compare`.

`rows` are the collectives of a program with mesh axes, phase and param; `findings` are those that ZeRO
does not need.
"""

from zero_jax.analysis.comms.estimated import CommsEstimate, EstimateRow, estimate
from zero_jax.analysis.comms.findings import Finding
from zero_jax.analysis.comms.measured import CommsComparison, CommsReport, compare, measure
from zero_jax.analysis.comms.rows import Row, ScheduledOverlap
from zero_jax.analysis.memory.residuals import sharded_residual_bytes

Comparison = CommsComparison  # as it is called from outside, `zero.comms.Comparison`

__all__ = [
    "CommsComparison",
    "CommsEstimate",
    "CommsReport",
    "Comparison",
    "EstimateRow",
    "Finding",
    "Row",
    "ScheduledOverlap",
    "compare",
    "estimate",
    "measure",
    "sharded_residual_bytes",
]
