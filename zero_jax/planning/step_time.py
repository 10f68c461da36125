"""Estimates the time of a train step from its compiled program: the compiler's cycles, and the links of the mesh."""

import contextlib
import dataclasses
import importlib

from jax.extend.mlir import ir
from jax.sharding import Mesh

from zero_jax import hlo
from zero_jax.core.text_tables import Report, format_bytes
from zero_jax.hlo import Instruction, Program
from zero_jax.planning.links import Links
from zero_jax.sharding.topology import Hardware, Topology
from zero_jax.transforms import KERNEL_SECONDS, KERNEL_SHARES, efficiency_of

# A compiler's estimate is ignored if it is above a second, and above this multiple of the time of flops and bytes.
_IMPLAUSIBLE = 1e4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate(Report):
    """How long a step takes, as far as a compiled program shows; an estimate, never a measurement."""

    step_seconds: float  # a step, computing and waiting
    compute_seconds: float  # computation alone
    exposed_seconds: float  # collectives that nothing hides
    collective_seconds: float  # all collectives, hidden or not, over links and network
    tokens_per_second: float  # over all devices; examples where the batch has no tokens
    unit: str  # `tokens` or `examples`
    # Model FLOPs utilization, the loss and the gradients that are trained, without what is computed again, over the
    # peak; attention counts whole (Chowdhery et al. 2022, appendix B)
    mfu: float
    model_flops: float  # operations of those, over all devices
    assumptions: tuple[str, ...]  # what the figures rest on
    mfu_causal: float  # the same with half of attention's products, which is what causal attention needs
    causal_model_flops: float  # operations of those, over all devices
    device_flops_per_second: float  # `model_flops` a second and device
    kernel_seconds: float  # of `compute_seconds`, kernels that the compiler has no cycles of, such as fused attention
    network_seconds: float  # of `collective_seconds`, transfers between slices
    network_bytes: float  # what a device sends to other slices in a step
    host_seconds: float = 0.0  # copies between a device and its host, hidden or not: the longer of the two directions
    host_bytes: int = 0  # what a device copies from and to its host in a step

    def __str__(self) -> str:
        share = self.exposed_seconds / self.step_seconds if self.step_seconds else 0
        waits_for = "collectives or the host" if self.host_bytes else "collectives"
        half = f" ({self.mfu_causal:.1%} with attention by half)" if self.mfu_causal < self.mfu else ""
        return (
            f"{_shown(self.step_seconds)} a step ({_shown(self.exposed_seconds)} or {share:.0%} waiting for "
            f"{waits_for}), "
            f"{self.tokens_per_second:,.0f} {self.unit}/s, MFU {self.mfu:.1%}{half}, "
            f"{self.device_flops_per_second / 1e12:,.0f} TFLOP/s a device"
        )


def _shown(seconds: float) -> str:
    if seconds >= 0.1 or not seconds:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What a step of a model computes, over all devices."""

    model_flops: float  # operations of the loss and its gradients, without what is computed again
    attention_flops: float = 0.0  # those of attention among them, counted whole
    num_tokens: int  # tokens, or what `unit` says
    unit: str = "tokens"


def estimate_time(
    program: Program, work: ModelWork, *, mesh: Mesh, topology: Topology, has_code: bool = True
) -> TimeEstimate:
    """Estimates a step of a model by playing the schedule of its program."""
    hardware = topology.hardware
    compute, links = _Compute(hardware, has_code=has_code), Links(mesh, topology, num_devices=program.num_devices)
    transfers, copies = hlo.network_transfers(program), hlo.host_transfers(program)
    host_bytes = int(sum(copy.total_sent_bytes for copy in copies))
    costs = hlo.Costs(
        instruction=compute.seconds,
        collective=links.seconds,
        transfer=links.network_seconds,
        copy=lambda copy: copy.sent_bytes / hardware.host_bytes_per_second,
        is_kernel=compute.is_kernel,
        links_of=links.taken,
    )
    timeline = hlo.play(program, hlo.collectives(program), costs, transfers=transfers, copies=copies)
    step = max(timeline.total_seconds, 1e-12)
    causal_flops = work.model_flops - work.attention_flops / 2
    peak = mesh.size * hardware.flops_per_second
    seconds = {name: x for name, x in vars(timeline).items() if name.endswith("_seconds") and name != "total_seconds"}
    return TimeEstimate(
        step_seconds=timeline.total_seconds,
        **seconds,
        tokens_per_second=work.num_tokens / step,
        unit=work.unit,
        mfu=work.model_flops / (step * peak),
        model_flops=work.model_flops,
        assumptions=_assumptions(hardware, compute, has_network=bool(transfers), host_bytes=host_bytes),
        mfu_causal=causal_flops / (step * peak),
        causal_model_flops=causal_flops,
        device_flops_per_second=work.model_flops / (step * mesh.size),
        host_bytes=host_bytes,
        network_bytes=sum(transfer.total_sent_bytes for transfer in transfers),
    )


class _Compute:
    """The time of instructions on a device, and what had to be assumed for it."""

    def __init__(self, hardware: Hardware, *, has_code: bool):
        self.hardware, self.has_code = hardware, has_code
        products, memory = (1.0, 1.0) if has_code else efficiency_of(hardware).compiled
        self.shares = products * hardware.product_share, memory * hardware.memory_share
        self.unknown: set[str] = set()
        self.implausible: set[str] = set()
        self.inexact: set[str] = set()
        self.engines: set[str] = set()
        self._works: dict[tuple[str, str], hlo.Work] = {}

    def seconds(self, program: Program, instruction: Instruction) -> float:
        """Returns the time of an instruction: by the compiler's cycles if they can be, else by flops and bytes."""
        clock, cycles = self.hardware.clock_hz, hlo.cycles(instruction)
        if clock and cycles is not None and cycles <= clock:
            return cycles / clock
        work = self.work(program, instruction)
        busy = self.busy(work)
        if clock and cycles is not None:
            if cycles / clock <= max(_IMPLAUSIBLE * busy, 1.0):
                return cycles / clock
            self.implausible.add(instruction.name)
        if not work.is_known:
            self.unknown.add(instruction.name)
        if work.engine:
            self.engines.add(work.engine)
        if not work.is_exact:
            self.inexact.add(instruction.name)
        return busy + (KERNEL_SECONDS if busy and self.hardware.platform == "cuda" else 0)

    def is_kernel(self, program: Program, instruction: Instruction) -> bool:
        """Returns whether a custom call is a kernel that the compiler has no cycles of."""
        return bool(self.work(program, instruction).engine)

    def work(self, program: Program, instruction: Instruction) -> hlo.Work:
        """Returns the flops and bytes of an instruction."""
        if instruction.key not in self._works:
            self._works[instruction.key] = hlo.roofline(program, instruction, decode=kernel_module)
        return self._works[instruction.key]

    def busy(self, work: hlo.Work) -> float:
        """Returns the seconds of some work, bound by matrix products or by memory."""
        hardware = self.hardware
        products, memory = self.shares
        flops_per_second = hardware.flops_per_second * KERNEL_SHARES.get(work.engine, products)
        bytes_per_second = hardware.memory_bytes_per_second * memory
        return max(work.flops / flops_per_second, work.bytes / bytes_per_second)


