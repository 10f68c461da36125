"""A model of the user's own: any loss function, and any batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from zero_jax import training
from zero_jax.core.agreement import agree_on, from_all_processes
from zero_jax.core.files.untrusted import text, whole_number
from zero_jax.core.tree import PyTree, check_arrays, key_shape, leading_dims, leaf_names, leaves_by_name, shapes_of
from zero_jax.data import BatchBuffers
from zero_jax.sharding.mesh import axes_of
from zero_jax.trainer.inputs.sources import BatchesEnded, Source, find_source
from zero_jax.trainer.reporting.metrics import scalar_figures, unshown_leaves
from zero_jax.transforms import PartWeight

# What each process gives: its part of the global batch (None), a part that may be equal to others, or all of it.
ProcessBatches = Literal["equal", "whole"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model and its batches, of any kind, as the trainer needs them.

    A batch is a pytree of arrays `[examples, ...]` of the host or of devices. With several processes each gives its own
    share of the examples. Without microbatches leaves may differ in their leading dim (nodes and edges of a graph);
    the examples are then those of the first leaf. Batches are one of

    - a function of the step, `batches(0)` for the first: a run is resumed at any step;
    - an iterable (a sequence, a grain dataset, a loader), which is read again from its end on, or an iterator, which
      is not. A resumed run sets iterators with `get_state` and `set_state` to where they were, and reads others again;
    - a function of nothing that returns one of these, such as a generator.

    The attributes are the arguments of `zero.Trainer`, and `config`, a dataclass saved with the run, or None. The
    first `eval_batches` of the batches to validate on are taken each time.

    Example:
      >>> zero.trainer.OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=lambda step: batch).name
      'model'
    """

    init_fn: Callable[[Array], Any]
    loss_fn: Callable[..., Any] | training.MeshLoss
    batches: Any
    validation: Any = None
    eval_fn: Callable[..., Any] | training.MeshLoss | None = None
    param_specs: Any = None
    name: str = "model"
    config: Any = None

    # What a `Model` alone may have.
    load_fn = base_init_fn = base_param_specs = adapt_fn = adapters = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OwnInput:
    """Batches of the user's own, with the methods that the loop calls (as those of `TextInput`)."""

    source: Source
    mesh: Mesh
    batch_shapes: PyTree  # of a global batch
    batch_size: int  # examples in it
    local_sizes: Mapping[str, int]  # the leading dims of what this process gives to it, by leaf
    validation: Iterable[PyTree] | None
    fingerprints: tuple[str, ...]  # a hash of the first batch of each process
    notes: tuple[str, ...] = ()  # leaves of the aux that are not shown
    is_whole: bool = False  # whether each process gives the global batch
    buffers: BatchBuffers = dataclasses.field(default_factory=BatchBuffers)

    num_tokens = None
    sampler = None
    identity_words = "batches of your own"

    @property
    def identity(self) -> dict[str, Any]:
        """The kind of the batches. Their hashes are no part of it, as the order may be random."""
        return {"batches": "own"}

    @property
    def rows(self) -> dict[str, str]:
        """The kind of the batches, and the shapes of one."""
        leaves = leaves_by_name(self.batch_shapes).items()
        shown = [f"{name} {x.dtype}{list(x.shape)}".strip() for name, x in leaves]
        more = f", and {len(shown) - 4} more" if len(shown) > 4 else ""
        rows = {"data": self.source.kind, "batch": f"{self.batch_size} examples: {', '.join(shown[:4])}{more}"}
        return rows | ({"not shown": "; ".join(self.notes)} if self.notes else {})

    def steps_of(self, epochs: float) -> int:
        """Returns the steps of a number of passes over the batches, which need a length, one in all processes."""
        size = self.source.size
        agree_on("the batches of a pass", {"length": size}, remedy="give all processes as many, or steps")
        if size is None:
            raise ValueError(
                f"epochs={epochs:g}: the batches are {self.source.kind}, which has no length: give steps instead"
            )
        # Rounded first: 1.1 * 100 is 110.00000000000001, which would be 111 steps.
        return max(1, math.ceil(round(epochs * size, 6)))

    def open(
        self, saved: Mapping[str, Any] | None, *, say: Callable[[str], None], beat: Callable[[], None]
    ) -> contextlib.AbstractContextManager[Iterator[PyTree]]:
        """Opens the batches after those of a checkpoint; raises `ValueError` where the processes have changed them."""
        position, state = 0, None
        if saved is not None:
            self._compare(saved, say)
            position, state = whole_number(saved["position"]), _process_state(saved.get("states"))
        batches = self.source.open(position, state, say=say, beat=beat)
        return contextlib.closing(OwnBatches(batches, sizes=self.local_sizes, position=position))

    def record(self, position: int, *, has_read_more: bool = False) -> dict[str, Any]:
        """Returns the number of batches read, and the iterators' states, which are unknown if it `has_read_more`."""
        sizes = {"num_processes": jax.process_count(), "batch_size": self.batch_size}
        record = {"position": position, **sizes, "fingerprints": list(self.fingerprints), **self.identity}
        state = None if has_read_more else self.source.state()
        return record if state is None else {**record, "states": from_all_processes(state)}

    def _compare(self, saved: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Compares the first batch with that of the run before, and says or raises what differs."""
        before, num_before, size = (saved.get(name) for name in ("fingerprints", "num_processes", "batch_size"))
        num_processes = jax.process_count()
        has_others = num_before != num_processes
        if has_others and num_before is not None and size not in (None, self.batch_size):
            raise ValueError(
                f"{num_processes} processes give {self.batch_size // num_processes} examples each, {self.batch_size} "
                f"in all; the run had {size} by {num_before} processes: give each process its part of the same "
                "global batch (divide its size by jax.process_count())"
            )
        if size is not None and (size := whole_number(size)) != self.batch_size:  # positions count batches
            first, last = sorted((saved["position"] * size, saved["position"] * self.batch_size))
            what = "never read" if size < self.batch_size else "read twice"
            say(
                f"batches: WARNING: a batch has {self.batch_size:,} examples, and had {size:,}. The run goes on after "
                f"batch {saved['position']:,}: where batches go through the data in order, the {last - first:,} "
                f"examples between {first:,} and {last:,} are {what}. To prevent that, resume with the size of before"
            )
        elif size is not None and not has_others and before not in (None, list(self.fingerprints)):
            say(
                "batches: WARNING: the first batch is not the one of the run before: these are other data, or they "
                "come in another order or with other random numbers each time. The run goes on with them"
            )

    def place(self, batch: PyTree) -> PyTree:
        """Shards a batch over the devices; arrays of the host are copied into buffers that are reused."""
        has_own_arrays = any(isinstance(x, jax.Array) for x in jax.tree.leaves(batch))
        placed = training.place_batch(batch, mesh=self.mesh, is_whole=self.is_whole)
        # Arrays on devices may be given again; the buffers would delete them.
        return placed if has_own_arrays else self.buffers.fill(placed)

    def weight(self, batch: PyTree) -> PartWeight:
        """Returns the weight of a validation batch: the number of its examples."""
        examples = np.float32(_num_examples(batch))
        return PartWeight(examples, examples)

    def figures(self, aux: PyTree) -> dict[str, float]:
        """Returns the scalars of the aux by name."""
        return scalar_figures(aux)


class OwnBatches(Iterator[PyTree]):
    """The user's batches, with `position` the number so far; each is checked to have the first one's dims (`sizes`)."""

    def __init__(self, batches: Iterator[PyTree], *, sizes: Mapping[str, int], position: int):
        self._batches, self._sizes, self.position = batches, sizes, position

    def __next__(self) -> PyTree:
        batch = next(self._batches)
        self.position += 1
        _check_sizes(batch, self._sizes, self.position)
        return batch

    def close(self) -> None:
        """Closes a generator, which may have files open."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def _check_sizes(batch: PyTree, sizes: Mapping[str, int], step: int) -> None:
    """Raises `ValueError` for a batch whose leaves, or their leading dims, are not those of the first one."""
    new_sizes = leading_dims(batch)
    if missing := [name for name in sizes if name not in new_sizes]:
        raise ValueError(
            f"the batch of step {step} has no leaf {missing[0]!r} with examples, as the first batch: give the same "
            "leaves in each"
        )
    for name, size in new_sizes.items():
        if size != (before := sizes.get(name, size)):
            raise ValueError(
                f"batch leaf {name!r} of step {step} has {size} examples, and that of the first batch {before}: drop "
                "the last batch of a pass if it is smaller (`drop_remainder`), or pad it"
            )


def own_input(
    model: OwnModel, *, mesh: Mesh, zero: training.ZeroConfig, eval_batches: int, process_batches: ProcessBatches = None
) -> OwnInput:
    """Checks a model of the user's own with its first batch, and returns its data; see `zero.Trainer`."""
    is_whole = process_batches == "whole"
    source = find_source("batches", model.batches)
    first = source.first()
    shapes = _placed_shapes("the first batch", first, mesh, zero.num_microbatches, is_whole=is_whole)
    fingerprints = _compared(first, mesh, process_batches)
    for index, batch in enumerate(source.in_memory):
        _check_sizes(batch, leading_dims(first), index + 1)
    # Traced now: an error in the user's functions comes before anything is made.
    variables = jax.eval_shape(model.init_fn, key_shape())
    aux = _aux_shapes(model.loss_fn, variables, shapes, mesh)
    weight = None if zero.loss_weight == "auto" else zero.loss_weight
    validation, eval_aux = None, {}
    if model.validation is not None:
        validation, first_validation = _validation(model.validation, eval_batches)
        placed = _placed_shapes("the first batch of the validation", first_validation, mesh, 1, is_whole=is_whole)
        if is_whole:
            _compared(first_validation, mesh, process_batches)
        eval_aux = _aux_shapes(model.eval_fn or model.loss_fn, variables, placed, mesh)
        if weight is not None and weight not in leaf_names(eval_aux):
            raise ValueError(
                f"loss_weight={weight!r} is not in the aux of the validation, which has "
                f"{', '.join(leaf_names(eval_aux)) or 'nothing'}: return it there too"
            )
    elif model.eval_fn is not None:
        raise ValueError(
            "eval_fn is for the validation, and there are no batches for it: give validation=, or leave it out"
        )
    return OwnInput(
        source=source,
        mesh=mesh,
        batch_shapes=shapes,
        batch_size=_num_examples(shapes),
        local_sizes=leading_dims(first),
        validation=validation,
        fingerprints=fingerprints,
        is_whole=is_whole,
        notes=tuple(dict.fromkeys(unshown_leaves(aux) + unshown_leaves(eval_aux))),
    )


@dataclasses.dataclass(frozen=True)
class _FirstBatches(Iterable[PyTree]):
    """The first batches of a source, each time it is iterated over."""

    again: Callable[[], Iterable[PyTree]]
    size: int

    def __iter__(self) -> Iterator[PyTree]:
        return itertools.islice(iter(self.again()), self.size)


def _validation(batches: Any, eval_batches: int) -> tuple[Iterable[PyTree], PyTree]:
    source = find_source("validation", batches)
    first, again = source.first(), source.again
    if again is None:  # an iterator that passes once: its batches are kept, as copies, for it may fill the same arrays
        kept: list[PyTree] = []
        with contextlib.suppress(BatchesEnded):
            for batch in itertools.islice(source.open(0), eval_batches):
                kept.append(jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch))
        return kept, first
    return _FirstBatches(again, eval_batches), first


