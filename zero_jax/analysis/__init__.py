"""Memory and traffic of a train step: estimated by formula, measured on the compiled program, compared.

`memory` and `comms` each have `estimate`, `measure` and `compare`; both measure through `zero_jax.hlo`, and read a
program's arguments as `leaves` of the train state. `trace_loss` counts residuals, traffic over `model` and operations
on the trace of a loss function. `paper` has the ZeRO paper's tables and configurations; `figures` plots. `summary`
lists and draws what a state holds and where.
"""

from zero_jax.analysis import comms, figures, memory, paper
from zero_jax.analysis.contents import StateSummary, summary
from zero_jax.analysis.paper import PAPER_CONFIGS
from zero_jax.training import LossTrace, trace_loss
