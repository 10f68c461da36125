"""A barrier between the processes of a save that a process whose part failed lets through at once.

Orbax's own would keep the others waiting until its time is up, many minutes later, and the next save with them.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax._src import distributed

_OK = "ok"
_NAMES = map("save{}".format, itertools.count())  # processes make their barriers in the same order
_NUM_PHASES = 2  # all shards are written; the folder has its name


class SaveFailed(RuntimeError):
    """Another process could not write its part."""


class SaveBarrier:
    """Lets the processes that save together tell each other how it went.

    All of them call `begin` before every save. Orbax calls the object between the phases of one.
    """

    def __init__(self) -> None:
        """Starts with no save under way."""
        self._name, self._save, self._phase = next(_NAMES), 0, 0

    def begin(self) -> None:
        """Begins the next save."""
        self._save, self._phase = self._save + 1, 0

    def fail(self, why: str) -> None:
        """Tells the others that this process will not come."""
        while self._phase < _NUM_PHASES:
            self._tell(why)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; `key` is not needed, for phases come one after another.

        Raises:
          SaveFailed: one of them told that it failed.
        """
        phase = self._phase
        self._tell(_OK)
        for process in range(jax.process_count()):
            said = _client().blocking_key_value_get(self._key(phase, process), timeout_ms)
            if said != _OK:
                raise SaveFailed(f"process {process} failed: {said}")

    def _tell(self, word: str) -> None:
        phase, self._phase = self._phase, self._phase + 1
        if jax.process_count() > 1:
            _client().key_value_set(self._key(phase, jax.process_index()), word)

    def _key(self, phase: int, process: int) -> str:
        return f"zero_jax/{self._name}/{self._save}/{phase}/{process}"


def _client() -> Any:
    """Returns what the processes of `jax.distributed` exchange words through."""
    client = distributed.global_state.client
    assert client is not None
    return client
