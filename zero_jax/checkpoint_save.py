"""Saving checkpoints: sharded, atomic, in the background, and never at the cost of an older one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import numbers
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from zero_jax.agreement import Agreement
from zero_jax.checkpoint_files import (
    RECORD,
    STATE,
    CheckpointError,
    list_steps,
    read_record,
    record_to_json,
    resolve,
    step_path,
)
from zero_jax.nonfinite import NonfiniteState, nonfinite_leaves
from zero_jax.orbax_noise import Quiet
from zero_jax.save_barrier import SaveBarrier, SaveFailed
from zero_jax.saved_state import encode_state
from zero_jax.state import TrainState
from zero_jax.tree import shown

Log = Callable[[str], None]

# Chunks are read whole: another mesh should not have to read much more than its shards.
_CHUNK_BYTES = 1 << 24
_OLD_SUFFIX = ".replaced"
_MOST_ERRORS = 100  # of one save; orbax has a few
_COMMITTED = "commit_success.txt"  # by this file orbax knows a whole checkpoint where folders cannot be renamed
_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "a file may not grow that large: raise the limit (`ulimit -f`)",
    errno.EACCES: "permission was denied: make the folder writable",
    errno.EPERM: "permission was denied: make the folder writable",
    errno.EROFS: "the file system is read-only: mount it for writing",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Says when to save, and what to keep.

    Attributes:
      save_every: steps between two checkpoints; 0 saves at the end only.
      keep_last: newest checkpoints to keep.
      keep_best: checkpoints of the lowest validation loss to keep besides.
    """

    save_every: int = 200
    keep_last: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.save_every < 0 or self.keep_best < 0:
            raise ValueError(f"save_every={self.save_every}, keep_best={self.keep_best}: neither may be negative")
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last}: keep at least 1, the newest checkpoint")


