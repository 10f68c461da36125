"""Agreement of the processes of a run: all continue or none, and all get a text of the first one, or of all.

The processes exchange text by JAX's coordination service, not arrays on devices: devices may compute meanwhile, and
processes whose devices wait for each other can still say why. With one process nothing is exchanged.

All of it is turns (`Turns`) that the processes take in the same order. A process that fails between two turns, within
an `Agreement`, takes the next turn with its error, whatever that turn is for in the others, and they raise there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed

_TIMEOUT_SECONDS = 3600  # how long the slowest process may take after the fastest
# How long a process that fails alone, or in a collective that the others may not leave any more, waits to say why.
_ALONE_SECONDS = 10
_TEXT, _ERROR, _REFUSAL = b"t", b"e", b"r"
_MAX_ERROR, _MAX_VALUE, _MAX_SHOWN, _MAX_LINES = 2000, 300, 6, 2**17


class OtherProcessFailed(RuntimeError):
    """Raised in a process where another one has failed.

    Attributes:
      errors: the errors by process.
      is_refusal: whether these are `ValueError`s, which say what to do.

    Example:
      >>> error = zero.cluster.OtherProcessFailed("process 1 failed", {1: "ValueError: no data"}, is_refusal=True)
      >>> error.errors
      {1: 'ValueError: no data'}
    """

    def __init__(self, message: str, errors: Mapping[int, str] | None = None, *, is_refusal: bool = False):
        """Takes the message, and the errors by process."""
        super().__init__(message)
        self.errors, self.is_refusal = dict(errors or {}), is_refusal


class Turns:
    """Turns that processes take together: each may give a text or an error, and all get those of all.

    A turn is a barrier, and a read of what was given: two messages to the coordination service, about a millisecond.
    `errors` are those of the last turn by process, such as `ValueError: no such name`; that of this one too.
    """

    def __init__(self, name: str, processes: Sequence[int] | None = None):
        """Takes a name that is the same in all processes, and that no other turns have; None are all processes."""
        self._name, self._count = f"zero_jax/{name}", 0
        self._processes = None if processes is None else list(processes)
        self._given: str | None = None
        self.errors: dict[int, str] = {}

    def take(
        self, text: str | None = None, *, error: str = "", is_refusal: bool = False, seconds: float = _TIMEOUT_SECONDS
    ) -> dict[int, str]:
        """Takes a turn with a text, or why this process fails, and returns the texts by process.

        An `OtherProcessFailed` is raised if another process has failed, or did not come within `seconds`.
        """
        client = distributed.global_state.client
        assert client is not None
        self._count, self.errors = self._count + 1, {}
        # A folder for each turn: a fast process may give its text of the next turn while a slow one still reads this
        # one's.
        folder, process = f"{self._name}/{self._count}/", jax.process_index()
        key = None
        if error or text is not None:
            kind = _TEXT if not error else _REFUSAL if is_refusal else _ERROR
            key = f"{folder}{process}"
            # Names of files, which texts and errors have, may be no Unicode.
            client.key_value_set_bytes(key, kind + (error or text or "").encode(errors="surrogateescape"))
        try:
            # The barrier is after the text: who passes it finds the texts of all.
            client.wait_at_barrier(self._name, int(seconds * 1000), self._processes)
        except jax.errors.JaxRuntimeError as caught:
            # A barrier that times out fails in all processes, so that none has to report it to the others.
            raise known_to_all(OtherProcessFailed(f"not all processes go on: {str(caught).splitlines()[0]}")) from None
        given = {int(name.rpartition("/")[2]): value for name, value in client.key_value_dir_get_bytes(folder)}
        # All have taken this turn, so that all have read what was given at the one before.
        if self._given is not None:
            client.key_value_delete(self._given)
        self._given = key
        texts = {p: value[1:].decode(errors="surrogateescape") for p, value in sorted(given.items())}
        errors = self.errors = {p: texts.pop(p) for p, value in sorted(given.items()) if value[:1] != _TEXT}
        # A process that fails raises its own error, not those of the others.
        if errors and not error:
            raise _failed(errors, is_refusal=all(given[p][:1] == _REFUSAL for p in errors))
        return texts

    @property
    def processes(self) -> Sequence[int]:
        """The processes that take them."""
        return range(jax.process_count()) if self._processes is None else self._processes

    def fail(self, error: Exception, seconds: float = _TIMEOUT_SECONDS) -> None:
        """Takes the next turn with an error, unless all processes know of it; the others may not come."""
        # An error that all raise was already agreed on: the others are past that turn, and would take this one for
        # another.
        if _is_known_to_all(error):
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            seconds = min(seconds, _ALONE_SECONDS)
        why = _bounded(f"{type(error).__name__}: {error}", _MAX_ERROR)
        with contextlib.suppress(OtherProcessFailed):
            self.take(error=why, is_refusal=isinstance(error, ValueError), seconds=seconds)
        known_to_all(error)


_turns = functools.cache(Turns)


def turns_of(processes: tuple[int, ...] | None = None) -> Turns:
    """Returns the turns of some processes, or of all."""
    if processes is None or len(processes) == jax.process_count():
        return _turns("all", None)
    return _turns(f"of {'-'.join(map(str, processes))}", processes)


def _failed(errors: Mapping[int, str], *, is_refusal: bool = False) -> Exception:
    message = "; ".join(f"process {p} failed: {why}" for p, why in errors.items())
    return known_to_all(OtherProcessFailed(message, errors, is_refusal=is_refusal))


def known_to_all(error: Exception) -> Exception:
    """Marks an error as one that is raised in all processes, or of which all know; returns it."""
    error._zero_jax_is_known = True  # type: ignore[attr-defined]
    return error


def _is_known_to_all(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "_zero_jax_is_known", False):
            return True
        error = error.__cause__
    return False


class Agreement(contextlib.AbstractContextManager):
    """A context in which all processes raise if one does, so that none waits for it in the next collective."""

    def __init__(
        self,
        failure: Callable[[str], Exception] | None = None,
        *,
        of: Sequence[type[Exception]] = (),
        turns: Turns | None = None,
    ):
        """Takes the error of the others by the failed processes, such as "0, 2", and the turns, if not those of all.

        With `of` it is theirs where all that failed have raised one of these; else all that have not raised another
        error raise an `OtherProcessFailed`.
        """
        self._failure, self._turns, self._of = failure, turns, [kind.__name__ for kind in of]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        # KeyboardInterrupt and SystemExit end this process at once: a turn would wait for the others, for up to an
        # hour.
        if jax.process_count() == 1 or (error is not None and not isinstance(error, Exception)):
            return
        turns = self._turns or turns_of()
        if error is not None:
            may_go_on = type(error).__name__ in self._of and not _is_known_to_all(error)
            turns.fail(error)
            if may_go_on and not self._are_of(turns.errors):  # another process does not
                raise _failed({p: why for p, why in turns.errors.items() if not self._are_of({p: why})}) from error
            return
        try:
            turns.take()
        except OtherProcessFailed as failed:
            if self._failure is None or not failed.errors or (self._of and not self._are_of(failed.errors)):
                raise
            raise known_to_all(self._failure(", ".join(map(str, failed.errors)))) from failed

    def _are_of(self, errors: Mapping[int, str]) -> bool:
        return {why.partition(":")[0] for why in errors.values()} <= {*self._of}


def from_first_process(text: str | Callable[[], str]) -> str:
    """Returns a text of the first process, of any length; a function that returns it is called there alone.

    Raises:
      ValueError: in the other processes, with the message of the error that the function raised in the first.
    """
    if jax.process_count() == 1:
        return text() if callable(text) else text
    turns, own_text = turns_of(), None
    if jax.process_index() == 0:
        try:
            own_text = text() if callable(text) else text
        except Exception as error:
            with contextlib.suppress(OtherProcessFailed):
                turns.take(error=str(error) or type(error).__name__, is_refusal=isinstance(error, ValueError))
            raise known_to_all(error) from None
    try:
        return _all_of(turns.take(own_text), [0])[0]
    except OtherProcessFailed as failed:
        # Another process failed before it came here: that is not an error of the function.
        if failed.errors.keys() != {0}:
            raise
        raise known_to_all(ValueError(str(failed))) from None


def from_all_processes(text: str) -> list[str]:
    """Returns the texts of all processes, which all call this, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    turns = turns_of()
    return list(_all_of(turns.take(text), turns.processes).values())


