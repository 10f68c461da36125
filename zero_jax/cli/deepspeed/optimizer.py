"""Rules of the table: what becomes of a key of the optimizer or the learning-rate schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.cli.deepspeed.rows import DeepSpeedValues, KeyRow, Kind, Rule, check
from zero_jax.cli.deepspeed.rules import differs, no_meaning, same_if, to
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import shown
from zero_jax.trainer import OptimizerConfig

PARAMS = "optimizer.params."
SCHEDULE = "scheduler.params."
_ONE_BIT = (
    "zero.quantize_grads sends gradients as int8 or int4 for any optimizer, with zero.quantize_error_feedback between "
    "replicas"
)
# The names that DeepSpeed knows and zero_jax does not have with the same meaning.
_OTHERS: Mapping[str, str] = {
    "lamb": "`zero-jax train` has no LAMB; a loop of your own takes optax.lamb, whose trust ratio has no max_coeff and "
    "min_coeff",
    "fusedlamb": "as Lamb",
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _ONE_BIT),
    "muon": "optimizer = 'muon' here scales updates as AdamW does (consistent_rms), and chooses its matrices by path",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "zero_jax has no muP"),
    "adagrad": "a loop of your own takes optax.adagrad",
    "rmsprop": "a loop of your own takes optax.rmsprop",
    "adafactor": "optimizer = 'adafactor' here does not scale by the params' size, and has other defaults",
}
_ADAM = ("adam", "adamw")
_TRANSLATED = (*_ADAM, "lion", "sgd")
# Params whose value can make an optimizer another one.
_BLOCKING = {"bias_correction", "adam_w_mode", "amsgrad", "nesterov", "dampening", "maximize", "momentum"}
_NESTEROV = "the momentum of 'sgd' is Nesterov's here"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ALL = tuple(_SCHEDULES)
_STATES = "the optimizer's state is float32 here"
_LINEAR = "the rise is linear here"
_FROM_ZERO = "the rise starts at 0 here"


@dataclasses.dataclass(frozen=True)
class Param:
    """A param of an optimizer or a schedule.

    Attributes:
      kind: the kind of its value.
      owners: the optimizers or schedules that have it.
      rule: makes its row for these.
      setting: what to set here where another program fills in the value; "" leaves that to the rule.
      absent: the owners whose default matters where the file does not have it.
    """

    kind: Kind
    owners: tuple[str, ...]
    rule: Rule
    setting: str = "it has no counterpart"
    absent: tuple[str, ...] = ()


def _name(values: DeepSpeedValues) -> str | None:
    kind = values.get("optimizer.type")
    return kind.lower() if isinstance(kind, str) else None


def optimizer_type(values: DeepSpeedValues, key: str) -> KeyRow:
    """The optimizer; it is translated where all its params are."""
    name = _name(values)
    if name not in _TRANSLATED:
        note = "the optimizer is of the program that reads this file: set [optimizer]"
        if name is not None:
            hint = did_you_mean(name, (*_OTHERS, *_TRANSLATED))
            note = _OTHERS.get(name, f"no optimizer of DeepSpeed's own: {hint}set [optimizer]")
        return values.row(key, "not translated", note)
    blocking = _blocking(values)
    if blocking:
        return values.row(key, "not translated", f"with {', '.join(blocking)} it is another optimizer than those here")
    kind = "adamw" if name in _ADAM else name
    settings = {name.removeprefix("optimizer."): value for row in _rows(values) for name, value in row.settings.items()}
    check("optimizer.params", lambda: OptimizerConfig(**{"optimizer": kind, **settings}))
    note = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if name == "adam" else ""
    return values.row(key, "translated", note, {"optimizer.optimizer": kind})


def optimizer_param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """A param of the optimizer."""
    if _name(values) not in _TRANSLATED:
        return _untranslated(values, key, f"of {values.get('optimizer.type') or 'an optimizer without a type'}")
    row = _row(values, key)
    if row is not None and _blocking(values):
        return _untranslated(values, key, row.reason or "of that optimizer")
    return row


def _untranslated(values: DeepSpeedValues, key: str, reason: str) -> KeyRow | None:
    return values.row(key, "not translated", reason) if key in values else None


def _row(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """Makes the row of a param of an optimizer that both have, whatever its other params."""
    name, param = _name(values), OPTIMIZER_PARAMS[key.removeprefix(PARAMS)]
    if key not in values and name not in param.absent:
        return None
    if values.is_auto(key):
        return values.auto(key, param.setting)
    if name not in param.owners:
        return values.row(key, "not translated", f"it is not of {values.get('optimizer.type')}")
    return param.rule(values, key)


def _rows(values: DeepSpeedValues) -> list[KeyRow]:
    """Makes the rows of the optimizer's params, those of the file first."""
    known = [PARAMS + name for name in OPTIMIZER_PARAMS]
    keys = [key for key in values.by_key if key in known] + [key for key in known if key not in values]
    return [row for key in keys if (row := _row(values, key)) is not None]


