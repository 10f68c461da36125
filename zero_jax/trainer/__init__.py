"""The training loop of `zero-jax train`, for any model.

`prepare` checks a `TrainConfig` and a `Model` of text, or an `OwnModel` with its batches, and makes a `Run`; `execute`
runs it: it resumes from a checkpoint, steps, validates, saves, samples text and stops on signals. `train` does both,
`Trainer` for an `OwnModel`. `inputs/` has what differs between the two: batches and their positions, figures, samples.
`reporting/` shows and records the metrics: console, JSON Lines, TensorBoard, curves.
"""

from zero_jax.trainer.callbacks import Callback
from zero_jax.trainer.capacity import tree_bytes
from zero_jax.trainer.checkpoints import ResumeError
from zero_jax.trainer.evaluation import Evaluation, evaluate
from zero_jax.trainer.inputs.own import OwnModel
from zero_jax.trainer.inputs.sources import first_batch
from zero_jax.trainer.inputs.text import Sampler
from zero_jax.trainer.optimizers import OptimizerConfig, make_optimizer
from zero_jax.trainer.reporting.curves import X_LABELS, RunRecords, plot_runs, read_run
from zero_jax.trainer.reporting.trackers import TrackedRun, Tracker
from zero_jax.trainer.result import EXIT_STATUS, TrainResult
from zero_jax.trainer.run import Model, Run, prepare
from zero_jax.trainer.run_folder import CONFIG_TITLE, is_run_config
from zero_jax.trainer.train_config import TEXT_FIELDS, TrainConfig
from zero_jax.trainer.trainer import Trainer, execute, train

__all__ = [
    "CONFIG_TITLE",
    "EXIT_STATUS",
    "TEXT_FIELDS",
    "X_LABELS",
    "Callback",
    "Evaluation",
    "Model",
    "OptimizerConfig",
    "OwnModel",
    "ResumeError",
    "Run",
    "RunRecords",
    "Sampler",
    "TrackedRun",
    "Tracker",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "evaluate",
    "execute",
    "first_batch",
    "is_run_config",
    "make_optimizer",
    "plot_runs",
    "prepare",
    "read_run",
    "train",
    "tree_bytes",
]
