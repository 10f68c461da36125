"""Searches the settings of a train step: estimates all, compiles the best few, gives the reason for each rejection."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zero_jax.core.text_tables import format_bytes
from zero_jax.planning.errors import SettingRefused
from zero_jax.planning.ranking import Candidate, Figures, Miss, Ranked, Ranking, naming, shortage
from zero_jax.sharding.stages import sharded_groups

# Multiples of the number of devices that are tried, by estimate, to find out how many would be enough.
_MORE_DEVICES = (2, 3, 4, 6, 8, 16, 32, 64, 128)
_SHARED_WEIGHT = 4
_MOST_ENDS = 3
# The last compile of a search in which nothing has fitted yet leaves this share of the memory to spare, and goes to the
# smallest setting where it is not known what the others need.
_LAST_SPARE = 0.15
# A setting that differs from a compiled one in copies, microbatches or the loss alone, and by estimate in less than
# this, comes after others that are at most so much slower: what it could save is nearly known.
_NEARLY = 0.05


def candidates(choices: Mapping[str, Sequence[Any]], *, num_devices: int, num_slices: int = 1) -> tuple[Candidate, ...]:
    """Returns all valid settings of what to try.

    Settings that compile to the program of another one are left out: replicas where nothing is sharded, a stage that
    shards over 1 of several devices, other stages than 3 on one device after the first, of stages 1 and 2 the second
    without microbatches, `keep_gathered` where params are not sharded, and `secondary` where they are not sharded over
    several slices, and over several devices of each.

    Args:
      choices: what to try of each attribute of `Candidate`; what has no entry keeps its default, but for `data`, which
        takes the rest of the devices, `num_microbatches`, of which up to 64 are tried, and `replica`: all that divide,
        and 1 with a pipeline.
      num_devices: the devices.
      num_slices: TPU slices or GPU hosts of them.

    Raises:
      ValueError: there are none for a batch size, because the devices or the batch do not divide.
    """
    tried: dict[str, Sequence[Any]] = {field.name: (field.default,) for field in dataclasses.fields(Candidate)}
    tried |= {"replica": (), "num_microbatches": range(1, 65), **choices}
    if num_devices < 1 or min(tried["batch_size"]) < 1:
        raise ValueError(f"num_devices={num_devices}, batch_sizes={tuple(tried['batch_size'])}: give positive numbers")
    models = [model for model in tried["model"] if num_devices % model == 0]
    if not models:
        sizes = ", ".join(map(str, tried["model"]))
        raise ValueError(f"model={sizes} does not divide num_devices={num_devices}: try model=1")
    if not any(num_devices % (model * pipe) == 0 for model in models for pipe in tried["pipe"]):
        sizes = ", ".join(map(str, tried["pipe"]))
        raise ValueError(f"pipe={sizes} does not divide num_devices={num_devices} over model={models}: try pipe=1")
    if all(tried["secondary"]) and num_slices == 1:
        raise ValueError(
            "secondary=True on one slice or host: there is no network between slices that it would spare: leave it out"
        )
    # On one device the stages make two programs: with params that are gathered, and without.
    distinct = {"params" in sharded_groups(stage): stage for stage in reversed(tried["stage"])}.values()
    settings = []
    for batch_size in tried["batch_size"]:
        before = len(settings)
        for model, pipe, stage in itertools.product(models, tried["pipe"], tried["stage"]):
            if num_devices % (model * pipe) == 0 and (model < num_devices or stage in distinct):
                sizes = {"stage": stage, "batch_size": batch_size, "model": model, "pipe": pipe}
                settings += _settings(tried, sizes, num_devices // model // pipe, num_slices)
        if len(settings) == before:
            raise ValueError(_indivisible(batch_size, num_devices, models, tried["replica"]))
    return tuple(settings)


def _settings(
    tried: Mapping[str, Sequence[Any]], sizes: Mapping[str, int], copies: int, num_slices: int
) -> Iterator[Candidate]:
    """Yields the settings of a stage, a batch size, and sizes of `model` and `pipe`, which leave `copies` devices."""
    groups, pipe, batch_size = sharded_groups(sizes["stage"]), sizes["pipe"], sizes["batch_size"]
    for replica in divisors(copies) if pipe == 1 or tried["replica"] else (1,):
        data = copies // replica
        same_as_unsharded = (replica > 1) if not groups else (data * pipe == 1 and copies > 1)
        if same_as_unsharded or batch_size % copies or (tried["replica"] and replica not in tried["replica"]):
            continue
        across = num_slices // math.gcd(num_slices, replica)
        has_secondary = "params" in groups and across > 1 and data // across > 1 and pipe == 1
        counts = [k for k in divisors(batch_size // copies) if k in tried["num_microbatches"] and k % pipe == 0]
        if sizes["stage"] in [stage for stage in tried["stage"] if stage in (1, 2)][1:]:
            counts = [k for k in counts if k > 1]
        valid = {
            **tried,
            **{name: (size,) for name, size in {**sizes, "replica": replica, "data": data}.items()},
            "num_microbatches": counts,
            "keep_gathered": [x and "params" in groups for x in tried["keep_gathered"]],
            "experts": [x for x in tried["experts"] if "params" in groups or not x],
            "secondary": [x for x in tried["secondary"] if has_secondary or not x],
            "pipeline": tried["pipeline"] if pipe > 1 else tried["pipeline"][:1],
        }
        for values in itertools.product(*valid.values()):
            yield Candidate(**dict(zip(valid, values, strict=True)))


def _indivisible(batch_size: int, num_devices: int, models: Sequence[int], replicas: Sequence[int]) -> str:
    parts = sorted({num_devices // model for model in models})
    below, above = batch_size // parts[0] * parts[0], -(-batch_size // parts[0]) * parts[0]
    return (
        f"batch_size={batch_size} on {num_devices} devices: no setting divides it over "
        f"{' or '.join(map(str, parts))} replicas x data"
        + (f" with replica in {tuple(replicas)}" if replicas else "")
        + f"; try batch_size={' or '.join(str(size) for size in dict.fromkeys((below, above)) if size)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Finds the setting of most examples a second that fits: ranks all by estimate, compiles the best few.

    First a plain setting is compiled, as a control: that of the fewest microbatches, and of those the fastest. Each
    compiled program corrects the estimated time of the settings that are not compiled yet (`_corrected`), and
    the fastest of them is compiled next. If the program of a setting is too large, the settings that need no less by
    estimate are skipped. If none has fitted, the last compile goes to the smallest by estimate. A `compile` may stop
    before the end (`needs_end`): then the fastest is compiled again, and what is faster than that by the first compile.
    """

    # Estimates bytes per device and seconds of a step; a `SettingRefused` rejects the setting
    estimate: Callable[[Candidate], Figures]
    compile: Callable[[Candidate], Figures]  # compiles a setting; an `Exception` that it raises rejects the setting
    capacity_bytes: float  # usable memory of a device
    host_capacity_bytes: float = math.inf  # memory of a host for each of its devices, infinite where it is not known
    max_compiles: int = 6  # the most settings to compile, the control included; 0 ranks by estimate alone
    # Returns whether a setting is what users would take without a search, whatever its microbatches
    is_plain: Callable[[Candidate], bool] = lambda setting: False
    # Returns whether a setting that was compiled has to be compiled again, to the end, to be the best
    needs_end: Callable[[Candidate], bool] = lambda setting: False
    log: Callable[[str], None] = lambda line: None  # called with each line of progress

    def run(self, candidates: Iterable[Candidate], fallback: Sequence[Candidate] = ()) -> Ranking:
        """Searches the candidates, then `fallback` where none fits; a Ctrl-C ends it with what is compiled."""
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
            compiled, ranked = list[Ranked](), list[Ranked]()
            try:
                self._compile_best(fitting, self.max_compiles - num_compiled, compiled, rejected)
                ranked = sorted((entry for entry in compiled if not entry.reason), key=_order)
                self._compile_to_the_end(ranked, rejected)
            except KeyboardInterrupt:
                if not compiled:
                    raise
                self.log("stopped: the result is of what was compiled until now")
                was_stopped = True
                ranked = ranked or sorted((entry for entry in compiled if not entry.reason), key=_order)
            num_compiled += len(compiled)
            rejected += [entry for entry in compiled if entry.reason]
            decided = {entry.setting for entry in (*ranked, *rejected)}
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

    def _missing(self, entry: Ranked) -> float:
        """Returns the bytes by which a setting exceeds the memory of the device or of the host, or less than 0."""
        return max(entry.bytes - self.capacity_bytes, entry.figures.host_bytes - self.host_capacity_bytes)

    def _estimated(self, setting: Candidate) -> Ranked:
        try:
            estimated = self.estimate(setting)
        except SettingRefused as error:
            return Ranked(setting=setting, kind="invalid", reason=str(error))
        if not (estimated.bytes >= 0 and estimated.seconds >= 0):
            raise ValueError(
                f"the estimate of {setting} is {estimated}: it has to be in bytes and seconds, and not below 0"
            )
        return self._judged(Ranked(setting=setting, estimated=estimated))

    def _compiled(self, entry: Ranked) -> Ranked:
        try:
            outcome = self.compile(entry.setting)
        except Exception as error:  # a compiler may raise anything; the search continues
            outcome = Figures(fits=False, note=f"{type(error).__name__}: {error}")
        return self._judged(dataclasses.replace(entry, outcome=outcome))

    def _judged(self, entry: Ranked) -> Ranked:
        """Returns a setting with the reason why it is rejected, by its estimate or its program; as it is if it fits."""
        figures, kind, reason = entry.figures, "", ""
        if figures.bytes > self.capacity_bytes and not (entry.outcome and (figures.fits or figures.bytes == math.inf)):
            kind = "compiled" if entry.outcome else "estimate"
            reason = "compiled, " * bool(entry.outcome)
            reason += shortage(figures.bytes, self.capacity_bytes, note=figures.note)
        elif not figures.fits:
            kind, reason = "failed", f"compiling failed: {figures.note or 'the compiler gave no reason'}"
        elif figures.host_bytes > self.host_capacity_bytes:
            lacks = shortage(figures.host_bytes, self.host_capacity_bytes, note="for each device")
            kind, reason = "host", f"in host memory: {lacks}"
        return dataclasses.replace(entry, kind=kind, reason=reason)

    def _compile_best(
        self, entries: Sequence[Ranked], max_compiles: int, compiled: list[Ranked], rejected: list[Ranked]
    ) -> None:
        """Compiles up to `max_compiles` entries, the fastest first; `rejected` gets what would be too large."""
        waiting = list(entries)
        name_of = naming(entries)
        needs_control = True
        while waiting and len(compiled) < max_compiles:
            waiting = _corrected(waiting, compiled)
            is_last_try = len(compiled) == max_compiles - 1 and bool(compiled) and all(x.reason for x in compiled)
            spare = 0.0
            if is_last_try:
                spare = _LAST_SPARE if any(x.outcome and x.outcome.bytes < math.inf for x in compiled) else 1.0
            limit = self.capacity_bytes * (1 - spare)
            likely = [entry for entry in waiting if _likely_bytes(entry, compiled) <= limit]
            plains = [x for x in likely or waiting if needs_control and not is_last_try and self.is_plain(x.setting)]
            plain = min(plains, key=lambda entry: entry.setting.num_microbatches, default=None)  # the fastest of these
            likely = likely or [min(waiting, key=lambda entry: entry.bytes)]
            chosen = plain or min(likely, key=lambda entry: _novelty(entry, compiled))
            waiting.remove(chosen)
            role = ", the plain setting, as a control" if chosen is plain else ""
            self.log(f"compiling {len(compiled) + 1} of at most {max_compiles}: {name_of(chosen.setting)}{role}")
            done = self._compiled(chosen)
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
            rejected += [dataclasses.replace(entry, kind="passed over", reason=reason) for entry in too_large]

    def _compile_to_the_end(self, ranked: list[Ranked], rejected: list[Ranked]) -> None:
        """Compiles the fastest to the end, and what then comes before it; `ranked` stays in order."""
        done, name_of = set[Candidate](), naming(ranked)
        while ranked and len(done) < _MOST_ENDS and ranked[0].setting not in done:
            entry = ranked[0]
            if self.needs_end(entry.setting):
                self.log(f"compiling to the end, for an exact time (quick leaves it out): {name_of(entry.setting)}")
                entry = self._compiled(entry)
                size = format_bytes(entry.bytes, decimals=1)
                self.log(f"  {entry.reason or f'{size}, {entry.seconds:.4g} s a step'}")
            del ranked[0]
            if entry.reason:
                rejected.append(entry)
            else:
                done.add(entry.setting)
                ranked.append(entry)
                ranked.sort(key=_order)

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
            estimated = dataclasses.replace(estimated, bytes=estimated.bytes + error_bytes)
            return self._missing(Ranked(setting=setting, estimated=estimated)) <= 0

        changes = (_more_devices(entry.setting), _smaller_microbatches(entry.setting), _smaller_batches(entry.setting))
        remedies = [next((remedy for setting, remedy in options if fits(setting)), None) for options in changes]
        at_least = lambda size: f"at least {format_bytes(math.ceil(size / 1e8) * 1e8, decimals=1)}"  # noqa: E731
        host_bytes, more = entry.figures.host_bytes, list[str]()
        if entry.bytes > self.capacity_bytes:
            more.append(f"devices with {at_least(entry.bytes)} of usable memory")
        if host_bytes > self.host_capacity_bytes:
            more.append(f"hosts with {at_least(host_bytes)} of memory for each device")
        return Miss(
            setting=entry.setting,
            missing_bytes=self._missing(entry),
            remedies=(*(remedy for remedy in remedies if remedy), ", and ".join(more)),
        )


