"""Seconds of kernels by a roofline: what compilers reach of a hardware's peaks, and what hides collectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from zero_jax.sharding.topology import Hardware
from zero_jax.transforms.kernels import Kernel

# The launch of a GPU kernel.
KERNEL_SECONDS = 3e-6
# The share of the peak at which kernels compute. cuDNN's causal attention, measured on an H100 with heads of 128 and
# sequences of 2,048: 465 TFLOP/s forward and 351 backward, of 989 (heads of 64: 305 and 193). Of Pallas kernels on TPU
# there is no published measurement: 0.7 is assumed (docs/estimates.md shows what it makes of steps whose time is
# published).
KERNEL_SHARES = {"pallas": 0.7, "cudnn attention": 0.47, "cudnn attention backward": 0.355}

# The link to the host that XLA:TPU plans with: it ends a move of the forward pass when such a link would have, 3.6 ms
# after it began 268 MB (a layer of llama-3.1-8b on v6e, of 27.5 ms). The move back is begun early enough.
_PLANNED_HOST_BYTES_PER_SECOND = 75e9


def waited_seconds(moved: float, num_bytes: float) -> float:
    """Returns what the forward pass on a TPU waits for bytes that move to the host in so many seconds."""
    return max(moved - num_bytes / _PLANNED_HOST_BYTES_PER_SECOND, 0.0)


# What does not fit into the memory on the chip, of v5e to v6e, moves at the nominal bandwidth at most.
_ON_CHIP_BYTES = 2**27

# The share of computation that can overlap with collectives of the same duration: 0.49 of gpt-7b's on v6e:16x16.
_HIDING = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a hardware's nominal peaks that the compiler's own figures reach."""

    products: float  # of the FLOPs, by large matrix products without the options of `overlap`
    memory: float  # of the memory bandwidth, by fused elementwise work
    vector: float = 1 / 32  # the peak of elementwise operations, as a share of the FLOPs
    layout: float = 0.38  # of the memory bandwidth, by copies to another layout
    unfused: float = 0.14  # of the memory bandwidth, by sums and constants of a kernel of their own
    # Of the collectives over `data`, what computation hides, without the options of `overlap` and with
    hidden: tuple[float, float] = (0, 0)
    # The share of the time of moving a product's operands and result that adds to its FLOPs at the peak, with the
    # on-chip memory that these options give to kernels; None where they give none
    reading: float | None = None
    # Of the FLOPs and of the memory bandwidth, by kernels of a compiled program whose cycles are not known
    compiled: tuple[float, float] = (0.9, 0.4)


# By hardware: fitted to XLA:TPU's cycles of large products and of attention by XLA (docs/estimates.md has the figures;
# above 1 where it fuses more than is assumed, or keeps values in VMEM); layouts and what is not fused are its cycles of
# a transposition and of a sum over the first dim, bf16, on v4 to v6e, their means on the others; on v5e XLA hides
# gathers without options (0.45 of gpt-7b and of two programs of MaxText). `reading` is fitted to products of other
# shapes, `compiled` to the cycles of 42 whole programs.
_EFFICIENCIES = {
    "v3": Efficiency(products=0.9, memory=0.8),
    "v4": Efficiency(products=0.93, memory=0.85, unfused=0.22, compiled=(0.97, 0.38)),
    "v5e": Efficiency(products=0.93, memory=0.9, layout=0.41, unfused=0.16, hidden=(0.45, 0.45), compiled=(0.92, 0.4)),
    "v5p": Efficiency(
        products=0.88, memory=0.5, layout=0.36, unfused=0.10, hidden=(0, 0.85), reading=0.37, compiled=(0.97, 0.36)
    ),
    "v6e": Efficiency(
        products=0.75, memory=1.6, layout=0.40, unfused=0.08, hidden=(0, 0.85), reading=0.36, compiled=(0.86, 0.38)
    ),
    "tpu7x": Efficiency(products=0.81, memory=1.0, hidden=(0, 0.78), reading=0.5, compiled=(0.82, 0.42)),
}
# GPU programs are rooflines at the shares of the hardware table, and their layouts are those of the kernels.
_GPU = Efficiency(
    products=1.0, memory=1.0, compiled=(1.0, 1.0), vector=1 / 15, layout=math.inf, unfused=1.0, hidden=(0.4, 0.7)
)
# The kernels of attention by platform, as the times of compiled programs have them.
_ATTENTION = {
    "tpu": {"attention": "pallas", "attention backward": "pallas", "pallas": "pallas"},
    "cuda": {"attention": "cudnn attention", "attention backward": "cudnn attention backward"},
}


