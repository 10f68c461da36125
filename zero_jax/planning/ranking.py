"""The result of a search for settings: the ranking, and why each other setting was rejected; prints as a table."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zero_jax.core.text_tables import Report, aligned, format_bytes

_MAX_LINES, _MORE_LINES = 10, 4  # settings that are shown, and of those that are not compiled beside the others
_MAX_REJECTED, _MAX_ALIKE = 40, 4  # lines of settings that are too large, and of those with the same other reason
# By what a setting of these kinds was found to need too much memory, of a device or, with `host`, of its host.
_BY = {"estimate": "estimate", "compiled": "compiler", "host": "host memory"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Report):
    """Settings of a train step that a search may choose, such as stage, mesh axes, microbatches and remat."""

    stage: int  # the ZeRO stage
    data: int  # size of the axis `data`, which the stage shards over, in each stage of a pipeline
    batch_size: int  # examples of a step
    replica: int = 1  # size of the axis `replica`
    model: int = 1  # size of the axis `model`
    num_microbatches: int = 1  # microbatches of a step
    remat: str = "full"  # name of the remat policy
    keep_gathered: bool = False  # whether gathered params are kept for the backward pass
    secondary: bool = False  # whether there is a secondary shard of the params inside each slice or host
    attention: str = "own"  # `own` or `fused`, as of `ZeroConfig`
    overlap: bool = True  # whether it is compiled with the options that let collectives run beside computation
    offload: str | None = None  # what is kept in host memory: `optimizer`, `state`, `all` or nothing
    experts: bool = False  # whether params of experts stay sharded, as `ZeroConfig.experts`
    quantize: bool = False  # whether params or gradients are sent in the formats of the config
    pipe: int = 1  # size of the axis `pipe`: stages of a pipeline
    pipeline: str = "gpipe"  # the schedule of these stages, as of `ZeroConfig`
    loss: str = ""  # name of the loss function, where there are several to choose from

    @property
    def policy(self) -> str:
        """The name of the remat policy and of the loss function that it applies to."""
        return policy_name(self.remat, self.loss)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.replica * self.data * self.pipe * self.model

    @property
    def parts(self) -> tuple[Any, ...]:
        """What settings that compile to similar programs have in common."""
        several = self.num_microbatches > 1, self.replica > 1, self.model > 1, self.pipe > 1, self.secondary
        compiled = self.attention, self.overlap, self.offload, self.experts, self.quantize, self.pipeline
        return self.stage, self.remat, self.loss, *several, *compiled

    def __str__(self) -> str:
        return self.describe(str(self.num_microbatches))

    def describe(self, num_microbatches: str) -> str:
        """Returns the setting as a line of text, with another text for the number of microbatches."""
        axes = {"replica": self.replica, "data": self.data, "pipe": self.pipe, "model": self.model}
        parts = [f"{axis}={size}" for axis, size in axes.items() if size > 1 or axis == "data"]
        parts += [f"microbatches={num_microbatches}", f"remat={self.remat}"]
        others = {
            self.loss: self.loss, "keep_gathered": self.keep_gathered, "secondary": self.secondary,
            f"attention={self.attention}": self.attention != "own", "no_overlap": not self.overlap,
            f"offload={self.offload}": self.offload, "experts": self.experts, "quantize": self.quantize,
            self.pipeline: self.pipe > 1,
        }  # fmt: skip
        parts += [text for text, is_so in others.items() if is_so]
        return f"stage {self.stage} {' '.join(parts)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Memory and time of a setting: estimated, or those of its compiled program, infinite where not known."""

    bytes: float = math.inf  # bytes per device
    seconds: float = math.inf  # seconds of a step
    # What estimated bytes consist of, such as `31.2 GB of model state`; why compiling failed, or why the program does
    # not fit
    note: str = ""
    host_bytes: float = 0.0  # bytes in host memory for each device
    fits: bool = True  # whether the program fits on a device
    fills: bool = False  # whether blocks keep what there is memory for, by an estimate, which a compile corrects


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranked:
    """A setting with its estimate, its compiled program, and why it was rejected."""

    setting: Candidate  # the setting
    estimated: Figures | None = None  # the estimate; None if the setting is invalid
    outcome: Figures | None = None  # the figures of the compiled program; None if it was not compiled
    # Kind of rejection: `invalid`, `estimate`, `compiled`, `host` (too little host memory), `failed` or `passed over`;
    # empty if not rejected
    kind: str = ""
    reason: str = ""  # why it was rejected, as a line; empty if not rejected
    # The estimated seconds of a step, corrected by what was compiled; None without that
    corrected_seconds: float | None = None

    @property
    def figures(self) -> Figures:
        """Those of the compiled program, if there is one, else the estimate."""
        return self.outcome or self.estimated or Figures()

    @property
    def bytes(self) -> float:
        """Bytes per device, of the compiled program if known, else estimated."""
        sizes = [source.bytes for source in (self.outcome, self.estimated) if source]
        return next((size for size in sizes if size < math.inf), math.inf)

    @property
    def fills(self) -> bool:
        """Whether its blocks keep what there is memory for."""
        return bool(self.estimated and self.estimated.fills)

    @property
    def seconds(self) -> float:
        """Seconds of a step: compiled, infinite where not known, or else estimated and corrected."""
        is_known = self.outcome or self.corrected_seconds is None
        return self.figures.seconds if is_known else self.corrected_seconds  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miss:
    """The setting that comes closest to fitting, and changes that make it fit."""

    setting: Candidate  # the setting
    missing_bytes: float  # bytes by which it exceeds the memory of a device, or of its host
    remedies: tuple[str, ...]  # changes, each sufficient by estimate

    def __str__(self) -> str:
        missing = format_bytes(self.missing_bytes, decimals=1)
        first = f"nothing fits; nearest: {self.setting}, short of {missing}. Each of these would do:"
        return "\n".join([first, *(f"  - {remedy}" for remedy in self.remedies)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking(Report):
    """The result of a search."""

    # Settings that fit: compiled ones first, then those that fit by estimate, each sorted by time
    ranked: tuple[Ranked, ...]
    rejected: tuple[Ranked, ...]  # the other settings, each with its reason
    # Of the compiled settings that fit (of all that fit by estimate if `max_compiles` is 0) the one of the most
    # examples a second, or None
    best: Candidate | None
    nearest: Miss | None  # the setting that comes closest, if none fits
    capacity_bytes: float  # usable memory of a device
    host_capacity_bytes: float  # memory of a host for each of its devices, infinite where it is not known
    num_compiled: int  # number of settings that were compiled
    was_stopped: bool = False  # whether a Ctrl-C ended the search before it was through

    def __str__(self) -> str:
        return f"{self.headline()}\n{self.tables()}"

    def tables(self) -> str:
        """Returns the settings that fit, the rejected ones by how near they came, and what was not compiled."""
        lines: list[str] = []
        compiled, name_of = [entry for entry in self.ranked if entry.outcome], naming((*self.ranked, *self.rejected))
        if self.ranked:
            shown = self.ranked[: max(_MAX_LINES, len(compiled) + _MORE_LINES)]
            names, of_all = _apart([name_of(entry.setting) for entry in shown])
            unit, scale = size_unit(max(entry.bytes, entry.figures.host_bytes) for entry in shown)
            rows = [("rank", "setting", unit, f"host {unit}", "s/step", "estimated", "by")]
            for i, (entry, name) in enumerate(zip(shown, names, strict=True), start=1):
                # A rank is among settings of the same kind: what is estimated does not compare with what is compiled.
                rank = i if entry.outcome or not compiled else ""
                by = "compiler" if entry.outcome else "estimate" + (", corrected" if entry.corrected_seconds else "")
                estimated = f"{entry.estimated.seconds:.4g}" if entry.estimated else ""
                sizes = f"{entry.bytes / scale:.1f}", f"{entry.figures.host_bytes / scale:.1f}"
                seconds = "unknown" if entry.seconds == math.inf else f"{entry.seconds:.4g}"
                rows.append((f"{rank}", name, *sizes, seconds, estimated, by))
            if not any(entry.figures.host_bytes for entry in shown):
                rows = [(*row[:3], *row[4:]) for row in rows]
            lines += ["", *([f"settings that fit, all with {of_all}"] if of_all else [])]
            lines.append(aligned(rows, right=set(range(len(rows[0]) - 1)) - {1}))
            if below := len(self.ranked) - len(shown):
                lines.append(f"      ... and {below:,} more that fit by estimate and rank below")
        if self.rejected:
            usable = f"{format_bytes(self.capacity_bytes, decimals=1)} usable"
            lines += ["", f"rejected ({len(self.rejected)}, the nearest first, {usable})"]
            lines.append(textwrap.indent(self._rejections(), "  "))
        if any(entry.figures.host_bytes for entry in (*self.ranked, *self.rejected)):
            lines += ["", f"host memory for each device: {host_memory(self.host_capacity_bytes)}"]
        if self.ranked and (waiting := len(self.ranked) - len(compiled)):
            why = (
                "the search was stopped"
                if self.was_stopped
                else f"{self.num_compiled} were, which --max-compiles bounds"
            )
            lines += ["", f"not compiled: {waiting} settings that fit by estimate and may be as fast or slower: {why}"]
        return "\n".join(lines)

    def _missing(self, entry: Ranked) -> float:
        """Returns the bytes by which a rejected setting exceeds the memory, of its host if that is why."""
        if entry.kind == "host":
            return entry.figures.host_bytes - self.host_capacity_bytes
        return entry.bytes - self.capacity_bytes

    def _rejections(self) -> str:
        """Returns the rejected settings, the nearest first: those too large as a table, the others by reason."""
        name_of, groups = naming(self.rejected), dict[tuple[Any, ...], list[Ranked]]()
        for entry in self.rejected:
            alike = dataclasses.replace(entry.setting, num_microbatches=1)
            groups.setdefault((alike, entry.kind, "" if entry.kind in _BY else entry.reason), []).append(entry)
        rows, by_reason = [("setting", "GB", "short of", "by", "GB of the first")], dict[str, list[str]]()
        for (alike, kind, reason), entries in sorted(groups.items(), key=lambda item: min(map(self._missing, item[1]))):
            counts = ",".join(str(entry.setting.num_microbatches) for entry in entries)
            text = name_of(alike).replace(alike.describe("1"), alike.describe(counts))
            if kind not in _BY:
                by_reason.setdefault(reason, []).append(text)
                continue
            least, most = min(entries, key=self._missing), max(entries, key=self._missing)
            needed = [x.figures.host_bytes if kind == "host" else x.bytes for x in (least, most)]
            sizes = dict.fromkeys(f"{size / 1e9:.1f}" for size in needed)
            short = f"{self._missing(least) / 1e9:.1f}"
            rows.append((text, " to ".join(sizes), short, _BY[kind], least.figures.note))
        lines = [aligned(rows[: _MAX_REJECTED + 1], right={1, 2})] if rows[1:] else []
        lines += _and_more(len(rows) - 1 - _MAX_REJECTED)
        for reason, settings in by_reason.items():
            lines += [f"{reason}:", *(f"  {setting}" for setting in settings[:_MAX_ALIKE])]
            lines += _and_more(len(settings) - _MAX_ALIKE)
        return "\n".join(lines)

    def headline(self) -> str:
        """Returns the best setting, or that there is none and what would do."""
        if self.best:
            name = naming((*self.ranked, *self.rejected))(self.best)
            return f"best: {name}{'' if self.num_compiled else ' (by estimate, not compiled)'}"
        if self.ranked:
            return (
                f"none of {self.num_compiled} compiled settings came out, but {len(self.ranked)} more fit by estimate: "
                "allow more compiles"
            )
        return str(self.nearest or "no setting came out, and not for want of memory: the reasons are below")


def policy_name(remat: str, loss: str) -> str:
    """Returns the name of a remat policy of a loss function."""
    return f"{remat} {loss}".strip()


def naming(entries: Iterable[Ranked]) -> Callable[[Candidate], str]:
    """Returns a function that names settings, with their batch size where that is not the same for all."""
    if len({entry.setting.batch_size for entry in entries}) == 1:
        return str
    return lambda setting: f"batch={setting.batch_size} {setting}"


def size_unit(sizes: Iterable[float]) -> tuple[str, float]:
    """Returns the unit of a column of sizes, and its bytes: GB, or of small models MB, of which GB would show 0.0."""
    return ("GB", 1e9) if max(sizes, default=math.inf) >= 1e8 else ("MB", 1e6)


def host_memory(capacity_bytes: float) -> str:
    """Returns what is assumed of the memory of a host for each of its devices."""
    return (
        "not known, nothing bounds it" if capacity_bytes == math.inf else f"{format_bytes(capacity_bytes)} are assumed"
    )


def _apart(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns the names of settings without the words that all of them have, and these words."""
    words = [re.findall(r"stage \d|\S+", name) for name in names]
    common = [word for word in words[0] if all(word in other for other in words)] if len(names) > 1 else []
    return [" ".join(word for word in each if word not in common) for each in words], " ".join(common)


def _and_more(number: int) -> list[str]:
    return [f"  ... and {number:,} more"] if number > 0 else []


def shortage(needed_bytes: float, capacity_bytes: float, *, note: str = "") -> str:
    """Returns a line on how much memory is missing."""
    gb = lambda num_bytes: format_bytes(num_bytes, decimals=1)  # noqa: E731
    consists = f" ({note})" if note else ""
    missing = f"short of {gb(needed_bytes - capacity_bytes)}"
    return f"needs {gb(needed_bytes)}{consists}, {gb(capacity_bytes)} usable: {missing}"
