"""Processes that would run different programs together are refused before the first execution.

Each process lowers the program by itself, so that another learning rate, seed, loss function or batch size in one of
them would update shards of one param by different rules, or leave the processes in different collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend
from jax.sharding import Mesh

import zero_jax
from zero_jax.core.agreement import agree_on, differs_elsewhere, refuse, turns_of
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import step_options
from zero_jax.training.zero_config import ZeroConfig

_REMEDY = (
    "all processes the same code, settings, random seeds and releases, and batches of the same sizes (docs/own_loop.md)"
)
_LONG_TEXT = re.compile(r'"(?:[^"\\]|\\.){1000,}"')


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

    def check(self, jitted: Any, state: PyTree, batch: PyTree, *, of: Any = None) -> None:
        """Compares the program for these arguments if it is new; all processes of the mesh call it, or none.

        Lowering it here costs nothing more: the call that follows takes what was lowered.

        `of` is the structure of the state, where the function takes several.

        Raises:
          ValueError: the processes differ.
          OtherProcessFailed: another process has failed, or does not call it.
        """
        if not self.processes:
            return
        leaves, tree = jax.tree.flatten(batch)
        key = jitted, of, tree, tuple((x.shape, x.dtype) for x in leaves)
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
        turns = turns_of(self.processes)
        agree_on(f"the {self.what}", facts, long_texts={"its program": text}, remedy=_REMEDY, turns=turns)
        self._agreed.add(key)


def program_text(lowered: Any) -> str:
    """Returns the text of a lowered program that is the same in equal processes.

    It has no names of files. Bodies of kernels, which may contain some, are left out.
    """
    lines = lowered.as_text().splitlines()
    return "\n".join(_LONG_TEXT.sub('"..."', line) if "custom_call" in line else line for line in lines)


def check_sizes(batch: PyTree, mesh: Mesh) -> None:
    """Raises `ValueError` if another process has placed a batch of such leaves, but of another size; waits for none."""
    if not (processes := _processes_of(mesh)):
        return
    leaves = leaves_by_name(batch)
    kinds = tuple((name, str(x.dtype), x.shape[1:]) for name, x in leaves.items())
    sizes = tuple(x.shape[:1] for x in leaves.values())
    seen = _sizes_seen(kinds, tuple(mesh.shape.items()))
    if sizes in seen:
        return
    seen.add(sizes)
    what = f"sizes {len(seen)} of {kinds} over {processes}"
    if others := differs_elsewhere(what, ", ".join(f"{name} {_shape(x)}" for name, x in leaves.items())):
        error = ValueError(
            f"a batch of process {jax.process_index()} has the global shapes "
            f"{', '.join(f'{name} {_shape(x)}' for name, x in leaves.items())}, and not {others}: give each process as "
            "many examples for each of its devices"
        )
        raise refuse(error, turns_of(processes))


@functools.cache
def _processes_of(mesh: Mesh) -> tuple[int, ...]:
    numbers = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    return numbers if len(numbers) > 1 else ()


@functools.cache
def _sizes_seen(kinds: Any, mesh_shape: Any) -> set[Any]:
    """Returns the sizes of batches so far, to be added to."""
    return set()


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _values(state: PyTree) -> dict[str, Any]:
    """Returns the step and the key of a train state, which all processes have whole, unless they are only shapes."""
    if not isinstance(state, TrainState) or not isinstance(state.key, jax.Array):
        return {}
    key = state.key
    key = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return {"the state's step": int(jax.device_get(state.step)), "the state's key": jax.device_get(key).tolist()}
