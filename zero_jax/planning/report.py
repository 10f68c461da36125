"""Reports on a compiled step: whether it fits, what a device holds and sends, and how long it may take."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zero_jax.analysis import comms, memory
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.planning.job import CompiledText, Job, compile_job
from zero_jax.planning.ranking import host_memory
from zero_jax.planning.step_time import ModelWork, TimeEstimate, estimate_time
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import precision_name
from zero_jax.sharding.rules import PARTLY_SHARDED
from zero_jax.sharding.spec import carries
from zero_jax.sharding.stages import sharded_groups
from zero_jax.sharding.topology import parse
from zero_jax.training import CompilerOption, StepLoss, TrainState, trace_step_loss, trained_params
from zero_jax.transforms import AttentionReport, ValueChoice, resolve_remat, training_flops

# JAX gives a GPU program this share of the memory by default.
_DEFAULT_GPU_SHARE = 0.75
# Traffic below this multiple of the ideal is not explained, and this many reasons are given.
_NEAR_IDEAL, _MAX_EXCESS = 1.02, 3
# A program that needs more of the memory, and whose collectives wait for more of their time, is said to be too full.
FULL, _WAITING = 0.97, 0.8
# More rows of attention are not shown.
_MAX_ATTENTIONS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """A train step compiled for hardware that need not be there; prints as a page.

    Attributes:
      name: what the plan is called.
      topology: name of the hardware.
      device_kind: what JAX calls a device of it.
      mesh: sizes of the mesh axes.
      stage: the ZeRO stage.
      precision: name of the precision policy, or `custom`.
      remat: the remat policy, what it keeps and where.
      attention: the attentions of the loss function: which ones a fused kernel computes on this hardware, and why not
        the others; None with `attention="own"`.
      num_params: parameters.
      batch_size: examples of a step, over all devices and microbatches.
      num_microbatches: forward passes of a step.
      fits: whether a device's usable memory holds it.
      needed_bytes: memory that a device needs: arguments, new outputs, the heap of temporaries, and code; None if the
        compiler did not report it.
      usable_bytes: memory of a device that a program may use.
      memory: the memory by group, or None where the compiler refused the program.
      comms: what a device sends, likewise.
      memory_estimate: the memory by formula.
      comms_estimate: what is sent by formula.
      time: the estimated time of a step, or None.
      compile_seconds: what compiling took when it was done.
      from_cache: whether it was done before.
      refusal: the compiler's error where it refused the program for its memory, else ''.
      compiler_options: those of the step, each with what it is for.
      notes: further things to know.
      values: with `remat="auto"` the values that blocks could keep, and what is kept of them.
      has_code: whether the compiler generated the program's code; it is stopped before that for a `quick` plan.
      tokens: tokens of a training whose days and device-hours are shown (or examples, by `time.unit`), or None.

    Example:
      >>> report = zero.plan(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, log=lambda _: None)
      >>> report.fits, report.needed_bytes < report.usable_bytes
      (True, True)
    """

    name: str
    topology: str
    device_kind: str
    mesh: Mapping[str, int]
    stage: int
    precision: str
    remat: str
    attention: AttentionReport | None
    num_params: int
    batch_size: int
    num_microbatches: int
    fits: bool
    needed_bytes: int | None
    usable_bytes: int
    memory: memory.MemoryReport | None = None
    comms: comms.CommsReport | None = None
    memory_estimate: Any
    comms_estimate: comms.CommsEstimate
    time: TimeEstimate | None = None
    compile_seconds: float
    from_cache: bool
    refusal: str = ""
    compiler_options: tuple[CompilerOption, ...]
    notes: tuple[str, ...]
    values: ValueChoice | None = None
    has_code: bool = True
    tokens: float | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def host_bytes(self) -> float:
        """Bytes in host memory for each device: as measured on the program, else by formula."""
        return self.memory_estimate.host_bytes if self.memory is None else self.memory.host_bytes

    @property
    def traffic_ratio(self) -> float | None:
        """Bytes sent over the ideal of the estimate; over `data` and `replica`, where that does not have all axes."""
        if self.comms_estimate.not_counted:
            return self.traffic_ratios.get("data")
        return self._ratios_by(lambda row: "all").get("all")

    @property
    def traffic_ratios(self) -> Mapping[str, float]:
        """The same for `data` (with `replica`) and for the axes of the `model`, those that the estimate has."""
        of_model = self.mesh.keys() - set(self.comms_estimate.data_axes)
        return self._ratios_by(lambda row: "model" if set(row.axes) <= of_model else "data")

    def _ratios_by(self, key: Callable[[Any], str]) -> dict[str, float]:
        """Returns bytes sent over the ideal by a key of rows; those without an ideal, or not measured, are left out."""
        if self.comms is None:
            return {}
        ideal, sent = self.comms_estimate.sent_by(key), self.comms.sent_by(key)
        return {name: sent.get(name, 0.0) / size for name, size in ideal.items() if size}

    @property
    def training(self) -> Mapping[str, float] | None:
        """The `days` and `device_hours` of a training on `tokens`."""
        if self.tokens is None or self.time is None:
            return None
        days = self.tokens / self.time.tokens_per_second / 86_400
        return {"days": days, "device_hours": days * 24 * self.num_devices}

    @property
    def sent_bytes_by_network(self) -> Mapping[str, float]:
        """Bytes that a device sends by network, as measured on the program, else by formula."""
        return (self.comms or self.comms_estimate).by_network

    def __str__(self) -> str:
        parts = [self.summary(), *([f"values that blocks could keep\n{self.values}"] if self.values else [])]
        if self.memory is None or self.comms is None:
            parts.append(f"memory of a device, by formula\n{self.memory_estimate}")
            parts.append(f"communication of a device and step, by formula\n{self.comms_estimate}")
        else:
            compared = comms.compare(self.comms_estimate, self.comms)
            findings = "".join(f"\nwarning: {finding}" for finding in self.comms.findings)
            parts.append(f"memory of a device, measured on the program\n{self.memory}")
            parts.append(f"communication of a device and step\n{compared}{findings}")
        return "\n\n".join(parts)

    def summary(self) -> str:
        """Returns the answer in some lines, without the tables."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items() if size > 1) or "one device"
        microbatches = f" in {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        needed = "an unknown amount" if self.needed_bytes is None else format_bytes(self.needed_bytes)
        fits, plural = "fits" if self.fits else "DOES NOT FIT", "s" if self.batch_size > 1 else ""
        done = "compiled" if self.has_code else "scheduled, without code,"
        done += " before, in" if self.from_cache else " in"
        rows = {
            "verdict": f"{fits}: needs {needed} of {format_bytes(self.usable_bytes)} a device",
            **({} if self.fits else {"what helps": self._what_helps()}),
            "plan": f"{self.name}, {self.num_params:,} params, stage {self.stage}, {self.precision}",
            "hardware": f"{self.topology}: {self.num_devices} x {self.device_kind}, {axes}",
            "batch": f"{self.batch_size} example{plural} a step{microbatches}",
            "remat": self.remat,
        }
        if self.time:
            rows["time"] = f"{self.time} (an estimate)"
        if self.time and self.training:
            cost = "{days:,.3g} days, {device_hours:,.0f} device-hours".format(**self.training)
            rows["training"] = f"{self.tokens:,.0f} {self.time.unit} take {cost} (an estimate)"
        if self.attention is not None:
            rows["attention"] = self.attention.summary()
        if self.comms and self.traffic_ratio is not None:
            rows["traffic"] = f"{format_bytes(self.comms.sent_bytes)} a device and step, {self._ratios()}"
            if "dcn" in self.comms.networks.values():
                rows["networks"] = self._networks()
            rows |= {"above it": excess} if (excess := self._excess()) else {}
        if self.memory_estimate.secondary_bytes:
            rows["secondary"] = f"{format_bytes(self.memory_estimate.secondary_bytes)} a device for the secondary shard"
        rows["compiler"] = f"{done} {self.compile_seconds:.0f} s"
        if self.refusal:
            rows["it says"] = self.refusal.splitlines()[0]
        lines = [aligned(rows.items())]
        lines += [f"attention: {row}" for row in (self.attention.rows[:_MAX_ATTENTIONS] if self.attention else ())]
        lines += [f"note: {note}" for note in self.notes]
        if self.compiler_options:
            lines += ["compiled with", *(f"  - {option}" for option in self.compiler_options)]
        if self.time:
            lines += ["the time assumes"] + [f"  - {assumption}" for assumption in self.time.assumptions]
        return "\n".join(lines)

    def _what_helps(self) -> str:
        """Returns what makes the largest group of the memory smaller."""
        groups = self.memory_estimate.by_group
        name = max(groups, key=lambda name: groups[name])
        stage = next((stage for stage in range(4) if name in sharded_groups(stage)), None)
        remedy = "remat='full', more microbatches or fewer examples" if stage is None else f"stage={stage} shards it"
        if name in self.memory_estimate.sharded:
            remedy = "it is sharded: more devices, or offload"
        search = "--auto (zero.plan_auto) searches settings that fit"
        return f"{name} takes the most by formula, {format_bytes(groups[name])}: {remedy}; {search}"

    def _ratios(self) -> str:
        ratios = self.traffic_ratios
        if self.comms_estimate.not_counted or not ratios.keys() > {"data"}:
            over = " over data" if self.comms_estimate.not_counted else ""
            return f"{self.traffic_ratio:.3f} x the ideal{over}"
        shown = ", ".join(f"{role} {ratio:.3f} x" for role, ratio in ratios.items())
        return f"{self.traffic_ratio:.3f} x the ideal ({shown})"

    def _excess(self) -> str:
        """Returns what makes the traffic more than the ideal, the most first; '' where it is not by a fiftieth."""
        assert self.comms is not None
        if (self.traffic_ratio or 0) < _NEAR_IDEAL:
            return ""
        rows = comms.compare(self.comms_estimate, self.comms).rows
        extra = sorted(rows, key=lambda row: row.estimated_bytes - row.measured_bytes)
        size, least = format_bytes, 1e-3 * self.comms.sent_bytes  # scalars are summed, too
        shown = [
            f"{row.phase} over {row.axes} {size(row.measured_bytes)}, ideally {size(row.estimated_bytes)}"
            for row in extra[:_MAX_EXCESS]
            if row.measured_bytes > max(_NEAR_IDEAL * row.estimated_bytes, row.estimated_bytes + least)
        ]
        return "; ".join([*shown, *(finding.message for finding in self.comms.findings[:_MAX_EXCESS])])

    def _networks(self) -> str:
        assert self.comms is not None
        ratios = self._ratios_by(self.comms.network_of)
        return ", ".join(
            f"{name} {format_bytes(sent)}" + (f" ({ratios[name]:.3f} x the ideal)" if name in ratios else "")
            for name, sent in self.comms.by_network.items()
        )


