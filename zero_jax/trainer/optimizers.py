"""Optimizers by name, with a learning-rate schedule and a moving average of the params.

Schedules are pure functions of the step, the same in a resumed run.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from zero_jax.core.field_checks import check_fields, check_value, hinted
from zero_jax.core.signatures import check_is
from zero_jax.core.tree import PathPatterns, leaf_names, path_name
from zero_jax.sharding.precision import floating_dtype
from zero_jax.training import check_decay, params_ema, round_state

# Gains and offsets have no weight decay. Embeddings are not orthogonalized by Muon: a gradient has single rows.
_NOT_DECAYED = ("scale", "bias", "norm")
_TABLES = ("embed", "embedding", "position")
_USUAL_WARMUP_STEPS = 50
# Defaults of the learning rate at the last step, as a share of the highest.
_USUAL_FINAL_SHARE = {"cosine": 0.1, "linear": 0.0, "wsd": 0.0}
_USUAL_DECAY_FRACTION = 0.1


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rate and its options.

    Attributes:
      optimizer: name of the optimizer: `adamw`, `sgd` (with momentum), `lion`, `adafactor` or `muon`.
      schedule: how the learning rate goes on after the warm-up: along a cosine or a line to the last step, `constant`,
        or `wsd` (warmup-stable-decay), which falls along a line in the last part of the run only.
      learning_rate: learning rate after the warm-up; None takes what is usual for the optimizer.
      warmup_steps: steps over which the learning rate rises from nothing; None takes 50, or a quarter of a shorter run.
      final_learning_rate: learning rate after the last step, as a share of `learning_rate`; None takes 0.1 for the
        cosine, 0 for `linear` and `wsd`.
      decay_fraction: share of the steps over which `wsd` falls; None takes 0.1.
      beta1: decay of the first moment (adamw, lion, and the leaves that muon leaves to Adam); None takes the usual.
      beta2: decay of the second moment (of the same optimizers); None takes the usual.
      epsilon: what keeps a division by zero away (adamw, adafactor, muon); None takes the usual.
      momentum: decay of the momentum (sgd, muon, adafactor); None takes the usual, for adafactor none at all.
      mu_dtype: dtype that the first moment or the momentum is kept in, `bfloat16` or `float32`; None takes that of the
        params that the optimizer updates.
      nu_dtype: dtype that the second moment is kept in, likewise (adamw, and the leaves that muon leaves to Adam).
      weight_decay: share of a matrix that each step takes away, times the learning rate.
      no_decay: regular expression of full leaf paths (`.*/embedding`) that weight decay leaves alone, besides vectors,
        scales, biases and norms.
      ema_decay: decay of an average of the params that is kept beside them for evaluation and export, such as 0.999;
        None keeps none.

    Example:
      >>> zero.trainer.OptimizerConfig(optimizer="lion").resolved(1000).learning_rate
      0.0005
    """

    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    learning_rate: float | None = None
    warmup_steps: int | None = None
    final_learning_rate: float | None = None
    decay_fraction: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    mu_dtype: str | None = None
    nu_dtype: str | None = None
    weight_decay: float = 0.1
    no_decay: str | None = None
    ema_decay: float | None = None

    def __post_init__(self):
        """Raises `ValueError` for invalid values, and for options that the optimizer does not have."""
        check_fields(self, lowest={"warmup_steps": 0, "weight_decay": 0})
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(
                f"learning_rate={self.learning_rate}: give a positive learning rate, or None for the usual"
            )
        self._check_schedule()
        self._check_options()
        if self.ema_decay is not None:
            check_decay(self.ema_decay)
        if self.no_decay is not None:
            # For its error.
            PathPatterns("no_decay", {self.no_decay: True})

    def resolved(self, num_steps: int) -> "OptimizerConfig":
        """Returns the config for a run of `num_steps` steps with what is usual for all that is None."""
        optimizer = _OPTIMIZERS[self.optimizer]
        usual: dict[str, Any] = {
            "learning_rate": optimizer.learning_rate,
            "warmup_steps": min(_USUAL_WARMUP_STEPS, num_steps // 4),
            "final_learning_rate": _USUAL_FINAL_SHARE.get(self.schedule),
            "decay_fraction": _USUAL_DECAY_FRACTION if self.schedule == "wsd" else None,
            **{name: default for name, (_, default) in optimizer.options.items()},
        }
        return dataclasses.replace(self, **{name: x for name, x in usual.items() if getattr(self, name) is None})

    def _check_schedule(self) -> None:
        share, fraction = self.final_learning_rate, self.decay_fraction
        if share is not None and self.schedule == "constant":
            raise ValueError(
                f"final_learning_rate={share}: the schedule 'constant' does not fall; leave it out, or take another "
                "schedule, such as 'linear'"
            )
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"final_learning_rate={share}: give a share of the highest, at least 0 and at most 1")
        if fraction is not None and self.schedule != "wsd":
            raise ValueError(
                f"decay_fraction={fraction} is for the schedule 'wsd'; {self.schedule!r} has no such phase: leave it "
                "out"
            )
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"decay_fraction={fraction}: give a share of the steps, above 0 and at most 1")

    def _check_options(self) -> None:
        options = _OPTIMIZERS[self.optimizer].options
        for name in _OPTIONS:
            value = getattr(self, name)
            if value is None:
                continue
            if name not in options:
                names = ", ".join(options)
                raise ValueError(f"{name}={value}: the optimizer {self.optimizer!r} has no {name}; it knows {names}")
            if name in _DTYPES:
                self._check_dtype(name, value)
            elif not (value > 0 if name == "epsilon" else 0 <= value < 1):
                wanted = "a positive number" if name == "epsilon" else "a number from 0 to below 1"
                raise ValueError(f"{name}={value}: give {wanted}, or None for the usual")

    def _check_dtype(self, name: str, value: str) -> None:
        """Raises `ValueError` for a dtype that loses moments: of no floats, of a small range, or of too few bits."""
        dtype = floating_dtype(value)
        if dtype is None or dtype.name not in _MOMENT_DTYPES:
            why = "is no floating dtype"
            if dtype is not None:
                is_wide = dtype.itemsize > 4
                why = "is wider than the params" if is_wide else "has not the range of float32, and would lose moments"
            give = " or ".join(map(repr, _MOMENT_DTYPES))
            raise ValueError(f"{name}={value!r} {why}: give {give}, or None for that of the params")
        kind = _OPTIMIZERS[self.optimizer]
        for momentum in kind.momenta if name == "mu_dtype" else ():
            decay = getattr(self, momentum)
            decay = kind.options[momentum][1] if decay is None else decay
            if decay is None:
                raise ValueError(
                    f"{name}={value!r}: {self.optimizer!r} has no momentum of its own: give {momentum} too"
                )
            if dtype == jnp.bfloat16 and 1 - decay < 2**-8:
                raise ValueError(
                    f"{name}={value!r} with {momentum}={decay}: a step changes less than the 8 bits of bfloat16 show, "
                    f"so that the moment stands still: give a {momentum} of 0.996 at most, or leave {name} out"
                )


