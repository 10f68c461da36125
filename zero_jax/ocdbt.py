"""OCDBT, tensorstore's key-value store in a folder: writing one, merging several, the files that hold a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorstore
from etils import epath

CONTEXT = {"file_io_concurrency": {"limit": 128}, "cache_pool": {"total_bytes_limit": 0}}
_FILE_BYTES = 1 << 31


def base(folder: epath.Path) -> str | dict[str, str]:
    """Returns a folder as tensorstore names it."""
    path = f"{folder}/"
    return path if "://" in path else {"driver": "file", "path": path}


def new_store(folder: epath.Path) -> dict[str, Any]:
    """Returns the spec of a store that is to be written to a folder."""
    return {
        "driver": "ocdbt",
        "base": base(folder),
        "assume_config": True,  # nobody else writes there
        "target_data_file_size": _FILE_BYTES,
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
    }


def merge(folder: epath.Path, parts: Sequence[epath.Path]) -> None:
    """Makes one index of stores in folders below a folder; their data stays where it is."""
    context, transaction = tensorstore.Context(CONTEXT), tensorstore.Transaction(atomic=True)
    store = tensorstore.KvStore.open(new_store(folder), context=context).result()
    copies = []
    for part in parts:
        opened = tensorstore.KvStore.open({"driver": "ocdbt", "base": base(part)}, context=context).result()
        copies.append(opened.experimental_copy_range_to(store.with_transaction(transaction)))
    finish(copies)
    transaction.commit_async().result()


def finish(pending: Sequence[Any]) -> None:
    """Waits for all of some operations, and then raises the first error of one."""
    errors = []
    for operation in pending:
        try:
            operation.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def data_files(folder: epath.Path, prefix: bytes) -> list[str]:
    """Returns the files, inside a store's folder, that hold the keys with a prefix; none if its index is damaged."""
    try:
        store = tensorstore.KvStore.open(base(folder)).result()
        version = tensorstore.ocdbt.dump(store).result()["versions"][-1]
        return sorted(_files_of(store, version["root"]["location"], prefix))
    except (ValueError, KeyError, IndexError):
        return []


def names(folder: epath.Path, suffix: str) -> set[str] | None:
    """Returns what comes before a suffix in the keys of a store that have it, or None if its index is damaged."""
    try:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base(folder)}).result()
        keys = [key.decode(errors="replace") for key in store.list().result()]
    except ValueError:
        return None
    return {key.removesuffix(suffix) for key in keys if key.endswith(suffix)}


def _files_of(store: tensorstore.KvStore, location: str, prefix: bytes, before: bytes = b"") -> set[str]:
    """Walks a B-tree of OCDBT; returns the files of the values below a prefix, the node itself for those inside it."""
    found: set[str] = set()
    node = tensorstore.ocdbt.dump(store, location).result()
    for entry in node["entries"]:
        key = before + entry["key"]
        if node["height"]:
            below = before + entry.get("subtree_common_prefix", b"")
            if key[: len(prefix)] <= prefix:
                found |= _files_of(store, entry["location"], prefix, below)
        elif key.startswith(prefix):
            found.add(_file(entry.get("indirect_value", location)))
    return found


def _file(location: str) -> str:
    """Takes the file out of `kind:folder:file:offset:length`."""
    return location.split(":", 1)[1].rsplit(":", 2)[0].replace(":", "")