def by_time(report: PlanReport) -> tuple[bool, float]:
    """Returns what plans are ordered by: whether one does not fit, and the seconds of its step, infinite if unknown."""
    return not report.fits, report.time.step_seconds if report.time else math.inf


def make_report(
    job: Job,
    *,
    name: str,
    cache: pathlib.Path | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    quick: bool = False,
) -> PlanReport:
    """Compiles a job in this process, as `compile_job` does, and reads the program."""
    mesh = job.mesh()
    state = job.state(mesh)
    hardware = parse(job.topology).hardware
    on_phase("tracing")
    loss = StepLoss.of(job.loss_fn, state.variables, mesh=mesh, config=job.config)
    traced = trace_step_loss(loss, state.variables, job.batch, with_uses=True)
    estimated = memory.estimate(state, mesh=mesh, config=job.config, traced=traced, tx=job.tx)
    sent = comms.estimate(state, mesh=mesh, config=job.config, traced=traced, tx=job.tx)
    attention = loss.attentions(state.variables, job.batch) if job.config.attention == "fused" else None
    program = compile_job(job, mesh, state, cache=cache, on_phase=on_phase, quick=quick)
    measured = time = None
    if not program.message:
        on_phase("reading the program")
        measured = memory.measure(program, layout=program.layout)
        time = _time_of(program, job, state, loss)
    return PlanReport(
        name=name,
        topology=job.topology,
        device_kind=hardware.device_kind,
        mesh=dict(mesh.shape),
        stage=job.config.stage,
        precision=precision_name(job.config.precision) or "custom",
        remat=str(resolve_remat(job.config.remat)),
        attention=attention,
        num_params=sum(x.size for x in jax.tree.leaves(state.params)),
        batch_size=job.batch_size,
        num_microbatches=job.config.num_microbatches,
        fits=measured is not None and measured.total_bytes <= hardware.usable_bytes,
        needed_bytes=program.needed_bytes if measured is None else measured.total_bytes,
        usable_bytes=hardware.usable_bytes,
        memory=measured,
        comms=None if measured is None else comms.measure(program, mesh=mesh),
        memory_estimate=estimated,
        comms_estimate=sent,
        time=time,
        compile_seconds=program.compile_seconds,
        from_cache=program.from_cache,
        refusal=program.message,
        has_code=program.has_code,
        compiler_options=job.options(mesh).options,
        notes=_notes(job, loss, program, measured, time),
    )