def _blocking(values: DeepSpeedValues) -> list[str]:
    """Returns the params that make the optimizer another one than those here."""
    rows = [row for row in _rows(values) if row.status == "not translated"]
    return [row.key for row in rows if row.key.removeprefix(PARAMS) in _BLOCKING]


def _learning_rate(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR") and _max_rate(values)[0] is not None:
        return values.row(key, "no meaning", "the scheduler sets the rate")
    rate = float(values.get(key, 1e-3))
    return values.row(key, "translated", values.default_of(key), {"optimizer.learning_rate": rate})


def _betas(values: DeepSpeedValues, key: str) -> KeyRow:
    betas = values.get(key, (0.9, 0.999))
    if len(betas) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in betas):
        raise ValueError(f"{key} = {shown(betas)}: give two numbers, such as [0.9, 0.999]")
    beta1, beta2 = map(float, betas)
    return values.row(key, "translated", values.default_of(key), {"optimizer.beta1": beta1, "optimizer.beta2": beta2})


def _weight_decay(values: DeepSpeedValues, key: str) -> KeyRow:
    is_torch = _name(values) == "adamw" and values.get(f"{PARAMS}torch_adam") is True
    decay = float(values.get(key, 0.01 if is_torch else 0.0))
    note = (
        "vectors, scales, biases and norms are not decayed here (optimizer.no_decay adds more); DeepSpeed decays all "
        "of a param group"
    )
    return values.row(key, "translated", note if decay else values.default_of(key), {"optimizer.weight_decay": decay})


def _momentum(values: DeepSpeedValues, key: str) -> KeyRow:
    momentum = values.get(key, 0.0)
    if momentum and values.get(f"{PARAMS}nesterov") is not True:
        return values.row(key, "not translated", _NESTEROV)
    return values.row(key, "translated", values.default_of(key, "PyTorch"), {"optimizer.momentum": float(momentum)})


def _adam_w_mode(values: DeepSpeedValues, key: str) -> KeyRow:
    if _name(values) == "adamw" or values.get(key) is not False:
        return values.row(key, "same", "weight decay is decoupled")
    if not values.get(f"{PARAMS}weight_decay"):
        return values.row(key, "same", "without weight decay, Adam and AdamW are one")
    return values.row(key, "not translated", "weight decay in the gradient (L2) does not exist here")


def _only(value: Any, reason: str) -> Rule:
    """The rule of a param that has one value here."""
    return same_if(lambda values, key: values.get(key) == value, reason)


def _max_grad_norm(values: DeepSpeedValues, key: str) -> KeyRow:
    note = "DeepSpeed refuses it: it is gradient_clipping there, zero.clip_norm here"
    return values.row(key, "not translated" if values.get(key) else "off", note)


def _is_nesterov(values: DeepSpeedValues, key: str) -> bool:
    return values.get(key) is True or not values.get(f"{PARAMS}momentum")


