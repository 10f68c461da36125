"""The residuals of a transformer by the ZeRO paper's formulas, from its sizes alone, and what sharded ones send."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import resolve_precision
from zero_jax.training import ZeroConfig
from zero_jax.transforms import resolve_remat, resolve_schedule

# Elements that a transformer block keeps for the backward pass, per element of its input (section 3.2, footnote 3).
_RESIDUALS_PER_BLOCK = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerResiduals:
    """The residuals of a transformer: what one device keeps from the forward to the backward pass (sections 3.2, 6.1).

    Without remat a block keeps about 12 x `d_model` x `batch_size` x `seq_len` elements; with remat only its input.
    Embeddings, the logits, and what the recomputation of one block needs for a moment are not counted.

    Attributes:
      num_layers: transformer blocks.
      batch_size: examples of one device in one microbatch.
      seq_len: tokens of an example.
      d_model: width of the residual stream.
      bytes_per_element: bytes of an element, 2 in 16-bit precision.
      remat: whether blocks are recomputed in the backward pass.
      model: devices that the saved residuals are sharded over (P_a); 1 keeps them unsharded.
      offload: whether they are kept in host memory (P_a+cpu).
    """

    num_layers: int
    batch_size: int
    seq_len: int
    d_model: int
    bytes_per_element: float = 2
    remat: bool = True
    model: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "batch_size", "seq_len", "bytes_per_element"):
            size = getattr(self, name)
            if size <= 0:
                raise ValueError(
                    f"{name}={size} is not positive: give the sizes of the transformer as one device runs it"
                )

    @property
    def _bytes(self) -> float:
        per_block = 1 if self.remat else _RESIDUALS_PER_BLOCK
        elements = per_block * self.num_layers * self.d_model * self.batch_size * self.seq_len
        return elements * self.bytes_per_element / self.model

    @property
    def device_bytes(self) -> float:
        """Bytes in the memory of a device."""
        return 0 if self.offload else self._bytes

    @property
    def host_bytes(self) -> float:
        """Bytes in host memory, for each device."""
        return self._bytes if self.offload else 0


def transformer_residuals(
    model_config: Any,
    *,
    batch_size: int,
    mesh: Mesh,
    config: ZeroConfig,
    remat: bool | None = None,
    model: int | None = None,
    offload: bool | None = None,
) -> TransformerResiduals:
    """Returns the residuals of a transformer in a train step.

    Args:
      model_config: anything with `num_layers`, `d_model`, `seq_len`, and `remat` where the argument is None.
      batch_size: examples of a step, over all devices and microbatches.
      mesh: the mesh.
      config: microbatches, remat policy and precision; a compute dtype of None counts as float32.
      remat: whether blocks are recomputed; None does as the config says.
      model: devices that the saved residuals are sharded over (P_a); None likewise.
      offload: whether they are kept in host memory (P_a+cpu); None likewise.

    Raises:
      ValueError: a batch that does not divide.
    """
    axes, policy = config.axes_of(mesh), resolve_remat(config.remat)
    if remat is None:
        remat = bool(model_config.remat) if policy.policy == "own" else policy.policy != "none"
    num_stages, num_layers = axes.num_stages(mesh), model_config.num_layers
    # All microbatches of a pipeline are on the stages, each of which has some of the layers: as if they were one. With
    # 1F1B there are those that wait: of all layers of a group, or its inputs and the layers of one where it recomputes.
    parts = axis_size(mesh, axes.batch) * (1 if num_stages > 1 else config.num_microbatches)
    schedule = resolve_schedule(config.pipeline)
    num_layers = schedule.num_places(num_stages, num_layers) if num_stages > 1 else num_layers
    if num_stages > 1 and schedule.is_interleaved:
        parts = axis_size(mesh, axes.of_stage.batch) * config.num_microbatches
        num_kept = schedule.num_kept(num_stages, config.num_microbatches)
        # A stage keeps what its own groups of layers have, of each microbatch that is on its way.
        num_layers //= num_stages * schedule.num_groups
        recomputes = policy.policy == "own" and not remat
        num_layers = num_layers + num_kept if recomputes else num_layers * num_kept
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"batch_size={batch_size} does not divide over {axis_size(mesh, axes.batch)} devices and "
            f"{config.num_microbatches} microbatches: make it a multiple of {parts}"
        )
    return TransformerResiduals(
        num_layers=num_layers,
        batch_size=batch_size // parts,
        seq_len=model_config.seq_len,
        d_model=model_config.d_model,
        bytes_per_element=np.dtype(resolve_precision(config.precision).compute or np.float32).itemsize,
        remat=remat,
        model=(1 if policy.residuals == "device" else axis_size(mesh, axes.model)) if model is None else model,
        offload=policy.residuals == "offloaded" if offload is None else offload,
    )


def sharded_residual_bytes(
    *, num_layers: int, batch: int, seq: int, hidden: int, model: int, bytes_per_element: int = 2
) -> float:
    """Returns what a device sends more in a step when residuals are sharded over `model` (P_a, paper section 8).

    One more all-gather of `[seq, hidden]` for each block and sample, before the block is recomputed.

    Args:
      num_layers: Blocks whose inputs are saved.
      batch: Samples that one model replica holds in a step.
      seq: Length of a sample.
      hidden: Features.
      model: Size of the `model` axis.
      bytes_per_element: Of a residual.

    Example:
      >>> zero.comms.sharded_residual_bytes(num_layers=2, batch=8, seq=128, hidden=64, model=2)
      131072.0
    """
    return num_layers * batch * seq * hidden * bytes_per_element * (model - 1) / model
