"""Params that enter a loop: slices of stacks as shards, what every iteration uses and vectors gathered once before it.

In a pipeline a stack is sharded over stages along its layers, and what a stage has of it over the other axes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zero_jax.core.device_put import default_layout
from zero_jax.dims import FREE, SHAPES, UNKNOWN, passthrough
from zero_jax.program.jaxprs import open_jaxpr, source_context, variables
from zero_jax.program.subcalls import Subcall
from zero_jax.program.walk import as_it_is
from zero_jax.sharding.chains import Chain, gather_scope, moving, reshard
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.quantized import PLAIN
from zero_jax.sharding.spec import Dims, gather_steps, named, steps_by_dim, without
from zero_jax.transforms.eqn_sequence import num_bytes
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.anchors import anchored
from zero_jax.transforms.gather.copied import GROWN_TIMES
from zero_jax.transforms.gather.deferred import (
    Copies,
    GatherOptions,
    Lazy,
    Value,
    gathered_copies,
    gathering,
    is_unsharded,
)
from zero_jax.transforms.gather.per_device import only_multiplied, used_whole
from zero_jax.transforms.pipeline.cut import LayerLoop
from zero_jax.transforms.pipeline.interleaved.microbatch import MicrobatchProgram
from zero_jax.transforms.pipeline.place import StagePlace
from zero_jax.transforms.pipeline.transform import run_schedule, split_stages

# `walk` is the `GatherWalk` that evaluates the loop; its type would be a circular import.


def sliced(walk: Any, value: Lazy | Value, aval: Any, eqn: Any) -> Lazy | Value:
    """Returns a value as its slices are in a scan, made of stacks; `aval` is that of a slice."""
    if isinstance(value, Lazy) and value.dims is None and value.moved is not None:
        value = value.moved
    elif isinstance(value, Lazy) and value.dims is not None and value.dims[0]:
        value = next((x for x in _moved_shards(walk.options, value) if not x.shard[0]), value)
    if not isinstance(value, Lazy) or value.dims is None or value.dims[0]:
        return walk.before(value, eqn, "scan over its sharded dim")
    if not fetched_by_slice(walk, value):
        value = _gathered_vectors(walk, value.as_root(), eqn)  # the scan slices an array, not what builds one
    aval = aval.update(dtype=value.aval.dtype)  # without a cast that is pending
    return dataclasses.replace(value, aval=aval, dims=value.shard[1:], depth=0)


def with_moved(walk: Any, eqn: Any, values: Sequence[Lazy | Value], made: Lazy | Value) -> Lazy | Value:
    """Returns the result of an equation that may cut the sharded dim of its operand, with what it is as another shard.

    Of `head.reshape(d, chunks, -1)` over a vocabulary that is sharded, a loop can then take slices as shards.
    """
    operand, is_alone = values[0], len(values) == len(eqn.outvars) == 1 and eqn.primitive.name in SHAPES
    if not (is_alone and isinstance(operand, Lazy) and isinstance(made, Lazy)):
        return made
    shards = [operand.moved] if operand.moved is not None else []
    shards += _moved_shards(walk.options, operand) if operand.is_shard else []
    for shard in shards:
        dims = passthrough(eqn, [shard.dims], lambda dims, i: axis_size(walk.options.mesh, dims[i]))
        if dims is not None and (moved := walk.derive(eqn, [shard], dims)[0]).is_deferred:
            return dataclasses.replace(made, moved=moved)
    return made


def _moved_shards(options: GatherOptions, value: Lazy) -> Iterator[Lazy]:
    """Yields a shard as one of each other dim that can have all of its axes, by an all-to-all, as is its gradient."""
    mesh, dims, axes = options.mesh, value.shard, options.axes.data
    if options.mapped or value.on_host or value.formats != PLAIN:
        return
    over = tuple(axis for dim in dims for axis in dim if axis in axes)
    for to, size in enumerate(value.aval.shape):
        steps = steps_by_dim(dims, to, axes)
        if not steps or size % axis_size(mesh, (*without(dims, over)[to], *over)):
            continue
        there = Chain() if is_unsharded(options, value) else Chain(tuple(named(mesh, step) for step in steps))
        back = moving(mesh, dims, to, axes)
        build = functools.partial(_moved, value.build, value.path, there, back)
        yield dataclasses.replace(value, build=build, dims=steps[-1], depth=value.depth + 1)


def _moved(build: Callable[..., Any], path: str, there: Chain, back: Chain, *roots: Any) -> jax.Array:
    with gather_scope(path):
        return reshard(build(*roots), forward=there, backward=back)


# Slices of no more rows are vectors, of the layers of a turn or alone: less than a tile of a TPU.
_FEW_ROWS = 8


def _gathered_vectors(walk: Any, stack: Lazy, eqn: Any) -> Lazy:
    """Gathers a stack of vectors, such as scales of norms and biases, before the loop; leaves others as they are.

    They are little beside matrices, and a gather of one takes its latency in each iteration. XLA:TPU makes all-reduces
    of such gathers, which wait for those of the matrices that have begun.
    """
    length, size, options = eqn.params["length"], num_bytes(stack.aval), walk.options
    are_vectors = stack.aval.ndim > 1 and math.prod(stack.aval.shape[1:-1]) <= _FEW_ROWS
    is_little = are_vectors and size <= options.max_hoisted_bytes and not options.stored_unsharded
    if not (is_little and _is_plain(walk, stack) and length > 1):
        return stack
    walk.notes.gather(stack, eqn, f"once before {length} iterations that use vectors of it", early=False)
    return dataclasses.replace(stack, roots=(_gathered(walk, stack, stack.roots[0], stack.shard),), is_gathered=True)


def vectors_together(walk: Any, jaxpr: Any, values: Sequence[Lazy | Value]) -> list[Lazy | Value]:
    """Gathers the vectors of the layers of a Python loop as one stack of those of a size; leaves others as they are."""
    groups, results = dict[Any, dict[int, Lazy]](), list(values)
    vectors = [(i, x) for i, x in enumerate(values) if isinstance(x, Lazy) and x.aval.ndim == 1 and _is_plain(walk, x)]
    if len(vectors) < 2 or walk.options.stored_unsharded:  # as of stacks of layers
        return results
    first_users = {var: eqn for eqn in reversed(jaxpr.eqns) for var in variables(eqn)}
    for i, value in vectors:
        if jaxpr.invars[i] in first_users:
            groups.setdefault((value.aval.shape, value.aval.dtype, value.shard), {})[i] = value
    several = [group for group in groups.values() if len(group) > 1]
    if sum(num_bytes(value.aval) for group in several for value in group.values()) > walk.options.max_hoisted_bytes:
        return results
    for group in several:
        for i, value in group.items():
            reason = f"once, beside {len(group) - 1} others of its size"
            walk.notes.gather(value, first_users[jaxpr.invars[i]], reason, early=False)
        first = next(iter(group.values()))
        stack = _gathered(walk, first, jnp.stack([value.built for value in group.values()]), ((), *first.shard))
        for (i, value), array in zip(group.items(), stack, strict=True):
            results[i] = dataclasses.replace(value, roots=(array,), is_gathered=True)
    return results


def shared_once(
    walk: Any, jaxpr: Any, values: Sequence[Any], uses: Mapping[int, Collection[int]]
) -> list[Lazy | Value]:
    """Gathers once what several steps of a Python loop multiply with, such as layers that share their params.

    Each device has a copy, whose gradients are reduced once. `uses` have the params of each equation that uses some.
    """
    counts = collections.Counter(itertools.chain.from_iterable(uses.values()))
    results, dims, left = list(values), walk.by_device.example_dims, walk.options.max_hoisted_bytes
    are_plain = [isinstance(x, Lazy) and not x.is_gathered and _is_plain(walk, x) for x in values]
    shared = [i for i in counts if counts[i] > 1 and are_plain[i] and only_multiplied(jaxpr, jaxpr.invars[i], dims)]
    # All of as many products, or none; those of most first, which a table of two may have no room beside.
    for count in sorted({counts[i] for i in shared}, reverse=True):
        group = [i for i in shared if counts[i] == count]
        left -= sum(num_bytes(values[i].aval) for i in group)
        for i in group if left >= 0 else ():
            first = next(jaxpr.eqns[index] for index, params in uses.items() if i in params)
            walk.notes.gather(values[i], first, f"once for {count} products", early=False)
            results[i] = _copies(walk, values[i])
    return results


def copied_where_grown(walk: Any, facts: Facts, values: Sequence[Any]) -> list[Lazy | Value]:
    """Gives each device a copy of the params of which larger values are made, as biases of positions are."""
    results, options = list(values), walk.options
    if walk.examples is None or options.axes.size_beside_batch(options.mesh) > 1:
        return results
    sizes = {i: x.aval.size for i, x in enumerate(values) if isinstance(x, Lazy)}
    least = {var: GROWN_TIMES * sum(sizes.get(i, 0) for i in facts.origins[var].params) for var in facts.used}
    if not any(0 < size <= var.aval.size for var, size in least.items()):
        return results
    for i in walk.by_device.grown_params(facts, values, least):
        is_stored_unsharded = values[i].dims is not None and not (values[i].is_shard or values[i].on_host)
        if is_stored_unsharded or (_is_plain(walk, values[i]) and not values[i].is_gathered):
            first = next(facts.jaxpr.eqns[index] for index, params in facts.uses.items() if i in params)
            walk.notes.gather(values[i], first, "once, for larger values that are made of it", early=False)
            results[i] = _copies(walk, values[i])
    return results


def _is_plain(walk: Any, value: Lazy) -> bool:
    """Tells whether a param is a shard that may be gathered before its use."""
    return value.is_shard and not (value.on_host or walk.options.mapped or value.formats.gather)


def _copies(walk: Any, value: Lazy) -> Copies:
    """Returns a param as a copy of each device's own, whose gradients are reduced once."""
    return Copies(value.widened(gathered_copies(walk.options, value)), params_only=True)


