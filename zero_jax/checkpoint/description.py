"""Describes a checkpoint for people and programs, without devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from zero_jax.checkpoint.finding import find_checkpoint, list_records
from zero_jax.checkpoint.leaf_files import verify
from zero_jax.checkpoint.record import CheckpointError, CheckpointRemoved, Record, resolve_folder
from zero_jax.core.text_tables import Report, aligned, flattened, plain, printable

_MAX_CHARACTERS = 1000  # of a value that the run recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description(Record, Report):
    """The record of a checkpoint, and what was checked; prints as a table.

    Attributes:
      problems: damaged leaves; None where the leaves were not verified.
      passed_over: newer checkpoints that cannot be read, with the reasons.
      others: validation losses of the other checkpoints beside it, by step.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> [path for path in zero.checkpoint.describe(folder).leaves if path.startswith("params")]
      ['params/down', 'params/up']
    """

    problems: tuple[str, ...] | None = None
    passed_over: tuple[str, ...] = ()
    others: Mapping[int, float | None] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of params, optimizer state and so on."""
        totals: dict[str, int] = {}
        for name, leaf in self.leaves.items():
            group = name.split("/")[0]
            totals[group] = totals.get(group, 0) + leaf.nbytes
        return totals

    def to_json(self) -> dict[str, Any]:
        """Returns the description for a program."""
        rows = [
            {"path": name, "shape": list(leaf.shape), "dtype": leaf.dtype, "bytes": leaf.nbytes}
            for name, leaf in self.leaves.items()
        ]
        figures = {"path": os.fspath(self.path), "bytes": self.nbytes, "leaves": rows, "extra": dict(self.extra)}
        names = ("step", "loss", "bytes_by_group", "problems", "passed_over")
        others = {"others": {str(step): plain(loss) for step, loss in self.others.items()}}
        return figures | {name: plain(getattr(self, name)) for name in names} | others

    def __str__(self) -> str:
        table = [("path", "dtype", "shape", "bytes")]
        for name, leaf in self.leaves.items():
            table.append((printable(name), leaf.dtype, "x".join(map(str, leaf.shape)) or "-", f"{leaf.nbytes:,}"))
        lines = [os.fspath(self.path), _step_text(self.step, self.loss)]
        if self.others:
            lines.append(f"others: {'; '.join(_step_text(*other) for other in self.others.items())}")
        lines.append(aligned(table, right=(2, 3)))
        groups = ", ".join(f"{printable(name)} {size:,}" for name, size in self.bytes_by_group.items())
        lines.append(f"{len(self.leaves)} leaves, {self.nbytes:,} bytes: {groups}")
        for name, value in self.extra.items():
            entries = ((path, json.dumps(x)) for path, x in flattened(value))
            shown = (f"{path} = {x}" if path else x for path, x in entries)
            lines += [f"{printable(name)}:", *(f"  {printable(line, limit=_MAX_CHARACTERS)}" for line in shown)]
        if self.problems is not None:
            lines += ["all leaves have the fingerprints that they were saved with"] if not self.problems else []
            lines += [f"DAMAGED: {problem}" for problem in self.problems]
        lines += [f"PASSED OVER: {reason}" for reason in self.passed_over]
        return "\n".join(lines)


def _step_text(step: int, loss: float | None) -> str:
    return f"step {step}" if loss is None else f"step {step}, validation loss {loss:.4f}"


def describe(path: str | os.PathLike[str], *, step: int | None = None, verify_leaves: bool = False) -> Description:
    """Describes a checkpoint.

    Args:
      path: a run's folder, its folder of checkpoints, or the folder of one step.
      step: the step; None takes the newest whose record is valid, and reports which ones it passed over.
      verify_leaves: read every leaf, in bounded memory, and compare it with its fingerprint.

    Raises:
      CheckpointError: there is none, or its record is damaged, or a run has deleted it while it was read.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> description = zero.checkpoint.describe(folder, verify_leaves=True)
      >>> description.step, description.problems
      (1, ())
    """
    record, passed_over = find_checkpoint(path, step)
    try:
        problems = tuple(verify(record)) if verify_leaves else None
    except CheckpointRemoved:
        if step is not None or record.path == resolve_folder(path):
            raise
        return describe(path, verify_leaves=verify_leaves)  # a newer one is there
    others = {}
    with contextlib.suppress(CheckpointError):  # the folder above may be no one's to list
        others = {other.step: other.loss for other in list_records(record.path.parent) if other.path != record.path}
    return Description(**vars(record), problems=problems, passed_over=tuple(passed_over), others=others)
