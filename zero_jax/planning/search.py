"""Searches the settings of a train step: estimates all, compiles the best few, gives the reason for each rejection."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from zero_jax.core.text_tables import format_bytes
from zero_jax.planning.errors import SettingRefused
from zero_jax.planning.ranking import Candidate, Estimated, Miss, Outcome, Ranked, Ranking, naming, shortage
from zero_jax.sharding.stages import sharded_groups

# Multiples of the number of devices that are tried, by estimate, to find out how many would be enough.
_MORE_DEVICES = (2, 3, 4, 6, 8, 16, 32, 64, 128)
_SHARED_WEIGHT = 4
_MOST_ENDS = 3
# The last compile of a search in which nothing has fitted yet leaves this share of the memory to spare, and goes to the
# smallest setting where it is not known what the others need.
_LAST_SPARE = 0.15
# A setting that differs from a compiled one in copies or microbatches alone, and by estimate in less than this, comes
# after others that are at most so much slower: what it could save is nearly known.
_NEARLY = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The dimensions of a search: the devices, and what to try of each setting.

    Attributes:
      num_devices: number of devices.
      batch_sizes: examples of a step.
      stages: the stages to try.
      remats: names of the remat policies to try.
      losses: names of the loss functions to try.
      needs_model: the policies and the loss functions that equal another where the axis `model` has size 1.
      models: sizes of the axis `model` to try; more than 1 needs a model whose params have specs for it.
      needs_one_stage: those of them that a pipeline cannot have.
      replicas: sizes of the axis `replica` to try; None tries all that divide, and 1 with a pipeline.
      keep_gathered: whether gathered params are kept for the backward pass, in settings that shard params.
      num_slices: TPU slices or GPU hosts of the devices.
      secondaries: whether to have a secondary shard of the params, in settings that shard them over several slices or
        hosts, and over several devices of each.
      attentions: who computes attention: `own`, `fused`.
      overlaps: whether to compile with the options that let collectives run beside computation.
      offloads: what to keep in host memory: `optimizer`, `state`, `all`, or None for nothing.
      quantizes: whether to send params or gradients quantized.
      pipes: sizes of the axis `pipe` to try; more than 1 needs layers that can be stages.
      pipelines: the schedules of these stages to try.
      max_num_microbatches: the most microbatches.
    """

    num_devices: int
    batch_sizes: Sequence[int]
    stages: Sequence[int] = (0, 1, 2, 3)
    remats: Sequence[str] = ("full",)
    losses: Sequence[str] = ("",)
    needs_model: Collection[str] = ()
    needs_one_stage: Collection[str] = ()
    models: Sequence[int] = (1,)
    replicas: Sequence[int] | None = None
    keep_gathered: bool = False
    num_slices: int = 1
    secondaries: Sequence[bool] = (False,)
    attentions: Sequence[str] = ("own",)
    overlaps: Sequence[bool] = (True,)
    offloads: Sequence[str | None] = (None,)
    quantizes: Sequence[bool] = (False,)
    pipes: Sequence[int] = (1,)
    pipelines: Sequence[str] = ("gpipe",)
    max_num_microbatches: int = 64


