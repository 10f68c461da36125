"""Attention cores of a loss function that knows nothing of it, computed by a fused kernel.

The function is traced to a jaxpr. Of each product with a softmax it is derived what function of queries, keys and
values it is; where that is one that `zero_jax.attention.dot_product_attention` computes, it takes its place. Anything
that is not known to be the same function is left as it is, and the report says why (docs/attention.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.attention import Choice, Implementation, mesh_context
from zero_jax.core.field_checks import check_word
from zero_jax.core.signatures import check_arguments, check_callable, place_of
from zero_jax.core.tree import PyTree, eval_shapes
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, inlining, trace_flat
from zero_jax.program.loss import Traced, trace_call, with_pass
from zero_jax.sharding.mesh import Axes, axes_of
from zero_jax.transforms.attention.core import AttentionCore
from zero_jax.transforms.attention.report import AttentionReport, AttentionRow, merged
from zero_jax.transforms.attention.walk import AttentionSearch, SearchedBody, Site, run

_FUNCTION = "give a function of params and further arguments"


def fuse_attention(
    loss_fn: Callable[..., Any],
    attention: str = "fused",
    *,
    mesh: Mesh,
    axes: Axes | None = None,
    implementation: str | None = None,
) -> Callable[..., Any]:
    """Transforms `loss_fn(params, ...)` so that a fused kernel computes its attention where it is the same function.

    The result computes the same values and has the same derivatives, up to rounding.

    Args:
      loss_fn: any traceable function of a params pytree and further arguments.
      attention: `fused`, or `own` for the function as it is.
      mesh: the mesh of the arrays.
      axes: the roles of its axes; None finds them by name.
      implementation: as for `dot_product_attention`.

    Returns:
      A function with the signature of `loss_fn`.

    Raises:
      ValueError: `attention` or `implementation` is unknown.

    Example:
      >>> attend = lambda params, x: jax.nn.dot_product_attention(x, x, x).mean()
      >>> zero.fuse_attention(attend, mesh=mesh)({}, jnp.ones((8, 16, 4, 8))).shape
      ()
    """
    check_callable("loss_fn", loss_fn, remedy=_FUNCTION)
    check_arguments(axes=axes)
    axes = axes or axes_of(mesh)
    check_word("implementation", implementation, get_args(Implementation), is_optional=True)
    check_word("attention", attention, ("own", "fused"))
    if attention == "own":
        return loss_fn

    def kernel(core: AttentionCore, read: Callable[[Any], jax.Array], aval: Any) -> jax.Array:
        with mesh_context(mesh, axes):
            return core(read, aval=aval, implementation=implementation)

    def fused(traced: Traced) -> Traced:
        body, _ = _search(traced, place_of(loss_fn))
        return traced.evaluated(lambda arrays, _: _without_scores(body, arrays, kernel)) if body.is_changed else traced

    return with_pass(loss_fn, fused)


def attention_report(
    loss_fn: Callable[..., Any], params: PyTree, *args: Any, mesh: Mesh | None = None, axes: Axes | None = None
) -> AttentionReport:
    """Reports the attention cores of a function: which ones a fused kernel computes, by what, and why not the others.

    Args:
      loss_fn: the function, as for `fuse_attention`.
      params: arrays or `ShapeDtypeStruct`s.
      *args: its further arguments, likewise.
      mesh: the devices that it is to run on; None takes those of `dot_product_attention` without a mesh.
      axes: the roles of the mesh's axes; None finds them by name.

    Example:
      >>> attend = lambda params, x: jax.nn.dot_product_attention(x, x, x).mean()
      >>> report = zero.attention_report(attend, {}, jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16"), mesh=mesh)
      >>> len(report.rows)
      1
    """
    check_callable("loss_fn", loss_fn, remedy=_FUNCTION)
    check_arguments(axes=axes, **({} if mesh is None else {"mesh": mesh}))
    rows: list[AttentionRow] = []

    def search(params: PyTree, *args: Any) -> Any:
        traced, values = trace_call(loss_fn, params, args, {})
        _, found = _search(traced, place_of(loss_fn))
        with contextlib.nullcontext() if mesh is None else mesh_context(mesh, axes or axes_of(mesh)):
            for row, core in found.rows:
                choice = Choice(implementation="") if core is None else core.choice(_zeros)
                rows.append(dataclasses.replace(row, kernel=choice.implementation, fallback=choice.reason))
        return values

    eval_shapes(search, params, *args)
    return AttentionReport(rows=merged(rows))


def _zeros(x: Any) -> jax.Array:
    """Returns an array in place of a variable or a leaf, of which the choice of a kernel reads no values."""
    aval = getattr(x, "aval", x)
    return jnp.zeros(aval.shape, aval.dtype)


def _search(traced: Traced, line: str) -> tuple[SearchedBody, AttentionSearch]:
    search = AttentionSearch()
    data = [i >= traced.num_params for i in range(len(jaxprs.open_jaxpr(traced.closed)[0].invars))]
    return search.body(traced.closed, [None] * len(data), data, Site(times=1, line=line)), search


def _without_scores(body: SearchedBody, arrays: Sequence[Any], kernel: Callable[..., Any]) -> list[Any]:
    """Evaluates a body without what was computed for its attention alone."""
    closed = trace_flat(lambda *xs: run(body, xs, kernel), [jax.typeof(x) for x in arrays])
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    return evaluate(jaxprs.without_dead_code(jaxpr), consts, arrays, inlining())