def _compared(first: PyTree, mesh: Mesh, process_batches: ProcessBatches) -> tuple[str, ...]:
    """Returns a hash of the first batch of each process; raises for equal parts, and for global batches that differ."""
    texts = from_all_processes(
        json.dumps([training.fingerprint(leaves_by_name(first)), training.part_of_batch(first, mesh, axes_of(mesh))])
    )
    fingerprints, parts = zip(*map(json.loads, texts), strict=True)
    if process_batches == "whole" and len(set(fingerprints)) > 1:
        raise ValueError(
            "process_batches='whole', and the first batches of the processes differ: give the same global batch in all "
            "of them (no random numbers of their own, no jax.process_index()), or leave process_batches out"
        )
    # Processes along `model` have the same examples: only parts that should differ are compared.
    same = training.equal_parts(dict(enumerate(fingerprints)), dict(enumerate(parts)))
    if same and process_batches is None:
        raise ValueError(
            f"the first batches of processes {same[0]} and {same[1]} are equal, and each is to give its own part of "
            "the global batch: each example would be trained on several times. If each gives the global batch, say so "
            "by process_batches='whole' (--process-batches whole), and each uses its part of it; else let the batches "
            "depend on jax.process_index(), or allow it by process_batches='equal'"
        )
    return tuple(fingerprints)


