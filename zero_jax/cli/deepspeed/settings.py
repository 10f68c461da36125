"""Translates a DeepSpeed config: stage, precision, clipping, batch, mesh, remat, logging; `optimizer` has the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.cli.deepspeed.keys import KEYS
from zero_jax.cli.deepspeed.optimizer import optimizer_rows
from zero_jax.cli.deepspeed.reading import flatten
from zero_jax.cli.deepspeed.rows import DeepSpeedKeys, KeyRow, Translation, check
from zero_jax.core.tree import shown
from zero_jax.training import ZeroConfig

_BF16 = ("bf16.enabled", "bfloat16.enabled")
_FP16 = "fp16.enabled"
_AUTOCAST = ("torch_autocast", "amp")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_REMAT = ("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing")


def translate(config: Mapping[str, Any], *, devices: int | None = None) -> Translation:
    """Translates a DeepSpeed config.

    Args:
      config: the config, as in its JSON file.
      devices: number of devices that it is for; without it, what depends on that is left to the reader.

    Raises:
      ValueError: a value of the wrong kind, or values that contradict each other.
    """
    values, unknown = flatten(config)
    keys = DeepSpeedKeys({key: value for key, value in values.items() if value is not None}, devices=devices)
    if devices is not None and devices < 1:
        raise ValueError(f"devices={devices}: give at least 1")
    rows = [KeyRow(key=key, value=values[key], status="unknown", reason=hint) for key, hint in unknown.items()]
    rows += [row for key in keys.values if key not in unknown for row in _by_table(keys, key)]
    sections = _stage, _offload, _quantize, _precision, _clipping, _mesh, _batch, _remat, _logging, optimizer_rows
    rows += [row for translator in sections for row in translator(keys)]
    nulls = {key for key, value in values.items() if value is None} - {row.key for row in rows}
    rows += [KeyRow(key=key, value=None, status="off") for key in nulls]
    order = {key: i for i, key in enumerate(values)}
    translation = Translation(rows=tuple(sorted(rows, key=lambda row: order.get(row.key, len(order)))))
    missing = {*values} - {row.key for row in translation.rows}
    assert not missing, f"keys without a row: {missing}"
    return translation


def _is_on(keys: DeepSpeedKeys, key: str) -> bool:
    """Returns whether a block of keys is switched on."""
    value, switch = keys.get(key), KEYS[key].switch
    if value is None or isinstance(value, bool) or switch is None:
        return bool(value)
    return value.get(switch) not in (None, False, "false", "none")


def _by_table(keys: DeepSpeedKeys, key: str) -> Iterator[KeyRow]:
    """Makes the row of a key that no translator reads."""
    entry, value = KEYS[key], keys.get(key)
    if entry.fate == "read":
        return
    is_off = value is None or value in entry.off if entry.kind != "block" else not _is_on(keys, key)
    is_fp16 = keys.get(_FP16) is True or (keys.is_auto(_FP16) and True not in map(keys.get, _BF16))
    if entry.fate == "not translated" and key.startswith("fp16.") and not is_fp16:
        yield keys.row(key, "off", "fp16 is off")
    elif entry.fate == "not translated" and is_off:
        yield keys.row(key, "off")
    elif entry.fate == "not translated" and keys.is_auto(key):
        yield keys.auto(key, entry.reason)
    else:
        yield keys.row(key, entry.fate, entry.reason)


def _stage(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    key, old = "zero_optimization.stage", "zero_optimization"
    if old in keys:
        stage = int(bool(keys.get(old)))
        yield keys.row(old, "translated", "the deprecated form of stage 1" if stage else "", zero__stage=stage)
    elif key not in keys or keys.get(key) is None:
        yield keys.row(key, "translated", "DeepSpeed's default is no ZeRO", zero__stage=0)
    elif keys.is_auto(key):
        yield keys.auto(key, "zero.stage")
    else:
        check(key, lambda: ZeroConfig(stage=keys.get(key)))
        yield keys.row(key, "translated", zero__stage=keys.get(key))
    overlap = "zero_optimization.overlap_comm"
    if overlap in keys:
        if isinstance(keys.get(overlap), bool):
            note = "of gathers too, where the hardware has options for it (docs/overlap.md)"
            yield keys.row(overlap, "translated", note, zero__overlap=keys.get(overlap))
        else:
            yield keys.row(overlap, "off", "zero.overlap is true by default")


def _offload(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    """Translates the offloading of the optimizer's state, and of the master params that DeepSpeed counts to it."""
    key, old = "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"
    value, is_old = keys.get(key), keys.get(old) is True
    note = "the update runs on the devices, not on the CPU; at stage 3 the master params are the params, and stay there"
    if old in keys:
        is_new = key in keys and _is_on(keys, key)
        settings: dict[str, Any] = {"zero__offload": "state"} if is_old and not is_new else {}
        yield keys.row(old, "translated" if settings else "off", note if settings else "", **settings)
    if key not in keys:
        return
    device, ratio = (value.get("device"), value.get("ratio", 1)) if isinstance(value, Mapping) else (None, 1)
    if not _is_on(keys, key):
        yield keys.row(key, "off")
    elif device != "cpu":
        yield keys.row(key, "not translated", "zero.offload keeps state in host memory, nowhere else")
    elif ratio != 1:
        yield keys.row(key, "translated", note, zero__offload="state", zero__offload_fraction=ratio)
    else:
        yield keys.row(key, "translated", note, zero__offload="state")


