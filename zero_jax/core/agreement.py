"""What the processes of a run agree on; one process agrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class FirstProcessFailed(ValueError):
    """What the other processes raise where the first one raised."""


class Agreement:
    """Lets all processes go on, or none: an error of one becomes one of all, which would miss it in what comes next."""

    def __init__(self, failure: Callable[[str], Exception]):
        """Takes what makes the error of the others, from the numbers of the processes that failed."""
        self._failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if jax.process_count() == 1 or (error is not None and not isinstance(error, Exception)):
            return
        failed = multihost_utils.process_allgather(np.int32(error is not None)).reshape(-1)
        if error is None and failed.any():
            raise self._failure(", ".join(map(str, np.flatnonzero(failed))))


def from_first_process(text: str | Callable[[], str]) -> str:
    """Returns a text of the first process, of any length.

    Args:
      text: the text, or a function that returns it, which the first process alone calls.

    Raises:
      FirstProcessFailed: in the other processes, with the message of the error that the function raised in the first.
    """
    if jax.process_count() == 1:
        return text() if callable(text) else text
    error, encoded = None, b""
    if jax.process_index() == 0:
        try:
            encoded = (text() if callable(text) else text).encode(errors="surrogateescape")
        except Exception as caught:
            error, encoded = caught, str(caught).encode(errors="replace")
    # The length first: all processes have to send arrays of one shape.
    size, failed = _from_first(np.array([len(encoded), error is not None], np.int32)).tolist()
    sent = np.zeros(size, np.uint8)
    sent[:] = np.frombuffer(encoded, np.uint8) if jax.process_index() == 0 else 0
    said = _from_first(sent).astype(np.uint8).tobytes().decode(errors="surrogateescape") if size else ""
    if error is not None:
        raise error
    if failed:
        raise FirstProcessFailed(f"process 0 failed: {said}")
    return said


def _from_first(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(numbers))