def _placed_shapes(label: str, batch: PyTree, mesh: Mesh, num_microbatches: int, *, is_whole: bool) -> PyTree:
    if not jax.tree.leaves(batch):
        raise ValueError(f"{label} has no arrays: give a pytree of arrays [examples, ...]")
    check_arrays(label, batch, remedy="give a pytree of arrays [examples, ...]")
    try:
        placed = training.place_batch(batch, mesh=mesh, is_whole=is_whole)
        training.check_batch(placed, mesh=mesh, axes=axes_of(mesh), num_microbatches=num_microbatches)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    if not any(x.ndim for x in jax.tree.leaves(placed)):
        raise ValueError(f"{label} has no leaf with a leading dim: give arrays [examples, ...]")
    return shapes_of(placed)


def _aux_shapes(
    loss_fn: Callable[..., Any] | training.MeshLoss, variables: PyTree, batch: PyTree, mesh: Mesh
) -> PyTree:
    """Returns the shapes of the aux of a loss function; raises `ValueError` for a loss that is no scalar."""
    return jax.eval_shape(training.user_loss(loss_fn, mesh).named(), variables, batch, key_shape())[1][0]


def _num_examples(batch: PyTree) -> int:
    return next(iter(leading_dims(batch).values()))


def _process_state(states: Any) -> str | None:
    """Returns this process's state among those of a checkpoint, which may be forged."""
    if states is None:
        return None
    if not isinstance(states, list) or len(states) != jax.process_count():
        num_states = len(states) if isinstance(states, list) else 0
        raise ValueError(
            f"the checkpoint has the positions of {num_states} processes in their batches, and there are "
            f"{jax.process_count()}: start as many, or give batches as a function of the step"
        )
    return text(states[jax.process_index()])