def candidates(space: Space) -> tuple[Candidate, ...]:
    """Returns all valid settings of a search space.

    Settings that compile to the program of another one are left out: replicas where nothing is sharded, a stage that
    shards over 1 of several devices, other stages than 3 on one device after the first, `keep_gathered` where params
    are not sharded.

    Raises:
      ValueError: there are none for a batch size, because the devices or the batch do not divide.
    """
    num_devices = space.num_devices
    if num_devices < 1 or min(space.batch_sizes) < 1:
        raise ValueError(f"num_devices={num_devices}, batch_sizes={tuple(space.batch_sizes)}: give positive numbers")
    models = [model for model in space.models if num_devices % model == 0]
    if not models:
        sizes = ", ".join(map(str, space.models))
        raise ValueError(f"model={sizes} does not divide num_devices={num_devices}: try model=1")
    if not any(num_devices % (model * pipe) == 0 for model in models for pipe in space.pipes):
        sizes = ", ".join(map(str, space.pipes))
        raise ValueError(f"pipe={sizes} does not divide num_devices={num_devices} over model={models}: try pipe=1")
    if all(space.secondaries) and space.num_slices == 1:
        raise ValueError(
            "secondary=True on one slice or host: there is no network between slices that it would spare: leave it out"
        )
    # On one device the stages make two programs: with params that are gathered, and without.
    distinct = {"params" in sharded_groups(stage): stage for stage in reversed(space.stages)}.values()
    settings = []
    for batch_size in space.batch_sizes:
        before = len(settings)
        for model, pipe, stage in itertools.product(models, space.pipes, space.stages):
            if num_devices % (model * pipe) == 0 and (model < num_devices or stage in distinct):
                settings += _settings(space, batch_size, model, pipe, stage)
        if len(settings) == before:
            raise ValueError(_indivisible(space, batch_size, models))
    return tuple(settings)