def _is_set(values: DeepSpeedValues, key: str) -> bool:
    return bool(values.get(key))


_OTHER_PARAMS = (
    "max_coeff min_coeff freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold "
    "var_freeze_step var_update_scaler local_step_scaler local_step_clipper muon_lr adam_lr ns_method per_head_muon "
    "eps_inside_sqrt lr_decay initial_accumulator_value alpha centered rho"
)
_OF_PYTORCH = "an implementation of PyTorch or CUDA"
_IMPLEMENTATION = "torch_adam set_grad_none fused foreach capturable differentiable"
OPTIMIZER_PARAMS: Mapping[str, Param] = {
    "lr": Param("number", _TRANSLATED, _learning_rate, "optimizer.learning_rate", absent=_TRANSLATED),
    "betas": Param("list", (*_ADAM, "lion"), _betas, "optimizer.beta1 and beta2", absent=_ADAM),
    "eps": Param("number", _ADAM, to("optimizer.epsilon", float, on=DeepSpeedValues.__contains__), "optimizer.epsilon"),
    "weight_decay": Param("number", _TRANSLATED, _weight_decay, "optimizer.weight_decay", absent=_TRANSLATED),
    "momentum": Param("number", ("sgd",), _momentum, "optimizer.momentum", absent=("sgd",)),
    "nesterov": Param("bool", _TRANSLATED, same_if(_is_nesterov, _NESTEROV)),
    "adam_w_mode": Param("bool", _TRANSLATED, _adam_w_mode),
    "bias_correction": Param("bool", _TRANSLATED, _only(True, "moments are always corrected for their bias here")),
    "amsgrad": Param("bool", _TRANSLATED, _only(False, "there is no AMSGrad here")),
    "dampening": Param("number", _TRANSLATED, _only(0, "there is no dampening here")),
    "maximize": Param("bool", _TRANSLATED, _only(False, "losses are minimized here")),
    "max_grad_norm": Param("number", _TRANSLATED, _max_grad_norm),
    "fp32_optimizer_states": Param("bool", _TRANSLATED, same_if(_is_set, _STATES, _STATES)),
    **dict.fromkeys(_IMPLEMENTATION.split(), Param("bool", _TRANSLATED, no_meaning(_OF_PYTORCH))),
    # Without owners, the rule is never asked.
    **dict.fromkeys(_OTHER_PARAMS.split(), Param("any", (), differs(""))),
}


def _max_rate(values: DeepSpeedValues) -> tuple[float | None, str]:
    """Returns the highest rate of a scheduler that sets it, or None and why not."""
    key, rate = f"{SCHEDULE}warmup_max_lr", values.get(f"{SCHEDULE}warmup_max_lr")
    if isinstance(rate, list):
        return None, "a rate for each param group; here is one for all: set optimizer.learning_rate"
    if rate is not None and not values.is_auto(key):
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ValueError(f"{key} = {shown(rate)}: give a number")
        return float(rate), ""
    if rate is not None:
        return None, "auto"
    if values.get("scheduler.type") == "WarmupDecayLR" or values.get(f"{PARAMS}lr") in (None, 1e-3):
        return 1e-3, "DeepSpeed's default"
    return None, "0.001 in DeepSpeed's older releases, the optimizer's rate in newer ones: set it"


def scheduler_type(values: DeepSpeedValues, key: str) -> KeyRow:
    """The schedule, which goes with an optimizer that is translated."""
    kind = values.get(key)
    if kind in _SCHEDULES and _name(values) in _TRANSLATED:
        end = {"optimizer.final_learning_rate": 0.0} if kind == "WarmupDecayLR" else {}
        return values.row(key, "translated", "", {"optimizer.schedule": _SCHEDULES[kind], **end})
    if kind is None:
        note = "a rate that stays, unless the program has a scheduler: set optimizer.schedule and warmup_steps"
    elif kind in _SCHEDULES:
        note = "it goes with the optimizer: set optimizer.schedule, learning_rate and warmup_steps"
    else:
        hint = "" if kind in ("OneCycle", "LRRangeTest") else did_you_mean(kind, _SCHEDULES)
        note = f"{hint}zero_jax has no such schedule: set optimizer.schedule"
    return values.row(key, "not translated", note)


