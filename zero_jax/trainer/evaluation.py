"""What a run shows of its model: the validation loss, always of the same batches, and text that it generates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import shown
from zero_jax.core.variables import Variables, as_variables
from zero_jax.data import Batch, BatchBuffers, Tokenizer
from zero_jax.sharding.precision import cast_floating
from zero_jax.training import MeshLoss, TrainState, ZeroConfig, ema_params, make_eval_step, merge


class Validation:
    """Measures the loss of params on the same batches each time."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | MeshLoss,
        batches: Sequence[Batch],
        *,
        mesh: Mesh,
        config: ZeroConfig,
        buffers: BatchBuffers,
    ):
        """Makes the eval step; the batches go to the devices through `buffers`."""
        self.batches, self._buffers = batches, buffers
        self._evaluate, self._total = make_eval_step(loss_fn, mesh=mesh, config=config), jax.jit(jnp.sum)

    def losses(self, state: TrainState, *, goes_on: Callable[[], bool]) -> tuple[float, float | None] | None:
        """Returns the loss of the params and, where the optimizer has one, of their moving average; see `loss`."""
        ema = ema_params(state.opt_state)
        # Params that are not trained (integers) have no average.
        trees = [state.params] if ema is None else [state.params, merge(state.params, ema)]
        losses: list[float] = []
        for params in trees:
            loss = self.loss(Variables(params=params, model_state=state.model_state), goes_on=goes_on)
            if loss is None:
                return None
            losses.append(loss)
        return losses[0], None if ema is None else losses[1]

    def loss(self, params: Any, *, goes_on: Callable[[], bool]) -> float | None:
        """Returns the mean over all targets by weight, or None where `goes_on`, called after each batch, is False."""
        total = weight = 0.0
        for batch in map(self._buffers.fill, self.batches):
            # Each loss is read before the next is dispatched: simulated devices that run ahead of others can deadlock.
            batch_weight = float(self._total(batch["weights"]))
            total += float(self._evaluate(params, batch).loss) * batch_weight
            weight += batch_weight
            if not goes_on():
                return None
        return total / weight


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Generates text after a prompt.

    Attributes:
      generate_fn: `generate_fn(params, prompt, key, num_tokens=, temperature=, top_k=) -> tokens`.
      tokenizer: makes tokens of the prompt, and text of tokens.
      compute: dtype that the params are cast to, or None.
      prompt: the prompt.
      num_tokens: tokens to generate.
      temperature: sampling temperature.
      top_k: samples among the `top_k` likeliest tokens; None among all.
      seed: seed of the sampling.
    """

    generate_fn: Callable[..., Array]
    tokenizer: Tokenizer
    compute: Any
    prompt: str
    num_tokens: int
    temperature: float
    top_k: int | None
    seed: int

    def check(self, init_fn: Callable[[Array], Any]) -> None:
        """Traces the sampling once, before the run starts.

        Raises:
          ValueError: settings that cannot be sampled with, such as a `top_k` beyond the vocabulary.
        """
        if not self._prompt_tokens.size:
            raise ValueError(
                f"sample_prompt={shown(self.prompt)} makes no tokens with the tokenizer {self.tokenizer.name}: give "
                "another prompt, or sample_tokens=0 for no sample"
            )
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = as_variables(jax.eval_shape(init_fn, key)).params
        try:
            jax.eval_shape(self._tokens, params, key)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"no sample can be made: {why}. sample_tokens=0 makes none") from error

    def on(self, mesh: Mesh) -> Callable[[Any], str]:
        """Returns a function from params on a mesh to generated text."""
        generate = jax.jit(self._tokens, out_shardings=NamedSharding(mesh, PartitionSpec()))

        def sample(params: Any) -> str:
            tokens = np.asarray(generate(params, jax.random.key(self.seed)))
            return self.tokenizer.decode(tokens[tokens < self.tokenizer.vocab_size])

        return sample

    @functools.cached_property
    def _prompt_tokens(self) -> np.ndarray:
        return self.tokenizer.encode(self.prompt).astype(np.int32)

    def _tokens(self, params: Any, key: Array) -> Array:
        settings = {"num_tokens": self.num_tokens, "temperature": self.temperature, "top_k": self.top_k}
        return self.generate_fn(cast_floating(params, self.compute), self._prompt_tokens, key, **settings)
