"""Saves checkpoints: sharded, atomic, in the background; a failed save leaves older ones as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import operator
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.checkpoint.array_writes import ArrayWrites
from zero_jax.checkpoint.finding import best_first, list_records, list_steps
from zero_jax.checkpoint.folder import CheckpointFolder
from zero_jax.checkpoint.record import STATE, CheckpointError, record_to_json, resolve_folder
from zero_jax.checkpoint.saved_state import encode_state, opt_state_classes
from zero_jax.core.agreement import Agreement, Turns, from_first_process
from zero_jax.core.field_checks import check_fields, hinted
from zero_jax.core.files.folder_lock import FolderInUse, FolderLock
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import is_bucket
from zero_jax.core.text_tables import Report
from zero_jax.core.tree import shown
from zero_jax.sharding.mesh import on_mesh
from zero_jax.training import NonfiniteState, TrainState, nonfinite_leaves, warn_of_lost_copies

Log = Callable[[str], None]

LOCK = "zero_jax.lock"
_CHECKPOINTERS: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_SEEN_SECONDS = 60  # after which a network file system shows in one process what another has written


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and which are kept.

    Attributes:
      save_every: steps between two checkpoints; 0 saves at the end only.
      keep_last: newest checkpoints to keep.
      keep_best: checkpoints of lowest validation loss to keep in addition; none whose loss is not finite.

    Example:
      >>> zero.CheckpointConfig(save_every=1000, keep_last=3)
      CheckpointConfig(save_every=1000, keep_last=3)
    """

    save_every: int = 200
    keep_last: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        check_fields(self, lowest={"save_every": 0, "keep_last": 1, "keep_best": 0})


