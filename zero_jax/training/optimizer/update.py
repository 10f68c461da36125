"""Calls an optimizer's `update` with the extra arguments that it takes: the loss, or functions of the params.

optax passes such values by keyword (`optax.GradientTransformationExtraArgs`). Only a call shows which of them an
optimizer takes: wrappers such as `optax.chain` accept and forward any.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.core.device_put import is_on_host
from zero_jax.core.tree import PyTree, leaves_by_name, strongly_typed
from zero_jax.dims import SAME_ELEMENTS
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import conditional, inline_jit, is_literal, open_jaxpr, used_inputs, with_results
from zero_jax.program.subcalls import CALLS
from zero_jax.sharding.precision import promoted
from zero_jax.training.optimizer.offload import HOST
from zero_jax.training.optimizer.refusals import check_same_leaves, check_updates, described, explained

# Zeros stay zeros in these.
_KEEPS_ZEROS = SAME_ELEMENTS | {"neg", "slice"}


class Offers(NamedTuple):
    """What an optimizer may take beside gradients, its state and params.

    The functions cost nothing unless the optimizer calls them. A stand-in replaces one that is None: the result of an
    update then has the right shapes and data dependences only.
    """

    value: Any = 0.0  # the loss of the batch at these params
    full_grads: PyTree = None  # the gradients of the loss before clipping; None if those of the update are
    loss_fn: Callable[[PyTree], jax.Array] | None = None  # the loss of the batch as a function of such params
    grad_fn: Callable[[PyTree], PyTree] | None = None  # its gradients, likewise


def call_update(tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, offers: Offers) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new state of an optimizer, called with the extra arguments that it takes.

    Raises:
      ValueError: the optimizer asks for what a step cannot make, or does not return an update for each param.
    """
    loss_of, grad_of = offers.loss_fn or _stand_in_loss(grads), offers.grad_fn or _stand_in_grads(grads)

    def value_fn(at: PyTree, *, loss: Any = None, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        del loss, obj_fn, grad_fn  # optax's line searches forward them, and refuse a function that does not take them
        return loss_of(_unmasked(at, params))

    value = jnp.asarray(offers.value, value_dtype(params))
    extras = {
        "value": value,
        "loss": value,
        "grad": grads if offers.full_grads is None else offers.full_grads,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda at, *_: grad_of(_unmasked(at, params)),
    }
    takes = inspect.signature(tx.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        extras = {p.name: extras[p.name] for p in takes if p.name in extras}
    if isinstance(params, optax.LookaheadParams):  # optax.lookahead takes gradients of the fast ones
        grads = grads.fast
    while True:  # a wrapper takes any keyword, and the optimizer in it may refuse one: without that, again
        try:
            updates, new_state = tx.update(grads, opt_state, params, **extras)
            break
        except TypeError as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or extras.pop(refused[1], None) is None:
                raise explained(error, params) from error
        except (ValueError, AttributeError, LookupError) as error:
            raise explained(error, params) from error
    check_updates(updates, params)
    return updates, new_state


def update_if(
    finite: jax.Array,
    update: Callable[..., tuple[PyTree, PyTree]],
    state: tuple[PyTree, PyTree],
    *,
    in_place: bool,
    traced: tuple[Any, Sequence[Any]] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns `update(*state)` where `finite`, else `state` bit for bit.

    On XLA:TPU a select fuses into the single loop that updates a leaf, its moments and its copies; a conditional would
    split that loop. XLA:CPU has no fusions with several results: each loop reads values that another must keep for the
    select, so all of the state would be copied first. A conditional updates it `in_place`.

    `update` is a function of params and optimizer state, the `state`; `traced` its closed jaxpr and operands, `state`
    among them, if it has been traced.
    """
    if not in_place:
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(*state), state)
    old, tree = jax.tree.flatten(state)
    if traced is not None and [x.dtype for x in traced[0].out_avals] == [x.dtype for x in old]:
        return tree.unflatten(conditional(finite, *traced, otherwise=old))  # not traced once more

    # The branches have to return one dtype, as `jnp.where` makes it.
    def as_wide(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if new.dtype == old.dtype else new.astype(promoted(new.dtype, old.dtype))

    return lax.cond(finite, lambda *old: jax.tree.map(as_wide, update(*old), old), lambda *old: old, *state)


def _updated(
    tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, value: Any, full_grads: PyTree
) -> tuple[tuple[PyTree, PyTree], PyTree, list[None]]:
    # Once for each call: part of the structure of the traced result, as a cached trace would not run a side effect.
    called: list[None] = []

    def noted(function: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
        return lambda at: called.append(None) or function(at)

    offers = Offers(value, full_grads, noted(_stand_in_loss(grads)), noted(_stand_in_grads(grads)))
    updates, new_state = call_update(tx, grads, opt_state, params, offers)
    return (optax.apply_updates(params, updates), strongly_typed(new_state)), updates, called


class _OptimizerTraces:
    """What is traced of one optimizer, which it does not keep alive.

    Args:
      find: returns the optimizer, as long as there is one.
    """

    def __init__(self, find: Callable[[], Any]):
        def traced_update(*args: PyTree) -> tuple[tuple[PyTree, PyTree], PyTree, list[None]]:
            return _updated(find(), *args)

        self.update = inline_jit(traced_update)
        self.first_opt_state = functools.lru_cache(maxsize=16)(lambda *args: _first_opt_state(find(), *args))


# By the ids of the parts of the optimizers that are alive.
_TRACES: dict[tuple[int, ...], _OptimizerTraces] = {}


def _traces_of(tx: Any) -> _OptimizerTraces:
    """Returns the traces of an optimizer; they are dropped with it, and so is what its functions hold."""
    kind, is_tuple = type(tx), isinstance(tx, tuple)
    parts = tuple(tx) if is_tuple else (tx,)  # there are no weak references to tuples
    key = tuple(map(id, parts))
    if key not in _TRACES:
        try:
            references = [weakref.ref(part, lambda _: _TRACES.pop(key, None)) for part in parts]
        except TypeError:
            return _OptimizerTraces(lambda: tx)
        _TRACES[key] = _OptimizerTraces(lambda: kind(*(x() for x in references)) if is_tuple else references[0]())
    return _TRACES[key]


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """The trace of an optimizer's update."""

    # The closed jaxpr, to params and state: of gradients, state, params, loss and, if any, unclipped gradients
    jaxpr: Any
    updates: Sequence[Any]  # the variables, or literals, of the updates in it
    new_state: PyTree  # the shapes of the state that it returns
    num_grads: int  # the number of gradients
    calls_functions: bool  # whether it calls functions of the params, which are stand-ins here
    clips: bool = False  # whether the step clips gradients
    is_rewritten: bool = False  # whether the jaxpr is another one than JAX traces of the optimizer

    @property
    def needed_grads(self) -> list[bool]:
        """Which gradients the optimizer reads: those of frozen params need not even be computed."""
        used = used_inputs(self.jaxpr)
        unclipped = used[len(used) - self.num_grads :] if self.clips else used
        return [a or b for a, b in zip(used[: self.num_grads], unclipped, strict=False)]

    def unchanged(self, needed: Sequence[bool]) -> list[bool]:
        """Tells which params it never changes; one whose gradient is read (`needed`) counts as changed.

        They are those of `optax.set_to_zero` under `multi_transform` or `masked`, and of any other optimizer whose
        updates are zeros that do not depend on the gradients.
        """
        if all(needed):
            return [False] * len(needed)
        zeros, values = _Zeros(), {}
        zeros.run(self.jaxpr, [False] * len(open_jaxpr(self.jaxpr)[0].invars), values)
        updates = [zeros.constant(x) if is_literal(x) else values[x] for x in self.updates]
        return [zero and not read for zero, read in zip(updates, needed, strict=True)]


class _Zeros(Dataflow[bool]):
    """Finds the values that are zeros whatever the inputs are."""

    enters = CALLS

    def constant(self, atom: Any) -> bool:
        return is_literal(atom) and jnp.ndim(atom.val) == 0 and bool(atom.val == 0)

    def operation(self, eqn: Any, operands: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in _KEEPS_ZEROS:
            zero = operands[0]
        elif name == "mul" and any(operands) and not all(operands):
            factor = eqn.invars[operands.index(False)]
            # Zero times a value that is not a literal may be NaN.
            zero = is_literal(factor) and bool(np.isfinite(np.asarray(factor.val)).all())
        else:
            zero = name in ("add", "add_any", "sub", "mul") and all(operands)
        return [zero] * len(eqn.outvars)


def trace_update(tx: Any, params: PyTree, opt_state: PyTree, *, mesh: Any, clip: float | None = None) -> TracedUpdate:
    """Traces an optimizer's update; JAX traces it once for all calls on such arguments, `apply_update` included.

    Takes the params that have gradients and the state, or their shapes, and the mesh of the step that applies the
    update (None where there is none): JAX's cache of traces distinguishes the meshes of arguments. Where gradients are
    clipped to a norm `clip`, the optimizer may read the unclipped ones, too.

    Raises:
      ValueError: the update fails, first of all because the state is that of another optimizer.
    """
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    params, opt_state = jax.tree.map(functools.partial(_argument, sharding=sharding), (params, opt_state))
    leaves = jax.tree.leaves(params)
    value = jax.ShapeDtypeStruct((), value_dtype(params), sharding=sharding)
    # The params stand for the gradients, clipped and before that, which are like them.
    try:
        traced = _traces_of(tx).update.trace(params, opt_state, params, value, None if clip is None else params)
    except ValueError:
        check_same_leaves("opt_state", "optimizer", opt_state, jax.eval_shape(tx.init, params), containers=True)
        raise
    (_, new_state), updates, calls = traced.out_info
    results = open_jaxpr(traced.jaxpr)[0].outvars
    num_kept = len(results) - len(jax.tree.leaves(updates))  # the updates come last, and are looked at alone
    jaxpr = with_results(traced.jaxpr, results[:num_kept])
    return TracedUpdate(jaxpr, results[num_kept:], new_state, len(leaves), bool(calls), clip is not None)


def _argument(x: Any, *, sharding: NamedSharding | None) -> Any:
    """Returns what an update is traced with: a shape of this sharding for one without, and for what the host has."""
    if isinstance(x, jax.ShapeDtypeStruct):
        is_shape = x.sharding is None or x.sharding.memory_kind == HOST
    else:
        is_shape = is_on_host(getattr(x, "aval", None))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_shape else x


def value_dtype(params: PyTree) -> Any:
    """Returns the dtype of the loss that an optimizer of these params gets: float32, or theirs if it is wider."""
    return promoted(jnp.float32, *(jnp.finfo(dtype).dtype for dtype in {x.dtype for x in jax.tree.leaves(params)}))


def apply_update(tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, offers: Offers) -> tuple[PyTree, PyTree]:
    """Returns updated params and the new state; the trace of the update is reused if it calls no functions."""
    if offers.loss_fn is not None:
        updates, state = call_update(tx, grads, opt_state, params, offers)
        return optax.apply_updates(params, updates), strongly_typed(state)
    return _traces_of(tx).update(grads, opt_state, params, offers.value, offers.full_grads)[0]


def evaluate_update(jaxpr: Any, operands: Sequence[Any], params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns updated params and the new state, by the closed jaxpr of an update and its operands."""
    results = evaluate(*open_jaxpr(jaxpr), operands)
    return jax.tree.unflatten(jax.tree.structure((params, opt_state)), [jnp.asarray(x) for x in results])


def init_opt_state(tx: Any, params: PyTree, *, mesh: Any, clip: float | None) -> PyTree:
    """Returns an optimizer's first state, with the leaves and dtypes that it has after an update.

    Some optimizers widen a leaf or add leaves in the first update (`optax.monitor`): a step would be compiled twice,
    and could not be skipped. Added leaves are zeros that no update reads.

    Raises:
      ValueError: an update changes the state's structure in another way.
    """
    state, settled = tx.init(params), first_opt_state(tx, params, mesh=mesh, clip=clip)
    if described(jax.eval_shape(lambda x: x, state)) == described(settled):
        return state
    first = leaves_by_name(state)
    return jax.tree.structure(settled).unflatten(
        jnp.asarray(first[name], x.dtype) if name in first else jnp.zeros(x.shape, x.dtype)
        for name, x in leaves_by_name(settled).items()
    )


def first_opt_state(tx: Any, params: PyTree, *, mesh: Any, clip: float | None = None) -> PyTree:
    """Returns the shapes of the state that `init_opt_state` returns on a mesh, cached.

    Raises:
      ValueError: an update changes the state's structure, other than by leaves that no update reads.
    """
    leaves, tree = jax.tree.flatten(params)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    return _traces_of(tx).first_opt_state(tree, shapes, mesh and mesh.abstract_mesh, clip, jnp.result_type(float))


def _first_opt_state(
    tx: Any, tree: Any, leaves: tuple[tuple[Any, Any], ...], mesh: Any, clip: float | None, default: Any
) -> PyTree:
    del default  # dtypes depend on whether JAX has 64 bits enabled
    params = tree.unflatten(jax.ShapeDtypeStruct(*leaf) for leaf in leaves)
    before = settled = jax.eval_shape(tx.init, params)
    for _ in range(3):  # a wider leaf may widen others
        wider = _widened(settled, trace_update(tx, params, settled, mesh=mesh, clip=clip).new_state)
        if described(wider) == described(settled):
            break
        settled = wider
    names, names_before = [*leaves_by_name(settled)], [*leaves_by_name(before)]
    if names != names_before:
        traced = trace_update(tx, params, settled, mesh=mesh, clip=clip)
        used = used_inputs(traced.jaxpr)[traced.num_grads :]
        read = dict(zip(names, used, strict=False))
        odd = [name for name in names if name not in names_before and read[name]]
        odd += [name for name in names_before if name not in names]
        if odd:
            raise ValueError(
                f"the first update changes the structure of the optimizer's state: leaf {odd[0]!r} is in it before or "
                "after only, and is read: give an optimizer whose init returns what its update does"
            )
    return settled


def _widened(old: PyTree, new: PyTree) -> PyTree:
    """Returns the shapes of a new state, each leaf promoted to a dtype that also holds the old values."""
    shapes = {name: (shape, dtype) for name, shape, dtype in described(old)}

    def widen(name: str, shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
        old_shape, old_dtype = shapes.get(name, (shape, dtype))
        if old_shape != shape:
            raise ValueError(
                f"an update changes leaf {name!r} of the optimizer's state from {list(old_shape)} to {list(shape)}: "
                "give an optimizer whose state keeps its shapes"
            )
        return jax.ShapeDtypeStruct(shape, dtype if dtype == old_dtype else promoted(dtype, old_dtype))

    return jax.tree.structure(new).unflatten(widen(*leaf) for leaf in described(new))


def _stand_in_loss(grads: PyTree) -> Callable[[PyTree], jax.Array]:
    """Returns a function of params whose value depends on params alone, and whose derivatives depend on gradients."""
    dtype = value_dtype(grads)

    @jax.custom_jvp
    def loss_fn(at: PyTree) -> jax.Array:
        squares = [jnp.square(jnp.abs(x)).sum().astype(dtype) for x in jax.tree.leaves(at)]
        return jnp.asarray(sum(squares), dtype)

    @loss_fn.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        at = primals[0]
        # No derivative of that value: one that depends on gradients and params, as that of the loss would.
        slopes = jax.tree.map(lambda g, x, t: (g * x * t).sum().real.astype(dtype), grads, at, tangents[0])
        return loss_fn(at), jnp.asarray(sum(jax.tree.leaves(slopes)), dtype)

    return loss_fn


def _stand_in_grads(grads: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function of params that depends, leaf by leaf, on them and on gradients."""
    return lambda at: jax.tree.map(jnp.multiply, grads, at)


def _unmasked(at: PyTree, params: PyTree) -> PyTree:
    """Fills the gaps that `optax.masked` left in a tree of params."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda new, old: old if is_masked(new) else new, at, params, is_leaf=is_masked)