def efficiency_of(hardware: Hardware) -> Efficiency:
    """Returns what a kind of hardware reaches."""
    return _EFFICIENCIES.get(hardware.name, _GPU)


class Roofline:
    """Estimates seconds of a step on a kind of hardware, compiled with options that hide collectives (`overlaps`)."""

    def __init__(self, hardware: Hardware, *, overlaps: bool):
        self.hardware = hardware
        self.efficiency = efficiency_of(hardware)
        self.hidden = self.efficiency.hidden[overlaps]
        self.reading = self.efficiency.reading if overlaps else None

    def flops_per_second(self, engine: str) -> float:
        """Returns the FLOPs a second of matrix products, by the engine of their kernel."""
        kernel = _ATTENTION[self.hardware.platform].get(engine, "")
        products = self.efficiency.products if self.reading is None else 1.0
        share = products * self.hardware.product_share
        return self.hardware.flops_per_second * KERNEL_SHARES.get(kernel, share)

    def compute_seconds(self, kernels: Iterable[Kernel], num_parts: float) -> float:
        """Returns the seconds of kernels of all examples, on the share of one of `num_parts` parts of the batch."""
        reached, launch = self.efficiency, KERNEL_SECONDS if self.hardware.platform == "cuda" else 0.0
        vector_per_second = self.hardware.flops_per_second * reached.vector
        shares = {"layout": reached.layout, "sum": reached.unfused, "slice": reached.compiled[1]}
        total = 0.0
        for kernel in kernels:
            parts = num_parts if kernel.is_split else 1
            num_bytes = kernel.split_bytes / num_parts + kernel.other_bytes
            moved = self.moved_seconds(num_bytes, shares.get(kernel.engine))
            products = kernel.flops / parts / self.flops_per_second(kernel.engine)
            if products and not kernel.engine:
                products += (self.reading or 0.0) * num_bytes / self.hardware.memory_bytes_per_second
            busy = max(products, kernel.vector_ops / parts / vector_per_second, moved)
            total += kernel.times * (busy + (launch if busy else 0.0))
        return total

    def kept_seconds(self, num_bytes: float) -> float:
        """Returns the seconds of writing a value into the stack of a loop, and of copying it out before it is read.

        Three passes over its bytes are the mean of 37 products in programs of llama-3.1-8b, 3.2-1b and 3.2-3b on v4 to
        TPU7x, those of the MLP among them, which since take none (`BlockCosts.keeping_seconds`).
        """
        return self.moved_seconds(3 * num_bytes, self.efficiency.compiled[1])

    def moved_seconds(self, num_bytes: float, share: float | None = None) -> float:
        """Returns the seconds of moving bytes at a share of the memory bandwidth, None for that of fused work."""
        reached = self.hardware.memory_bytes_per_second * self.hardware.memory_share
        fused = self.efficiency.memory
        return num_bytes / (reached * (share or (fused if num_bytes <= _ON_CHIP_BYTES else min(fused, 1.0))))

    def with_host_seconds(self, seconds: float, num_bytes: float) -> float:
        """Returns the seconds of a step that also moves residuals to the host and back: it waits for part of that."""
        moved = num_bytes / self.hardware.host_bytes_per_second
        # Nothing runs beside the copies of a GPU.
        waited = 2 * moved if self.hardware.platform == "cuda" else waited_seconds(moved, num_bytes)
        return max(seconds + waited, 2 * moved)

    def exposed_seconds(self, comms: float, compute: float) -> float:
        """Returns the seconds that computation waits for collectives over `data`."""
        return max(comms - min(self.hidden, _HIDING) * compute, comms * (1 - self.hidden))
