"""Whether an attention that was found is one that the kernel computes, and the kernel's arguments for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.attention import Choice, attention_choice, dot_product_attention
from zero_jax.dims import SAME_ELEMENTS
from zero_jax.sharding.precision import promoted
from zero_jax.transforms.attention.dims import Index, Indices, all_leaves, before, leaves
from zero_jax.transforms.attention.followed import MASKED, Followed, Logits
from zero_jax.transforms.attention.prove import Prover
from zero_jax.transforms.attention.softmax import number
from zero_jax.transforms.attention.tables import BandTerm, Leaf, Pattern, Same, Term


class NotTheSame(Exception):
    """The kernel does not compute this; the argument says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """`low <= query - key <= high` (None does not bound), within segments."""

    low: int | None = None
    high: int | None = None
    segments: tuple[Leaf, tuple[Index, ...]] | None = None

    @property
    def is_causal(self) -> bool:
        """Whether keys after the query are masked."""
        return self.low == 0

    def window(self, num_queries: int, num_keys: int) -> tuple[int, int] | None:
        """Returns how many keys to the left and to the right a query sees; None if that is not bounded."""
        if self.high is None and (self.low is None or self.is_causal):
            return None
        left = num_queries if self.high is None else self.high
        return left, num_keys if self.low is None else -self.low

    def __str__(self) -> str:
        parts = ["causal"] if self.is_causal else []
        if self.high is not None or self.low not in (None, 0):
            ends = (-math.inf if self.high is None else -self.high, math.inf if self.low is None else -self.low)
            parts.append(f"window {ends[0]:g} to {ends[1]:g}")
        return ", ".join([*parts, *(["segments"] if self.segments else [])]) or "no mask"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCore:
    """An attention as the kernel computes it."""

    # Queries, keys and values: variables of the jaxpr, and the indices of their dims
    operands: tuple[tuple[Any, Indices], ...]
    batch: tuple[Index, ...]  # indices of the batch
    queries: tuple[Index, ...]  # indices of the places of queries
    keys: tuple[Index, ...]  # indices of the places of keys
    heads: tuple[Index, ...]  # indices of the heads of keys
    groups: tuple[Index, ...]  # indices of the queries' heads that share a head of keys
    features: tuple[Index, ...]  # contracted indices of queries and keys
    results: tuple[Index, ...]  # indices of the values' features
    indices: Indices  # indices of the result's dims
    scale: float  # what the logits are multiplied by
    cap: float | None  # their soft cap
    mask: Mask  # which keys a query sees

    def __call__(self, read: Callable[[Any], jax.Array], *, aval: Any, implementation: Any = None) -> jax.Array:
        """Calls the kernel for a result of such an `aval`; `read` returns the array of a variable or a leaf."""
        arrays, arguments = self.arguments(read)
        out = dot_product_attention(*arrays, **arguments, implementation=implementation)
        order = self.batch + self.queries + self.heads + self.groups + self.results
        out = _arranged(out.reshape([i.size for i in order]), tuple((i,) for i in order), list(self.indices))
        return out.reshape(aval.shape).astype(aval.dtype)

    def choice(self, read: Callable[[Any], jax.Array]) -> Choice:
        """Returns which implementation the devices take; `read` is as for a call."""
        arrays, arguments = self.arguments(read)
        return attention_choice(*arrays, **arguments)

    def arguments(self, read: Callable[[Any], jax.Array]) -> tuple[list[jax.Array], dict[str, Any]]:
        """Returns queries, keys and values, and the other arguments of `dot_product_attention`."""
        (query, q_dims), (key, k_dims), (value, v_dims) = self.operands
        q, k, v = read(query), read(key), read(value)
        dtype = jnp.result_type(q, k, v)
        q = _arranged(q, q_dims, [self.batch, self.queries, self.heads + self.groups, self.features])
        k = _arranged(k, k_dims, [self.batch, self.keys, self.heads, self.features])
        v = _arranged(v, v_dims, [self.batch, self.keys, self.heads, self.results])
        arguments: dict[str, Any] = {
            "scale": self.scale,
            "is_causal": self.mask.is_causal,
            "local_window_size": self.mask.window(q.shape[1], k.shape[1]),
            "logits_soft_cap": self.cap,
        }
        if self.mask.segments is not None:
            leaf, indices = self.mask.segments
            ids = read(leaf).reshape([index.size for index in indices])
            dims = tuple((index,) for index in indices)
            arguments["segment_ids"] = _arranged(ids, dims, [self.batch, self.queries]).astype(jnp.int32)
        return [x.astype(dtype) for x in (q, k, v)], arguments

    def __str__(self) -> str:
        sizes = [math.prod(index.size for index in part) for part in (self.batch, self.queries, self.keys)]
        heads = math.prod(index.size for index in self.heads)
        num_heads = heads * math.prod(index.size for index in self.groups)
        parts = [f"batch {sizes[0]}, {sizes[1]} x {sizes[2]}", f"{num_heads} heads"]
        parts[1] += f" ({heads} of keys)" if heads != num_heads else ""
        parts.append(str(self.mask))
        return ", ".join(parts + ([f"soft cap {self.cap:g}"] if self.cap else []))


