"""Batches that all processes read together: all get one of the same sizes, or all learn why not."""

from __future__ import annotations

from collections.abc import Callable

import jax

from zero_jax.core.agreement import OtherProcessFailed, known_to_all, turns_of
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.trainer.inputs.sources import BatchesEnded


class Together:
    """Reads batches (`label` in errors) in all processes together, before any of them enters the step that takes them.

    With one process nothing is compared. Otherwise a batch costs a turn (`core/agreement.py`), while the devices are
    busy with the step before. `ended` are the processes without a further batch, where others had one.
    """

    def __init__(self, label: str) -> None:
        self._label, self._last = label, None
        self.ended: tuple[int, ...] = ()

    def read(self, read: Callable[[], PyTree]) -> PyTree:
        """Returns the global arrays that `read` returns; `BatchesEnded` in all processes, if that is all it raises."""
        if jax.process_count() == 1:
            return read()
        turns = turns_of()
        try:
            batch = read()
            shapes = tuple((name, str(x.dtype), x.shape) for name, x in leaves_by_name(batch).items())
            shown = ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in shapes)
            texts = turns.take(None if shapes == self._last else shown)
        except Exception as error:
            turns.fail(error)
            failures = {p: why for p, why in turns.errors.items() if not why.startswith(BatchesEnded.__name__)}
            if turns.errors and not failures:
                self.ended = tuple(turns.errors) if len(turns.errors) < jax.process_count() else ()
                raise known_to_all(BatchesEnded(str(error))) from error
            if not isinstance(error, BatchesEnded):
                raise
            message = "; ".join(f"process {p} failed: {why}" for p, why in failures.items())
            raise known_to_all(OtherProcessFailed(message or "the other processes do not go on", failures)) from error
        if texts:
            self._compare(texts)
        self._last = shapes
        return batch

    def _compare(self, texts: dict[int, str]) -> None:
        """Raises `ValueError` unless all processes have given the same sizes."""
        others = {process: texts.get(process, "those of the batch before") for process in range(jax.process_count())}
        if len(set(others.values())) > 1:
            shown = "; ".join(f"{sizes} in process {process}" for process, sizes in others.items())
            raise known_to_all(
                ValueError(
                    f"{self._label} of the processes differ in their global sizes: {shown}. Give all processes batches "
                    "of the same sizes: drop or pad the last one of a pass"
                )
            )