def _quantize(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    """Translates quantized gathers and gradients (ZeRO++), which DeepSpeed has at stage 3."""
    fields = {"zero_quantized_weights": "quantize_gathers", "zero_quantized_gradients": "quantize_grads"}
    for name, field in fields.items():
        key = f"zero_optimization.{name}"
        if key not in keys:
            continue
        if keys.get(key) is not True:
            yield keys.row(key, "off")
        elif keys.get("zero_optimization.stage") != 3:
            yield keys.row(key, "not translated", "DeepSpeed sends them quantized at stage 3 alone")
        else:
            yield keys.row(key, "translated", "in blocks of int8 (docs/quantized.md)", **{f"zero__{field}": "int8"})


def _precision(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    present = [key for key in (*_BF16, _FP16) if key in keys]
    chosen = [key for key in present if keys.get(key) is True]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are both true: DeepSpeed takes one of them; set one to false")
    casts = [key for key in _AUTOCAST if key in keys and _is_on(keys, key)]
    for key in present:
        if key in chosen:
            name = "fp16" if key == _FP16 else "bf16"
            yield keys.row(key, "translated", zero__precision=name)
        elif keys.is_auto(key) and not chosen:
            yield keys.auto(key, "zero.precision = 'bf16', 'fp16' or 'fp32'")
        else:
            yield keys.row(key, "off")
    if not (chosen or casts or any(keys.is_auto(key) for key in present)):
        yield KeyRow(
            key="bf16 and fp16", value=None, status="translated", settings={"zero.precision": "fp32"},
            reason="neither is on, so that DeepSpeed trains in the model's dtype", is_absent=True,
        )  # fmt: skip


def _clipping(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    key = "gradient_clipping"
    value = keys.get(key)
    if keys.is_auto(key):
        yield keys.auto(key, "zero.clip_norm")
    elif not value:
        note = "" if key in keys else "DeepSpeed's default is no clipping"
        yield keys.row(key, "translated", note, zero__clip_norm=None)
    else:
        check(key, lambda: ZeroConfig(clip_norm=float(value)))
        yield keys.row(key, "translated", "of the global norm", zero__clip_norm=float(value))


def _model_size(keys: DeepSpeedKeys) -> int:
    size = keys.get("tensor_parallel.autotp_size")
    return size if isinstance(size, int) and size > 1 else 1


def _mesh(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    key = "tensor_parallel.autotp_size"
    if key in keys:
        size = _model_size(keys)
        if size > 1:
            yield keys.row(key, "translated", "the model needs specs for that axis", run__model_axis=size)
        else:
            yield keys.row(key, "off")
    key = "zero_optimization.mics_shard_size"
    size = keys.get(key)
    if key not in keys:
        return
    if not isinstance(size, int) or size < 1:
        yield keys.row(key, "off")
    elif keys.devices is None:
        note = f"set run.replica to the number of devices / {size}, or give --devices"
        yield keys.row(key, "not translated", note)
    else:
        copies = _divided(keys.devices, size * _model_size(keys), f"{key} = {size}")
        yield keys.row(key, "translated", f"full copies on groups of {size} devices", run__replica=copies)


def _divided(total: int, part: int, label: str) -> int:
    if total % part:
        raise ValueError(f"{label}: {total} does not divide by {part}: correct it, or --devices")
    return total // part


def _batch(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    """Translates the three keys of the batch, of which DeepSpeed infers one."""
    for key in _BATCH:
        value = keys.get(key)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key} = {value}: give at least 1")
    devices = keys.devices
    parts = None if devices is None else _divided(devices, _model_size(keys), "tensor_parallel.autotp_size")
    batch, micro, steps = _BATCH
    if not any(key in keys for key in _BATCH):
        return
    size, micro_size, num = (None if keys.is_auto(key) else keys.get(key) for key in _BATCH)
    has_auto = any(keys.is_auto(key) for key in _BATCH)
    if not has_auto:
        size, num = _inferred(size, micro_size, num, parts)
    needed = f"DeepSpeed infers it by {batch} = {micro} x {steps} x devices: give --devices, or set"
    for key, value, setting in ((batch, size, "run.batch_size"), (steps, num, "zero.num_microbatches")):
        if keys.is_auto(key):
            yield keys.auto(key, setting)
        elif value is not None:
            note = "" if key in keys else "as DeepSpeed infers it"
            if key == steps and value > 1:
                note += "; microbatches are weighted by their tokens here, and equally there: the same in packed rows"
            section, name = setting.split(".")
            yield keys.row(key, "translated", note.removeprefix("; "), **{f"{section}__{name}": value})
        elif not has_auto or key in keys:
            yield keys.row(key, "not translated", f"{needed} {setting}")
    if keys.is_auto(micro):
        yield keys.auto(micro, "it follows from run.batch_size and zero.num_microbatches")
    elif micro in keys:
        yield keys.row(micro, "same", "it follows: batch_size / (num_microbatches x data-parallel devices)")


def _inferred(
    size: int | None, micro_size: int | None, num: int | None, parts: int | None
) -> tuple[int | None, int | None]:
    """Returns batch size and microbatches as DeepSpeed infers them, as far as they are known, and checks them."""
    label = f"{_BATCH[0]} = {size}, {_BATCH[1]} = {micro_size}, {_BATCH[2]} = {num}"
    if num is None and (size is None or micro_size is None):
        num = 1
    elif num is None and size is not None and micro_size is not None and parts is not None:
        num = _divided(size, micro_size * parts, label)
    if size is None and micro_size is not None and num is not None and parts is not None:
        size = micro_size * num * parts
    if size is not None and num is not None:
        num_parallel = _divided(size, num * (micro_size or 1), label)
        if parts is not None and micro_size is not None and parts != num_parallel:
            raise ValueError(f"{label} are for {num_parallel} data-parallel devices, not {parts}")
        if parts is not None:
            _divided(size, num * parts, label)
    return size, num


def _remat(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    partition, offload = _REMAT
    where = "DeepSpeed does so where the model calls its checkpoint function, and zero_jax in each block"
    if offload in keys:
        if keys.get(offload) is True:
            yield keys.row(offload, "translated", where, zero__remat="full_offloaded")
        else:
            yield keys.row(offload, "off")
    if partition in keys:
        if keys.get(partition) is not True:
            yield keys.row(partition, "off")
        elif keys.get(offload) is True:
            yield keys.row(partition, "same", "'full_offloaded' shards them over an axis `model`, too")
        elif _model_size(keys) > 1:
            yield keys.row(partition, "translated", where, zero__remat="full_sharded")
        else:
            note = "set zero.remat = 'full_sharded' and run.model_axis together: residuals are sharded over that axis"
            yield keys.row(partition, "not translated", note)


def _logging(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    if "steps_per_print" in keys:
        value = keys.get("steps_per_print")
        if isinstance(value, int) and value >= 1:
            yield keys.row("steps_per_print", "translated", run__log_every=min(value, 2**31 - 1))
        else:
            yield keys.row("steps_per_print", "off")
    for name in ("tensorboard", "wandb"):
        if name not in keys:
            continue
        if not _is_on(keys, name):
            yield keys.row(name, "off")
        elif name == "tensorboard":
            yield keys.row(name, "translated", "records go to the run's own folder", log__tensorboard=True)
        else:
            value = keys.get(name)
            project = value.get("project", "deepspeed") if isinstance(value, Mapping) else "deepspeed"
            if not isinstance(project, str):
                raise ValueError(f"wandb.project = {shown(project)}: give text")
            yield keys.row(name, "translated", "group and team are those of wandb's settings", log__wandb=project)
