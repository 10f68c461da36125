"""The config of a training run."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Literal

from zero_jax.checkpoint import CheckpointConfig
from zero_jax.core.field_checks import check_fields, hinted
from zero_jax.core.signatures import check_is
from zero_jax.data import DataConfig
from zero_jax.trainer.optimizers import OptimizerConfig
from zero_jax.trainer.reporting.writers import WriterConfig
from zero_jax.trainer.run_folder import check_name
from zero_jax.training import ZeroConfig

# The fields of `ZeroConfig` that the trainer chooses where they are `auto`.
_AUTO_FIELDS, LEFT_OPEN = ("precision", "clip_norm"), "_left_to_the_trainer"
# The fields that are about text, or are the batches' own in a run of an `OwnModel`.
TEXT_FIELDS = ("data", "batch_size", "sample_every", "sample_prompt", "sample_tokens", "temperature", "top_k")
# Counts of steps are int32 on the devices.
_COUNTS = "devices replica model_axis pipe steps batch_size eval_every eval_batches log_every max_nonfinite_steps top_k"
_LOWEST = {
    **dict.fromkeys(_COUNTS.split(), 1),
    **dict.fromkeys(("seed", "sample_tokens", "sample_every", "temperature", "hang_seconds"), 0),
}
_HIGHEST = {"steps": 2**31 - 1, "sample_tokens": 2**20}
_PARTS = {
    "zero": ZeroConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "log": WriterConfig,
}


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config of a training run.

    The fields about text (`data`, `batch_size`, samples) are for a `Model`, and of no use to an `OwnModel`.

    Attributes:
      zero: stage, precision, microbatches and clipping. What a `ZeroConfig` leaves to `auto` is as in the default.
      data: the text.
      optimizer: how params are updated.
      checkpoint: when the state is saved, and what is kept.
      log: where figures go.
      devices: number of devices to use, the first ones there are; None takes all. A CPU stands in for as many as asked,
        8 by default.
      replica: size of the mesh axis `replica`, full copies of the sharded state; the axis `data` takes the rest.
      model_axis: size of the mesh axis `model`, tensor parallelism.
      pipe: stages of the pipeline that microbatches go through, each with layers of its own; 1 for none.
      steps: optimizer updates.
      epochs: passes over the text, or over batches that have a length, instead of `steps`.
      batch_size: sequences in a step, over all devices and microbatches.
      eval_every: steps between two measurements of the validation loss.
      eval_batches: batches in one such measurement, always the same ones; of text they are of `batch_size` sequences.
      log_every: steps between two progress lines.
      process_batches: what each of several processes gives of batches of your own: None for its part of the global
        batch, which is refused where it is equal to that of another process, `equal` for such parts, `whole` for the
        global batch, of which each process uses its part.
      seed: chooses the initial params, the batches and the sample.
      out: folder of all runs.
      name: name of the run's folder in `out`; None makes one up from model and stage.
      checkpoints: where checkpoints go, in a folder of the run's name: a folder or a URL such as gs://bucket/runs; None
        keeps them in the run's folder.
      resume: `auto` goes on from the newest complete checkpoint of the run of that name, or begins if there is none;
        `never` begins, in a folder of its own.
      init_from: a checkpoint (or a run's folder) to take the params from, with a fresh optimizer; not where the run is
        resumed.
      max_nonfinite_steps: steps in a row whose loss or gradients are not finite, after which the run stops.
      hang_seconds: seconds without a step after which stack traces are printed; after as many again the process ends
        with status 76. 0 waits for ever. Compiling and restoring may take ten times as long.
      profile_steps: steps to record a profile of, such as 10:15; none records nothing.
      sample_every: steps between two samples; 0 for one at the end alone.
      sample_prompt: text that a sample goes on from.
      sample_tokens: length of a sample; 0 for none.
      temperature: below 1 the sample sticks to likelier tokens, 0 always takes the likeliest.
      top_k: the sample is chosen among this many of the likeliest tokens; None means among all.

    Example:
      >>> zero.TrainConfig(zero=zero.ZeroConfig(stage=2), steps=1000).zero.precision
      'bf16'
    """

    zero: ZeroConfig = ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: WriterConfig = WriterConfig()
    devices: int | None = None
    replica: int = 1
    model_axis: int = 1
    pipe: int = 1
    steps: int = 800
    epochs: float | None = None
    batch_size: int = 8
    eval_every: int = 50
    eval_batches: int = 16
    log_every: int = 20
    process_batches: Literal["equal", "whole"] | None = None
    seed: int = 0
    out: str = "runs"
    name: str | None = None
    checkpoints: str | None = None
    resume: Literal["never", "auto"] = "never"
    init_from: str | None = None
    max_nonfinite_steps: int = 20
    hang_seconds: float = 600.0
    profile_steps: str | None = None
    sample_every: int = 0
    sample_prompt: str = "def "
    sample_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = 40

    def __post_init__(self):
        """Raises `ValueError` for invalid values."""
        check_fields(self, lowest=_LOWEST, highest=_HIGHEST)
        for name, kind in _PARTS.items():
            check_is(name, getattr(self, name), kind, remedy=f"give a {kind.__name__}")
        object.__setattr__(self, "zero", _chosen(self.zero))
        if self.name is not None:
            check_name(self.name)
        for name in ("out", "checkpoints", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}='' names no folder: give a path, or leave it out")
        if self.sample_tokens and not self.sample_prompt:
            raise ValueError("a sample needs a prompt to go on from: give a sample_prompt, or sample_tokens=0 for none")
        if self.epochs is not None:
            if self.epochs <= 0:
                raise ValueError(f"epochs={self.epochs}: give a positive number of passes, or leave it out")
            if self.steps != type(self).steps:
                raise ValueError(
                    f"epochs={self.epochs:g} and steps={self.steps} both say how long: leave out one of them"
                )
        # Raises for a text that is no range.
        self.profiled  # noqa: B018

    @property
    def profiled(self) -> range:
        """The steps to profile."""
        if self.profile_steps is None:
            return range(0)
        match = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        last = sys.maxsize if self.epochs is not None else self.steps  # which are not known yet
        if not match or not 1 <= int(match[1]) <= int(match[2]) <= last:
            raise ValueError(
                f"profile_steps={self.profile_steps!r}: give the first and the last step, such as 10:15, within the "
                f"run's 1:{self.steps}"
            )
        return range(int(match[1]), int(match[2]) + 1)


def _chosen(zero: ZeroConfig) -> ZeroConfig:
    """Returns a config with the trainer's choice for what it leaves to `auto`, which fields it remembers."""
    open_fields = [name for name in _AUTO_FIELDS if getattr(zero, name) == "auto"]
    if not open_fields:
        return zero
    chosen = dataclasses.replace(zero, **{name: getattr(TrainConfig.zero, name) for name in open_fields})
    object.__setattr__(chosen, LEFT_OPEN, open_fields)  # no field: it is neither compared nor saved
    return chosen
