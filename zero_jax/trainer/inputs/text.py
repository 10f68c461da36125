"""Text as the data of a run: packed rows of tokens, shuffled by grain, and samples that the model generates."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax import data
from zero_jax.core.agreement import from_all_processes, from_first_process
from zero_jax.core.device_put import to_device
from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import mapping
from zero_jax.core.tree import PyTree, key_shape, shapes_of, shown
from zero_jax.core.variables import as_variables
from zero_jax.sharding.mesh import batch_sharding
from zero_jax.sharding.precision import cast_floating
from zero_jax.transforms import PartWeight


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextInput:
    """Rows of tokens of a data set, with the methods that the loop calls."""

    dataset: data.Dataset
    config: data.DataConfig
    mesh: Mesh
    batch_size: int  # sequences
    seq_len: int
    seed: int  # chooses the order
    eval_batches: int
    sampler: Sampler | None = None
    buffers: data.BatchBuffers = dataclasses.field(default_factory=data.BatchBuffers)
    streams: list[data.StreamBatches] = dataclasses.field(default_factory=list)  # the open one of a stream

    identity_words = "the data, seed and seq_len"

    @property
    def num_tokens(self) -> int:
        """Tokens in a batch, which throughput is counted in."""
        return self.batch_size * self.seq_len

    @property
    def rows(self) -> dict[str, str]:
        """Lines of the description of the run: `data` and `batch`."""
        return {"data": str(self.dataset), "batch": f"{self.batch_size} sequences of {self.seq_len} tokens"}

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the order of the examples; it must not change in a resumed run."""
        return {"fingerprint": self.dataset.fingerprint, "seed": self.seed, "seq_len": self.seq_len}

    @property
    def validation(self) -> Sequence[data.Batch]:
        """Batches to validate on, the same each time."""
        return data.validation_batches(self.dataset, num_batches=self.eval_batches, **self._sizes)

    @property
    def batch_shapes(self) -> PyTree:
        """The shapes of a batch."""
        return shapes_of(self.validation[0])

    def steps_of(self, epochs: float) -> int:
        """Returns the steps of a number of passes over the rows, the last of which may begin another pass."""
        rows = self.dataset.train.num_rows(seq_len=self.seq_len)
        # Rounded first: 1.1 * 100 is 110.00000000000001, which would be 111 steps.
        return max(1, math.ceil(round(epochs * rows / self.batch_size, 6)))

    def open(self, saved: Mapping[str, Any] | None, *, say: Callable[[str], None], beat: Callable[[], None]) -> Any:
        """Opens the training batches after those of a checkpoint's record (None: all), prefetched by threads."""
        position = 0 if saved is None else saved["position"]
        settings = {**self._sizes, "seed": self.seed, "prefetch_batches": self.config.prefetch_batches}
        if not isinstance(self.dataset, data.Stream):
            return data.train_batches(self.dataset, position=position, **settings)
        states = None if saved is None else mapping(saved.get("states"))
        batches = data.stream_batches(self.dataset, position=position, states=states, **settings)
        # In place: the dataclass is frozen.
        self.streams[:] = [batches]
        return batches

    def record(self, position: int, *, has_read_more: bool = False) -> dict[str, Any]:
        """Returns the number of examples read, and what determines their order; of a stream where its lanes are."""
        record = {"position": position, **self.identity}
        if not self.streams:
            return record
        # Of the position that the run is at: the threads that prefetch have read further.
        lanes = [json.loads(x) for x in from_all_processes(json.dumps(self.streams[0].states[position]))]
        return {**record, "states": {lane: state for states in lanes for lane, state in states.items()}}

    def place(self, batch: PyTree) -> PyTree:
        """Copies a batch into buffers that are reused."""
        return self.buffers.fill(batch)

    def weight(self, batch: PyTree) -> PartWeight:
        """Returns the weight of a validation batch: the number of its targets."""
        total = _total(batch["weights"])
        return PartWeight(total, total)

    def figures(self, aux: PyTree) -> dict[str, float]:
        """Returns what is recorded of a loss function's aux beside the loss: nothing."""
        return {}

    @property
    def _sizes(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "sharding": batch_sharding(self.mesh),
            "separate_documents": self.config.has_segments,
        }


# A program with a replicated result: a process cannot read a global array with shards on other processes.
_total = jax.jit(jnp.sum)


def open_dataset(config: data.DataConfig, model: Any, *, held_out: bool, log: Callable[[str], None]) -> data.Dataset:
    """Loads the data set of a run of a `Model`, the same in all processes; with `held_out`, all for validation."""
    with extra("train"):
        import grain  # noqa: F401 - needed by the first batch, missed before anything is made

    dataset = data.load_dataset(config, seq_len=model.seq_len, held_out=held_out, log=log)
    if from_first_process(dataset.fingerprint) != dataset.fingerprint:
        raise ValueError(
            f"process {jax.process_index()} reads other text than process 0 ({dataset}): give all hosts the same "
            "files, or a folder that they share"
        )
    if dataset.tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the text has {dataset.tokenizer.vocab_size} different tokens, the model {model.name} has room for "
            f"{model.vocab_size}: give it a vocab_size of at least {dataset.tokenizer.vocab_size}"
        )
    return dataset


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Generates text after a prompt; the settings are those of `TrainConfig`, `generate_fn` is as in `Model`."""

    generate_fn: Callable[..., Array]
    tokenizer: data.Tokenizer
    compute: Any  # dtype that the params are cast to, or None
    prompt: str
    num_tokens: int
    temperature: float
    top_k: int | None
    seed: int

    def check(self, init_fn: Callable[[Array], Any]) -> None:
        """Traces the sampling once; raises `ValueError` for settings such as a `top_k` beyond the vocabulary."""
        if not self._prompt_tokens.size:
            raise ValueError(
                f"sample_prompt={shown(self.prompt)} makes no tokens with the tokenizer {self.tokenizer.name}: give "
                "another prompt, or sample_tokens=0 for no sample"
            )
        key = key_shape()
        params = as_variables(jax.eval_shape(init_fn, key)).params
        try:
            jax.eval_shape(self._tokens, params, key)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"no sample can be made: {why}. sample_tokens=0 makes none") from error

    def on(self, mesh: Mesh) -> Callable[..., str]:
        """Returns a function from params on a mesh to generated text; a keyword `seed` is instead of the sampler's."""
        # Replicated: every process reads the tokens.
        generate = jax.jit(self._tokens, out_shardings=NamedSharding(mesh, PartitionSpec()))

        def sample(params: Any, *, seed: int = self.seed) -> str:
            tokens = np.asarray(generate(params, jax.random.key(seed)))
            # A model may have a larger vocabulary than the tokenizer, padded for example.
            return self.tokenizer.decode(tokens[tokens < self.tokenizer.vocab_size])

        return sample

    @functools.cached_property
    def _prompt_tokens(self) -> np.ndarray:
        return self.tokenizer.encode(self.prompt).astype(np.int32)

    def _tokens(self, params: Any, key: Array) -> Array:
        settings = {"num_tokens": self.num_tokens, "temperature": self.temperature, "top_k": self.top_k}
        # Offloaded params are in host memory.
        params = cast_floating(jax.tree.map(to_device, params), self.compute)
        return self.generate_fn(params, self._prompt_tokens, key, **settings)
