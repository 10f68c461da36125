"""One function of attention, `dot_product_attention`, run by the fused kernel that the hardware has.

`function` checks the arguments and chooses: Pallas's splash attention on TPUs (`splash`), cuDNN on GPUs (`cudnn`), or
the plain form by XLA (`xla`), which can do everything. The platform is that of the mesh: an argument, or the mesh that
the step is traced for (`mesh_context`).
"""

from zero_jax.attention.function import Choice, Implementation, attention_choice, dot_product_attention
from zero_jax.attention.fused import PRIMITIVES, RESIDUALS, attention_work
from zero_jax.attention.placement import mesh_context
