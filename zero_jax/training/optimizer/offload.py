"""Which leaves of a train state are kept in host memory between steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from zero_jax.core.field_checks import brief, check_fields
from zero_jax.core.tree import PathPatterns, PyTree, leaf_names
from zero_jax.core.variables import MODEL_STATE, model_state_names
from zero_jax.sharding.rules import path_of_param

HOST = "pinned_host"
_MEMORY_OF: Mapping[str, Sequence[str]] = {
    "optimizer": ("opt_state",),
    "state": ("opt_state", "master"),
    "all": ("opt_state", "master", "params"),
    MODEL_STATE: (MODEL_STATE,),
}
# What the loss function fetches where it uses it.
_FETCHED = frozenset({"params", MODEL_STATE})


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Which part of the train state is kept in host memory (ZeRO-Offload, arXiv:2101.06840).

    The update brings it to the device a chunk at a time, and back. The loss function brings params to it where it uses
    them.

    Attributes:
      what: `optimizer` for the leaves of the optimizer's state that are shaped like a param; `state` for the master
        params too, where they are kept beside params of lower precision (stages 0 to 2); `all` for the params too
        (stage 3); `model_state` for the model state alone, such as the frozen base of adapters (stage 3).
      paths: regular expressions of full paths of params, or of `model_state/...`: what belongs to them is kept on the
        host. None takes all.
      fraction: the share of those bytes that is kept on the host, param by param in the order of the tree; a param
        that would exceed it stays on the device.
      window_bytes: bytes of a chunk on a device. Two are there at a time.

    Example:
      >>> zero.ZeroConfig(stage=1, offload=zero.Offload(what="optimizer", fraction=0.5)).resolved_offload().fraction
      0.5
    """

    what: Literal["optimizer", "state", "all", "model_state"] = "optimizer"
    paths: Sequence[str] | None = None
    fraction: float = 1.0
    window_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        check_fields(self, lowest={"fraction": 0, "window_bytes": 1}, highest={"fraction": 1}, prefix="offload: ")
        PathPatterns.of_list("offload: paths", [] if self.paths is None else self.paths)


def resolve_offload(offload: Any) -> Offload | None:
    """Returns the `Offload` of a config's field; raises `ValueError` for what is none."""
    if offload is None or isinstance(offload, Offload):
        return offload
    if not isinstance(offload, str) or offload not in _MEMORY_OF:
        raise ValueError(
            f"offload={offload!r}: give 'optimizer', 'state', 'all', 'model_state', a zero.Offload, or None"
        )
    return Offload(what=offload)  # pyright: ignore[reportArgumentType]


def check_offload(offload: Offload, mesh: Mesh | AbstractMesh, sharded: Collection[str]) -> None:
    """Checks what is to be kept in host memory; `sharded` are the groups that are sharded as the master params.

    Raises:
      ValueError: the devices do not reach host memory as `pinned_host`, or params are not fetched where they are used.
    """
    if _FETCHED.intersection(_MEMORY_OF[offload.what]) and "params" not in sharded:
        group, remedy = ("params", ", or offload='state'") if offload.what == "all" else ("model state", "")
        raise ValueError(
            f"offload={offload.what!r} keeps the {group} on the host, which are whole on each device at stages 0 to 2, "
            f"and a copy with secondary=True: give stage=3 without it{remedy}"
        )
    if isinstance(mesh, AbstractMesh):  # nothing can be compiled for it
        return
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if kinds and HOST not in kinds:  # compile-only GPUs list none
        raise ValueError(
            f"offload: {device.platform} devices have no memory of kind {HOST!r} (they have {', '.join(kinds)}): "
            "leave offload out"
        )


def on_host(
    offload: Offload, groups: Mapping[str, PyTree], params: Mapping[str, tuple[int, ...]], *, min_size: int
) -> dict[str, list[bool]]:
    """Tells which leaves of the trees `opt_state`, `master`, `params` and `model_state` are kept on the host.

    `params` are the shapes of the params by path, and those of the model state by `model_state/...`; leaves of fewer
    elements than `min_size` stay on the device.

    Raises:
      ValueError: a pattern that no param matches.
    """
    names_of = {MODEL_STATE: model_state_names}
    leaves = {
        group: list(zip(names_of.get(group, leaf_names)(tree), jax.tree.leaves(tree), strict=True))
        for group, tree in groups.items()
    }
    chosen = set(params)
    if offload.paths is not None:
        patterns = PathPatterns.of_list("offload: paths", offload.paths)
        patterns.check_matched([*params])
        chosen = {path for path in params if patterns.matches(path)}
    owner: dict[tuple[str, int], str] = {}
    num_bytes = dict.fromkeys(params, 0)
    for group in _MEMORY_OF[offload.what]:
        for i, (name, leaf) in enumerate(leaves.get(group, ())):
            path = path_of_param(name, params)
            # XLA:TPU does not compile (error 1200) a loss function that reads params of one dim from the host.
            can_move = group not in _FETCHED or leaf.ndim > 1
            can_move &= group != "params" or jnp.issubdtype(leaf.dtype, jnp.inexact)
            # Of the optimizer's state what is shaped like a param: counters and factors are small.
            can_move &= path is not None and params[path] == tuple(leaf.shape)
            if path in chosen and can_move and math.prod(leaf.shape) >= max(min_size, 1):
                owner[group, i] = path
                num_bytes[path] += math.prod(leaf.shape) * leaf.dtype.itemsize
    remaining_bytes, host_paths = offload.fraction * sum(num_bytes.values()), set()
    for path, size in num_bytes.items():
        if 0 < size <= remaining_bytes:
            host_paths.add(path)
            remaining_bytes -= size
    return {group: [owner.get((group, i)) in host_paths for i in range(len(named))] for group, named in leaves.items()}


def host_shardings(shardings: PyTree, flags: Sequence[bool]) -> PyTree:
    """Returns shardings, those of flagged leaves in host memory."""
    leaves, tree = jax.tree.flatten(shardings)
    return tree.unflatten([_in_host_memory(s) if flag else s for s, flag in zip(leaves, flags, strict=True)])


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in host memory, on an abstract mesh for compile-only GPUs, whose memory kinds JAX drops."""
    placed = sharding.with_memory_kind(HOST)
    if placed.memory_kind == HOST:
        return placed
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)
