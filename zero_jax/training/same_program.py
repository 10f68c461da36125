"""Processes that would run different programs together, or on values that differ, are refused before the first step.

Each process lowers the program by itself, so that another learning rate, seed, loss function or batch size in one of
them would update shards of one param by different rules, or leave the processes in different collectives. What several
processes give of one array is compared by hashes: params as a whole, and the first batch of each size.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zero_jax
from zero_jax.core.agreement import agree_on, by_value, known_to_all, refuse, turns_of, values_elsewhere
from zero_jax.core.device_put import is_global
from zero_jax.core.tree import PyTree, key_numbers, leaves_by_name
from zero_jax.sharding.mesh import Axes
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import step_options
from zero_jax.training.zero_config import ZeroConfig

_REMEDY = (
    "all processes the same code, settings, random seeds and releases, and batches of the same sizes (docs/own_loop.md)"
)
_SAME_VALUES = (
    "all processes the same params, optimizer, config and key: seed NumPy's random numbers alike, or give init_state a "
    "function of its key"
)
_LONG_TEXT = re.compile(r'"(?:[^"\\]|\\.){1000,}"')
_BLOCKS, _BLOCK_BYTES = 256, 2**16  # of an array that is too large to be hashed whole: evenly spaced, the ends included
# The sizes of batches so far, by their leaves and the mesh.
_SIZES_SEEN: dict[Any, set[Any]] = collections.defaultdict(set)


def releases() -> dict[str, str]:
    """Returns the releases that a program depends on, by name."""
    backend = get_backend()
    return {
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "zero_jax": zero_jax.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platform": f"{backend.platform} {backend.platform_version}",
    }


@dataclasses.dataclass(frozen=True, eq=False)
class SameProgram:
    """Compares a jitted function between the processes of a mesh, once for each structure of its arguments."""

    what: str  # for errors
    mesh: Mesh
    config: ZeroConfig
    _agreed: set[Any] = dataclasses.field(default_factory=set, repr=False)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes of the mesh, or none where it has one alone."""
        return _processes_of(self.mesh)

    def check(
        self,
        jitted: Any,
        state: PyTree,
        batch: PyTree,
        *,
        given: PyTree = None,
        axes: Axes | None = None,
    ) -> None:
        """Compares the program for these arguments if it is new; all processes of the mesh call it, or none.

        Lowering it here costs nothing more: the call that follows takes what was lowered. With `axes`, the roles of the
        mesh axes, the batch is compared, too, as this process has `given` it: warns where it is the same for different
        parts of the batch.

        Raises:
          ValueError: the processes differ, or give different values of the same part of the batch.
          OtherProcessFailed: another process has failed, or does not call it.
        """
        if not self.processes:
            return
        leaves, tree = jax.tree.flatten((state, batch))
        key = jitted, tree, tuple((x.shape, x.dtype) for x in leaves)
        if key in self._agreed:
            return
        facts = {
            "the function": self.what,
            **releases(),
            "compiler options": sorted(step_options(self.mesh, self.config).values.items()),
            **{f"batch leaf {name!r}": _shape(x) for name, x in leaves_by_name(batch).items()},
            **{f"the state's leaf {name!r}": _shape(x) for name, x in leaves_by_name(state).items()},
            **_values(state),
        }
        text = program_text(jitted.lower(state, batch))
        # Named only beside a difference of the program, not compared: an evaluation has no gradients to clip.
        fields = {name: x for name, x in vars(self.config).items() if isinstance(x, str | int | float | None)}
        turns, texts = turns_of(self.processes), {"its program": text}
        agree_on(f"the {self.what}", facts, long_texts=texts, causes=fields, remedy=_REMEDY, turns=turns)
        if axes is not None:
            _check_parts({p: json.loads(x) for p, x in turns.take(json.dumps(_parts(given, self.mesh, axes))).items()})
        self._agreed.add(key)


