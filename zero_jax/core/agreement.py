"""Agreement of the processes of a run: all continue or none, and all get a text of the first one, or of all.

With one process nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

_OK = "ok"
_TIMEOUT_SECONDS = 3600  # how long the slowest process may take after the fastest


class FirstProcessFailed(ValueError):
    """Raised in the other processes where the first one raised."""


class Agreement:
    """A context in which all processes raise if one does, so that none waits for it in the next collective."""

    def __init__(self, failure: Callable[[str], Exception]):
        """Takes the function from the numbers of the failed processes, such as "0, 2", to the error of the others."""
        self._failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if jax.process_count() == 1 or (error is not None and not isinstance(error, Exception)):
            return
        failed = multihost_utils.process_allgather(np.int32(error is not None)).reshape(-1)
        if error is None and failed.any():
            raise self._failure(", ".join(map(str, np.flatnonzero(failed))))


class OtherProcessFailed(RuntimeError):
    """Raised in a process where another one has failed."""


class Barrier:
    """A barrier for background threads: all processes leave the context together, and all raise if one fails.

    The processes exchange text, not arrays on devices as `Agreement` does, so that the devices may train meanwhile.
    """

    def __init__(self, name: str) -> None:
        """Takes a name that is the same in all processes, and that no other barrier has."""
        self._name, self._phase = name, 0

    def __enter__(self) -> None:
        self._phase += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if jax.process_count() == 1:
            return
        client = distributed.global_state.client
        assert client is not None
        outcome = _OK if error is None else f"{kind.__name__ if kind else ''}: {error}"[:1000]
        client.key_value_set(self._key(jax.process_index()), outcome)
        outcomes = [
            client.blocking_key_value_get(self._key(process), _TIMEOUT_SECONDS * 1000)
            for process in range(jax.process_count())
        ]
        failed = [f"process {process} failed: {error}" for process, error in enumerate(outcomes) if error != _OK]
        if error is None and failed:
            raise OtherProcessFailed("; ".join(failed))

    def _key(self, process: int) -> str:
        return f"zero_jax/save/{self._name}/{self._phase}/{process}"


def from_first_process(text: str | Callable[[], str]) -> str:
    """Returns a text of the first process, of any length.

    A function that returns it is called by the first process alone.

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
    received = _from_first(sent).astype(np.uint8).tobytes().decode(errors="surrogateescape") if size else ""
    if error is not None:
        raise error
    if failed:
        raise FirstProcessFailed(f"process 0 failed: {received}")
    return received


def from_all_processes(text: str) -> list[str]:
    """Returns the texts of all processes, which all call this, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    encoded = text.encode()
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(encoded)))).reshape(-1)
    sent = np.zeros(int(sizes.max()), np.uint8)
    sent[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    received = np.asarray(multihost_utils.process_allgather(sent))
    return [row[:size].astype(np.uint8).tobytes().decode() for row, size in zip(received, sizes, strict=True)]


def _from_first(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(numbers))
