"""Models of Flax NNX, Flax Linen and Equinox as the functions that a train step, the trainer and a plan take.

`from_nnx`, `from_linen` and `from_equinox` take how a model is made, and a loss on the model. They return
`ModelFunctions`: the model is split into params, model state and what is static, and put together where the loss is
called. Each library is imported by the function for it.
"""

from zero_jax.libraries.models import ModelFunctions, from_equinox, from_linen, from_nnx, with_parameters

# Without the name that only `finetuning/` needs.
__all__ = ["ModelFunctions", "from_equinox", "from_linen", "from_nnx"]