def make_schedule(config: OptimizerConfig, *, num_steps: int) -> optax.Schedule:
    """Makes the schedule of a run: a function from the updates so far to the learning rate of the next one.

    Warmup-stable-decay (Hu et al. 2024, "MiniCPM", section 4) stays at the highest rate until the last part of the run,
    in which it falls, here along a line. What comes before does not depend on `num_steps`: a run can go on from there.
    """
    check_value("num_steps", num_steps, int)
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: give at least 1")
    config = config.resolved(num_steps)
    schedule, warmup_steps, peak = config.schedule, config.warmup_steps, config.learning_rate
    assert warmup_steps is not None and peak is not None
    if warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} leaves nothing of a run of {num_steps} steps: make it smaller, "
            f"{num_steps // 10} for example, or train for longer"
        )
    # A rate of exactly 0 would waste the first step.
    start, end = peak / (warmup_steps + 1), peak * (config.final_learning_rate or 0.0)
    if schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup_steps, num_steps, end)
    parts = [optax.linear_schedule(start, peak, warmup_steps)] if warmup_steps else []
    boundaries = [warmup_steps] if warmup_steps else []
    if schedule == "linear":
        parts.append(optax.linear_schedule(peak, end, num_steps - warmup_steps))
    else:
        parts.append(optax.constant_schedule(peak))
    if schedule == "wsd":
        fraction = config.decay_fraction
        assert fraction is not None
        decay_steps = max(1, round(num_steps * fraction))  # the share of a short run may round to 0
        if warmup_steps + decay_steps > num_steps:
            raise ValueError(
                f"decay_fraction={fraction} of {num_steps} steps are {decay_steps}, which leaves no room for "
                f"warmup_steps={warmup_steps}: give at most {(num_steps - warmup_steps) / num_steps:.3g}"
            )
        parts.append(optax.linear_schedule(peak, end, decay_steps))
        boundaries.append(num_steps - decay_steps)
    return optax.join_schedules(parts, boundaries)


