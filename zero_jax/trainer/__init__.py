"""The training loop of `zero-jax train`, for any model.

`prepare` checks a `TrainConfig` and a `Model` and makes a `Run`; `execute` runs it: it resumes from a checkpoint,
steps, validates, saves, samples text and stops on signals. `train` does both. `reporting/` shows and records the
metrics: console, JSON Lines, TensorBoard, curves.
"""

from zero_jax.trainer.capacity import tree_bytes
from zero_jax.trainer.checkpoints import ResumeError
from zero_jax.trainer.loop import EXIT_STATUS, execute, train
from zero_jax.trainer.optimizers import OptimizerConfig, make_optimizer
from zero_jax.trainer.reporting.curves import X_LABELS, RunRecords, plot_runs, read_run
from zero_jax.trainer.result import TrainResult
from zero_jax.trainer.run import Model, Run, TrainConfig, prepare
from zero_jax.trainer.run_folder import discarding, hold

__all__ = [
    "EXIT_STATUS",
    "X_LABELS",
    "Model",
    "OptimizerConfig",
    "ResumeError",
    "Run",
    "RunRecords",
    "TrainConfig",
    "TrainResult",
    "discarding",
    "execute",
    "hold",
    "make_optimizer",
    "plot_runs",
    "prepare",
    "read_run",
    "train",
    "tree_bytes",
]
