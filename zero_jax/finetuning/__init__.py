"""Fine-tuning: a frozen base in few bytes, and low-rank adapters on any loss function by path rule.

`Lora.init` splits params into adapters (the params that are trained) and the frozen base (model state), which
`quantization` stores in few bits. `Lora.loss_fn` makes the loss function of both, by `transforms/low_rank/`.
`Lora.merge` makes plain params again.
"""

from zero_jax.finetuning.lora import Lora
from zero_jax.finetuning.quantization import QuantizedWeight, dequantize, quantize

__all__ = ["Lora", "QuantizedWeight", "dequantize", "quantize"]
