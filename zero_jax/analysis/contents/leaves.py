"""The leaves of a sharded tree as a table: shape, dtype, spec, bytes in all and on a device."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.analysis.contents.page import LeafSummary, draw_page
from zero_jax.analysis.leaves import host_memory_kind
from zero_jax.core.files.json_lines import write_text
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PyTree, check_arrays, leaf_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSummary(Report):
    """The leaves of a sharded tree by group; prints as a tree, and is drawn as HTML (`save_html`, notebooks).

    Attributes:
      title: the kind of the tree.
      mesh: size of each mesh axis, empty where the leaves have no common mesh.
      leaves: the leaves, in the order of the tree.

    Example:
      >>> report = zero.summary(state)
      >>> [leaf.path for leaf in report.leaves][:2]
      ['step', 'params/down']
    """

    title: str
    mesh: Mapping[str, int]
    leaves: tuple[LeafSummary, ...] = dataclasses.field(repr=False)

    @property
    def groups(self) -> dict[str, tuple[LeafSummary, ...]]:
        """The leaves by group."""
        groups: dict[str, list[LeafSummary]] = {}
        for leaf in self.leaves:
            groups.setdefault(leaf.group, []).append(leaf)
        return {name: tuple(leaves) for name, leaves in groups.items()}

    @property
    def global_bytes(self) -> int:
        """Bytes of all leaves, each once."""
        return sum(leaf.global_bytes for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes that a device holds."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def host_bytes(self) -> int:
        """Bytes that are kept in host memory for a device."""
        return sum(leaf.host_bytes for leaf in self.leaves)

    @property
    def heading(self) -> str:
        """What the tree is and where: a line."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1 or len(self.mesh) == 1)
        where = f" on mesh {mesh} ({math.prod(self.mesh.values())} devices)" if self.mesh else ""
        sizes = f"{format_bytes(self.global_bytes)}, {format_bytes(self.device_bytes)} a device"
        host = f", {format_bytes(self.host_bytes)} in host memory for each" if self.host_bytes else ""
        return f"{self.title}{where}: {len(self.leaves)} leaves, {sizes}{host}"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "shape", "dtype", "spec", "global", "per device", "")]
        above: list[str] = []
        for leaf in self.leaves:
            *folders, name = leaf.path.split("/")
            same = next((i for i, (a, b) in enumerate(zip(above, folders, strict=False)) if a != b), None)
            same = min(len(above), len(folders)) if same is None else same
            for depth in range(same, len(folders)):
                rows.append((f"{'  ' * depth}{folders[depth]}", "", "", "", *self._totals(folders[: depth + 1]), ""))
            above = folders
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            sizes = format_bytes(leaf.global_bytes), format_bytes(leaf.device_bytes)
            kind = f"{format_bytes(leaf.host_bytes)} in {leaf.memory_kind}" if leaf.memory_kind else ""
            rows.append((f"{'  ' * len(folders)}{name}", shape, leaf.dtype, leaf.spec, *sizes, kind))
        return f"{self.heading}\n{aligned(rows, right=(4, 5))}"

    def _totals(self, folders: list[str]) -> tuple[str, str]:
        """Returns the bytes of a group, and nothing for folders inside it."""
        if len(folders) > 1:
            return "", ""
        sizes = [(leaf.global_bytes, leaf.device_bytes) for leaf in self.groups[folders[0]]]
        global_bytes, device_bytes = map(sum, zip(*sizes, strict=True))
        return format_bytes(global_bytes), format_bytes(device_bytes)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        sums = {name: getattr(self, name) for name in ("global_bytes", "device_bytes", "host_bytes")}
        return dataclasses.asdict(self) | sums

    def to_html(self) -> str:
        """Returns a page of its own, without scripts: the leaves with their shards drawn."""
        return draw_page(self.heading, self.groups)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page atomically."""
        write_text(pathlib.Path(path), self.to_html())

    def _repr_html_(self) -> str:
        return draw_page(self.heading, self.groups, is_part=True)


def summary(tree: PyTree) -> StateSummary:
    """Summarizes what a sharded tree holds and where: each leaf's shape, dtype, spec and bytes, by group.

    Nothing is read from the devices, and no process waits for another.

    Args:
      tree: a `TrainState`, its params, or any pytree of arrays or `ShapeDtypeStruct`s, such as `zero.abstract_state`
        returns.

    Raises:
      ValueError: a leaf that is no array.

    Example:
      >>> zero.summary(state).groups["params"][0].shape
      (64, 64)
    """
    check_arrays("tree", tree, remedy="summarize a tree of arrays")
    leaves = [_leaf(name, leaf) for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)]
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    mesh = dict(meshes.pop().shape) if len(meshes) == 1 else {}
    return StateSummary(title=type(tree).__name__, mesh=mesh, leaves=tuple(leaves))


def _leaf(name: str, leaf: Any) -> LeafSummary:
    name = name or "value"
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    sharding, shape = getattr(leaf, "sharding", None), tuple(leaf.shape)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype)) if is_key else leaf
    item_bytes = words.dtype.itemsize * (math.prod(words.shape[len(shape) :]) if is_key else 1)
    shard = shape if sharding is None else tuple(sharding.shard_shape(shape))
    parts = tuple(-(-size // part) if part else 1 for size, part in zip(shape, shard, strict=True))
    num_devices = 1 if sharding is None else sharding.num_devices
    host_kind = host_memory_kind(sharding)
    shard_bytes = math.prod(shard) * item_bytes
    return LeafSummary(
        path=name,
        shape=shape,
        dtype=str(leaf.dtype),
        spec=_spec(sharding, len(shape)),
        parts=parts,
        num_copies=max(1, num_devices // math.prod(parts)),
        memory_kind=host_kind,
        global_bytes=math.prod(shape) * item_bytes,
        device_bytes=0 if host_kind else shard_bytes,
        host_bytes=shard_bytes if host_kind else 0,
    )


def _spec(sharding: Any, ndim: int) -> str:
    if sharding is None:
        return "on the host"
    if not isinstance(sharding, NamedSharding):
        return "one device" if sharding.num_devices == 1 else type(sharding).__name__
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    names = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
    return f"[{', '.join('+'.join(map(str, name)) or '-' for name in names)}]"