def _time_of(program: CompiledText, job: Job, state: TrainState, loss: StepLoss) -> TimeEstimate:
    num_tokens, unit = _tokens(job)
    arguments = loss.shapes(state.variables, job.batch)
    closed = loss.program.trace(*arguments).closed
    trained = trained_params(job.tx, state, mesh=loss.placement.mesh, config=loss.config)
    trained += [False] * len(jax.tree.leaves((state.model_state, arguments[1:])))
    work = ModelWork(
        model_flops=training_flops(closed, trained),
        attention_flops=training_flops(closed, trained, attention_only=True),
        num_tokens=num_tokens,
        unit=unit,
    )
    mesh, topology = loss.placement.mesh, parse(job.topology)
    return estimate_time(program.program, work, mesh=mesh, topology=topology, has_code=program.has_code)


def _tokens(job: Job) -> tuple[int, str]:
    """Returns the tokens of a batch, if it has integer leaves `[batch, tokens]`, else its examples."""
    tokens = [x.size for x in jax.tree.leaves(job.batch) if len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)]
    return (max(tokens), "tokens") if tokens else (job.batch_size, "examples")


def _notes(
    job: Job,
    loss: StepLoss,
    program: CompiledText,
    measured: memory.MemoryReport | None,
    time: TimeEstimate | None,
) -> tuple[str, ...]:
    """Returns what else to know of a job, and of its program if the compiler made one."""
    topology, mesh, axes = parse(job.topology), loss.placement.mesh, loss.placement.axes
    notes, hardware, size = [], topology.hardware, axis_size(mesh, axes.model)
    if size > 1 and not any(carries(leaf.dims, axes.model) for leaf in jax.tree.leaves(loss.placement.params)):
        notes.append(
            f"no param is sharded over `model`: its {size} devices hold and compute the same, but for what the loss "
            "function shards; shard the params with param_specs (--param-specs), or leave `model` at 1"
        )
    notes += _partly_sharded(loss)
    num_slices, num_copies = topology.num_slices, axis_size(mesh, axes.replica)
    if num_copies > num_slices > 1:
        notes.append(
            f"replica={num_copies} is more than the {num_slices} slices or hosts: each has several copies; "
            f"replica={num_slices} keeps gathers inside of them as well, with less memory"
        )
    if unknown := job.options(mesh).unknown:
        notes.append(f"this compiler does not know, and was not passed: {', '.join(unknown)}")
    if not program.has_code:
        notes.append(
            "the compiler was stopped before it generated code: memory, traffic and schedule are the program's, but "
            "without the code itself and what a kernel needs on the chip; the time does not know the compiler's cycles"
        )
    if program.cache_error:
        unkept = f"the program could not be kept for the next time ({program.cache_error})"
        notes.append(f"{unkept}: give another cache, or none")
    needed, total = 0 if measured is None else measured.total_bytes, hardware.usable_bytes * 10 / 9
    if hardware.platform == "cuda" and _DEFAULT_GPU_SHARE * total < needed <= hardware.usable_bytes:
        share = f"{max(math.ceil(100 * needed / total) / 100, 0.76):.2f}"
        notes.append(f"JAX uses 75% of a GPU's memory by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={share}")
    if time is not None and job.config.overlap:
        notes += _too_full(needed / hardware.usable_bytes, time)
    if measured is not None and measured.host_bytes:
        capacity_bytes, host_bytes = hardware.host_memory_bytes or math.inf, format_bytes(measured.host_bytes)
        assumed = f"of {hardware.name} hosts {host_memory(capacity_bytes)}"
        is_short = measured.host_bytes > capacity_bytes
        lacks = ", which is too little: take hosts with more, or more devices" if is_short else ""
        notes.append(f"needs {host_bytes} of host memory for each device; {assumed}{lacks}")
    return tuple(notes)


