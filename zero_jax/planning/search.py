"""The search for the best setting of a train step: estimate all, compile the few best, say why each other is out.

Nothing here knows of compilers or of memory: `estimate` and `compile` are given by the caller.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from zero_jax.planning.ranking import Estimated, Miss, Outcome, Ranked, Ranking, Setting, shortage, show_gb
from zero_jax.sharding.stages import sharded_groups

Estimate = Callable[[Setting], Estimated]
Compile = Callable[[Setting], Outcome]
Log = Callable[[str], None]

# How many times as many devices a near miss is tried with, by estimate.
_MORE_DEVICES = (2, 3, 4, 6, 8, 16, 32, 64, 128)


def candidates(
    *,
    num_devices: int,
    batch_size: int,
    stages: Sequence[int] = (0, 1, 2, 3),
    remats: Sequence[str] = ("full",),
    needs_model: Collection[str] = (),
    models: Sequence[int] = (1,),
    num_heads: int | None = None,
    d_model: int | None = None,
    replicas: Sequence[int] | None = None,
    keep_gathered: Sequence[bool] = (False,),
    max_num_microbatches: int = 64,
) -> tuple[Setting, ...]:
    """Returns all settings that are valid for a number of devices and a batch.

    Settings that are the same program under another name are left out: replicas where nothing is sharded, a stage that
    shards over one device of several, `keep_gathered` where params are not sharded.

    Args:
      num_devices: devices.
      batch_size: examples of a step.
      stages: the stages to try.
      remats: names of remat policies to try.
      needs_model: those of them that are another one's program where there is no `model` axis.
      models: sizes of the `model` axis to try; more than 1 needs a model whose params have specs for it.
      num_heads: attention heads, which `model` has to divide.
      d_model: width of the model, which `model` has to divide.
      replicas: sizes of the `replica` axis to try; None tries all that divide.
      keep_gathered: the values to try where params are sharded.
      max_num_microbatches: the most microbatches.

    Raises:
      ValueError: there are none, because the devices or the batch do not divide.
    """
    if num_devices < 1 or batch_size < 1:
        raise ValueError(f"num_devices={num_devices}, batch_size={batch_size}: give positive numbers")
    fitting = [m for m in models if not any(size % m for size in (num_devices, num_heads or m, d_model or m))]
    if not fitting:
        raise ValueError(
            f"model={', '.join(map(str, models))} divides not all of num_devices={num_devices}, "
            f"num_heads={num_heads}, d_model={d_model}: try model=1"
        )
    found = []
    for model, stage in itertools.product(fitting, stages):
        groups = sharded_groups(stage)
        copies = num_devices // model
        for replica in _divisors(copies):
            data = copies // replica
            same_as_unsharded = (replica > 1) if not groups else (data == 1 and copies > 1)
            if (replicas is not None and replica not in replicas) or same_as_unsharded or batch_size % copies:
                continue
            counts = [k for k in _divisors(batch_size // copies) if k <= max_num_microbatches]
            kept = keep_gathered if "params" in groups else (False,)
            policies = [remat for remat in remats if model > 1 or remat not in needs_model]
            for k, remat, keep in itertools.product(counts, policies, kept):
                found.append(
                    Setting(
                        stage=stage,
                        replica=replica,
                        data=data,
                        model=model,
                        batch_size=batch_size,
                        num_microbatches=k,
                        remat=remat,
                        keep_gathered=keep,
                    )
                )
    if not found:
        ways = sorted({num_devices // model for model in fitting})
        below, above = batch_size // ways[0] * ways[0], -(-batch_size // ways[0]) * ways[0]
        raise ValueError(
            f"batch_size={batch_size} on {num_devices} devices: no setting divides it over "
            f"{' or '.join(map(str, ways))} replicas x data"
            + (f" with replica in {tuple(replicas)}" if replicas is not None else "")
            + f"; try batch_size={' or '.join(str(size) for size in dict.fromkeys((below, above)) if size)}"
        )
    return tuple(found)


def search(
    candidates: Iterable[Setting],
    *,
    estimate: Estimate,
    compile: Compile,
    capacity_bytes: float,
    max_compiles: int = 6,
    log: Log | None = None,
) -> Ranking:
    """Finds the fastest setting that fits, by estimate first and by compiling the few best.

    Settings are compiled from the fastest by estimate on. Where the compiler finds one too large, those that need no
    less by estimate are passed over; and if none has fitted, the last compile goes to the one that needs least.

    Args:
      candidates: the settings.
      estimate: estimates bytes per device and seconds a step; a `ValueError` rejects the setting.
      compile: compiles; what it raises, other than `KeyboardInterrupt` and the like, is an outcome too.
      capacity_bytes: usable memory of a device.
      max_compiles: the most settings to compile; 0 ranks by estimate alone.
      log: is told how it goes.

    Raises:
      ValueError: no candidates, or an estimate that is not a number.
    """
    say = log or (lambda _: None)
    settings = tuple(dict.fromkeys(candidates))
    if not settings or max_compiles < 0:
        raise ValueError(
            f"search: {len(settings)} candidates, max_compiles={max_compiles}: give settings, see candidates()"
        )
    ranked = [_estimated(setting, estimate, capacity_bytes) for setting in settings]
    open_ = sorted((entry for entry in ranked if not entry.reason), key=_order)
    out = [entry for entry in ranked if entry.reason]
    say(f"{len(settings)} settings: {len(open_)} may fit by estimate, {len(out)} do not")
    compiled, passed_over = _compile_best(open_, compile, capacity_bytes, max_compiles, say)
    out += [entry for entry in compiled if entry.reason] + passed_over
    left = {entry.setting for entry in (*compiled, *passed_over)}
    kept = sorted((entry for entry in compiled if not entry.reason), key=_order)
    kept += [entry for entry in open_ if entry.setting not in left]
    best = kept[0] if kept and (kept[0].outcome or max_compiles == 0) else None
    return Ranking(
        ranked=tuple(kept),
        rejected=tuple(out),
        best=best.setting if best else None,
        nearest=None if kept else _nearest(out, estimate, capacity_bytes),
        capacity_bytes=capacity_bytes,
        num_compiled=len(compiled),
    )


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _order(entry: Ranked) -> tuple[float, float, str]:
    return (entry.seconds, entry.bytes, str(entry.setting))


def _estimated(setting: Setting, estimate: Estimate, capacity_bytes: float) -> Ranked:
    try:
        estimated = estimate(setting)
    except ValueError as error:
        return Ranked(setting=setting, kind="invalid", reason=str(error) or "ValueError without a message")
    if not (estimated.bytes >= 0 and estimated.seconds >= 0):
        raise ValueError(
            f"the estimate of {setting} is {estimated}: it has to be in bytes and seconds, and not below 0"
        )
    if estimated.bytes <= capacity_bytes:
        return Ranked(setting=setting, estimated=estimated)
    reason = shortage(estimated.bytes, capacity_bytes, note=estimated.note)
    return Ranked(setting=setting, estimated=estimated, kind="estimate", reason=reason)


def _compile_best(
    entries: Sequence[Ranked], compile: Compile, capacity_bytes: float, max_compiles: int, say: Log
) -> tuple[list[Ranked], list[Ranked]]:
    """Compiles up to `max_compiles` of the entries, in their order; returns those, and those passed over."""
    waiting, compiled, passed_over = list(entries), [], []
    while waiting and len(compiled) < max_compiles:
        is_last_try = len(compiled) == max_compiles - 1 and not any(not entry.reason for entry in compiled)
        chosen = min(waiting, key=lambda entry: entry.bytes) if is_last_try and compiled else waiting[0]
        waiting.remove(chosen)
        say(f"compiling {len(compiled) + 1} of at most {max_compiles}: {chosen.setting}")
        done = _compiled(chosen, compile, capacity_bytes)
        compiled.append(done)
        say(f"  {done.reason or f'fits: {show_gb(done.bytes)}, {done.seconds:.4g} s a step'}")
        if done.kind != "compiled":
            continue
        # What needs no less by the same estimate does not fit either: another one is the better use of a compile.
        hopeless = [entry for entry in waiting if entry.bytes >= chosen.bytes]
        waiting = [entry for entry in waiting if entry.bytes < chosen.bytes]
        reason = f"not compiled: needs no less by estimate than {chosen.setting}, which the compiler found too large"
        passed_over += [dataclasses.replace(entry, kind="passed over", reason=reason) for entry in hopeless]
    return compiled, passed_over


def _compiled(entry: Ranked, compile: Compile, capacity_bytes: float) -> Ranked:
    try:
        outcome = compile(entry.setting)
    except Exception as error:  # a compiler may raise anything, and a search goes on
        outcome = Outcome(fits=False, error=f"{type(error).__name__}: {error}")
    if outcome.fits:
        return dataclasses.replace(entry, outcome=outcome)
    if outcome.bytes is not None and outcome.bytes > capacity_bytes:
        reason = "compiled, " + shortage(outcome.bytes, capacity_bytes, note=outcome.error)
        return dataclasses.replace(entry, outcome=outcome, kind="compiled", reason=reason)
    reason = f"compiling failed: {outcome.error or 'the compiler gave no reason'}"
    return dataclasses.replace(entry, outcome=outcome, kind="failed", reason=reason)


def _nearest(rejected: Sequence[Ranked], estimate: Estimate, capacity_bytes: float) -> Miss | None:
    """Returns the setting that misses by the fewest bytes, and what would make it fit."""
    # Sizes by the compiler and by estimate do not compare; what was compiled needs less than the rest by estimate.
    kinds = ([entry for entry in rejected if entry.kind == kind] for kind in ("compiled", "estimate"))
    too_large = next((entries for entries in kinds if entries), [])
    if not too_large:
        return None
    entry = min(too_large, key=lambda entry: (entry.bytes, entry.seconds))
    assert entry.estimated is not None
    # Where it was compiled, other settings are taken to be off by as much as its own estimate was.
    known_off = max(entry.bytes - entry.estimated.bytes, 0)

    def fits(setting: Setting) -> bool:
        try:
            return estimate(setting).bytes + known_off <= capacity_bytes
        except ValueError:
            return False

    changes = (_more_devices(entry.setting), _smaller_microbatches(entry.setting), _smaller_batches(entry.setting))
    remedies = [next((remedy for setting, remedy in tried if fits(setting)), None) for tried in changes]
    return Miss(
        setting=entry.setting,
        missing_bytes=entry.bytes - capacity_bytes,
        remedies=(
            *(remedy for remedy in remedies if remedy),
            f"devices with at least {show_gb(math.ceil(entry.bytes / 1e8) * 1e8)} of usable memory",
        ),
    )


def _more_devices(setting: Setting) -> Iterable[tuple[Setting, str]]:
    for times in _MORE_DEVICES:
        data, parts = setting.data * times, setting.replica * setting.data * times
        batch_size = setting.batch_size if setting.batch_size % parts == 0 else setting.batch_size * times
        k = _fewer_microbatches(setting, batch_size // parts)
        changed = dataclasses.replace(setting, data=data, batch_size=batch_size, num_microbatches=k)
        more = changed.num_devices - setting.num_devices
        batch = "" if batch_size == setting.batch_size else f", with a batch of {batch_size}"
        yield changed, f"{more} devices more ({changed.num_devices} in all{batch})"


def _fewer_microbatches(setting: Setting, per_device_batch_size: int) -> int:
    """Returns the number of microbatches that a smaller batch takes: as many as the setting has, or the next fewer."""
    return max(k for k in _divisors(per_device_batch_size) if k <= setting.num_microbatches)


def _smaller_microbatches(setting: Setting) -> Iterable[tuple[Setting, str]]:
    per_device = setting.batch_size // (setting.replica * setting.data)
    for k in _divisors(per_device):
        if k > setting.num_microbatches:
            yield dataclasses.replace(setting, num_microbatches=k), f"{k} microbatches"


def _smaller_batches(setting: Setting) -> Iterable[tuple[Setting, str]]:
    parts = setting.replica * setting.data
    for per_device in reversed(_divisors(setting.batch_size // parts)[:-1]):
        size = per_device * parts
        k = _fewer_microbatches(setting, per_device)
        changed = dataclasses.replace(setting, batch_size=size, num_microbatches=k)
        yield changed, f"a batch of {size} in {k} microbatch{'es' if k > 1 else ''}"