def _arranged(array: jax.Array, indices: Indices, groups: Sequence[Sequence[Index]]) -> jax.Array:
    """Returns an array with a dim for each group of indices; along those that it lacks it is broadcast."""
    own = all_leaves(indices)
    wanted = [index for group in groups for index in leaves(group)]
    array = array.reshape([index.size for index in own])
    array = array.transpose([own.index(index) for index in wanted if index in own])
    array = array.reshape([index.size if index in own else 1 for index in wanted])
    array = jnp.broadcast_to(array, [index.size for index in wanted])
    return array.reshape([math.prod(index.size for index in leaves(group)) for group in groups])


def make_core(found: Followed, prover: Prover) -> AttentionCore:
    """Returns the kernel's arguments for a softmax that was multiplied with values; raises `NotTheSame` for others."""
    logits = found.logits
    assert logits is not None and found.values is not None
    if logits.terms and logits.fill > MASKED:
        raise NotTheSame(f"masked logits are as high as {logits.fill:g}, so masked keys may have weights above 0")
    for eqn in (logits.product.eqn, prover.producers[found.result]):
        precision = eqn.params["precision"]
        each = precision if isinstance(precision, tuple) else (precision,)
        if any(x in (lax.Precision.HIGH, lax.Precision.HIGHEST) for x in each):
            raise NotTheSame("its products are of a higher precision than the kernel's")
    keys = frozenset(leaves(found.contracted))
    sets = [frozenset(all_leaves(indices)) for _, indices in logits.product.operands]
    side = next((i for i in (1, 0) if keys <= sets[i] - sets[1 - i]), None)
    if side is None:
        raise NotTheSame("the softmax is not over the keys")
    if any(var is None for var, _ in (*logits.product.operands, found.values)):
        raise NotTheSame("an operand is a constant")
    query = _peeled(logits.product.operands[1 - side], prover, scales=True, repeats=False)
    key = _peeled(logits.product.operands[side], prover, scales=True, repeats=True)
    # Casts of the values stay: their dtype is that of the result.
    value = _peeled(found.values, prover, scales=False, repeats=True)
    for x in (query, key, value):
        if x.var.aval.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotTheSame(f"an operand is {x.var.aval.dtype}, and the kernel computes in float32")
    roles = _roles(logits, keys, [all_leaves(x.indices) for x in (query, key, value)])
    scale = logits.scale * query.factor * key.factor * (1.0 if logits.cap is None else logits.cap)
    cap = None if logits.cap is None else abs(logits.cap)
    operands = tuple((x.var, x.indices) for x in (query, key, value))
    return AttentionCore(operands=operands, scale=scale, cap=cap, indices=found.indices, **roles)


def _roles(logits: Logits, keys: frozenset[Index], operands: Sequence[tuple[Index, ...]]) -> dict[str, Any]:
    of_query, of_key, of_value = operands
    everywhere = all_leaves(logits.product.indices)
    # Of queries alone are their places, and heads that share one of keys; with keys they share the batch and heads.
    own = tuple(i for i in everywhere if i in of_query and i not in (*of_key, *of_value))
    shared = tuple(i for i in everywhere if i not in keys and i not in own)
    queries = _mask_queries(logits.terms, keys, own)
    if not logits.terms:  # where all queries see all keys, any of their own dims can be the places
        largest = max((index.size for index in own), default=None)
        queries = tuple(index for index in own if index.size == largest)[-1:]
    mask = _mask(logits.terms, queries, tuple(i for i in of_key if i in keys))
    ahead = of_query[: of_query.index(queries[0])] if queries else of_query
    batch = tuple(index for index in shared if index in ahead)[:1]
    if mask.segments is not None:
        of_segments = set(mask.segments[1]) - {*queries}
        if not of_segments <= {*shared}:
            raise NotTheSame("segments differ among heads that share keys")
        batch = tuple(index for index in shared if index in {*batch, *of_segments})
    return {
        "batch": batch,
        "queries": queries,
        "keys": tuple(i for i in of_key if i in keys),
        "heads": tuple(index for index in shared if index not in batch),
        "groups": tuple(index for index in own if index not in queries),
        "features": tuple(i for i in of_key if i in of_query and i not in everywhere),
        "results": tuple(i for i in of_value if i not in everywhere),
        "mask": mask,
    }