class Checkpointer(Report, contextlib.AbstractContextManager):
    """Saves train states into a folder; every process of a run makes one, for the same folder.

    A save returns once the state has been copied to the host. The files are written in the background, and a folder of
    the step's name appears when all of them are complete. Only then are older checkpoints deleted. A save that fails is
    logged and counted, and changes nothing else.

    The first save locks the folder for this run, until `close` or the end of the process. Only what a `Checkpointer`
    has written there is ever replaced or deleted, and nothing before the first save.

    Attributes:
      directory: the folder.
      num_saved: saves that were completed.
      num_failed: saves that failed.
      blocked_seconds: what the last save took before it returned.

    Example:
      >>> with zero.Checkpointer(folder, config=zero.CheckpointConfig(keep_last=1), log=lambda _: None) as saved:
      ...     for step in (100, 200):
      ...         saved.save(step, state)
      >>> zero.checkpoint.list_steps(folder)
      [200]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        config: CheckpointConfig | None = None,
        log: Log = print,
        run: str = "",
    ) -> None:
        """Makes the folder.

        Args:
          directory: the folder, or the URL of one in a bucket.
          config: when to save and what to keep.
          log: called with a line for each save that fails, and for what is removed.
          run: the name of this run, for the error of other runs that want to save into the folder.

        Raises:
          ValueError: the folder cannot be made, or is not a folder.
        """
        self.directory = resolve_folder(directory)
        self.num_saved = self.num_failed = 0
        self.blocked_seconds = 0.0
        self._config, self._log = config or CheckpointConfig(), log
        self._under_way: tuple[int, Future[None]] | None = None  # a step, and its save in the background
        self._folder = CheckpointFolder(self.directory, log)
        self._lock = FolderLock(self.directory / LOCK, run=run)
        self._turns: Turns | None = None  # of the background threads
        self._is_taken = False  # and all processes see the lock
        if _is_primary():
            try:
                self._folder.make()
            except OSError as error:
                raise ValueError(f"cannot write checkpoints to {self.directory}: {with_remedy(error)}") from error

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __str__(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"Checkpointer of {self.directory}: {self.num_saved} saved{failed}, {self._config!r}"

    def is_due(self, step: int) -> bool:
        """Returns whether to save a checkpoint after so many steps."""
        every = self._config.save_every
        return every > 0 and step > 0 and step % every == 0

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, in order."""
        return list_steps(self.directory)

    def take(self) -> None:
        """Locks the folder for this run, as the first save does; all processes call it.

        Raises:
          ValueError: another run has locked it; the message names that run and a remedy.
        """
        if self._is_taken:
            return
        with Agreement(lambda _: FolderInUse(f"{self.directory} cannot be used by this run (see process 0's log)")):
            if _is_primary():
                with contextlib.suppress(OSError):  # the save will fail of it, and log it
                    self._lock.take()
        self._is_taken = self._check_shared()
        # Not the turns of all: the main thread takes those meanwhile, at another moment in each process.
        # With a name of their own, as another `Checkpointer` of this process may save at the same time.
        self._turns = self._turns or Turns(f"save {from_first_process(secrets.token_hex(8))}")

    def _check_shared(self) -> bool:
        """Raises `ValueError` in all processes unless each sees in its folder what the first one wrote: the lock.

        Each process writes its own shards. In folders of their own these would be no checkpoint. Returns whether the
        first one could write; its disk may be full.
        """
        if jax.process_count() == 1:
            return True
        written, last = from_first_process(self._lock.seen), time.monotonic() + _SEEN_SECONDS

        def other_folder(processes: object) -> ValueError:
            if is_bucket(self.directory):  # which all see: another run has replaced the lock
                return self._lock.refusal()
            return ValueError(
                f"{self.directory}: process {processes} does not see what process 0 wrote there: all processes save "
                "into one folder. Give all the same path on a file system that they share, or the URL of a bucket "
                "(docs/clusters.md)"
            )

        with Agreement(other_folder):
            while written and self._lock.seen() != written:
                if time.monotonic() > last:
                    raise other_folder(jax.process_index())
                time.sleep(0.1)
        return bool(written)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        extra: Mapping[str, Any] | None = None,
        loss: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        """Saves a state; returns when it is copied to the host, so that the next step may donate it.

        Waits for the save before if that is still being written.

        Args:
          step: steps done.
          state: the state, not donated.
          extra: what else to record; anything that JSON has a form for, and arrays, which become lists.
          loss: its validation loss, or None.
          allow_nonfinite: save a state whose params hold NaN or infinities, and record their paths in `extra` as
            `nonfinite_leaves`.

        Raises:
          ValueError: an invalid step or loss, a state that was donated or is no `TrainState`, or a folder in use.
          NonfiniteState: params hold NaN or infinities, and that is not allowed; a `ValueError` too.
          RuntimeError: the background thread of the save before died of a bug.
        """
        step, loss = _checked_step(step), checked_loss(loss)
        if not isinstance(state, TrainState):
            raise ValueError(
                f"a {type(state).__name__} is no zero.TrainState: orbax saves a state of your own as it is, and "
                "restores it onto `zero.state_shardings` (docs/checkpoints.md)"
            )
        warn_of_lost_copies(state, who="a checkpoint has")
        self.wait()
        self.take()
        started = time.perf_counter()
        mesh = state.step.sharding.mesh  # type: ignore[union-attr]
        # Processes compute together here: before anything that one of them alone may fail at.
        with on_mesh(mesh):
            (arrays, leaves), nonfinite = encode_state(state, mesh=mesh), nonfinite_leaves(state, mesh=mesh)
        if nonfinite:
            if not allow_nonfinite:
                raise NonfiniteState(step, nonfinite)
            extra = {**(extra or {}), "nonfinite_leaves": nonfinite}
        folder = self._folder.writing(step) / STATE
        try:
            with Agreement():
                classes = opt_state_classes(state)
                record = record_to_json(step=step, loss=loss, leaves=leaves, classes=classes, extra=extra or {})
                if _is_primary():
                    self._folder.make()  # again: a user may have removed it meanwhile
                    self._lock.take()  # again: in a bucket another run may have replaced it
                    self._folder.begin(step)
                    folder.mkdir()
        except Exception as error:
            self._failed(step, error)
        else:
            writes = ArrayWrites(arrays, folder)
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint of step {step}")
            # `writes` has copied the shards to the host by now: the caller may donate the state.
            self._under_way = step, thread.submit(self._finish, step, record, writes)
            thread.shutdown(wait=False)  # the thread ends with the save
            _CHECKPOINTERS.add(self)
        finally:
            self.blocked_seconds = time.perf_counter() - started

    def wait(self) -> None:
        """Waits until the last save is complete, or has failed.

        Raises:
          RuntimeError: its background thread died of a bug, which the message has.
        """
        if self._under_way:
            (step, save), self._under_way = self._under_way, None
            if error := save.exception():
                raise RuntimeError(
                    f"the background thread that saved step {step} died: {type(error).__name__}: {error}"
                ) from error

    def close(self) -> None:
        """Waits for the last save and unlocks the folder.

        Raises:
          RuntimeError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._lock.release()
            self._turns, self._is_taken = None, False

    def _finish(self, step: int, record: bytes, writes: ArrayWrites) -> None:
        """Writes a save, and then deletes older checkpoints; runs in the background thread."""
        try:
            with Agreement(turns=self._turns):  # after it no process writes any more, whether one failed or none
                writes.wait()
            # After the turn above: an index that is merged while a process writes would lack what that one adds.
            with Agreement(turns=self._turns):
                if _is_primary():
                    writes.finalize()
                    self._folder.publish(step, record)
        except Exception as error:
            self._failed(step, error)
        else:
            self.num_saved += 1
            self._delete_older(step)

    def _delete_older(self, step: int) -> None:
        if not _is_primary():
            return
        try:
            self._lock.take()
            # A link to a checkpoint elsewhere is the user's: it is neither deleted nor counted.
            records = [record for record in list_records(self.directory) if not os.path.islink(record.path)]
            best = best_first(records)[: self._config.keep_best]
            # Where a run went back, as from a damaged checkpoint, those of later steps do not count for it.
            before, num = [record for record in records if record.step <= step], self._config.keep_last
            kept = {record.step for record in [*before[-num:], *records[-num:], *best]}
            for old in {record.step for record in records} - kept:
                self._folder.delete(old)
        except (OSError, FolderInUse, CheckpointError) as error:
            self._log(
                f"the checkpoint of step {step} is saved, but an older one cannot be deleted: {with_remedy(error)}"
            )

    def _failed(self, step: int, error: Exception) -> None:
        self.num_failed += 1
        why = with_remedy(error)
        try:
            if _is_primary():
                self._folder.abandon()
            complete = self.steps()
        except (OSError, CheckpointError) as second:
            complete, why = [], f"{why}, and the folder cannot be read or tidied ({with_remedy(second)})"
        others = f"complete: step {', '.join(map(str, complete))}" if complete else "there is no other checkpoint"
        self._log(f"checkpoint of step {step} NOT saved to {self.directory}: {why}. Training goes on; {others}")


def checked_loss(loss: Any) -> float | None:
    """Returns a loss as a float or None; raises `ValueError` for anything that is not a number."""
    if loss is None or (isinstance(loss, numbers.Real) and not isinstance(loss, bool)):
        return None if loss is None else float(loss)
    if getattr(loss, "shape", None) == () and jnp.dtype(loss.dtype).kind in "iufV":  # V: bfloat16 and its like
        return float(loss)
    raise ValueError(f"loss={shown(loss)}: give the validation loss as a number, or None")


def _is_primary() -> bool:
    return jax.process_index() == 0


def _checked_step(step: Any) -> int:
    """Returns a step as an int, numpy's included."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ValueError(f"step={step!r}: give the number of steps done, a whole number that is not negative")
    return number


def _wait_for_all() -> None:
    # A list, because a weak set may shrink while it is iterated.
    for checkpointer in list(_CHECKPOINTERS):
        with contextlib.suppress(RuntimeError):  # of one save, which must not cut off those of other checkpointers
            checkpointer.wait()


# Orbax writes in pools of threads, and `concurrent.futures` closes all pools in an exit function of `threading`. The
# last registered function runs first, so this one waits for saves before the pools close.
threading._register_atexit(_wait_for_all)  # pyright: ignore[reportAttributeAccessIssue]
