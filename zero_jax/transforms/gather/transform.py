"""Gather-on-use: ZeRO-3 (and the gradients of ZeRO-1 and 2) for a loss function that knows nothing of it.

The function is traced to a jaxpr, and the jaxpr is walked with the sharded params marked. Casts, transposes and slices
stay on the shard; at its first real use a param is gathered, inside the scan body or checkpointed region that uses it.
The transpose of the gather moves the cotangent to the shard, which is what makes XLA emit a reduce-scatter.
docs/gather_on_use.md gives the reason of each rule.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zero_jax.attention import mesh_context
from zero_jax.core.agreement import by_value, values_elsewhere
from zero_jax.core.signatures import check_arguments, check_callable, place_of
from zero_jax.core.tree import PyTree, is_key, leaves_by_name
from zero_jax.dims import FREE, UNKNOWN, is_float
from zero_jax.program import jaxprs
from zero_jax.program.loss import LossProgram, Traced, with_pass
from zero_jax.program.walk import as_it_is
from zero_jax.sharding.chains import Chain, gather_scope, reshard
from zero_jax.sharding.mesh import axes_of, axis_size, on_mesh
from zero_jax.sharding.model_specs import dims_by_name
from zero_jax.sharding.quantized import PLAIN, Formats, Quantize, check_quantize
from zero_jax.sharding.spec import Dims, carries, named
from zero_jax.transforms.gather.anchors import anchored
from zero_jax.transforms.gather.deferred import (
    MAX_HOISTED_BYTES,
    GatherOptions,
    HostParam,
    Lazy,
    Value,
    array_of,
    device_sum,
    fetch,
    fetch_as,
    used_shapes,
)
from zero_jax.transforms.gather.events import GatherEvent, GatherReport, Notes, WideUse
from zero_jax.transforms.gather.loops import vectors_together
from zero_jax.transforms.gather.per_device import summed_use
from zero_jax.transforms.gather.sorted_rows import sorted_by_device
from zero_jax.transforms.gather.walk import GatherFrame, GatherWalk
from zero_jax.transforms.weight_grads import is_narrower

# By the processes of a mesh and the place of a function, the shapes that it was traced for so far
_SHAPES_SEEN: dict[str, set[str]] = collections.defaultdict(set)


def gather_on_use(
    fn: Callable[..., Any],
    specs: PyTree,
    *,
    mesh: Mesh,
    keep_gathered: bool = False,
    reduce_dtype: Any = None,
    data_axes: Sequence[str] | None = None,
    replica_axes: Sequence[str] | None = None,
    pipe_axes: Sequence[str] | None = None,
    max_hoisted_bytes: int = MAX_HOISTED_BYTES,
    quantize: Quantize | None = None,
) -> Callable[..., Any]:
    """Transforms `fn(params, ...)` so that sharded params are gathered where they are used and released after.

    The result computes the same values and has the same derivatives. Gradients come out sharded like the params.

    Args:
      fn: any traceable function of a params pytree and further arguments; its own `jax.checkpoint`s are respected.
      specs: a `PartitionSpec` or `NamedSharding` for each leaf of the params (or a prefix of that tree).
      mesh: the mesh of the specs.
      keep_gathered: keep gathered params from the forward to the backward pass outside of `jax.checkpoint` regions:
        a third less traffic for the memory of the whole params.
      reduce_dtype: dtype in which gradients are summed across devices; None sums in their own.
      data_axes: the mesh axes to gather over, if they are not called `data` or `data_*`.
      replica_axes: the mesh axes of the batch besides `data_axes`, if not called `replica`.
      pipe_axes: those of `data_axes` that are stages of a pipeline, if not called `pipe` or `pipe_*`.
      max_hoisted_bytes: params that a loop uses whole in every iteration are gathered once before the loop if all of
        them together take at most this many bytes, else in every iteration.
      quantize: the formats that params are gathered in (its `gathers`); the function is then one of rounded params,
        and its gradients are those at them.

    Returns:
      A function with the signature of `fn`.

    Raises:
      ValueError: the specs do not fit the params.

    Example:
      >>> specs = zero.state_shardings(state, mesh=mesh, config=config).params
      >>> gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh)
      >>> jax.jit(jax.grad(gathered))(state.params, batch)["up"].sharding.shard_shape((64, 64))
      (64, 8)
    """
    check_callable("fn", fn, remedy="give a function of params, as gather_on_use(fn, specs, mesh=mesh)")
    axes = axes_of(mesh, data=data_axes, replica=replica_axes, pipe=pipe_axes)
    check_arguments(
        specs=specs, keep_gathered=keep_gathered, reduce_dtype=reduce_dtype, max_hoisted_bytes=max_hoisted_bytes
    )
    options = GatherOptions(
        mesh=mesh,
        axes=axes,
        regather=not keep_gathered,
        reduce_dtype=reduce_dtype,
        max_hoisted_bytes=max_hoisted_bytes,
        quantize=check_quantize(quantize),
    )
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) > 1 and not isinstance(fn, LossProgram):
        fn = _compared(fn, processes)
    return gathered(fn, specs, options)


def _compared(fn: Callable[..., Any], processes: Collection[int]) -> Callable[..., Any]:
    """Returns a function that warns where another process traces it for other shapes: of a program of its own.

    A batch that each process makes of its own examples has no size in common, and nothing else compares it.
    """
    name = place_of(fn)
    of_these = f"{name} in processes {sorted(processes)}"  # on a mesh of its own a process may do what others do not
    seen = _SHAPES_SEEN[of_these]

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = leaves_by_name({**{str(i): x for i, x in enumerate(args[1:], 1)}, **kwargs}).items()
        arrays = (f"argument {path} {jax.typeof(x).str_short()}" for path, x in leaves if isinstance(x, jax.Array))
        shapes = ", ".join(arrays)
        if shapes not in seen:
            seen.add(shapes)
            # The first shapes are compared with the first elsewhere, the second with the second.
            others = values_elsewhere(f"shapes {len(seen)} of {of_these}", shapes)
            if differing := by_value({p: x for p, x in others.items() if p in processes and x != shapes}):
                warnings.warn(
                    f"process {jax.process_index()} calls {name} with {shapes}, and not {differing}: give each process "
                    "as many examples for each of its devices, else steps are wrong, or wait for ever",
                    stacklevel=2,
                )
        return fn(*args, **kwargs)

    return call


def gather_report(fn: Callable[..., Any], specs: PyTree, *args: Any, mesh: Mesh, **options: Any) -> GatherReport:
    """Reports where `gather_on_use(fn, specs, mesh=mesh, **options)` gathers, for arguments of these shapes.

    Args:
      fn: the function, as for `gather_on_use`.
      specs: the specs, as for `gather_on_use`.
      *args: arrays or `ShapeDtypeStruct`s: the params and the further arguments of `fn`.
      mesh: the mesh of the specs.
      **options: further options of `gather_on_use`.

    Example:
      >>> specs = zero.state_shardings(state, mesh=mesh, config=config).params
      >>> report = zero.gather_report(loss_fn, specs, state.params, batch, mesh=mesh)
      >>> print(str(report).splitlines()[0])
      2 gathers, 0 of them early; 0 uses in a wider dtype
    """
    roles = {role: options.get(f"{role}_axes") for role in ("data", "replica", "pipe")}
    axes = axes_of(mesh, **roles)
    program = gather_on_use(LossProgram(fn), specs, mesh=mesh, **options)
    with on_mesh(mesh), mesh_context(mesh, axes):
        events = program.notes(*args)
    return GatherReport(
        events=tuple(event for event in events if isinstance(event, GatherEvent)),
        wide=tuple(dict.fromkeys(event for event in events if isinstance(event, WideUse))),
    )


def gathered(fn: Callable[..., Any], specs: PyTree, options: GatherOptions) -> Any:
    """Transforms `fn(params, ...)` so that its params are gathered, or their gradients summed, where they are used.

    `specs` are those of the params, or where params are stored whole those of their gradients.

    Raises:
      NotImplementedError: when a mapped function is differentiated, a gradient that the walk cannot bring to its uses.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with on_mesh(options.mesh), mesh_context(options.mesh, options.axes):
            yield

    def run(traced: Traced, leaves: Sequence[Any], events: list[GatherEvent | WideUse] | None) -> list[Any]:
        values = leaves[traced.num_params :]
        params = jax.tree.unflatten(traced.params_tree, leaves[: traced.num_params])
        closed, marked = traced.closed, _mark(params, specs, options)
        examples = None
        if not options.mapped:
            size = axis_size(options.mesh, options.axes.batch)
            # A scalar, such as a key, is no example.
            of_batch = (FREE if not np.ndim(x) else UNKNOWN if x.shape[0] % size else 0 for x in values)
            states = [*(FREE for _ in marked), *of_batch]
            if "sort" in traced.primitives:
                closed = sorted_by_device(closed, states, mesh=options.mesh, axes=options.axes)
            closed, examples = anchored(closed, states, mesh=options.mesh, axes=options.axes)
        batch_sizes = frozenset(value.shape[0] for value in values if np.ndim(value))
        walk = GatherWalk(options, batch_sizes, Notes(events, gathers=not options.stored_unsharded), examples)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        ins = vectors_together(walk, jaxpr, [*marked, *(Value(value, params_only=False) for value in values)])
        frame = GatherFrame(regather=options.regather, prevent_cse=True, ends_forward=True)
        # Arrays that the function closes over may be its batch: only scalars are sure to be mere constants.
        closed_over = [Value(c, params_only=jnp.ndim(c) == 0) for c in consts]
        return [array_of(options, out) for out in walk.evaluate(jaxpr, closed_over, ins, frame)]

    return with_pass(fn, lambda traced: traced.evaluated(functools.partial(run, traced)), context)


