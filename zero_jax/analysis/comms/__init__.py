"""Communication of a train step: `estimate` by formula, `measure` on the compiled program, `compare`.

`rows` are the collectives of a program with mesh axes, phase and param, which `names` reads from the program;
`findings` are what ZeRO does not need.
"""

from zero_jax.analysis.comms.estimated import CommsEstimate, EstimateRow, estimate, sharded_residual_bytes
from zero_jax.analysis.comms.findings import Finding
from zero_jax.analysis.comms.measured import CommsReport, Comparison, compare, measure
from zero_jax.analysis.comms.rows import Row, ScheduledOverlap

__all__ = [
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