class Checkpointer:
    """Saves train states into a folder; every process of a run makes one, for the same folder.

    A save returns once the state has been copied to the host. The files are written in the background, and a folder of
    the step's name appears when all of them are. After that, and only then, are older checkpoints deleted. A save that
    fails is told to `log` and counted, and leaves everything as it was.

    Attributes:
      directory: the folder.
      num_saved: saves that were completed.
      num_failed: saves that failed.
      blocked_seconds: what the last save took before it returned.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, config: CheckpointConfig | None = None, log: Log = print
    ) -> None:
        """Makes the folder, and removes what saves that were cut off have left there.

        Raises:
          ValueError: the folder cannot be made.
        """
        self.directory = resolve(directory)
        self.num_saved = self.num_failed = 0
        self.blocked_seconds = 0.0
        self._config, self._log = config or CheckpointConfig(), log
        self._thread: threading.Thread | None = None
        self._losses: dict[int, float | None] = {}
        if _is_primary():
            self._prepare()
        handler = ocp.CompositeCheckpointHandler(
            **{STATE: ocp.PyTreeCheckpointHandler(use_ocdbt=True), RECORD: ocp.JsonCheckpointHandler()}
        )
        # A folder that cannot be made is told at once: in the background all other tasks would wait for it in vain.
        self._barrier = SaveBarrier()
        options = ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=self._barrier)
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        self._quiet = Quiet()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def is_due(self, step: int) -> bool:
        """Tells whether a checkpoint is to be saved after so many steps."""
        every = self._config.save_every
        return every > 0 and step > 0 and step % every == 0

    def steps(self) -> list[int]:
        """Returns the steps that there are whole checkpoints of, in order."""
        return list_steps(self.directory)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        extra: Mapping[str, Any] | None = None,
        loss: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        """Saves a state; returns when it is on the host, and a step may be given it.

        A save that is still being written is waited for.

        Args:
          step: steps done.
          state: the state, whole and not donated.
          extra: what else is to be found with it; anything that JSON can hold.
          loss: its validation loss, if known.
          allow_nonfinite: save a state whose params hold NaN or infinities, and record their paths in `extra` as
            `nonfinite_leaves`.

        Raises:
          ValueError: the state was donated, or is no `TrainState`; `loss` is no number.
          NonfiniteState: params hold NaN or infinities, and that is not allowed; a `ValueError` too.
        """
        loss = checked_loss(loss)
        if not isinstance(state, TrainState):
            raise ValueError(
                f"a {type(state).__name__} is no zero.TrainState: orbax saves a state of your own as it is, and "
                "restores it onto `zero.state_shardings` (docs/checkpoints.md)"
            )
        self.wait()
        started = time.perf_counter()
        mesh = state.step.sharding.mesh  # type: ignore[union-attr]
        encoded = encode_state(state, mesh=mesh)
        if nonfinite := nonfinite_leaves(state, mesh=mesh):
            if not allow_nonfinite:
                raise NonfiniteState(step, nonfinite)
            extra = {**(extra or {}), "nonfinite_leaves": nonfinite}
        path = step_path(self.directory, step)
        try:
            self._barrier.begin()
            with Agreement(lambda processes: SaveFailed(f"process {processes} failed")):
                record = record_to_json(step=step, loss=loss, leaves=encoded.leaves, extra=extra or {})
                self._make_room(path)
            save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in encoded.arrays}
            arrays = ocp.args.PyTreeSave(encoded.arrays, save_args=save_args)
            self._orbax.save(path, args=ocp.args.Composite(**{STATE: arrays, RECORD: ocp.args.JsonSave(record)}))
            self._thread = threading.Thread(target=self._finish, args=(step, loss), name=f"checkpoint of step {step}")
            self._thread.start()
        except Exception as error:
            self._failed(step, error)
        finally:
            self.blocked_seconds = time.perf_counter() - started

    def wait(self) -> None:
        """Waits until the last save is whole, or has failed."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for the last save and lets go of the folder."""
        self.wait()
        self._orbax.close()
        if self.num_failed and _is_primary():
            self._remove_parts()
        if not self.num_failed:  # what failed saves have abandoned reports until the process ends
            self._quiet.remove()

    def _prepare(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.iterdir():
                if path.name.endswith(_OLD_SUFFIX) and not _original(path).exists():
                    path.rename(_original(path))
                elif path.name.startswith("step_") and not _is_final(path):
                    path.rmtree()
                    self._log(f"removed {path}: a save or a deletion that was cut off")
        except OSError as error:
            raise ValueError(f"cannot write checkpoints to {self.directory}: {_explain(error)}") from error
        for step in self.steps():
            try:
                self._losses[step] = read_record(step_path(self.directory, step)).loss
            except CheckpointError:
                self._losses[step] = None

    def _make_room(self, path: epath.Path) -> None:
        """Sees that a folder can be made, and moves an older checkpoint of the same step out of the way.

        The older one is deleted when the new one is whole.
        """
        if not _is_primary():
            return
        self._remove_parts()
        probe = self.directory / f"{path.name}{ocp.path.step.TMP_DIR_SUFFIX}probe"
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmtree()
        if path.exists():
            path.rename(_aside(path))

    def _finish(self, step: int, loss: float | None) -> None:
        """Waits for a save in the background, and then deletes what need not be kept."""
        try:
            self._orbax.wait_until_finished()
            is_written = True
        except Exception as error:
            is_written = False
            self._failed(step, error)
        if not is_written:
            gc.collect()  # by its traceback a failed save keeps its copy of the state on the host, for good if not told
            if _is_primary():
                self._remove_parts()  # once more: what was being written is let go of only now
            return
        self.num_saved += 1
        self._losses[step] = loss
        if not _is_primary():
            return
        try:
            self._delete(_aside(step_path(self.directory, step)))
            for old in set(self.steps()) - self._kept():
                self._delete(step_path(self.directory, old))
        except OSError as error:
            self._log(f"the checkpoint of step {step} is saved, but an older one cannot be deleted: {_explain(error)}")

    def _kept(self) -> set[int]:
        steps = self.steps()
        losses = {step: self._losses.get(step) for step in steps}
        ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None and loss == loss)
        best = [-step for _, step in ranked[: self._config.keep_best]]
        return {*steps[-self._config.keep_last :], *best}

    def _delete(self, path: epath.Path) -> None:
        """Deletes a checkpoint so that a part of it is never taken for one."""
        if not path.exists():
            return
        if "://" in os.fspath(path):
            (path / _COMMITTED).unlink(missing_ok=True)
        elif not path.name.endswith(_OLD_SUFFIX):
            path = path.rename(path.parent / f"{path.name}{ocp.path.step.TMP_DIR_SUFFIX}deleted")
        path.rmtree()

    def _remove_parts(self) -> None:
        """Removes what failed saves have left; writes that were under way may make some of it anew."""
        with contextlib.suppress(OSError):
            for part in self.directory.iterdir():
                if part.name.startswith("step_") and ocp.path.step.TMP_DIR_SUFFIX in part.name:
                    part.rmtree()

    def _failed(self, step: int, error: Exception) -> None:
        """Tells that a save has failed, and removes the part of it that was written."""
        self.num_failed += 1
        self._barrier.fail(_explain(error))
        self._forget_errors()
        path = step_path(self.directory, step)
        try:
            if _is_primary():
                self._remove_parts()
                if _aside(path).exists() and not path.exists():
                    _aside(path).rename(path)
            there = self.steps()
        except OSError as second:
            there, error = [], OSError(f"{error}, and the folder cannot be read or tidied ({second})")
        kept = f"whole and kept: step {', '.join(map(str, there))}" if there else "there is no other checkpoint"
        self._log(
            f"checkpoint of step {step} NOT saved to {self.directory}: {_explain(error)}. Training goes on; {kept}"
        )

    def _forget_errors(self) -> None:
        """Takes the other errors of a failed save off orbax, which would give them to the next one."""
        for _ in range(_MOST_ERRORS):
            try:
                return self._orbax.wait_until_finished()
            except Exception:
                continue


def checked_loss(loss: Any) -> float | None:
    """Returns a loss as a number of Python; raises `ValueError` for what is none."""
    if loss is None or (isinstance(loss, numbers.Real) and not isinstance(loss, bool)):
        return None if loss is None else float(loss)
    if getattr(loss, "shape", None) == () and jnp.dtype(loss.dtype).kind in "iufV":  # V: bfloat16 and its like
        return float(loss)
    raise ValueError(f"loss={shown(loss)}: give the validation loss as a number, or None")


def _is_primary() -> bool:
    return jax.process_index() == 0


def _aside(path: epath.Path) -> epath.Path:
    return path.parent / f"{path.name}{_OLD_SUFFIX}"


def _original(path: epath.Path) -> epath.Path:
    return path.parent / path.name.removesuffix(_OLD_SUFFIX)


def _is_final(path: epath.Path) -> bool:
    """Tells whether a folder is no remains of a save; one that was damaged later is left for its owner to look at."""
    return not path.name.endswith(_OLD_SUFFIX) and ocp.path.step.is_checkpoint_finalized(path)


def _explain(error: Exception) -> str:
    """Returns the first line of an error and, where the system's reason is known, what to do about it."""
    lines = str(error).splitlines() or [type(error).__name__]
    first = lines[0].split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
    code = error.errno if isinstance(error, OSError) else None
    advice = [text for known, text in _ADVICE.items() if known == code or os.strerror(known) in first]
    return f"{first} ({advice[0]})" if advice else first