def check_same_init(
    jitted: Any, initial: PyTree, variables: PyTree, key: jax.Array, params: PyTree, mesh: Mesh
) -> None:
    """Raises `ValueError` if the processes of a mesh make different train states: other params, programs or keys.

    The function that makes the state takes the params on the devices (`initial`) and the key. `variables` are the
    params that this process has given, or None. `params` are the shapes of the state's, which are gathered after it.
    """
    if jax.process_count() == 1 or not (processes := _processes_of(mesh)):
        return
    facts: dict[str, Any] = {
        f"the values of {name!r}": fingerprint({name: x}, in_blocks=True)
        for name, x in leaves_by_name(variables).items()
        if not is_global(x)
    }
    facts |= {f"the leaf {name!r}": _shape(x) for name, x in leaves_by_name(initial).items()}
    facts["the state's key"] = _key_values(key)
    lowered = jitted.lower(initial, key)
    facts |= {f"the state's leaf {name!r}": _shape(x) for name, x in leaves_by_name(lowered.out_info).items()}
    # What a stage gathers is in no program: a process that gathers nothing would leave the others waiting.
    facts |= {f"the spec of 'params/{name}'": str(x.sharding.spec) for name, x in leaves_by_name(params).items()}
    text = program_text(lowered)
    what, turns = "the train state that they make", turns_of(processes)
    agree_on(what, facts, long_texts={"its program": text}, remedy=_SAME_VALUES, turns=turns)


def fingerprint(leaves: Mapping[str, Any], *, in_blocks: bool = False) -> str:
    """Returns a hash of the names, dtypes, shapes and values of arrays; of global ones, of this process's part.

    Of large arrays it is that of 16 MB `in_blocks` all over them, if those are enough.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in leaves.items():
        leaf = key_numbers(leaf)
        shards = [x.data for x in leaf.addressable_shards] if is_global(leaf) else [leaf]
        for shard in map(np.ascontiguousarray, shards):
            digest.update(repr((name, str(shard.dtype), np.shape(leaf))).encode())
            values = shard.reshape(-1).view(np.uint8).data  # without a copy of the array's bytes
            if in_blocks and len(values) > _BLOCKS * _BLOCK_BYTES:
                starts = np.linspace(0, len(values) - _BLOCK_BYTES, _BLOCKS).astype(int).tolist()
                for start in starts:
                    digest.update(values[start : start + _BLOCK_BYTES])
            else:
                digest.update(values)
    return digest.hexdigest()


def part_of_batch(batch: PyTree, mesh: Mesh, axes: Axes) -> str:
    """Returns which part of the examples of a batch the devices of this process have."""
    if any(map(is_global, jax.tree.leaves(batch))):
        return "placed"
    sharding = NamedSharding(mesh, PartitionSpec(axes.batch))
    # As of `mesh.size` examples, which all axes divide, so that batches of any size have the same parts.
    places = sharding.addressable_devices_indices_map((mesh.size,)).values()
    return str(sorted({index[0].start or 0 for index in places if index}))


def equal_parts(fingerprints: Mapping[int, str], parts: Mapping[int, str]) -> list[int]:
    """Returns the processes of the first batch that several give for different parts, or none."""
    by_batch: dict[str, dict[str, int]] = {}  # by digest and part the first process
    for process, digest in fingerprints.items():
        by_batch.setdefault(digest, {}).setdefault(parts[process], process)
    return next((list(by_part.values()) for by_part in by_batch.values() if len(by_part) > 1), [])


def _parts(batch: PyTree, mesh: Mesh, axes: Axes) -> dict[str, Any]:
    """Returns what is compared of what a process gives of a batch: hashes of its leaves, and which part they are."""
    given = {name: key_numbers(x) for name, x in leaves_by_name(batch).items() if not is_global(x)}
    rows = {name: x for name, x in given.items() if np.ndim(x)}
    return {
        "part": part_of_batch(batch, mesh, axes),
        "rows": {name: fingerprint({name: x}) for name, x in rows.items()},
        "scalars": {name: fingerprint({name: x}) for name, x in given.items() if name not in rows},
        # Zeros or ones, of which equal parts are no mistake.
        "is_constant": all(not np.any(x != np.ravel(x)[:1]) for x in map(np.asarray, rows.values())),
    }


def _check_parts(given: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises `ValueError` for values that differ where they are one array; warns of parts of one array that are equal.

    They are what `_parts` returns, by process.
    """
    parts = {process: record["part"] for process, record in given.items()}
    why_same = {"scalars": "has no dim of examples", "rows": "is of the same examples in both"}
    first_given: dict[Any, tuple[int, str]] = {}  # process and digest, by name and part
    for process, record in given.items():
        leaves = [(kind, name, digest) for kind in why_same for name, digest in record[kind].items()]
        for kind, name, digest in leaves:
            part = parts[process] if kind == "rows" else ""  # scalars are one array of all processes
            first, before = first_given.setdefault((name, part), (process, digest))
            if before != digest and part != "placed":
                message = (
                    f"batch leaf {name!r} {why_same[kind]}, and processes {first} and {process} give different values "
                    "of it: give the same in all of them (no random numbers of their own, no jax.process_index())"
                )
                raise known_to_all(ValueError(message))
    digests = {process: json.dumps(record["rows"]) for process, record in given.items() if not record["is_constant"]}
    if same := equal_parts(digests, parts):
        warnings.warn(
            f"processes {same[0]} and {same[1]} give the same batch, and each is to give its own part of the global "
            "batch: each example counts several times. Let the batch depend on jax.process_index(), such as "
            "batch[jax.process_index()::jax.process_count()]",
            stacklevel=4,
        )


