"""Errors of a plan: of the model's functions, with the lines that raised them, and of the compiler."""

import contextlib
import pathlib
import sys
import traceback
from collections.abc import Iterator

import jax

_PACKAGE = f"{pathlib.Path(__file__).parent.parent}/"
_LIBRARIES = frozenset({"jax", "jaxlib"}) | sys.stdlib_module_names
_MAX_LINES = 6


class CompilerCrash(RuntimeError):
    """Raised if the compiling process ends without a result: it crashed, was killed, or took too long.

    Example:
      >>> try:
      ...     report = zero.plan(loss_fn, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, log=str)
      ... except zero.CompilerCrash as error:  # another stage or batch may compile
      ...     print(error)
      >>> report.stage
      3
    """


class ModelError(RuntimeError):
    """Raised if a function of the model raises; the message has its error and the lines of the model.

    Example:
      >>> def broken(params, batch):
      ...     return params["sideways"].sum()
      >>> try:
      ...     zero.plan(broken, init_fn, tx, batch=batch, topology="v5e:2x2", config=config, log=lambda _: None)
      ... except zero.ModelError as error:
      ...     print(str(error).splitlines()[0])
      the model raised KeyError: 'sideways'
    """


class SettingRefused(ValueError):
    """Raised for a setting that zero_jax refuses for a model; a search goes on with the others."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Makes a `SettingRefused` of each `ValueError` that zero_jax, or JAX for it, raises; not of the model's own."""
    try:
        yield
    except ValueError as error:
        is_ours, lines = user_lines(error)
        if is_ours or not lines:
            raise SettingRefused(str(error) or "ValueError without a message") from error
        raise


def explain(error: Exception) -> Exception:
    """Returns the exception to raise for an error that was caught around calls of a model's functions.

    A `ValueError` of zero_jax stays one. An error that came through lines of the model becomes a `ModelError` with
    these lines, an error of the compiler a `CompilerCrash`. Any other is a bug of zero_jax: a `RuntimeError` with the
    traceback.
    """
    is_ours, lines = user_lines(error)
    where = "".join(f"\n  {line}" for line in lines)
    if isinstance(error, ValueError) and (is_ours or not lines):
        return ValueError(f"{error}{where}")
    if lines:
        notes = [f"\n  {note}" for note in getattr(error, "__notes__", ()) if not note.startswith("-")]  # JAX's own
        return ModelError(f"the model raised {type(error).__name__}: {error}{where}{''.join(notes)}")
    if isinstance(error, CompilerCrash | ModelError):
        return error
    if isinstance(error, jax.errors.JaxRuntimeError):
        return CompilerCrash(f"the compiler refuses the program: {str(error).strip().splitlines()[0]}")
    return RuntimeError("".join(traceback.format_exception(error)))


def user_lines(error: BaseException) -> tuple[bool, list[str]]:
    """Returns whether zero_jax raised an error, and the last lines of the user's code (or another package's) before."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_ours, lines, last = False, [], ""
    for frame, summary in zip(frames, traceback.extract_tb(error.__traceback__), strict=True):
        # A module of zero_jax that runs as a script has another name; methods of a dataclass have no file.
        package = frame.f_globals.get("__name__", "").split(".")[0]
        is_ours = package == "zero_jax" or summary.filename.startswith(_PACKAGE)
        if is_ours or package in _LIBRARIES:
            continue
        line = last = f"{summary.filename}:{summary.lineno} in {summary.name}: {summary.line}"
        if "site-packages" not in summary.filename:
            lines.append(line)
    return is_ours, [*lines[-_MAX_LINES:], *([last] if last and last not in lines else [])]
