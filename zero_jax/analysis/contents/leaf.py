"""A leaf of a sharded tree: shape, dtype, spec and bytes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSummary:
    """A leaf of a sharded tree.

    Attributes:
      path: its path, such as params/embed.
      shape: its global shape.
      dtype: its dtype.
      spec: the mesh axes of each dim, such as `[data, -]`; how else it is placed, where it has no spec.
      parts: number of shards along each dim.
      num_copies: devices that hold the same shard.
      memory_kind: kind of the host memory that it is offloaded to, or None.
      global_bytes: bytes of all of it, once.
      device_bytes: bytes that a device holds.
      host_bytes: bytes that are kept in host memory for a device instead.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    parts: tuple[int, ...]
    num_copies: int
    memory_kind: str | None
    global_bytes: int
    device_bytes: int
    host_bytes: int = 0

    @property
    def group(self) -> str:
        """The first component of its path."""
        return self.path.split("/")[0]
