"""What ends a plan: an error of the model's own functions, or of the compiler, told so that a reader knows where."""

from __future__ import annotations

import pathlib
import sys
import traceback

import jax

_PACKAGE = f"{pathlib.Path(__file__).parent.parent}/"
_OTHERS = frozenset({"jax", "jaxlib"}) | sys.stdlib_module_names
_MAX_LINES = 6


class CompilerCrash(RuntimeError):
    """The process that compiled ended without a result: it crashed, was killed, or took too long."""


class ModelError(RuntimeError):
    """A function of the model's own raised; the message tells what, and on which lines of the model."""


def explain(error: Exception) -> Exception:
    """Returns what to raise for an error that was caught around calls of a model's functions.

    What came through lines of the user's own names them. A `ValueError` of zero_jax stays one. An error that neither
    the model nor the compiler has made is a mistake of zero_jax's, and has its whole traceback.
    """
    is_ours, lines = _came_through(error)
    where = "".join(f"\n  {line}" for line in lines)
    if isinstance(error, ValueError) and (is_ours or not lines):
        return ValueError(f"{error}{where}")
    if lines:
        return ModelError(f"the model raised {type(error).__name__}: {error}{where}")
    if isinstance(error, CompilerCrash | ModelError):
        return error
    if isinstance(error, jax.errors.JaxRuntimeError):
        return CompilerCrash(f"the compiler refuses the program: {str(error).strip().splitlines()[0]}")
    return RuntimeError("".join(traceback.format_exception(error)))


def _came_through(error: Exception) -> tuple[bool, list[str]]:
    """Tells whether zero_jax raised an error, and the last lines of the user's own code that it came through.

    Of other packages (a Flax model's), the one line where the error was raised is told beside them.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_ours, own, last = False, [], ""
    for frame, told in zip(frames, traceback.extract_tb(error.__traceback__), strict=True):
        # Run as a script, a module of zero_jax has another name; the methods of a dataclass have no file.
        package = frame.f_globals.get("__name__", "").split(".")[0]
        is_ours = package == "zero_jax" or told.filename.startswith(_PACKAGE)
        if is_ours or package in _OTHERS:
            continue
        line = last = f"{told.filename}:{told.lineno} in {told.name}: {told.line}"
        if "site-packages" not in told.filename:
            own.append(line)
    return is_ours, [*own[-_MAX_LINES:], *([last] if last and last not in own else [])]
