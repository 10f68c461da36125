"""Where the gradients of a step are reduced across devices."""

from __future__ import annotations

import dataclasses
import warnings
from typing import NoReturn

from zero_jax.transforms import Separability


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradPlan:
    """Where the gradients of a step are reduced across devices: decided once, before anything is made of the loss.

    `Placement.grad_plan` is what the config asks for; `judge` decides what the loss allows. With K microbatches::

        stage 0 or 1, K > 1        is_per_device  each device adds up its own, summed over the batch's axes once a step
        replica or secondary       once_over      each copy of the params adds up its own, summed over copies at the end
        quantized grads otherwise  at_use         each device has its own at each use of a param, and sends them there
        else                                      XLA sums them at each use of a param, in every backward pass

    The second and the third go together: within a copy gradients are sent at each use, between copies once a step.
    """

    batch_axes: tuple[str, ...]  # the mesh axes of the batch
    # Those of them whose devices, or copies of the params, accumulate gradients of their own, which are summed over
    # these axes once a step. Over all others they are summed in every backward pass, at each use of a param.
    once_over: tuple[str, ...]
    coded_over: tuple[str, ...]  # the axes over which gradients are sent quantized
    num_microbatches: int  # the backward passes of a step
    is_per_device: bool  # whether each device accumulates gradients of its own, rather than each copy of the params
    # Whether each device's own gradients are sent quantized at each use of a param, rather than once a step
    at_use: bool
    # The axes of the stages of a pipeline, which the examples of a device of `once_over` are sharded over
    pipe: tuple[str, ...] = ()
    map_by: str = "vmap"  # what maps the loss over the devices of `once_over`: ``vmap``, or ``shard_map``
    # Why gradients are not summed once a step, if the config asks for it and the loss does not allow it
    why_not_once: str = ""

    @property
    def takes_parts(self) -> bool:
        """Whether the loss is called on parts of the batch: microbatches, or the examples of a device or a copy."""
        return self.num_microbatches > 1 or bool(self.once_over) or self.at_use

    @property
    def sums_to_masters(self) -> bool:
        """Whether the sums are made in the shards of the master params: no other shards of a gradient are before."""
        return self.is_per_device and bool(self.once_over)

    @property
    def adds_in_place(self) -> bool:
        """Whether the gradients that devices have of microbatches are added where they are made."""
        return self.sums_to_masters and not self.at_use and self.num_microbatches > 1

    @property
    def is_vmapped(self) -> bool:
        """Whether `jax.vmap` maps the loss over devices."""
        return self.map_by == "vmap" and bool(self.once_over or self.at_use)

    @property
    def is_exact(self) -> bool:
        """Whether parts have to give what the whole batch does, aux and random numbers too: nothing asked for them."""
        return bool(self.once_over) and not self.is_per_device and not self.coded_over

    @property
    def whole_batch(self) -> str:
        """What to set so that the loss is called on the whole batch, and on no parts of it."""
        if self.pipe:  # of a pipeline from stage 2 on all microbatches are one batch
            return "stage=2"
        return "num_microbatches=1" if self.num_microbatches > 1 else "zero.Quantize without grads"

    def allowed(self, loss: Separability) -> GradPlan:
        """Returns the plan that a loss allows.

        XLA partitions the convolutions of `jax.vmap` wrongly: a loss with some is mapped by `jax.shard_map`. So is one
        that is plain, if it has kernels, which XLA does not partition, or over copies of the params, unless `jax.vmap`
        maps it within each copy.

        Raises:
          ValueError: gradients are to be sent quantized, and devices have none of their own.
        """
        not_local = loss.not_local
        if not_local and (self.at_use or (self.once_over and self.coded_over)):
            refuse_coded(not_local)
        if self.pipe and loss.convolves and self.once_over:
            return self.summed_each_pass("XLA partitions convolutions wrongly where some axes of a batch are mapped")
        is_copy = not self.pipe and any(axis not in self.once_over for axis in self.batch_axes)
        has_kernels = loss.has_kernels and not self.pipe
        by_shards = loss.convolves or ((is_copy or has_kernels) and loss.is_plain and not self.at_use)
        if is_copy and by_shards and loss.branches_on_params and not (not_local or self.coded_over):
            # Where one branch alone uses a param, within a `jax.shard_map` that leaves axes to XLA.
            return self.summed_each_pass("XLA refuses branches whose gradients have other shardings")
        plan = dataclasses.replace(self, map_by="shard_map" if by_shards else "vmap")
        return plan.summed_each_pass(not_local) if not_local and self.once_over else plan

    def summed_each_pass(self, why: str) -> GradPlan:
        """Returns the plan that sums gradients over all axes in every backward pass."""
        return dataclasses.replace(self, once_over=(), why_not_once=why)

    def warn(self, *, another_loss: str, weighted_by: str) -> None:
        """Warns if the loss on microbatches is another one, or if more is sent than the config asks for.

        `another_loss` says why it may be another one, `weighted_by` by what their losses are weighted; empty if not so.
        """
        k = self.num_microbatches
        sent = f"gradients are summed across devices in each of the {k} microbatches, not once a step"
        if self.pipe:
            sent = "gradients are summed across devices in every tick of the pipeline, not once a step"
        if another_loss:
            warnings.warn(
                f"the loss on microbatches may be another one than on the whole batch, because {another_loss}: it is "
                f"the mean of the losses of {k} microbatches, each by itself"
                f"{f', weighted by {weighted_by}' if weighted_by else ''}. num_microbatches=1 gives the loss of the "
                f"whole batch{'; ' + sent if self.why_not_once else ''}",
                stacklevel=2,
            )
        elif self.why_not_once and self.is_per_device:
            warnings.warn(
                f"{sent}, because {self.why_not_once}: the loss needs whole microbatches. Stage 2 sends no more then, "
                f"and holds less{'' if self.pipe else '; num_microbatches=1 sends the least'}",
                stacklevel=2,
            )


def refuse_coded(why: str) -> NoReturn:
    """Raises `ValueError` where gradients cannot be sent quantized."""
    raise ValueError(
        f"quantize: devices have no gradients of their own to send quantized, because {why}: leave grads out of "
        "zero.Quantize (gathers may stay)"
    )
