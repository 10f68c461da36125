"""Keeps what orbax prints about a failed save off the screen; `Checkpointer` tells of it in a line of its own."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


class Quiet:
    """While it is installed, orbax's log records and the wakes of its closed event loops are dropped.

    A save that fails leaves writes behind that report to an event loop that is gone, each with a traceback.
    """

    def __init__(self) -> None:
        """Installs it."""
        self._filter, self._before = _OrbaxFilter(), sys.unraisablehook
        self._hook = self._drop
        logging.getLogger("absl").addFilter(self._filter)
        sys.unraisablehook = self._hook

    def remove(self) -> None:
        """Removes it."""
        logging.getLogger("absl").removeFilter(self._filter)
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._before

    def _drop(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._before(unraisable)


class _OrbaxFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname
