"""Tracebacks of errors in a user's functions, without the frames of zero_jax between these and the caller."""

from __future__ import annotations

import contextlib
import os
import pathlib
import types

import jax

_PACKAGE = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
# What these packages run is no function of a user's.
_NOT_OF_A_USER = {"zero_jax", "jax", "jaxlib", "optax", "contextlib"}


class ShortTraceback(contextlib.AbstractContextManager):
    """Leaves zero_jax out of a user's error's traceback, as JAX does; `JAX_TRACEBACK_FILTERING=off` shows all.

    A user's error is one that came through a user's function, or a `ValueError` or a `FloatingPointError` of
    `jax_debug_nans`, which keep the frame that raised them.
    """

    def __exit__(self, kind: object, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        if isinstance(error, ValueError) and "ordered effects are not supported" in str(error):
            # JAX's text has no more than the addresses of objects.
            error.add_note(
                "jax.debug.print, jax.debug.callback and io_callback keep their order on one device alone: give "
                "ordered=False to those in loss_fn and in the optimizer"
            )
        if error is None or jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
            return
        entries = []
        while traceback is not None:
            entries.append(traceback)
            traceback = traceback.tb_next
        kept = [entry for entry in entries if not _is_ours(entry)]
        if isinstance(error, (ValueError, FloatingPointError)) and _is_ours(entries[-1]):
            kept.append(entries[-1])
        # What zero_jax raised itself, but for these, is a bug of its own: whoever mends it needs all frames.
        elif _is_ours(entries[-1]) or not any(map(_is_of_user, kept)):
            return
        error.__traceback__ = None
        # `tb_next` can only be given when an entry is made, so the innermost is made first.
        for entry in reversed(kept):
            error.__traceback__ = types.TracebackType(
                error.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno
            )


def path_in_package(file: str) -> str:
    """Returns the path of a file within zero_jax; '' for others, and for models, which are a user's functions."""
    path = file.removeprefix(_PACKAGE)
    return "" if path == file or path.startswith(f"models{os.sep}") else path


def _is_ours(entry: types.TracebackType) -> bool:
    return bool(path_in_package(entry.tb_frame.f_code.co_filename))


def _is_of_user(entry: types.TracebackType) -> bool:
    return entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_OF_A_USER


SHORT_TRACEBACK = ShortTraceback()
