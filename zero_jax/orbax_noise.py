"""Keeps what orbax prints about a failed save off the screen; `Checkpointer` tells of it in a line of its own."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import Any


class Quiet:
    """While it is installed, orbax's log records and what its abandoned writes report are dropped.

    A save that fails leaves writes behind: each reports, with a traceback, to an event loop that is gone, or to nobody.
    """

    def __init__(self) -> None:
        """Installs it."""
        self._filters = {"absl": _OrbaxFilter(), "asyncio": _NeverRetrieved()}
        self._before = sys.unraisablehook
        self._hook = self._drop
        for name, one in self._filters.items():
            logging.getLogger(name).addFilter(one)
        sys.unraisablehook = self._hook

    def remove(self) -> None:
        """Removes it, once what was abandoned has been collected and has said so."""
        gc.collect()
        for name, one in self._filters.items():
            logging.getLogger(name).removeFilter(one)
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._before

    def _drop(self, unraisable: Any) -> None:
        error, frame = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
        is_orbax = frame is not None and f"{os.sep}orbax{os.sep}" in frame.co_filename
        if not is_orbax and not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._before(unraisable)


class _OrbaxFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname


class _NeverRetrieved(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not ("never retrieved" in text and "orbax" in text)
