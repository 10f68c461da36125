"""What the processes of a run agree on; one process agrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_LONGEST_TEXT = 1024


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


def from_first_process(text: str) -> str:
    """Returns the text that the first process gave, of at most 1,024 bytes."""
    if jax.process_count() == 1:
        return text
    padded = np.zeros(_LONGEST_TEXT, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    padded[: encoded.size] = encoded
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().rstrip(b"\0").decode()