def _mask_queries(terms: frozenset[Term], keys: frozenset[Index], own: tuple[Index, ...]) -> tuple[Index, ...]:
    found: set[Index] = set()
    for term in terms:
        if isinstance(term, Pattern):
            raise NotTheSame("the mask is neither causal nor a window")
        if isinstance(term, BandTerm):
            indices = {term.first, term.second}
        else:
            differ = [pair for pair in zip(term.first, term.second, strict=True) if pair[0] is not pair[1]]
            if len(differ) != 1:
                raise NotTheSame("the mask compares integers that are no segments of a sequence")
            indices = {*differ[0]}
        rest = indices - keys
        if len(indices) != 2 or len(rest) != 1 or len(keys) != 1 or not rest <= {*own}:
            raise NotTheSame("the mask is over other dims than queries and keys")
        found |= rest
    if len(found) > 1:
        raise NotTheSame("the masks are of several dims of queries")
    return tuple(found)


def _mask(terms: frozenset[Term], queries: tuple[Index, ...], keys: tuple[Index, ...]) -> Mask:
    """Returns the mask; its rows have been found to be of `queries`, its columns of `keys`."""
    if not terms:
        return Mask()
    num_queries, num_keys = queries[0].size, keys[0].size
    low, high = 1 - num_keys, num_queries - 1  # of the place of a query less that of a key
    segments = None
    for term in terms:
        if isinstance(term, BandTerm):
            bounds = (-term.high, -term.low) if term.first is keys[0] else (term.low, term.high)
            low, high = max(low, bounds[0]), min(high, bounds[1])
        elif isinstance(term, Same):
            if segments is not None:
                raise NotTheSame("two arrays of segments")
            if jnp.dtype(term.leaf.dtype).itemsize > 4:
                raise NotTheSame(f"segments are {term.leaf.dtype}, and the kernel takes int32")
            segments = term.leaf, term.first if queries[0] in term.first else term.second
    # The first query sees a key if `low <= 0`, the last one if the first of its keys is one; those between do, too. In
    # segments only a query's own place is sure to be of its segment.
    sees_itself = low <= 0 <= high and num_queries == num_keys
    if low > min(0, high) or num_queries - 1 - high > num_keys - 1 or (segments is not None and not sees_itself):
        raise NotTheSame("the mask leaves rows without a key, or none is sure to be there")
    if not low <= 0 <= high:
        raise NotTheSame(f"the mask is a window from {-high} to {-low}, which does not have the query's own place")
    return Mask(
        low=None if low <= 1 - num_keys and num_keys > 1 else low,
        high=None if high >= num_queries - 1 else high,
        segments=segments,
    )


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of the kernel: a variable, the indices of its dims, and what it is multiplied by."""

    var: Any
    indices: Indices
    factor: float = 1.0


def _peeled(operand: tuple[Any, Indices], prover: Prover, *, scales: bool, repeats: bool) -> _Operand:
    """Returns what an operand was before it was cast to a wider dtype, multiplied by a number or repeated.

    The kernel sums in float32, multiplies by numbers (these are left out if it `scales`), and reads one head of keys
    for several of queries (repeated heads are taken once if it `repeats`).
    """
    best = x = _Operand(*operand)
    while (eqn := prover.producers.get(x.var)) is not None and len(eqn.outvars) == 1:
        name, is_better = eqn.primitive.name, True
        if name == "convert_element_type" and scales:
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if not jnp.issubdtype(old, jnp.floating) or promoted(old, new) != new:
                break
            x = dataclasses.replace(x, var=eqn.invars[0])
        elif name in ("mul", "div") and scales:
            numbers = [*map(number, prover.of_atoms(eqn.invars, prover.known))]
            place = 0 if name == "div" or numbers[1] is not None else 1
            value = numbers[1 - place]
            if not value or not math.isfinite(value):
                break
            x = _Operand(eqn.invars[place], x.indices, x.factor * value if name == "mul" else x.factor / value)
        elif repeats and _is_repeated(x.var, prover) and (earlier := before(eqn, x.indices)) is not None:
            # A transpose or reshape alone is no gain: it is only passed on the way to the repetition.
            x, is_better = _Operand(eqn.invars[0], earlier, x.factor), name == "broadcast_in_dim"
        else:
            break
        if x.var not in prover.known:  # a literal
            break
        best = x if is_better else best
    return best


def _is_repeated(var: Any, prover: Prover) -> bool:
    """Tells whether a variable is a repetition of another one, but for transposes and reshapes."""
    while (eqn := prover.producers.get(var)) is not None and eqn.primitive.name in SAME_ELEMENTS:
        before_, after_ = (math.prod(x.aval.shape) for x in (eqn.invars[0], eqn.outvars[0]))
        if before_ < after_:
            return True
        var = eqn.invars[0]
    return False