def _gathered(walk: Any, value: Lazy, array: jax.Array, dims: Dims) -> jax.Array:
    """Returns an array sharded over some dims, made of a param, as a whole; its gradient is sharded so."""
    options, shard = walk.options, Chain((named(walk.options.mesh, dims),))
    with gather_scope(value.path):
        forward = gathering(options, dataclasses.replace(value, dims=dims), array.shape)
        return reshard(array, forward=forward, backward=shard)


def fetched_by_slice(walk: Any, value: Lazy) -> bool:
    """Tells whether a stack is in host memory, and its slices can be fetched by themselves."""
    if not value.on_host or value.depth:
        return False
    mesh, stack = walk.options.mesh, value.roots[0]
    shape = [size // axis_size(mesh, axes) for size, axes in zip(stack.shape, value.shard, strict=True)]
    # XLA:TPU fetches slices along a dim that is not one of the two of a tile, which are last in memory.
    return len(shape) > 2 and default_layout(mesh.devices.flat[0], shape, stack.dtype)[0] == 0


def hoisted(walk: Any, eqn: Any, values: Sequence[Any], sub: Subcall) -> list[Lazy | Value]:
    """Decides which loop-invariant params are gathered once before the loop rather than in every iteration."""
    jaxpr, _ = open_jaxpr(sub.jaxpr)
    values = [_built_once(value) for value in values]
    pairs = list(zip(values, jaxpr.invars, strict=False))
    invariant = {var for value, var in pairs if value.is_deferred and used_whole(jaxpr, var)}
    size = sum(num_bytes(v.aval) for v, var in pairs if var in invariant)
    # Params that are stored unsharded take no more memory before the loop: their gradients are reduced once after it.
    if sub.length < 2 or not (size <= walk.options.max_hoisted_bytes or walk.options.stored_unsharded):
        return values
    return [_gathered_once(walk, eqn, sub, value, var) if var in invariant else value for value, var in pairs]


def _built_once(value: Lazy | Value) -> Lazy | Value:
    """Makes what is made of unsharded params before a loop, rather than in every iteration, if it is no larger."""
    if not isinstance(value, Lazy) or value.dims is None or value.is_deferred:
        return value
    is_larger = value.aval.size > max(root.size for root in value.roots)
    return value if is_larger or not value.depth else value.as_root()


def _gathered_once(walk: Any, eqn: Any, sub: Subcall, value: Lazy, var: Any) -> Lazy | Value:
    walk.notes.gather(value, eqn, f"once before {sub.length} iterations that use it", early=False)
    jaxpr, _ = open_jaxpr(sub.jaxpr)
    if value.is_shard and not walk.options.mapped and only_multiplied(jaxpr, var, walk.by_device.example_dims):
        return _copies(walk, value)
    root = walk.gathered_array(value)
    if walk.options.product_dtype is None:
        return Value(root, params_only=True)
    # As wide as the loop uses it: that is what its gradients are summed in over the iterations.
    return Lazy((root,), as_it_is, jax.typeof(root), value.path, dims=((),) * root.ndim)


def staged(walk: Any, eqn: Any, values: Sequence[Lazy | Value], frame: Any) -> list[Value]:
    """Evaluates a loop over layers as the stages of a pipeline, which gather their params within themselves."""
    loop, layers, others, stacks = split_stages(eqn, values)
    shardings = [_grad_of_stages(walk, x, layers.place) for x in stacks]
    if isinstance(loop, MicrobatchProgram):
        shardings = [*(_grad_of_stages(walk, x, layers.place, is_stack=False) for x in others), *shardings]
    others = [walk.before(x, eqn, "read by all stages") for x in others]
    stacks = [_stack_of_stages(walk, eqn, x, layers) for x in stacks]
    are_params = [value.params_only for value in others[: len(layers.consts)]]
    if isinstance(loop, MicrobatchProgram):  # whose operands are not those of the layers
        are_params = [False] * len(layers.consts)
    within = dataclasses.replace(frame, prevent_cse=False, ends_forward=False, sent={})
    inner, layer = _of_stage(walk, layers)

    def run(number: Any, consts: list[Any], carry: list[Any], slices: list[Any]) -> list[Any]:
        ins = [Value(number, params_only=False)]
        ins += [Value(x, params_only=is_param) for x, is_param in zip(consts, are_params, strict=True)]
        ins += [Value(x, params_only=False) for x in carry]
        ins += [stack.with_arrays([x]) for stack, x in zip(stacks, slices, strict=True)]
        return [inner.array(x, eqn, within) for x in inner.run(layer, ins, within)]

    with source_context(eqn):
        arrays = [stack.arrays[0] for stack in stacks]
        results = run_schedule(loop, [x.array for x in others], arrays, run, shardings)
    return [Value(x, params_only=False) for x in results]


def _stack_of_stages(walk: Any, eqn: Any, value: Lazy | Value, loop: LayerLoop) -> Lazy | Value:
    """Returns a stack as its slices are in a layer, made of an array `[stages, layers / stages, ...]`."""
    if isinstance(value, Lazy) and value.dims is None:
        value = walk.before(value, eqn, "a stack of stages")
    place = loop.place
    if isinstance(value, Value):
        return Value(place.stages(value.array, loop.num_groups), params_only=value.params_only)
    root, options = value.as_root(), walk.options
    # The dims of a layer: without `pipe`, which shards the layers.
    dims, grad_sharding = without(root.shard[1:], place.pipe), _grad_of_stages(walk, value, place)
    assert grad_sharding is not None
    is_grouped, data, stack = loop.num_groups > 1, options.axes.data, root.roots[0]
    with gather_scope(root.path):
        stack = place.stages(stack, loop.num_groups, dims if is_grouped else None)
        stored = [without(dims, data) if options.stored_unsharded else dims]
        if options.stored_unsharded and is_grouped:  # devices sent their shards
            stored = gather_steps(dims, data, options.mesh) or stored
        forward = Chain(tuple(named(options.mesh, (place.pipe, (), *each)) for each in stored))
        stack = reshard(stack, forward=forward, backward=Chain((grad_sharding,)))
    return dataclasses.replace(root, roots=(stack,), aval=root.aval.update(shape=root.aval.shape[1:]), dims=dims)


def _grad_of_stages(
    walk: Any, value: Lazy | Value, place: StagePlace, *, is_stack: bool = True
) -> NamedSharding | None:
    """Returns the sharding of the gradients that stages have of a param; None where it is open.

    They are `[stages, ...]`; of a stack `[stages, layers / stages, ...]`.
    """
    if not isinstance(value, Lazy) or value.dims is None:
        return None
    dims = without(value.as_root().shard, place.pipe)
    return named(walk.options.mesh, (place.pipe, *(((), *dims[1:]) if is_stack else dims)))


def _of_stage(walk: Any, loop: LayerLoop) -> tuple[Any, Any]:
    """Returns the walk over the layers of a stage, on a microbatch, and the jaxpr of a layer that it walks over."""
    options = dataclasses.replace(walk.options, axes=walk.options.axes.of_stage, stages=loop.place)
    jaxpr, num_shards = open_jaxpr(loop.layer)[0], loop.place.num_shards
    roles = [None, *loop.consts, *loop.carry, *[None] * loop.num_slices]
    states, sizes = [], set()
    for role, var in zip(roles, jaxpr.invars, strict=True):
        if role is None or not role.is_rows:
            states.append(FREE)
        else:
            sizes.add(var.aval.shape[role.dim])
            states.append(UNKNOWN if var.aval.shape[role.dim] % num_shards else role.dim)
    layer, examples = anchored(loop.layer, states, mesh=loop.place.mesh, axes=options.axes)
    return type(walk)(options, frozenset(sizes), walk.notes, examples), layer
