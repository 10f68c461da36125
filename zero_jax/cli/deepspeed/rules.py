"""Rules of the table: what becomes of a key that has more than a row of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.cli.deepspeed.rows import KEYS, OTHER_OPTIMIZERS, DeepSpeedValues, KeyRow, check
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import shown
from zero_jax.trainer import OptimizerConfig
from zero_jax.training import ZeroConfig

_OFFLOAD = "zero_optimization.offload_optimizer"
_TENSOR_PARALLEL = "tensor_parallel.autotp_size"
_PRECISIONS: Mapping[str, str] = {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"}
_BATCH = _SIZE, _MICRO_SIZE, _NUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PARAMS = "optimizer.params."
SCHEDULE = "scheduler.params."
_ADAM = ("adam", "adamw")
_TRANSLATED = (*_ADAM, "lion", "sgd")
# Params whose value can make an optimizer another one.
_BLOCKING = {"bias_correction", "adam_w_mode", "amsgrad", "nesterov", "dampening", "maximize", "momentum"}
_NESTEROV = "the momentum of 'sgd' is Nesterov's here"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _by_table(values: DeepSpeedValues, key: str) -> KeyRow:
    """Makes the row of a key by its row of the table: an entry of the config file, or why there is none."""
    entry, value = KEYS[key], values.get(key)
    if entry.no_meaning:
        return values.row(key, "no meaning", entry.no_meaning)
    is_open = values.is_auto("fp16.enabled") and not any(values.get(key) is True for key in _PRECISIONS)
    if key.startswith("fp16.") and not is_open and values.get("fp16.enabled") is not True:
        return values.row(key, "off", "fp16 is off")
    if entry.to and values.is_auto(key):
        return values.row(key, "off", entry.setting)
    is_none = entry.to and entry.kind == "int" and isinstance(value, int) and value < 1
    if is_none or value in entry.off or (entry.kind == "block" and not _is_on(values, key, entry.switch)):
        return values.row(key, "off")
    if entry.to:
        value = entry.default if value is None else value
        own: Any = float(value) if entry.kind == "number" else value
        made = min(own, entry.largest or own) if entry.value is None else entry.value
        if entry.to.startswith("optimizer."):
            check(key, lambda: OptimizerConfig(**{entry.to.removeprefix("optimizer."): made}))
        return values.row(key, "translated", entry.note or values.default_of(key), {entry.to: made})
    if value in entry.same:
        return values.row(key, "same", entry.differs)
    if values.is_auto(key):
        return values.auto(key, entry.differs)
    return values.row(key, "not translated", entry.differs)


def _is_on(values: DeepSpeedValues, key: str, switch: str = "enabled") -> bool:
    value = values.get(key)
    if value is None or isinstance(value, bool) or not switch:
        return bool(value)
    return value.get(switch) not in (None, False, "false", "none")


def _is_count(values: DeepSpeedValues, key: str) -> bool:
    return isinstance(count := values.get(key), int) and count >= 1


def _stage(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """The stage of ZeRO; `"zero_optimization": true` is an older form of stage 1."""
    older = "zero_optimization"
    if key != older and older in values:
        return None
    if values.is_auto(key):
        return values.auto(key, "zero.stage")
    stage = int(values.get(key, 0))
    check(key, lambda: ZeroConfig(stage=stage))
    note = "" if key in values else "DeepSpeed's default is no ZeRO"
    note = "the deprecated form of stage 1" if key == older and stage else note
    return values.row(key, "translated", note, {"zero.stage": stage})


def _offload(values: DeepSpeedValues, key: str) -> KeyRow:
    """Offloading of the optimizer's state, and of the master params that DeepSpeed counts to it."""
    if not _is_on(values, key, "device"):
        return values.row(key, "off")
    entries = values.get(key)
    if not isinstance(entries, Mapping) or entries.get("device") != "cpu":
        return values.row(key, "not translated", "zero.offload keeps state in host memory, nowhere else")
    share = {} if entries.get("ratio", 1) == 1 else {"zero.offload_fraction": entries["ratio"]}
    return values.row(key, "translated", KEYS[key].note, {"zero.offload": "state", **share})


def _old_offload(values: DeepSpeedValues, key: str) -> KeyRow:
    """The deprecated switch of `offload`, which says the same."""
    return values.row(key, "off") if _is_on(values, _OFFLOAD, "device") else _by_table(values, key)


