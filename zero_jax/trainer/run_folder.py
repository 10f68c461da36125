"""The folder of a run: its name, its lock and its config, the same in all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from zero_jax.core.agreement import Agreement, from_first_process
from zero_jax.core.files.folder_lock import FolderInUse, FolderLock
from zero_jax.core.files.json_lines import write_text
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.files.untrusted import is_bucket, mapping, parse_json, read_file
from zero_jax.core.text_tables import flattened
from zero_jax.core.tree import shown

CONFIG_TITLE = "the options of this run that are set"  # with which a run's config.toml begins
_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 2**24
_LONGEST_NAME_BYTES = 200  # file systems allow 255; names of partial files are longer


def check_name(name: str) -> None:
    """Raises `ValueError` for a name that is not valid for a folder directly in the folder of all runs."""
    is_folder = name == pathlib.PurePath(name).name and name not in ("", "..")
    if not (is_folder and name.isprintable() and len(name.encode()) <= _LONGEST_NAME_BYTES):
        raise ValueError(
            f"name={shown(name)} is not the name of a folder in out: give one without slashes and control characters, "
            f"of at most {_LONGEST_NAME_BYTES} bytes, and the folder above it by out"
        )


def folder_name(name: str | None, default: str) -> str:
    """Returns the name of a run's folder, if nothing is there yet."""
    return name or re.sub(r"[^\w.+-]", "-", default)


def make_folder(
    out: pathlib.Path,
    name: str | None,
    default_name: str,
    *,
    resume: bool,
    check: Callable[[str], None] = lambda _: None,
) -> tuple[pathlib.Path, bool]:
    """Makes a run's folder `out/name` in process 0, returned in all; a `default_name` gets a number if taken.

    Returns, too, whether it was not there before; this is known to process 0 alone. `check` raises `FileExistsError`
    for a name that is used elsewhere.
    """
    names, is_new = [folder_name(name, default_name)], False
    # A resumed run goes on in the folder of the default name, and a new one finds a name that is free.
    if name is None and not resume:
        names += [f"{names[0]}-{i}" for i in range(2, 10_000)]

    def make() -> str:
        nonlocal is_new
        existing = out / names[-1]
        for candidate in names:
            try:
                check(candidate)
                is_new = not (out / candidate).exists()
                # Of two runs that start at once `mkdir` lets one have the name.
                (out / candidate).mkdir(parents=True, exist_ok=resume)
                config = out / candidate / _CONFIG
                is_empty = config.is_file() and not config.stat().st_size  # as a crash of the system may leave it
                if config.exists() and not is_empty and not is_run_config(config):
                    raise ValueError(
                        f"{config} is not the config of a run, which would be written over it: choose another name, or "
                        "move that file"
                    )
                return str((out / candidate).absolute())
            except FolderInUse:
                if len(names) == 1:
                    raise
            except FileExistsError as error:
                existing = error.filename or existing
            except OSError as error:
                raise ValueError(f"cannot make the folder of the run: {with_remedy(error)}") from error
        if not (is_bucket(existing) or os.path.isdir(existing)):  # a file, or a link to a disk that is not mounted
            error = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(existing))
            raise ValueError(f"cannot make the folder of the run: {with_remedy(error)}")
        raise ValueError(
            f"{existing} holds a run already: choose another name, remove that folder, or go on with that run by "
            "resume='auto' (--resume auto)"
        )

    return pathlib.Path(from_first_process(make)), is_new


def is_run_config(path: pathlib.Path) -> bool:
    """Returns whether a file is the `config.json` of a run, and not that of a model of the hub, or something else.

    Raises:
      OSError: there is no such file, or it cannot be read.

    Example:
      >>> run = zero.TrainConfig(steps=2, out=folder, name="first")
      >>> _ = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=run, tx=tx).train(log=str)
      >>> zero.trainer.is_run_config(folder / "first" / "config.json")
      True
    """
    with contextlib.suppress(ValueError):
        config = mapping(parse_json(read_file(epath.Path(path), limit_bytes=_MAX_CONFIG_BYTES)))
        return {"model", "zero", "optimizer"} <= config.keys()
    return False


@contextlib.contextmanager
def held(folder: pathlib.Path, *, is_new: bool) -> Iterator[None]:
    """Locks the folder of a run, in process 0, until the context is left or the process ends.

    A new folder of a run that fails before it starts is removed, so that its name is free. One with more than a lock
    and configs stays, and so does one that was there before.
    """
    with contextlib.ExitStack() as stack:
        with Agreement(lambda _: FolderInUse(f"{folder} is in use by another run (see process 0's log)")):
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):  # not writable, which another check reports
                    stack.enter_context(FolderLock(epath.Path(folder) / "lock", run=str(folder)))
        try:
            yield
        except Exception:
            disposable = {"lock", "config.toml", _CONFIG}
            with contextlib.suppress(OSError):
                if is_new and disposable.issuperset(path.name for path in folder.iterdir()):
                    for name in disposable:
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            raise


def save_config(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes a run's config as JSON; values that have no JSON form as text."""
    write_text(folder / _CONFIG, json.dumps(config, indent=2, default=str) + "\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two configs, such as `zero.stage: 3 -> 2`."""
    before, after = dict(flattened(old)), dict(flattened(new))
    names = sorted({*before, *after})
    return [f"{x}: {before.get(x)} -> {after.get(x)}" for x in names if before.get(x) != after.get(x)]


def as_json(config: Any) -> Any:
    """Converts a dataclass to JSON and back: tuples are lists, keys are strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
