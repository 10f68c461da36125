"""Formulas of the ZeRO paper for memory and traffic, as functions of numbers.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054). Nothing here looks at a model or a mesh; `estimated.py` does. A stage is the set of groups that it
shards: `params`, `grads` and `opt_state`. As in the paper, `opt_state` includes the master params, so `master` adds
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

# Which groups each of the paper's cases shards (section 5).
PAPER_CASES: Mapping[str, frozenset[str]] = {
    "baseline": frozenset(),
    "P_os": frozenset({"opt_state"}),
    "P_os+g": frozenset({"opt_state", "grads"}),
    "P_os+g+p": frozenset({"opt_state", "grads", "params"}),
}

# Elements that a transformer block keeps for the backward pass, per element of its input (section 3.2, footnote 3).
_RESIDUALS_PER_BLOCK = 12

# P_a moves each block's input over `model` once more. Megatron's model parallelism moves 12 times that: two all-reduces
# of two moves each in the forward pass, in the recomputation and in the backward pass (section 8.1).
SHARDED_RESIDUAL_OVERHEAD = 1 / 12

# Remat adds a forward pass to a step of one forward pass and a backward pass of twice its cost (section 3.2).
REMAT_EXTRA_COMPUTE = 1 / 3


def model_state_bytes(
    num_params: float,
    *,
    sharded: Collection[str],
    num_devices: int,
    optimizer_bytes: float = 12,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> dict[str, float]:
    """Returns the bytes of params, gradients and optimizer state on each device (sections 3.1 and 5).

    Args:
      num_params: parameters (psi); with model parallelism those of one of its parts.
      sharded: the groups that are sharded, of `params`, `grads`, `opt_state`.
      num_devices: devices that they are sharded over (N_d).
      optimizer_bytes: bytes a parameter of master params and optimizer state (K): 12 for Adam in mixed precision.
      param_bytes: bytes of a low-precision parameter.
      grad_bytes: bytes of a gradient.
    """
    sizes = {"params": param_bytes, "grads": grad_bytes, "opt_state": optimizer_bytes}
    return {group: size * num_params / (num_devices if group in sharded else 1) for group, size in sizes.items()}


def max_params(capacity_bytes: float, *, sharded: Collection[str], num_devices: int, model: int = 1) -> float:
    """Returns the parameters of the largest model whose model states fit on devices of some size (section 5.4).

    Args:
      capacity_bytes: bytes of a device that are there for model states.
      sharded: the groups that are sharded.
      num_devices: devices that they are sharded over (N_d).
      model: model-parallel degree, which divides every group.
    """
    each = model_state_bytes(1, sharded=sharded, num_devices=num_devices)
    return capacity_bytes * model / sum(each.values())


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
        """Raises `ValueError` for a size that is not positive."""
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


def moved_elements(num_params: float, *, sharded: Collection[str]) -> float:
    """Returns the elements that a device sends per step on behalf of the params, on very many devices (section 7).

    Gradients are reduce-scattered, params all-gathered: once after the update, or, where they are sharded, once for
    the forward and once for the backward pass. Data parallelism's all-reduce is made of the same two halves. On `n`
    devices it is (n - 1) / n of it.
    """
    return (3 if "params" in sharded else 2) * num_params


def transformer_params(*, num_layers: int, d_model: int, vocab_size: int = 50257, seq_len: int = 1024) -> int:
    """Returns the parameters of a GPT-2: 12 `d_model`^2 a block, and the tables of tokens and positions.

    Biases and norms, some 13 x `d_model` a block, are left out.
    """
    return 12 * num_layers * d_model**2 + (vocab_size + seq_len) * d_model