def _settings(space: Space, batch_size: int, model: int, pipe: int, stage: int) -> Iterable[Candidate]:
    """Yields the settings of a batch size, sizes of the axes `model` and `pipe`, and a stage."""
    groups, copies = sharded_groups(stage), space.num_devices // model // pipe
    unfit = {*(space.needs_model if model == 1 else ()), *(space.needs_one_stage if pipe > 1 else ())}
    for replica in divisors(copies) if pipe == 1 or space.replicas is not None else (1,):
        data = copies // replica
        same_as_unsharded = (replica > 1) if not groups else (data * pipe == 1 and copies > 1)
        if (space.replicas is not None and replica not in space.replicas) or same_as_unsharded or batch_size % copies:
            continue
        across = space.num_slices // math.gcd(space.num_slices, replica)
        has_secondary = "params" in groups and across > 1 and data // across > 1 and pipe == 1
        counts = [k for k in divisors(batch_size // copies) if k <= space.max_num_microbatches and k % pipe == 0]
        dimensions = {
            "num_microbatches": counts,
            "remat": [remat for remat in space.remats if remat not in unfit],
            "loss": [loss for loss in space.losses if loss not in unfit],
            "secondary": [secondary for secondary in space.secondaries if has_secondary or not secondary],
            "attention": space.attentions,
            "overlap": space.overlaps,
            "offload": space.offloads,
            "quantize": space.quantizes,
            "pipeline": space.pipelines if pipe > 1 else space.pipelines[:1],
        }
        fixed = {"stage": stage, "replica": replica, "data": data, "model": model, "pipe": pipe}
        fixed["batch_size"] = batch_size
        keep_gathered = space.keep_gathered and "params" in groups
        for values in itertools.product(*dimensions.values()):
            varied: dict[str, Any] = dict(zip(dimensions, values, strict=True))
            yield Candidate(**fixed, keep_gathered=keep_gathered, **varied)


def _indivisible(space: Space, batch_size: int, models: Sequence[int]) -> str:
    """Returns the error message for a batch size that no setting divides."""
    num_parts = sorted({space.num_devices // model for model in models})
    below, above = batch_size // num_parts[0] * num_parts[0], -(-batch_size // num_parts[0]) * num_parts[0]
    return (
        f"batch_size={batch_size} on {space.num_devices} devices: no setting divides it over "
        f"{' or '.join(map(str, num_parts))} replicas x data"
        + (f" with replica in {tuple(space.replicas)}" if space.replicas is not None else "")
        + f"; try batch_size={' or '.join(str(size) for size in dict.fromkeys((below, above)) if size)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Finds the setting of most examples a second that fits: ranks all by estimate, compiles the best few.

    First a plain setting is compiled, as a control: that of the fewest microbatches, and of those the fastest. Each
    compiled program corrects the estimated time of the settings that are not compiled yet (`_corrected_seconds`), and
    the fastest of them is compiled next. If the program of a setting is too large, the settings that need no less by
    estimate are skipped. If none has fitted, the last compile goes to the smallest by estimate. A `compile` may stop
    before the end (`needs_end`): then the fastest is compiled again, and what is faster than that by the first compile.

    Attributes:
      estimate: estimates bytes per device and seconds of a step; a `SettingRefused` rejects the setting.
      compile: compiles a setting; an `Exception` that it raises rejects the setting.
      capacity_bytes: usable memory of a device.
      host_capacity_bytes: memory of a host for each of its devices; None does not bound it.
      max_compiles: the most settings to compile, the control included; 0 ranks by estimate alone.
      is_plain: returns whether a setting is what users would take without a search, whatever its microbatches.
      needs_end: returns whether a setting that was compiled has to be compiled again, to the end, to be the best.
      log: called with each line of progress.
    """

    estimate: Callable[[Candidate], Estimated]
    compile: Callable[[Candidate], Outcome]
    capacity_bytes: float
    host_capacity_bytes: float | None = None
    max_compiles: int = 6
    is_plain: Callable[[Candidate], bool] = lambda setting: False
    needs_end: Callable[[Candidate], bool] = lambda setting: False
    log: Callable[[str], None] = lambda line: None

    def run(self, candidates: Iterable[Candidate], fallback: Sequence[Candidate] = ()) -> Ranking:
        """Searches the candidates; where none fits, by estimate or by the compiler, the settings of `fallback`.

        A Ctrl-C ends it with the result of what was compiled until then.

        Raises:
          ValueError: no candidates, or an estimate that is not a number.
        """
        settings = tuple(dict.fromkeys(candidates))
        if not settings or self.max_compiles < 0:
            raise ValueError(
                f"search: {len(settings)} candidates, max_compiles={self.max_compiles}: give settings, see candidates()"
            )
        rejected, ranked, num_compiled, was_stopped = [], [], 0, False
        for group in (settings, fallback):
            entries = list(map(self._estimated, group))
            fitting = sorted((entry for entry in entries if not entry.reason), key=_order)
            rejected += [entry for entry in entries if entry.reason]
            where = "" if group is settings else "nothing fits without host memory; "
            unfit = len(entries) - len(fitting)
            self.log(f"{where}{len(group)} settings: {len(fitting)} may fit by estimate, {unfit} do not")
            compiled, skipped, was_stopped = self._compile_best(fitting, self.max_compiles - num_compiled)
            num_compiled += len(compiled)
            rejected += [entry for entry in compiled if entry.reason] + skipped
            decided = {entry.setting for entry in (*compiled, *skipped)}
            ranked = sorted((entry for entry in compiled if not entry.reason), key=_order)
            if not was_stopped:
                ranked, refused, was_stopped = self._compiled_to_the_end(ranked)
                rejected += refused
            ranked += _corrected([entry for entry in fitting if entry.setting not in decided], compiled)
            if ranked or was_stopped or not fallback:
                break
        best = ranked[0] if ranked and (ranked[0].outcome or self.max_compiles == 0) else None
        return Ranking(
            ranked=tuple(ranked),
            rejected=tuple(rejected),
            best=best.setting if best else None,
            nearest=None if ranked else self._nearest(rejected),
            capacity_bytes=self.capacity_bytes,
            host_capacity_bytes=self.host_capacity_bytes,
            num_compiled=num_compiled,
            was_stopped=was_stopped,
        )

    def _missing_on_host(self, entry: Ranked | Estimated) -> float:
        return -math.inf if self.host_capacity_bytes is None else entry.host_bytes - self.host_capacity_bytes

    def _missing(self, entry: Ranked | Estimated) -> float:
        """Returns the bytes by which a setting exceeds the memory of the device or of the host, or less than 0."""
        return max(entry.bytes - self.capacity_bytes, self._missing_on_host(entry))

    def _bounded(self, entry: Ranked) -> Ranked:
        """Returns a setting that fits on a device, rejected if it does not fit in the host's memory."""
        if self.host_capacity_bytes is None or self._missing_on_host(entry) <= 0:
            return entry
        lacks = shortage(entry.host_bytes, self.host_capacity_bytes, note="for each device")
        return dataclasses.replace(entry, kind="host", reason=f"in host memory: {lacks}")

    def _estimated(self, setting: Candidate) -> Ranked:
        try:
            estimated = self.estimate(setting)
        except SettingRefused as error:
            return Ranked(setting=setting, kind="invalid", reason=str(error))
        if not (estimated.bytes >= 0 and estimated.seconds >= 0):
            raise ValueError(
                f"the estimate of {setting} is {estimated}: it has to be in bytes and seconds, and not below 0"
            )
        if estimated.bytes <= self.capacity_bytes:
            return self._bounded(Ranked(setting=setting, estimated=estimated))
        reason = shortage(estimated.bytes, self.capacity_bytes, note=estimated.note)
        return Ranked(setting=setting, estimated=estimated, kind="estimate", reason=reason)

    def _compile_best(self, entries: Sequence[Ranked], max_compiles: int) -> tuple[list[Ranked], list[Ranked], bool]:
        """Compiles up to `max_compiles` entries, the fastest first.

        Returns:
          The compiled entries, the skipped ones, and whether a Ctrl-C has ended it. One that comes before anything is
          compiled is raised.
        """
        waiting, compiled, skipped = list(entries), [], []
        name_of = naming(entries)
        needs_control = True
        while waiting and len(compiled) < max_compiles:
            waiting = _corrected(waiting, compiled)
            is_last_try = len(compiled) == max_compiles - 1 and bool(compiled) and all(x.reason for x in compiled)
            plains = [x for x in waiting if needs_control and not is_last_try and self.is_plain(x.setting)]
            plain = min(plains, key=lambda entry: entry.setting.num_microbatches, default=None)  # the fastest of these
            spare = 0.0
            if is_last_try:
                spare = _LAST_SPARE if any(x.outcome and x.outcome.bytes for x in compiled) else 1.0
            limit = self.capacity_bytes * (1 - spare)
            likely = [entry for entry in waiting if _likely_bytes(entry, compiled) <= limit]
            likely = likely or [min(waiting, key=lambda entry: entry.bytes)]
            chosen = plain or min(likely, key=lambda entry: _novelty(entry, compiled))
            waiting.remove(chosen)
            role = ", the plain setting, as a control" if chosen is plain else ""
            self.log(f"compiling {len(compiled) + 1} of at most {max_compiles}: {name_of(chosen.setting)}{role}")
            try:
                done = self._compiled(chosen)
            except KeyboardInterrupt:
                if not compiled:
                    raise
                self.log("stopped: the result is of what was compiled until now")
                return compiled, skipped, True
            compiled.append(done)
            needs_control = needs_control and bool(done.reason)
            self.log(f"  {done.reason or f'fits: {format_bytes(done.bytes, decimals=1)}, {done.seconds:.4g} s a step'}")
            if done.kind != "compiled":
                continue
            # A setting that needs no less by the same estimate would not fit either, unless it keeps what fits.
            too_large = [x for x in waiting if x.bytes >= chosen.bytes and not (x.fills or chosen.fills)]
            waiting = [entry for entry in waiting if entry not in too_large]
            reason = (
                f"not compiled: needs no less by estimate than {chosen.setting}, which the compiler found too large"
            )
            skipped += [dataclasses.replace(entry, kind="passed over", reason=reason) for entry in too_large]
        return compiled, skipped, False

    def _compiled_to_the_end(self, ranked: Sequence[Ranked]) -> tuple[list[Ranked], list[Ranked], bool]:
        """Compiles the fastest to the end, and those that then come before it, up to a number.

        Returns:
          The ranked entries, those that were refused at the end, and whether a Ctrl-C has ended it.
        """
        waiting, done, refused = list(ranked), list[Ranked](), list[Ranked]()
        name_of = naming(ranked)
        while waiting and len(done) < _MOST_ENDS and not (done and _order(done[0]) <= _order(waiting[0])):
            entry = waiting[0]
            if self.needs_end(entry.setting):
                self.log(f"compiling to the end, for an exact time (quick leaves it out): {name_of(entry.setting)}")
                try:
                    entry = self._compiled(entry)
                except KeyboardInterrupt:
                    return [*done, *waiting], refused, True
                size = format_bytes(entry.bytes, decimals=1)
                self.log(f"  {entry.reason or f'{size}, {entry.seconds:.4g} s a step'}")
            waiting = waiting[1:]
            if entry.reason:
                refused.append(entry)
            else:
                done = sorted([*done, entry], key=_order)
        return [*done, *waiting], refused, False

    def _compiled(self, entry: Ranked) -> Ranked:
        try:
            outcome = self.compile(entry.setting)
        except Exception as error:  # a compiler may raise anything; the search continues
            outcome = Outcome(fits=False, error=f"{type(error).__name__}: {error}")
        entry = dataclasses.replace(entry, outcome=outcome)
        if outcome.fits:
            return self._bounded(entry)
        if outcome.bytes is not None and outcome.bytes > self.capacity_bytes:
            reason = "compiled, " + shortage(outcome.bytes, self.capacity_bytes, note=outcome.error)
            return dataclasses.replace(entry, kind="compiled", reason=reason)
        reason = f"compiling failed: {outcome.error or 'the compiler gave no reason'}"
        return dataclasses.replace(entry, kind="failed", reason=reason)

    def _nearest(self, rejected: Sequence[Ranked]) -> Miss | None:
        """Returns the rejected setting that exceeds the memory by the fewest bytes, with changes that make it fit."""
        # Sizes of programs and estimates do not compare; compiled settings need less than the others by estimate.
        too_large = [entry for entry in rejected if entry.kind in ("compiled", "estimate", "host")]
        too_large = [entry for entry in too_large if entry.outcome] or too_large
        if not too_large:
            return None
        entry = min(too_large, key=lambda entry: (self._missing(entry), entry.seconds))
        assert entry.estimated is not None
        # The estimates of other settings are taken to be too low by as much as the estimate of a compiled one was.
        error_bytes = max(entry.bytes - entry.estimated.bytes, 0)

        def fits(setting: Candidate) -> bool:
            try:
                estimated = self.estimate(setting)
            except SettingRefused:
                return False
            return self._missing(dataclasses.replace(estimated, bytes=estimated.bytes + error_bytes)) <= 0

        changes = (_more_devices(entry.setting), _smaller_microbatches(entry.setting), _smaller_batches(entry.setting))
        remedies = [next((remedy for setting, remedy in options if fits(setting)), None) for options in changes]
        at_least = lambda size: f"at least {format_bytes(math.ceil(size / 1e8) * 1e8, decimals=1)}"  # noqa: E731
        if entry.bytes > self.capacity_bytes:
            more = f"devices with {at_least(entry.bytes)} of usable memory"
            lacks_host = self._missing_on_host(entry) > 0
            more += f", and hosts with {at_least(entry.host_bytes)} for each" if lacks_host else ""
        else:
            more = f"hosts with {at_least(entry.host_bytes)} of memory for each device"
        return Miss(
            setting=entry.setting,
            missing_bytes=self._missing(entry),
            remedies=(*(remedy for remedy in remedies if remedy), more),
        )


def divisors(n: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _order(entry: Ranked) -> tuple[float, float, str]:
    return (entry.seconds / entry.setting.batch_size, entry.bytes, str(entry.setting))


def _corrected(waiting: Iterable[Ranked], compiled: Sequence[Ranked]) -> list[Ranked]:
    """Returns the entries that are not compiled, with their estimates corrected, fastest first."""
    known = any(entry.outcome and entry.outcome.seconds for entry in compiled)
    seconds = lambda x: x.estimated.seconds * _ratio(x, compiled, "seconds") if known and x.estimated else None  # noqa: E731
    return sorted((dataclasses.replace(x, corrected_seconds=seconds(x)) for x in waiting), key=_order)


def _ratio(entry: Ranked, compiled: Iterable[Ranked], figure: str) -> float:
    """Returns the mean ratio of a compiled to an estimated figure, `seconds` or `bytes`, of the compiled settings.

    The mean is geometric. The weight of a setting is multiplied by 4 for each of its `parts` that is that of this one.
    """
    total, weights = 0.0, 0.0
    for other in compiled:
        estimated, found = getattr(other.estimated, figure, None), getattr(other.outcome, figure, None)
        if not (estimated and found):
            continue
        shared = sum(x == y for x, y in zip(entry.setting.parts, other.setting.parts, strict=True))
        total += _SHARED_WEIGHT**shared * math.log(found / estimated)
        weights += _SHARED_WEIGHT**shared
    return math.exp(total / weights) if weights else 1.0


def _likely_bytes(entry: Ranked, compiled: Iterable[Ranked]) -> float:
    """Returns the estimated bytes of a setting, corrected by those of compiled ones unless it keeps what fits."""
    return entry.bytes * (1 if entry.fills else _ratio(entry, [x for x in compiled if not x.fills], "bytes"))


def _novelty(entry: Ranked, compiled: Iterable[Ranked]) -> tuple[float, ...]:
    """Returns what settings are ordered by to be compiled: their time, longer for what is nearly compiled already."""

    def is_near(other: Ranked) -> bool:
        same = {"data": 0, "replica": 1, "secondary": False, "num_microbatches": 1}
        alike, other_alike = (dataclasses.replace(x.setting, **same) for x in (entry, other))
        seconds = [x.estimated.seconds for x in (entry, other) if x.estimated]
        return alike == other_alike and len(seconds) == 2 and max(seconds) <= (1 + _NEARLY) * min(seconds)

    seconds, *others = _order(entry)[:2]
    return seconds * (1 + _NEARLY * any(map(is_near, compiled))), *others


def _more_devices(setting: Candidate) -> Iterable[tuple[Candidate, str]]:
    for times in _MORE_DEVICES:
        data, parts = setting.data * times, setting.replica * setting.data * times
        batch_size = setting.batch_size if setting.batch_size % parts == 0 else setting.batch_size * times
        k = _fewer_microbatches(setting, batch_size // parts)
        changed = dataclasses.replace(setting, data=data, batch_size=batch_size, num_microbatches=k)
        more = changed.num_devices - setting.num_devices
        batch = "" if batch_size == setting.batch_size else f", with a batch of {batch_size}"
        yield changed, f"{more} devices more ({changed.num_devices} in all{batch})"


def _fewer_microbatches(setting: Candidate, per_device_batch_size: int) -> int:
    """Returns the largest number of microbatches that divides the batch, at most as many as the setting has."""
    return max(k for k in divisors(per_device_batch_size) if k <= setting.num_microbatches)


def _smaller_microbatches(setting: Candidate) -> Iterable[tuple[Candidate, str]]:
    per_device = setting.batch_size // (setting.replica * setting.data)
    for k in divisors(per_device):
        if k > setting.num_microbatches:
            yield dataclasses.replace(setting, num_microbatches=k), f"{k} microbatches"


def _smaller_batches(setting: Candidate) -> Iterable[tuple[Candidate, str]]:
    parts = setting.replica * setting.data
    for per_device in reversed(divisors(setting.batch_size // parts)[:-1]):
        size = per_device * parts
        k = _fewer_microbatches(setting, per_device)
        changed = dataclasses.replace(setting, batch_size=size, num_microbatches=k)
        yield changed, f"a batch of {size} in {k} microbatch{'es' if k > 1 else ''}"