def agree_on(
    what: str,
    facts: Mapping[str, object],
    *,
    remedy: str,
    long_texts: Mapping[str, str] | None = None,
    causes: Mapping[str, object] | None = None,
    turns: Turns | None = None,
) -> None:
    """Raises `ValueError` in all processes, with names and values, unless the facts about `what` are the same in all.

    Of `long_texts`, such as a program, the error has the first line that differs, unless others say why they do:
    facts, and `causes`, which may differ where all else is the same.
    """
    if jax.process_count() == 1:
        return
    turns, texts = turns or turns_of(), long_texts or {}
    record = {name: str(value) for name, value in facts.items()}
    record |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    # The hash first: a thousand processes would send a thousand times a thousand records.
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    if len(set(_all_of(turns.take(digest), turns.processes).values())) == 1:
        return
    record |= {name: str(value) for name, value in (causes or {}).items()}
    records = {process: json.loads(text) for process, text in turns.take(json.dumps(record)).items()}
    names = [name for name in dict.fromkeys(name for x in records.values() for name in x)]
    differing = [name for name in names if len({x.get(name) for x in records.values()}) > 1]
    of_each = lambda name: {process: record.get(name, "missing") for process, record in records.items()}  # noqa: E731
    shown = [f"{name} is {by_value(of_each(name))}" for name in differing if name not in texts]
    if not {*differing} - texts.keys() - (causes or {}).keys():
        shown += [_first_line(name, texts[name], records, turns) for name in differing if name in texts]
    more = f"; and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    raise known_to_all(
        ValueError(f"the processes differ in {what}: {'; '.join(shown[:_MAX_SHOWN])}{more}. Give {remedy}")
    )