def scheduler_param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """A param of the schedule."""
    kind, param = values.get("scheduler.type"), SCHEDULE_PARAMS[key.removeprefix(SCHEDULE)]
    if kind not in _SCHEDULES or _name(values) not in _TRANSLATED:
        return _untranslated(values, key, f"of {kind}")
    if kind not in param.owners:
        return _untranslated(values, key, f"it is not of {kind}")
    if key not in values and kind not in param.absent:
        return None
    return values.auto(key, param.setting) if param.setting and values.is_auto(key) else param.rule(values, key)


def _is_linear(values: DeepSpeedValues, key: str) -> bool:
    return values.get(f"{SCHEDULE}warmup_type", "log") == "linear"


def _warmup_steps(values: DeepSpeedValues, key: str) -> KeyRow:
    steps = values.get(key, 1000)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps")
    note = "it rises along a line, 2 steps earlier than DeepSpeed's"
    if not _is_linear(values, key):
        note = "it rises along a line from 0, and DeepSpeed's along a logarithm unless warmup_type is 'linear'"
    return values.row(key, "translated", note, {"optimizer.warmup_steps": max(2, steps)})


def _peak(values: DeepSpeedValues, key: str) -> KeyRow:
    rate, why = _max_rate(values)
    if rate is None:
        return values.row(key, "not translated", why)
    if not rate > 0:
        raise ValueError(f"{key} = {rate}: give a positive rate")
    return values.row(key, "translated", why, {"optimizer.learning_rate": rate})


def _total_steps(values: DeepSpeedValues, key: str) -> KeyRow:
    steps = values.get(key)
    if not isinstance(steps, int) or steps < 1:
        kind = values.get("scheduler.type")
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps, which {kind} needs")
    return values.row(key, "translated", "the rate falls until the last step", {"run.steps": steps})


def _final_rate(values: DeepSpeedValues, key: str) -> KeyRow:
    share = values.get(key, 1e-4)
    if not 0 <= share <= 1:
        raise ValueError(f"{key} = {share}: give a share of the rate, at least 0 and at most 1")
    return values.row(key, "translated", values.default_of(key), {"optimizer.final_learning_rate": float(share)})


def _last_iteration(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get(key) == -1:
        return values.row(key, "off")
    return values.row(key, "not translated", "a resumed run knows its step")


_start = same_if(lambda values, key: not values.get(key), _FROM_ZERO, _FROM_ZERO)
_OTHER_SCHEDULES = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase cycle_min_lr "
    "cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"
)
SCHEDULE_PARAMS: Mapping[str, Param] = {
    "warmup_num_steps": Param("int", _ALL, _warmup_steps, "optimizer.warmup_steps", absent=_ALL),
    "warmup_max_lr": Param("any", _ALL[:2], _peak, "optimizer.learning_rate", absent=_ALL[:2]),
    "total_num_steps": Param("int", _ALL[1:], _total_steps, "run.steps", absent=_ALL[1:]),
    "cos_min_ratio": Param("number", _ALL[2:], _final_rate, "optimizer.final_learning_rate", absent=_ALL[2:]),
    "warmup_min_lr": Param("any", _ALL, _start, "the rise starts at 0"),
    "warmup_min_ratio": Param("number", _ALL, _start, "the rise starts at 0"),
    "warmup_type": Param("text", _ALL, same_if(_is_linear, _LINEAR, _LINEAR), ""),
    "last_batch_iteration": Param("int", _ALL, _last_iteration, ""),
    **dict.fromkeys(_OTHER_SCHEDULES.split(), Param("any", (), differs(""))),
}