def _mark(params: PyTree, specs: PyTree, options: GatherOptions) -> list[Lazy | Value]:
    """Marks the params that are (or whose gradients are) sharded over `data`; with a reduce dtype, whole ones too."""
    marked: list[Lazy | Value] = []
    dtype = options.product_dtype
    each = dims_by_name(used_shapes(params), specs, mesh=options.mesh)
    for leaf, (name, dims) in zip(jax.tree.leaves(params), each, strict=True):
        formats = PLAIN
        if options.quantize is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
            formats = options.quantize.formats(name)
        if isinstance(leaf, HostParam):
            marked.append(_fetched(leaf, name, dims, formats, options))
            continue
        aval = jax.typeof(leaf)
        if carries(dims, options.axes.data) and not is_key(aval):
            root = _root(leaf, name, dims, options) if is_float(aval) else leaf
            marked.append(Lazy((root,), as_it_is, aval, name, dims, formats=formats))
        elif options.mapped and is_float(aval):
            marked.append(Value(_root(leaf, name, dims, options), params_only=True))
        elif is_narrower(aval, dtype) or (is_float(aval) and aval.ndim > 1):
            # Of no axes: it is followed to its uses, whose products sum its gradient in the reduce dtype. Of a small
            # one, as of a table of biases, each device may have a copy there.
            marked.append(Lazy((leaf,), as_it_is, aval, name, ((),) * aval.ndim))
        else:
            marked.append(Value(leaf, params_only=True))
    return marked


def _root(leaf: jax.Array, name: str, dims: Dims, options: GatherOptions) -> jax.Array:
    """Returns a param, or what stands for it, whose cotangents add up to a shard, whatever its uses are."""
    is_sharded = carries(dims, options.axes.data)
    if options.mapped:
        refusal = f"the gradient of {name!r} is not summed at each of its uses" if is_sharded else ""
        return summed_use(leaf, device_sum(options, dims, refusal=refusal))
    with gather_scope(name):
        backward = Chain((named(options.mesh, dims),)) if is_sharded else Chain()
        return reshard(leaf, forward=Chain(), backward=backward)


def _fetched(param: HostParam, name: str, dims: Dims, formats: Formats, options: GatherOptions) -> Lazy:
    roots, build = (param.array,), fetch_as(param.dtype)
    if param.gradient is not None:
        roots, build = (*roots, _root(param.gradient, name, dims, options)), fetch
    dims = dims if carries(dims, options.axes.data) else ((),) * param.array.ndim
    aval = jax.typeof(jnp.zeros(param.array.shape, param.dtype))
    return Lazy(roots, build, aval, name, dims, formats=formats, on_host=True)