def _quantized(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get(key) is True and values.get("zero_optimization.stage") != 3:
        return values.row(key, "not translated", "DeepSpeed sends them quantized at stage 3 alone")
    return _by_table(values, key)


def _chosen_precisions(values: DeepSpeedValues) -> list[str]:
    chosen = [key for key in _PRECISIONS if values.get(key) is True]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are both true: DeepSpeed takes one of them; set one to false")
    return chosen


def _precision(values: DeepSpeedValues, key: str) -> KeyRow:
    chosen = _chosen_precisions(values)
    if key in chosen:
        return values.row(key, "translated", "", {"zero.precision": _PRECISIONS[key]})
    if values.is_auto(key) and not chosen:
        return values.auto(key, "zero.precision = 'bf16', 'fp16' or 'fp32'")
    return values.row(key, "off")


def _no_precision(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """What it means that neither bf16 nor fp16 is on."""
    is_cast = any(_is_on(values, block) for block in ("torch_autocast", "amp"))
    if _chosen_precisions(values) or is_cast or any(map(values.is_auto, _PRECISIONS)):
        return None
    note = "neither is on, so that DeepSpeed trains in the model's dtype"
    return values.row(key, "translated", note, {"zero.precision": "fp32"})


def _clipping(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.is_auto(key):
        return values.auto(key, "zero.clip_norm")
    norm = float(values.get(key, 0)) or None
    check(key, lambda: ZeroConfig(clip_norm=norm))
    note = "of the global norm" if norm else "" if key in values else "DeepSpeed's default is no clipping"
    return values.row(key, "translated", note, {"zero.clip_norm": norm})


def _model_size(values: DeepSpeedValues) -> int:
    return values[_TENSOR_PARALLEL] if _is_count(values, _TENSOR_PARALLEL) else 1


def _replicas(values: DeepSpeedValues, key: str) -> KeyRow:
    """The number of full copies, by the devices of a copy (MiCS)."""
    if not _is_count(values, key):
        return values.row(key, "off")
    size = values[key]
    if values.devices is None:
        note = f"set run.replica to the number of devices / {size}, or give --devices"
        return values.row(key, "not translated", note)
    copies = _divided(values.devices, size * _model_size(values), f"{key} = {size}")
    return values.row(key, "translated", f"full copies on groups of {size} devices", {"run.replica": copies})


def _divided(total: int, part: int, label: str) -> int:
    if total % part:
        raise ValueError(f"{label}: {total} does not divide by {part}: correct it, or --devices")
    return total // part


def _batch(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """The batch size or the microbatches: of three keys, DeepSpeed infers one."""
    value, setting = _inferred_batch(values)[key], KEYS[key].setting
    if values.is_auto(key) and value is None:
        needed = "" if key == _NUM else ", or give --devices and --per-device-batch-size"
        return values.auto(key, f"{setting}{needed}")
    if value is None:
        if any(map(values.is_auto, _BATCH)) or not any(name in values for name in _BATCH):
            return None
        needed = f"DeepSpeed infers it by {_SIZE} = {_MICRO_SIZE} x {_NUM} x devices: give --devices, or set"
        return values.row(key, "not translated", f"{needed} {setting}")
    notes = [] if key in values else ["as DeepSpeed infers it"]
    if values.is_auto(key):
        notes = ["as the Hugging Face Trainer computes it, gradient_accumulation_steps of 1 where that is auto, too"]
    if key == _NUM and value > 1:
        notes += ["microbatches are weighted by their tokens here, and equally there: the same in packed rows"]
    return values.row(key, "translated", "; ".join(notes), {setting: value})


def _inferred_batch(values: DeepSpeedValues) -> dict[str, int | None]:
    """Returns batch size and microbatches as DeepSpeed infers them, as far as they are known, and checks them."""
    size, micro_size, num = (None if values.is_auto(key) else values.get(key) for key in _BATCH)
    for key in _BATCH:
        if key in values and not values.is_auto(key) and not _is_count(values, key):
            raise ValueError(f"{key} = {values.get(key)}: give at least 1")
    devices = values.devices
    parts = None if devices is None else _divided(devices, _model_size(values), _TENSOR_PARALLEL)
    if not any(key in values for key in _BATCH):
        return {_SIZE: size, _NUM: num}
    if any(map(values.is_auto, _BATCH)):  # the Trainer fills in its own arguments, then DeepSpeed infers the rest
        micro_size = values.per_device_batch_size if micro_size is None else micro_size
        if micro_size is None or parts is None:
            return {_SIZE: size, _NUM: num}
        num = 1 if num is None and (values.is_auto(_NUM) or size is None) else num
    label = f"{_SIZE} = {size}, {_MICRO_SIZE} = {micro_size}, {_NUM} = {num}"
    if num is None and size is not None and micro_size is not None:
        num = None if parts is None else _divided(size, micro_size * parts, label)
    elif num is None:
        num = 1
    if size is None and micro_size is not None and num is not None and parts is not None:
        size = micro_size * num * parts
    if size is not None and num is not None:
        num_parallel = _divided(size, num * (micro_size or 1), label)
        if parts is not None and micro_size is not None and parts != num_parallel:
            raise ValueError(f"{label} are for {num_parallel} data-parallel devices, not {parts}")
        if parts is not None:
            _divided(size, num * parts, label)
    return {_SIZE: size, _NUM: num}


def _partitioned_residuals(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get(key) is not True:
        return values.row(key, "off")
    if values.get("activation_checkpointing.cpu_checkpointing") is True:
        return values.row(key, "same", "'full_offloaded' shards them over an axis `model`, too")
    if _model_size(values) > 1:
        return values.row(key, "translated", KEYS[key].note, {"zero.remat": "full_sharded"})
    note = "set zero.remat = 'full_sharded' and run.model_axis together: residuals are sharded over that axis"
    return values.row(key, "not translated", note)


def _wandb(values: DeepSpeedValues, key: str) -> KeyRow:
    row, entries = _by_table(values, key), values.get(key)
    if row.status == "off" or not isinstance(entries, Mapping) or "project" not in entries:
        return row
    if not isinstance(entries["project"], str):
        raise ValueError(f"wandb.project = {shown(entries['project'])}: give text")
    return dataclasses.replace(row, settings={KEYS[key].to: entries["project"]})


def _name(values: DeepSpeedValues) -> str | None:
    kind = values.get("optimizer.type")
    return kind.lower() if isinstance(kind, str) else None


def _optimizer_type(values: DeepSpeedValues, key: str) -> KeyRow:
    """The optimizer; it is translated where all its params are."""
    name = _name(values)
    if name not in _TRANSLATED:
        note = "the optimizer is of the program that reads this file: set [optimizer]"
        if name is not None:
            hint = did_you_mean(name, (*OTHER_OPTIMIZERS, *_TRANSLATED))
            note = OTHER_OPTIMIZERS.get(name, f"no optimizer of DeepSpeed's own: {hint}set [optimizer]")
        return values.row(key, "not translated", note)
    if blocking := _blocking(values):
        return values.row(key, "not translated", f"with {', '.join(blocking)} it is another optimizer than those here")
    kind = "adamw" if name in _ADAM else name
    settings = {name.removeprefix("optimizer."): value for row in _rows(values) for name, value in row.settings.items()}
    check("optimizer.params", lambda: OptimizerConfig(**{"optimizer": kind, **settings}))
    note = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if name == "adam" else ""
    return values.row(key, "translated", note, {"optimizer.optimizer": kind})


def _param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """Makes the row of a param, whose optimizer or schedule both have, whatever its other params."""
    entry, kind = KEYS[key], values.get(f"{key.partition('.')[0]}.type")
    owner = _name(values) if key.startswith(PARAMS) else kind
    if key not in values and owner not in entry.absent.split():
        return None
    if owner not in entry.owners.split():
        return values.row(key, "not translated", f"it is not of {kind}")
    if values.is_auto(key):
        return values.auto(key, entry.setting or entry.differs or "it has no counterpart")
    return _own_row(values, key)


def _rows(values: DeepSpeedValues) -> list[KeyRow]:
    """Makes the rows of the optimizer's params, those of the file first."""
    keys = [*values, *(key for key in KEYS if key not in values)]
    return [row for key in keys if key in KEYS and key.startswith(PARAMS) and (row := _param(values, key)) is not None]


def _blocking(values: DeepSpeedValues) -> list[str]:
    """Returns the params that make the optimizer another one than those here."""
    rows = [row for row in _rows(values) if row.status == "not translated" and not values.is_auto(row.key)]
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
    # PyTorch's AdamW decays by 0.01 unless it is told, DeepSpeed's own by nothing.
    decay = float(values.get(key, 0.01 if is_torch else 0.0))
    note = (
        "vectors, scales, biases and norms are not decayed here (optimizer.no_decay adds more); DeepSpeed decays all "
        "of a param group"
    )
    return values.row(key, "translated", note if decay else values.default_of(key), {"optimizer.weight_decay": decay})


def _momentum(values: DeepSpeedValues, key: str) -> KeyRow:
    """SGD's momentum, which is Nesterov's here."""
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


def _nesterov(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get(key) is True or not values.get(f"{PARAMS}momentum"):
        return values.row(key, "same")
    return values.row(key, "not translated", _NESTEROV)


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


def _scheduler_type(values: DeepSpeedValues, key: str) -> KeyRow:
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


def _warmup_steps(values: DeepSpeedValues, key: str) -> KeyRow:
    steps = values.get(key, 1000)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps")
    note = "it rises along a line, 2 steps earlier than DeepSpeed's"
    if values.get(f"{SCHEDULE}warmup_type") != "linear":
        note = "it rises along a line from 0, and DeepSpeed's along a logarithm unless warmup_type is 'linear'"
    return values.row(key, "translated", note, {"optimizer.warmup_steps": max(2, steps)})  # DeepSpeed takes 2 or more


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
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps, which {values['scheduler.type']} needs")
    return values.row(key, "translated", "the rate falls until the last step", {"run.steps": steps})


def row_of(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """Makes the row of a key; None for one that the file does not have and that has no row then."""
    if key not in KEYS:
        return _no_precision(values, key)
    section = key.partition(".")[0]
    if not key.startswith((PARAMS, SCHEDULE)):
        return _own_row(values, key)
    if _name(values) in _TRANSLATED and (section == "optimizer" or values.get("scheduler.type") in _SCHEDULES):
        row = _param(values, key)
        if row is None or section == "scheduler" or not _blocking(values):
            return row
        reason = row.reason or "of that optimizer"
    else:
        reason = f"of {values.get(f'{section}.type') or f'a config without {section}.type'}"
    return values.row(key, "not translated", reason) if key in values else None


def _own_row(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """Makes the row of a key by the function that the table names."""
    return globals()[f"_{KEYS[key].rule}"](values, key)
