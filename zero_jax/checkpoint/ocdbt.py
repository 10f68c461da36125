"""OCDBT, tensorstore's key-value store in a folder: its keys, and the files that hold them."""

from __future__ import annotations

import tensorstore
from etils import epath


def base(folder: epath.Path) -> str | dict[str, str]:
    """Returns a folder as tensorstore names it."""
    path = f"{folder}/"
    return path if "://" in path else {"driver": "file", "path": path}


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
