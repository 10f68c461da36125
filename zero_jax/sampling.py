"""Text that a model makes up while it trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.precision import cast_floating, resolve_precision
from zero_jax.training_run import Run


def make_sampler(run: Run) -> Callable[[Any], str] | None:
    """Makes the function from params to text that goes on from the run's prompt; None if there is none to make."""
    config, tokenizer = run.config, run.dataset.tokenizer
    if run.model.generate_fn is None or not config.sample_tokens:
        return None
    generate = functools.partial(
        run.model.generate_fn,
        num_tokens=config.sample_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
    )
    compute = resolve_precision(config.zero.precision).compute
    prompt = tokenizer.encode(config.sample_prompt).astype(np.int32)

    @functools.partial(jax.jit, out_shardings=NamedSharding(run.mesh, PartitionSpec()))
    def generate_tokens(params: Any, seed: Array) -> Array:
        return generate(cast_floating(params, compute), prompt, jax.random.key(seed))

    def sample(params: Any) -> str:
        tokens = np.asarray(generate_tokens(params, np.int32(config.seed % 2**31)))
        return tokenizer.decode(tokens[tokens < tokenizer.vocab_size])

    return sample