def program_text(lowered: Any) -> str:
    """Returns the text of a lowered program that is the same in equal processes.

    It has no names of files. Bodies of kernels, which may contain some, are left out.
    """
    lines = lowered.as_text().splitlines()
    return "\n".join(_LONG_TEXT.sub('"..."', line) if "custom_call" in line else line for line in lines)


def check_given(given: PyTree, placed: PyTree, mesh: Mesh, axes: Axes) -> None:
    """Compares the first batch of each size with those that other processes have placed already; waits for none.

    Warns of the same values for another part of the batch.

    Raises:
      ValueError: another process has placed a batch of another size, or of other values for the same part of it.
    """
    if not (processes := _processes_of(mesh)):
        return
    leaves = leaves_by_name(placed)
    # The first size of such batches is compared with the first elsewhere, the second with the second.
    kinds = tuple((name, str(x.dtype), x.shape[1:]) for name, x in leaves.items())
    sizes = tuple(x.shape[:1] for x in leaves.values())
    seen = _SIZES_SEEN[kinds, tuple(mesh.shape.items())]
    if sizes in seen:
        return
    seen.add(sizes)
    what = f"sizes {len(seen)} of {kinds} over {processes}"
    shapes = ", ".join(f"{name} {_shape(x)}" for name, x in leaves.items())
    mine = {"shapes": shapes, **_parts(given, mesh, axes)}
    others = {process: json.loads(text) for process, text in values_elsewhere(what, json.dumps(mine)).items()}
    try:
        if differing := by_value({p: other["shapes"] for p, other in others.items() if other["shapes"] != shapes}):
            raise ValueError(
                f"a batch of process {jax.process_index()} has the global shapes {shapes}, and not {differing}: give "
                "each process as many examples for each of its devices"
            )
        _check_parts(dict(sorted({jax.process_index(): mine, **others}.items())))
    except ValueError as error:
        raise refuse(error, turns_of(processes)) from None


@functools.cache
def _processes_of(mesh: Mesh) -> tuple[int, ...]:
    numbers = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    return numbers if len(numbers) > 1 else ()


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _values(state: PyTree) -> dict[str, Any]:
    """Returns the step and the key of a train state, which all processes have whole, unless they are only shapes."""
    if not isinstance(state, TrainState) or not isinstance(state.key, jax.Array):
        return {}
    return {"the state's step": int(jax.device_get(state.step)), "the state's key": _key_values(state.key)}


def _key_values(key: jax.Array) -> list[int]:
    return jax.device_get(key_numbers(key)).tolist()
