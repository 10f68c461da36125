"""Batches of the user's own, of two kinds: a function of the step, or an iterator. `find_source` makes one of any.

A function of the step (also a sequence) is read from any position. An iterator with `get_state` and `set_state` (as
grain's) is set to the state that a checkpoint has. Any other iterator is read again up to its position. All processes
read `Together`.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zero_jax.core.agreement import OtherProcessFailed, known_to_all, turns_of
from zero_jax.core.tree import PyTree, leaves_by_name, shown

_REMEDY = (
    "give a function of the step that returns a batch, an iterable of batches (a list, a generator, a grain dataset), "
    "or a function of nothing that returns one"
)


class BatchesEnded(Exception):
    """Raised where an iterator has no more batches and cannot begin again."""


def find_source(label: str, batches: Any) -> Source:
    """Returns the source for batches of any supported kind; `label` names them in errors."""
    if isinstance(batches, Mapping):
        raise ValueError(f"{label} is a {type(batches).__name__}, a single batch perhaps: {_REMEDY}, such as [batch]")
    if not callable(batches) or isinstance(batches, Iterable):
        return _from_iterable(label, batches, None)
    num_required = _num_required(batches)
    if num_required == 1:
        if inspect.isgeneratorfunction(batches):
            raise ValueError(
                f"{label}: {_name(batches)} takes a step and yields: return the batch of that step, or take no "
                "argument and yield all of them"
            )
        return StepSource(batches, "a function of the step")
    if num_required > 1:
        raise ValueError(
            f"{label}: {_name(batches)}{inspect.signature(batches)} takes {num_required} values: {_REMEDY}"
        )
    returned = batches()
    if callable(returned) and not isinstance(returned, Iterable):
        raise ValueError(f"{label}: {_name(batches)}() returned {shown(returned)}, no batches: {_REMEDY}")
    if isinstance(returned, Mapping):
        raise ValueError(
            f"{label}: {_name(batches)}() returned a {type(returned).__name__}, a single batch perhaps: take the step "
            "as an argument, or yield batches"
        )
    return _from_iterable(f"{label}: {_name(batches)}()", returned, batches)


def first_batch(label: str, batches: Any) -> PyTree:
    """Returns the first batch of batches of any kind, as `find_source` knows them.

    Example:
      >>> zero.trainer.first_batch("batches", [batch])["x"].shape
      (16, 64)
    """
    return find_source(label, batches).first()


def _from_iterable(label: str, batches: Any, make: Callable[[], Any] | None) -> Source:
    """Returns the source of an iterable; `make` makes it again if it can be read only once."""
    try:
        iterator = iter(batches)
    except TypeError as error:
        raise ValueError(f"{label} is {shown(batches)}, no batches: {_REMEDY}") from error
    has_state = _has_state(iterator)
    # A data set of grain may be a sequence, too; its iterator, which has a state, reads ahead in threads.
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__") and not has_state:
        if not len(batches):
            raise ValueError(f"{label} has no batch: give one at least")
        in_memory = batches if isinstance(batches, list | tuple) else ()
        return StepSource(
            lambda step: batches[step % len(batches)], f"a sequence of {len(batches):,}", len(batches), in_memory
        )
    # An iterator is its own `iter` and passes once, so only `make` begins again; any other iterable is iterated again.
    make = make if iterator is batches else lambda: batches
    again = None if make is None else lambda: iter(make())
    try:
        return IteratorSource(label, iterator, again, size=len(batches))
    except (TypeError, NotImplementedError):  # a loader of torch has the method for any data set
        return IteratorSource(label, iterator, again)


@dataclasses.dataclass(frozen=True)
class StepSource:
    """Batches as a function of the number of batches before."""

    batch_of: Callable[[int], PyTree]  # the function
    kind: str  # what they are
    size: int | None = None  # batches of a pass, if it has an end, after which it begins again
    in_memory: Sequence[PyTree] = ()  # all batches, if they are in memory

    def first(self) -> PyTree:
        """Returns the batch of step 0."""
        return next(self.open(0))

    def open(self, position: int, state: str | None = None, **_: Callable[..., None]) -> Iterator[PyTree]:
        """Yields the batches from a position on."""
        for step in itertools.count(position):
            try:
                batch = self.batch_of(step)
            except StopIteration as error:  # of a loader that it reads: a function has no end
                raise ValueError(f"{self.kind} raised StopIteration at step {step}: let it return a batch") from error
            yield batch

    def again(self) -> Iterator[PyTree]:
        """Returns the batches of one pass."""
        return map(self.batch_of, itertools.count() if self.size is None else range(self.size))

    def state(self) -> None:
        """Returns the state of the open iterator as text: none, the position says all."""


class IteratorSource:
    """Batches of an iterator, pass after pass if it can be made `again`; with a state if it has `get_state`."""

    in_memory = ()

    def __init__(
        self, label: str, iterator: Any, again: Callable[[], Iterator[PyTree]] | None, *, size: int | None = None
    ):
        self._label, self.again, self.size = label, again, size
        self._iterator: Any = iterator
        self._taken: list[PyTree] = []
        self._has_state = _has_state(iterator)
        self.kind = "an iterator with a state" if self._has_state else "an iterable without a state"
        if self._has_state:
            # Before the first batch is read, after which the iterator is set back.
            self._begin = iterator.get_state()
            _encode(label, self._begin)  # a state that cannot be saved is refused now, and not at the first save

    def first(self) -> PyTree:
        """Returns the first batch; the iterator is set back, or the batch is kept."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise ValueError(f"{self._label} has no batch: give one at least") from None
        if self._has_state:
            self._set(self._begin)
        else:
            self._taken = [batch]
        return batch

    def open(
        self,
        position: int,
        state: str | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        beat: Callable[[], None] = lambda: None,
    ) -> Iterator[PyTree]:
        """Returns the batches from a state on, or those after the first `position` ones, which are read and dropped."""
        batches = self._batches()
        if self._has_state and state is not None:
            self._set(_decode(state))
            return batches
        if position:
            why = f"{self.kind} has no position to save; a function of the step or a grain dataset has one"
            why = "the checkpoint has no state of theirs" if self._has_state else why
            say(f"batches: reading and dropping the {position:,} before step {position + 1}: {why}")
        for number in range(position):
            beat()
            try:
                next(batches)
            except BatchesEnded as error:
                raise ValueError(
                    f"{error} after {number:,}, and the run has read {position:,}: give those of before, or batches "
                    "that begin again at their end"
                ) from error
        return batches

    def state(self) -> str | None:
        """Returns the state of the iterator as text, if it has one."""
        return _encode(self._label, self._iterator.get_state()) if self._has_state else None

    def _batches(self) -> Iterator[PyTree]:
        yield from self._taken
        # Dropped before the pass goes on, else the first batch would stay in memory.
        self._taken = []
        yield from self._iterator
        while self.again is not None:
            self._iterator = self.again()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ValueError(f"{self._label} had no batch when it was read again: give one at least") from None
            yield batch
            del batch  # or it would stay in memory for all of the pass
            yield from self._iterator
        raise BatchesEnded(f"{self._label} has no more batches")

    def _set(self, state: Any) -> None:
        try:
            self._iterator.set_state(state)
        except Exception as error:
            raise ValueError(
                f"{self._label} does not take the state {shown(state)} back ({type(error).__name__}: {error}): give "
                "the dataset that the checkpoint was written with"
            ) from error


