"""The phases of a save: every process ends one with all others, or learns which of them failed.

Unlike `agreement`, which sends arrays between devices, this exchanges words, and may be used in a background thread
while the devices train.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax
from jax._src import distributed

_OK = "ok"
_TIMEOUT_SECONDS = 3600  # how long the slowest process may write after the fastest


class SaveFailed(RuntimeError):
    """Another process could not write its part."""


class SaveBarrier:
    """Lets the processes that save together tell each other how a phase of it went.

    A phase is the body of a `with` statement: on leaving it, a process tells the others whether its part failed and
    waits until all have told. If any has failed, all raise.
    """

    def __init__(self, name: str) -> None:
        """Starts before the first phase.

        Args:
          name: a name that no other barrier of these processes has, the same in all of them.
        """
        self._name, self._phase = name, 0

    def __enter__(self) -> None:
        self._phase += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if jax.process_count() == 1:
            return
        client = _client()
        word = _OK if error is None else f"{kind.__name__ if kind else ''}: {error}"[:1000]
        client.key_value_set(self._key(jax.process_index()), word)
        words = [
            client.blocking_key_value_get(self._key(process), _TIMEOUT_SECONDS * 1000)
            for process in range(jax.process_count())
        ]
        failed = {process: said for process, said in enumerate(words) if said != _OK}
        if error is None and failed:
            raise SaveFailed("; ".join(f"process {process} failed: {said}" for process, said in failed.items()))

    def _key(self, process: int) -> str:
        return f"zero_jax/save/{self._name}/{self._phase}/{process}"


def _client() -> Any:
    """Returns what the processes of `jax.distributed` exchange words through."""
    client = distributed.global_state.client
    assert client is not None
    return client
