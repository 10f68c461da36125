"""Memory and traffic of a train step: estimated by formula, measured on the compiled program, compared.

`memory` and `comms` each have `estimate`, `measure` and `compare`; both measure through `zero_jax.hlo`. `trace_loss`
counts residuals, traffic over `model` and operations on the trace of a loss function. `paper` has the ZeRO paper's
tables, computed from `formulas`.
"""

from zero_jax.analysis import comms, figures, formulas, memory, paper
from zero_jax.analysis.loss_trace import LossTrace, trace_loss
from zero_jax.analysis.paper_configs import PAPER_CONFIGS

__all__ = ["PAPER_CONFIGS", "LossTrace", "comms", "figures", "formulas", "memory", "paper", "trace_loss"]