Source = StepSource | IteratorSource


def _encode(label: str, state: Any) -> str:
    """Encodes a state as JSON; checks that decoding returns an equal state."""
    try:
        text = json.dumps({"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state})
        is_same = bool(_decode(text) == state)  # JSON makes lists of tuples, and text of whole numbers as keys
    except (TypeError, ValueError, RecursionError):
        text, is_same = "", False
    if not is_same:
        raise ValueError(
            f"{label}: its get_state() returned {shown(state)}, for which JSON has no form: let it return bytes, or "
            "dicts and lists of numbers and text; a generator around it has no state"
        )
    return text


def _decode(text: str) -> Any:
    record = json.loads(text)
    if not isinstance(record, dict) or record.keys() not in ({"bytes"}, {"json"}):
        raise ValueError(f"{shown(text)} is no state of batches")
    return base64.b64decode(record["bytes"]) if "bytes" in record else record["json"]


def _has_state(iterator: Any) -> bool:
    return all(callable(getattr(iterator, name, None)) for name in ("get_state", "set_state"))


def _num_required(function: Callable[..., Any]) -> int:
    """Returns the number of positional arguments without a default; 1 if the signature is not available."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Together:
    """Reads batches (`label` in errors) in all processes together, before any of them enters the step that takes them.

    With one process nothing is compared. Otherwise a batch costs a turn (`core/agreement.py`), while the devices are
    busy with the step before. `ended` are the processes without a further batch, where others had one.
    """

    def __init__(self, label: str) -> None:
        self._label, self._last = label, None
        self.ended: tuple[int, ...] = ()

    def read(self, read: Callable[[], PyTree]) -> PyTree:
        """Returns the global arrays that `read` returns; `BatchesEnded` in all processes, if that is all it raises."""
        if jax.process_count() == 1:
            return read()
        turns = turns_of()
        try:
            batch = read()
            shapes = tuple((name, str(x.dtype), x.shape) for name, x in leaves_by_name(batch).items())
            shown = ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in shapes)
            texts = turns.take(None if shapes == self._last else shown)  # as a rule all have those of before
        except Exception as error:
            turns.fail(error)
            failures = {p: why for p, why in turns.errors.items() if not why.startswith(BatchesEnded.__name__)}
            if turns.errors and not failures:
                self.ended = tuple(turns.errors) if len(turns.errors) < jax.process_count() else ()
                # No process has anything but an end to report, and all of them know.
                raise known_to_all(BatchesEnded(str(error))) from error
            if not isinstance(error, BatchesEnded):
                raise
            message = "; ".join(f"process {p} failed: {why}" for p, why in failures.items())
            raise known_to_all(OtherProcessFailed(message or "the other processes do not go on", failures)) from error
        if texts:
            self._compare(texts)
        self._last = shapes
        return batch

    def _compare(self, texts: dict[int, str]) -> None:
        """Raises `ValueError` unless all processes have given the same sizes."""
        others = {process: texts.get(process, "those of the batch before") for process in range(jax.process_count())}
        if len(set(others.values())) > 1:
            shown = "; ".join(f"{sizes} in process {process}" for process, sizes in others.items())
            raise known_to_all(
                ValueError(
                    f"{self._label} of the processes differ in their global sizes: {shown}. Give all processes batches "
                    "of the same sizes: drop or pad the last one of a pass"
                )
            )