def divisors(n: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _order(entry: Ranked) -> tuple[float, float, str]:
    # The text, so that equals come in the same order each time.
    return (entry.seconds / entry.setting.batch_size, entry.bytes, str(entry.setting))


def _corrected(waiting: Iterable[Ranked], compiled: Sequence[Ranked]) -> list[Ranked]:
    """Returns the entries that are not compiled, with their estimates corrected, fastest first."""
    known = any(entry.outcome and entry.outcome.seconds < math.inf for entry in compiled)
    seconds = lambda x: x.estimated.seconds * _ratio(x, compiled, "seconds") if known and x.estimated else None  # noqa: E731
    return sorted((dataclasses.replace(x, corrected_seconds=seconds(x)) for x in waiting), key=_order)


def _ratio(entry: Ranked, compiled: Iterable[Ranked], figure: str) -> float:
    """Returns the mean ratio of a compiled to an estimated figure, `seconds` or `bytes`, of the compiled settings.

    The mean is geometric. The weight of a setting is multiplied by 4 for each of its `parts` that is that of this one.
    """
    total, weights = 0.0, 0.0
    for other in compiled:
        estimated, measured = getattr(other.estimated, figure, None), getattr(other.outcome, figure, math.inf)
        if not estimated or not 0 < measured < math.inf:
            continue
        shared = sum(x == y for x, y in zip(entry.setting.parts, other.setting.parts, strict=True))
        total += _SHARED_WEIGHT**shared * math.log(measured / estimated)
        weights += _SHARED_WEIGHT**shared
    return math.exp(total / weights) if weights else 1.0


def _likely_bytes(entry: Ranked, compiled: Iterable[Ranked]) -> float:
    """Returns the estimated bytes of a setting, corrected by those of compiled ones unless it keeps what fits."""
    return entry.bytes * (1 if entry.fills else _ratio(entry, [x for x in compiled if not x.fills], "bytes"))


def _novelty(entry: Ranked, compiled: Iterable[Ranked]) -> tuple[float, ...]:
    """Returns what settings are ordered by to be compiled: their time, longer for what is nearly compiled already."""

    def is_near(other: Ranked) -> bool:
        same = {"data": 0, "replica": 1, "secondary": False, "num_microbatches": 1, "loss": ""}
        alike = {dataclasses.replace(x.setting, **same) for x in (entry, other)}
        seconds = [x.estimated.seconds for x in (entry, other) if x.estimated]
        return len(alike) == 1 and len(seconds) == 2 and max(seconds) <= (1 + _NEARLY) * min(seconds)

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
