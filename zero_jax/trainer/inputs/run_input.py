"""What the loop asks of the data of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from zero_jax.core.tree import PyTree
from zero_jax.trainer.inputs.text import Sampler
from zero_jax.training import Metrics


class RunInput(Protocol):
    """The batches of a run."""

    @property
    def batch_size(self) -> int:
        """Examples in a batch, over all devices and processes."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """Tokens in a batch, which throughput is counted in; None counts examples."""
        ...

    @property
    def sampler(self) -> Sampler | None:
        """Generates text by the model; None for none."""
        ...

    @property
    def rows(self) -> Mapping[str, str]:
        """Lines of the description of the run: `data` and `batch`."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What has to stay as it is where a run is resumed, as a checkpoint records it."""
        ...

    @property
    def identity_words(self) -> str:
        """The same in words, for errors."""
        ...

    @property
    def validation(self) -> Iterable[PyTree] | None:
        """Batches to validate on, the same each time, or None."""
        ...

    def batch_shapes(self) -> PyTree:
        """Returns the shapes of a global batch."""
        ...

    def open(
        self, saved: Mapping[str, Any] | None, *, say: Callable[[str], None], beat: Callable[[], None]
    ) -> contextlib.AbstractContextManager[Iterator[PyTree]]:
        """Opens the batches after those that a checkpoint's record says; None is the beginning.

        `say` is called with lines for the log, `beat` while it takes long.
        """
        ...

    def record(self, batches: Any) -> dict[str, Any]:
        """Returns what a checkpoint records of the open batches, `identity` and `position` at least."""
        ...

    def place(self, batch: PyTree) -> PyTree:
        """Returns a batch on the devices; may wait for them."""
        ...

    def weight(self, batch: PyTree, metrics: Metrics) -> float:
        """Returns the weight of a batch in the mean over the validation batches."""
        ...

    def figures(self, aux: PyTree) -> dict[str, float]:
        """Returns what is recorded of a loss function's aux."""
        ...