def _partly_sharded(loss: StepLoss) -> list[str]:
    """Says that leaves are sharded over a part of the devices alone, because no dims are divisible by all of them."""
    mesh, axes = loss.placement.mesh, loss.placement.axes
    leaves = [leaf for leaf in jax.tree.leaves(loss.placement.params) if leaf.reason.startswith(PARTLY_SHARDED)]
    if not leaves or not sharded_groups(loss.config.stage):
        return []
    largest = max(leaves, key=lambda leaf: leaf.num_bytes)
    over = "+".join(axis for axis in axes.data if carries(largest.dims, (axis,)))
    return [
        f"{len(leaves)} leaves are sharded over a part of `data` alone, such as {largest.path!r} {largest.shape} over "
        f"{over}: no dims are divisible by all of its {axis_size(mesh, axes.data)} devices; take a number of devices "
        "that divides them, and a device stores less"
    ]


def _too_full(share: float, time: TimeEstimate) -> list[str]:
    """Says that collectives are not overlapped, where a program needs nearly all of the memory."""
    waited = time.exposed_seconds - time.host_seconds  # what is waited for the host is no collective
    if share <= FULL or not 0 < _WAITING * time.collective_seconds < waited:
        return []
    return [
        f"collectives are not overlapped: the program is at {share:.1%} of memory, where the compiler's scheduler has "
        "no room to start them early: keep less (remat='auto' leaves room, 'full' most), or take more microbatches"
    ]