def make_optimizer(config: OptimizerConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Makes the optimizer for a run of `num_steps` steps.

    Its `init` raises `ValueError` where `no_decay` matches the path of no param.

    Raises:
      ValueError: the warm-up, or warm-up and decay, are not over when the run is.

    Example:
      >>> tx = zero.trainer.make_optimizer(zero.trainer.OptimizerConfig(optimizer="sgd"), num_steps=100)
      >>> hasattr(tx, "update")
      True
    """
    check_is("config", config, OptimizerConfig, remedy="give a zero.trainer.OptimizerConfig")
    optimizer, usual = _OPTIMIZERS[config.optimizer], config.resolved(num_steps)
    options = {keyword: getattr(usual, name) for name, (keyword, _) in optimizer.options.items()}
    nu_dtype = options.pop("nu_dtype", None)  # not optax's to cast
    mask = functools.partial(decay_mask, no_decay=config.no_decay)
    schedule = make_schedule(config, num_steps=num_steps)
    tx = optimizer.make(schedule, weight_decay=config.weight_decay, mask=mask, **options)
    if nu_dtype is not None:
        tx = round_state(tx, "nu", nu_dtype)
    # Last, so that the average is of the params after the update.
    if config.ema_decay is not None:
        tx = optax.chain(tx, params_ema(config.ema_decay))
    return tx if config.no_decay is None else _with_checked_paths(tx, config.no_decay)


def _with_checked_paths(tx: optax.GradientTransformation, no_decay: str) -> optax.GradientTransformation:
    """Raises in `init` where `no_decay` matches no param; the masks themselves get parts of the params only."""

    def init(params: Any) -> Any:
        PathPatterns("no_decay", {no_decay: True}).check_matched(leaf_names(params))
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(tx).update)


def decay_mask(params: Any, *, no_decay: str | None = None) -> Any:
    """Returns for each param whether weight decay applies: not to vectors, scales, biases and matches of `no_decay`."""

    def is_decayed(path: Any, x: Any) -> bool:
        excluded = no_decay is not None and re.fullmatch(no_decay, path_name(path)) is not None
        return x.ndim > 1 and not _is_named(path, _NOT_DECAYED) and not excluded

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _muon_dims(path: Any, x: Any) -> MuonDimensionNumbers | None:
    """Returns the dims of a param that Muon orthogonalizes: the last two of (stacked) matrices, none of tables."""
    is_matrix = x.ndim > 1 and not _is_named(path, _NOT_DECAYED + _TABLES)
    return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1) if is_matrix else None


def _is_named(path: tuple[Any, ...], names: tuple[str, ...]) -> bool:
    return any(part == name or part.endswith("_" + name) for part in path_name(path).split("/") for name in names)


def _sgd(schedule: Any, *, weight_decay: float, mask: Any, **options: Any) -> optax.GradientTransformation:
    # Before `sgd`, so that the decay is scaled by the learning rate.
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), optax.sgd(schedule, nesterov=True, **options))


def _adafactor(schedule: Any, *, weight_decay: float, mask: Any, **options: Any) -> optax.GradientTransformation:
    # Its own weight decay is not scaled by the learning rate, unlike that of the others here.
    decay: Any = lambda step: weight_decay * schedule(step)  # noqa: E731
    # With `multiply_by_parameter_scale` the learning rate would be a share of the RMS of each param.
    options |= {"weight_decay_rate": decay, "weight_decay_mask": mask, "multiply_by_parameter_scale": False}
    return optax.adafactor(schedule, **options)


def _muon(schedule: Any, *, weight_decay: float, mask: Any, **options: Any) -> optax.GradientTransformation:
    options |= {"weight_decay": weight_decay, "weight_decay_mask": mask}
    options["muon_weight_dimension_numbers"] = functools.partial(jax.tree_util.tree_map_with_path, _muon_dims)
    # With `consistent_rms` Muon takes steps as large as AdamW's, so that one learning rate serves both kinds of leaves.
    return muon(schedule, consistent_rms=0.2, **options)


class _Optimizer(NamedTuple):
    learning_rate: float  # its usual learning rate
    momenta: tuple[str, ...]  # the options that are decays of what `mu_dtype` is of
    options: Mapping[str, tuple[str, Any]]  # for each option optax's name of it and a default
    make: Callable[..., optax.GradientTransformation]  # what makes it


_MOMENT_DTYPES = ("bfloat16", "float32")
_DTYPES = ("mu_dtype", "nu_dtype")
_OPTIONS = ("beta1", "beta2", "epsilon", "momentum", *_DTYPES)
_MOMENTS = {"mu_dtype": ("mu_dtype", None), "nu_dtype": ("nu_dtype", None)}
_OPTIMIZERS: Mapping[str, _Optimizer] = {
    # A `beta2` of 0.95, as GPT-3 and Llama have it: with optax's 0.999 a burst of large gradients is felt for longer.
    "adamw": _Optimizer(
        3e-3,
        ("beta1",),
        {"beta1": ("b1", 0.9), "beta2": ("b2", 0.95), "epsilon": ("eps", 1e-8), **_MOMENTS},
        optax.adamw,
    ),
    "sgd": _Optimizer(
        0.3, ("momentum",), {"momentum": ("momentum", 0.9), "mu_dtype": ("accumulator_dtype", None)}, _sgd
    ),
    "lion": _Optimizer(
        5e-4, ("beta2",), {"beta1": ("b1", 0.9), "beta2": ("b2", 0.99), "mu_dtype": ("mu_dtype", None)}, optax.lion
    ),
    "adafactor": _Optimizer(
        3e-3,
        ("momentum",),
        {"epsilon": ("eps", 1e-30), "momentum": ("momentum", None), "mu_dtype": ("dtype_momentum", None)},
        _adafactor,
    ),
    "muon": _Optimizer(
        8e-3,
        ("momentum", "beta1"),
        {
            "momentum": ("beta", 0.95),
            "beta1": ("adam_b1", 0.9),
            "beta2": ("adam_b2", 0.999),
            "epsilon": ("eps", 1e-8),
            **_MOMENTS,
        },
        _muon,
    ),
}