def kernel_module(body: bytes | str) -> ir.Module | None:
    """Decodes the body of a Pallas TPU kernel, MLIR bytecode (or text); None if that fails."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("jaxlib.mosaic.python.tpu").register_dialect(context)
    try:
        with context, ir.Location.unknown():
            return ir.Module.parse(body)
    except (ValueError, RuntimeError, ir.MLIRError):
        return None


def _assumptions(hardware: Hardware, compute: _Compute, *, has_network: bool, host_bytes: int) -> tuple[str, ...]:
    memory = f"{hardware.memory_bytes_per_second / 1e9:,.0f} GB/s of memory"
    peak = f"{hardware.flops_per_second / 1e12:,.0f} TFLOP/s"
    products, moved = compute.shares
    by_shares = f"computation: {products:.0%} of {peak} or {moved:.0%} of {memory}"
    if hardware.clock_hz:
        busy = (
            f"computation: the compiler's own cycles at {hardware.clock_hz / 1e9:.2f} GHz; where it gives none, {peak} "
            f"or {memory}, whichever takes longer"
        )
        if not compute.has_code:
            busy = f"{by_shares}, whichever takes longer: about what programs reach by the compiler's own cycles"
        link = f"links: {hardware.link_bytes_per_second / 1e9:.0f} GB/s a direction, both directions of a closed ring, "
        link += "all torus dims of a group at once"
    else:
        busy = f"{by_shares} (shares that an H100 reached), whichever takes longer, and 3 us a kernel"
        link = f"links: {hardware.link_bytes_per_second / 1e9:.0f} GB/s a device inside a host"
    network = f"{hardware.network_bytes_per_second / 1e9:.1f} GB/s a device between slices or hosts"
    assumptions = [
        busy,
        f"{link}, {network}, 1 us a hop",
        "collectives overlap with computation where, and only where, the compiled program schedules them so",
        f"MFU: matrix products of the loss and of its gradients over {peak} a device; no input, no host, no stragglers",
    ]
    for engine in sorted(compute.engines):
        assumptions.append(
            f"kernels ({engine}): their own cost estimate, else the matrix products of their grid or shapes, at "
            f"{KERNEL_SHARES[engine]:.0%} of {peak}"
        )
    if has_network:
        assumptions.append("each transfer between slices has a device's share of the network to itself, and 20 us")
    if host_bytes:
        assumptions.append(
            f"copies between a device and its host: {format_bytes(host_bytes)} a step, at "
            f"{hardware.host_bytes_per_second / 1e9:.0f} GB/s in each direction"
        )
    for names, text in (
        (compute.inexact, "kernels skip blocks by data that is not known here, and count with all blocks"),
        (compute.implausible, "instructions have impossible cycles, and count by their flops and bytes"),
        (compute.unknown, "custom calls of unknown cost count as memory traffic only"),
    ):
        if names:
            assumptions.append(f"{len(names)} {text}: {', '.join(sorted(names)[:3])}")
    return tuple(assumptions)