def values_elsewhere(what: str, value: str) -> dict[int, str]:
    """Exchanges values under a name without waiting: of two processes at least the later one gets the other's."""
    client = distributed.global_state.client
    if client is None:  # the processes of a TPU slice that have not joined
        return {}
    folder = f"zero_jax/values/{hashlib.sha256(what.encode()).hexdigest()}/"
    # Without `allow_overwrite` the service refuses a key that this process has set before.
    client.key_value_set(f"{folder}{jax.process_index()}", value, allow_overwrite=True)
    given = {int(name.rpartition("/")[2]): other for name, other in client.key_value_dir_get(folder)}
    return {process: other for process, other in given.items() if process != jax.process_index()}


def refuse(error: Exception, turns: Turns) -> Exception:
    """Tells the other processes, if they come soon, of an error of this one alone; returns it."""
    turns.fail(error, seconds=_ALONE_SECONDS)
    return error


def _all_of(texts: dict[int, str], processes: Iterable[int]) -> dict[int, str]:
    """Returns the texts; raises `RuntimeError` unless they are those of these processes."""
    if texts.keys() != {*processes}:
        raise RuntimeError(
            f"processes {sorted({*processes} ^ texts.keys())} are at another call than this one: let all make the same "
            "calls in the same order"
        )
    return texts


def by_value(values: Mapping[int, str]) -> str:
    """Returns the values with the processes that have them, such as `3 in process 0, 2 in processes 1 and 2`."""
    processes: dict[str, list[int]] = {}
    for process, value in sorted(values.items()):
        processes.setdefault(value, []).append(process)
    return ", ".join(f"{_bounded(value)} in {_numbered(numbers)}" for value, numbers in processes.items())


def _numbered(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    if len(numbers) > _MAX_SHOWN:
        return f"processes {', '.join(map(str, numbers[:_MAX_SHOWN]))} and {len(numbers) - _MAX_SHOWN} more"
    return f"processes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _bounded(text: str, limit: int = _MAX_VALUE) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _first_line(name: str, text: str, records: Mapping[int, Mapping[str, str]], turns: Turns) -> str:
    """Returns the first line that differs between process 0 and the first process with another text.

    A long line is shown from the piece of it that differs.
    """
    first = min(records)
    other = next(process for process in sorted(records) if records[process].get(name) != records[first].get(name))
    gives, lines = jax.process_index() in (first, other), text.splitlines()

    def first_other(pieces: Sequence[str]) -> int:
        # Hashes of 8 characters bound the text that is sent to 1 MiB.
        hashes = [f"{zlib.crc32(piece.encode()):08x}" for piece in pieces[:_MAX_LINES]]
        # All processes take this turn, also those that give nothing: it counts for all of `turns`.
        given = turns.take("".join(hashes) if gives else None)
        a, b = ([given[process][i : i + 8] for i in range(0, len(given[process]), 8)] for process in (first, other))
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    number = first_other(lines)
    line = lines[number].strip() if number < len(lines) else "missing"
    size = _MAX_VALUE // 3
    start = size * first_other([line[i : i + size] for i in range(0, len(line), size)])
    line = f"...{line[start - size :]}" if start > size else line
    return f"{name}, line {number + 1}, is {by_value(turns.take(_bounded(line) if gives else None))}"
