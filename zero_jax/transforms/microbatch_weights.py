"""The weight of a microbatch: what its mean loss is a mean over.

The mean of means is the mean of the whole only if every part weighs the same. A loss that is a mean over something
uneven, such as the tokens that a mask leaves, ends in a division by a value of the batch; that divisor is the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import TracedFunction, evaluate, flattened, inlining, trace_flat
from zero_jax.core.passes import Dependence, Pass
from zero_jax.core.tree import PyTree
from zero_jax.sharding.precision import wide

# After these a quotient is still that quotient, up to a factor and a term that no example has a part in.
_KEEP_WEIGHT = frozenset(
    {"convert_element_type", "neg", "reshape", "squeeze", "copy", "mul", "name", "add", "sub", "stop_gradient"}
)
_PARAMS = frozenset({0})
# Added to a sum that something is divided by, a number up to this is there to avoid 0 / 0.
EPSILON = 1e-5


class PartWeight(NamedTuple):
    """The weight of parts of a batch: a scalar for one part, or arrays of those of several.

    A divisor is often bounded, as `jnp.maximum(count, 1)` is. The bounded divisors of parts do not add up to that of
    the batch, which is the larger of the sum of their counts and the bound.

    Attributes:
      count: what the loss is a mean over, such as a number of tokens: 0 for an empty part.
      divisor: what the loss is divided by: `count`, or the bound if it is larger.
      bound: the bound; minus infinity where there is none.
      epsilon: what is added to them in `divisor`, to avoid 0 / 0.
    """

    count: Any
    divisor: Any
    bound: Any = -np.inf
    epsilon: Any = 0.0

    def joined(self) -> PartWeight:
        """Returns the weight of all parts together."""
        count, bound, epsilon = jnp.sum(self.count), jnp.max(self.bound), jnp.max(self.epsilon)
        return PartWeight(count, jnp.maximum(count, bound) + epsilon, bound, epsilon)


def with_weight(loss_fn: Callable[..., Any], loss_weight: str | None) -> TracedFunction:
    """Returns `loss_fn` with its `PartWeight`: `(variables, batch, key) -> (loss, (aux, model_state, weight))`.

    Args:
      loss_fn: a `LossFunction`, or what was made of one: `(variables, batch, key) -> (loss, (aux, model_state))`.
      loss_weight: name of an entry of aux; `auto` finds the divisor that the loss ends in, and gives 1 where it ends in
        none; None gives 1.
    """

    def add_weight(closed: Any, out_shape: Any, args: tuple[PyTree, ...]) -> tuple[Any, Any]:
        one, unbounded, nothing = (jaxprs.literal(np.float32(x)) for x in (1, -np.inf, 0))
        weight = PartWeight(one, one, unbounded, nothing)
        closed = _without_duplicates(closed, num_params=len(jax.tree.leaves(args[0])))
        if loss_weight == "auto":
            closed, found = _find_divisor(closed, num_params=len(jax.tree.leaves(args[0])))
            if found is not None:
                weight = found._replace(bound=found.bound or unbounded, epsilon=found.epsilon or nothing)
        opened, _ = jaxprs.open_jaxpr(closed)
        loss, (aux, model_state) = jax.tree.unflatten(jax.tree.structure(out_shape), opened.outvars)
        if loss_weight not in ("auto", None):
            named = _named(aux, loss_weight)
            weight = PartWeight(named, named, unbounded, nothing)
        results, tree = jax.tree.flatten((loss, (aux, model_state, weight)))
        return jaxprs.with_results(closed, results), jax.tree.unflatten(tree, [atom.aval for atom in results])

    return TracedFunction(loss_fn if isinstance(loss_fn, TracedFunction) else TracedFunction(loss_fn), add_weight)


def divided_by_nonzero(weighted: TracedFunction) -> TracedFunction:
    """Divides the sums of parts whose divisor is 0 by 1, which is their divisor then: the batch's sum has them, too.

    So it is in detection, where a part without objects has a loss, and divides it by 0. What is added to such a mean
    counts by the divisor itself, and is 0 in these parts. Divisors with a bound stay as they are.

    Args:
      weighted: what `with_weight` returned.
    """

    def rewrite(closed: Any, out_shape: Any, args: tuple[PyTree, ...]) -> tuple[Any, Any]:
        num_params, env = len(jax.tree.leaves(args[0])), dict[Any, _Quotient]()
        opened, consts = jaxprs.open_jaxpr(closed)
        found = _quotients(opened, num_params, env).divisor
        if any(env[var].divisor for eqn in opened.eqns if jaxprs.inner_jaxprs(eqn) for var in eqn.outvars):
            opened, consts = jaxprs.open_jaxpr(flattened(opened, consts))  # terms are added in a nested `jit`
            found = _quotients(opened, num_params, env).divisor
        count, divisor, *_ = opened.outvars[-len(PartWeight._fields) :]
        casts = {x.outvars[0]: x.invars[0] for x in opened.eqns if x.primitive.name == "convert_element_type"}
        is_weight = found is not None and _origin(found.count, casts) is _origin(count, casts)
        if found is None or found.bound is not None or not is_weight or divisor is not count:
            return closed, out_shape
        division = _NonzeroDivision(found.count, env)

        def function(*arrays: Any) -> list[Any]:
            *results, divisor, bound, epsilon = evaluate(opened, consts, arrays, division.equation)
            return [*results, nonzero(divisor), bound, epsilon]

        return trace_flat(function, [var.aval for var in opened.invars]), out_shape

    return TracedFunction(weighted, rewrite)


class _NonzeroDivision:
    """Evaluates equations, divisions by `divisor` by 1 where it is 0."""

    def __init__(self, divisor: Any, quotients: Mapping[Any, _Quotient]):
        self.divisor, self.quotients = divisor, quotients
        self.value: Any = None

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Returns the values of the results of an equation."""
        name = eqn.primitive.name
        if name == "div" and eqn.invars[1] is self.divisor:
            self.value = values[1]
            values = [values[0], nonzero(values[1])]
        elif name in ("add", "sub") and self.is_mean(eqn.outvars[0]):
            none = self.value == 0
            values = [
                x if self.is_mean(atom) else jnp.where(none, jnp.zeros_like(x), x)
                for atom, x in zip(eqn.invars, values, strict=True)
            ]
        return jaxprs.bind(eqn, values)

    def is_mean(self, atom: Any) -> bool:
        """Tells whether a value is a mean with this divisor."""
        found = None if jaxprs.is_literal(atom) else self.quotients[atom].divisor
        return found is not None and found.count is self.divisor


def _origin(atom: Any, casts: Mapping[Any, Any]) -> Any:
    """Returns what a value is a cast of."""
    while not jaxprs.is_literal(atom) and atom in casts:
        atom = casts[atom]
    return atom


def nonzero(total: jax.Array) -> jax.Array:
    """Returns a sum of weights to divide by: 1 where it is 0."""
    return jnp.where(total == 0, 1, total)


def weight_alone(traced: TracedFunction, variables: PyTree, batch: PyTree, key: Any) -> Callable[..., Any] | None:
    """Returns the `PartWeight` of a part of a batch as a function of that and a key; None if all parts weigh the same.

    Args:
      traced: what `with_weight` returned.
      variables: the params, or `Variables`.
      batch: a batch.
      key: a key.

    Raises:
      NotImplementedError: the weight depends on the params.
    """

    def jaxpr_of(*args: Any) -> tuple[Any, Any]:
        closed, out_shape = traced.trace(*args)
        _, (*_, weight) = jax.tree.unflatten(jax.tree.structure(out_shape), jaxprs.open_jaxpr(closed)[0].outvars)
        return jaxprs.without_dead_code(jaxprs.with_results(closed, weight)), jaxprs.open_jaxpr(closed)[1]

    def weigh(batch: PyTree, key: Any) -> PartWeight:
        jaxpr, consts = jaxpr_of(variables, batch, key)
        weight = evaluate(jaxpr, consts, jax.tree.leaves((variables, batch, key)), inlining())
        return PartWeight(*(jnp.asarray(x, wide(x.dtype)) for x in weight))

    used = jaxprs.used_inputs(jaxpr_of(variables, batch, key)[0])
    if any(used[: len(jax.tree.leaves(variables))]):
        raise NotImplementedError("the weight of a part of the batch depends on the params")
    return weigh if any(used) else None


def _named(aux: PyTree, name: str) -> Any:
    if isinstance(aux, Mapping) and name in aux:
        return aux[name]
    has = sorted(aux) if isinstance(aux, Mapping) else type(aux).__name__
    raise ValueError(
        f"loss_weight={name!r}, but the aux that loss_fn returned has no such entry (it has {has}): "
        f"return (loss, {{..., {name!r}: weight}})"
    )


def _without_duplicates(closed: Any, *, num_params: int) -> Any:
    """Returns a jaxpr that computes each value of the batch once: sums of one mask are one divisor, not two."""
    opened, _ = jaxprs.open_jaxpr(closed)
    read = {x for x in opened.outvars if not jaxprs.is_literal(x)}
    read.update(var for eqn in opened.eqns for var in jaxprs.variables(eqn))
    made_of: dict[Any, frozenset[int]] = {}
    Dependence().run(opened, [_PARAMS if i < num_params else frozenset() for i in range(len(opened.invars))], made_of)
    known: dict[Any, Any] = {}
    same: dict[Any, Any] = {}
    eqns = []
    for eqn in opened.eqns:
        eqn = eqn.replace(invars=[x if jaxprs.is_literal(x) else same.get(x, x) for x in eqn.invars])
        of_params = any(made_of[var] for var in eqn.outvars)
        if not of_params and not eqn.effects and read.issuperset(eqn.outvars):
            try:
                first = known.setdefault((eqn.primitive, *map(_key, eqn.invars), *sorted(eqn.params.items())), eqn)
            except TypeError:  # a parameter that has no hash
                first = eqn
            if first is not eqn:
                same.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        eqns.append(eqn)
    results = [x if jaxprs.is_literal(x) else same.get(x, x) for x in opened.outvars]
    return jaxprs.with_results(closed, results, eqns=eqns) if same else closed


def _key(atom: Any) -> Any:
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if jaxprs.is_literal(atom) else atom


def _find_divisor(closed: Any, *, num_params: int) -> tuple[Any, PartWeight | None]:
    """Returns the divisor that the first result ends in, or None, and a jaxpr of which its atoms are."""
    for _ in range(2):
        opened, consts = jaxprs.open_jaxpr(closed)
        env: dict[Any, _Quotient] = {}
        divisor = _quotients(opened, num_params, env).divisor
        if divisor is None or all(x is None or jaxprs.is_literal(x) or x in env for x in divisor):
            break
        # It has a variable of a nested `jit`.
        closed = flattened(opened, consts)
    return closed, divisor


def _quotients(opened: Any, num_params: int, env: dict[Any, _Quotient]) -> _Quotient:
    """Returns what the first result of a jaxpr is, and adds what all its variables are to `env`."""
    params, batch = opened.invars[:num_params], opened.invars[num_params:]
    inputs = [_Quotient(of_params=True)] * len(params) + [_Quotient(of_batch=var.aval.ndim > 0) for var in batch]
    return _Quotients({var.aval.shape[:1] for var in batch if var.aval.ndim}).run(opened, inputs, env)[0]


@dataclasses.dataclass(frozen=True)
class _Bounded:
    """The count in a divisor `max(count, bound) + epsilon`; the bound is a number, or an atom."""

    count: Any
    bound: Any = -np.inf
    epsilon: float = 0.0

    def weight(self, divisor: Any) -> PartWeight:
        """Returns the weight whose divisor is an atom; None for no bound or epsilon."""
        literal = lambda x: jaxprs.literal(divisor.aval.dtype.type(x))  # noqa: E731
        is_number, epsilon = isinstance(self.bound, float), literal(self.epsilon) if self.epsilon else None
        bound = self.bound if not is_number else literal(self.bound) if self.bound > -np.inf else None
        return PartWeight(self.count, divisor, bound, epsilon)


@dataclasses.dataclass(frozen=True)
class _Quotient:
    """What a value depends on, and the divisor if it is a quotient by a scalar of the batch.

    Scalars of a batch are the same in all its parts: `of_batch` is what depends on its examples, or on their number.
    `bounded` is that of a value such as `jnp.maximum(mask.sum(), 1) + 1e-6`. A term that is added to such
    a mean counts by the count alone, or parts below the bound would add too much of it: the divisor is the count then.
    """

    of_params: bool = False
    of_batch: bool = False
    divisor: PartWeight | None = None
    bounded: _Bounded | None = None


class _Quotients(Pass[_Quotient]):
    """Which values are quotients; divisors are variables of the jaxpr that divides."""

    enters = frozenset({"call"})

    def __init__(self, batch_dims: Collection[tuple[int, ...]]):
        super().__init__()
        self.batch_dims = batch_dims  # the leading dims of the batch's leaves

    def constant(self, atom: Any) -> _Quotient:
        return _Quotient()

    def operation(self, eqn: Any, operands: list[_Quotient]) -> list[_Quotient]:
        name, num_of_batch = eqn.primitive.name, sum(x.of_batch for x in operands)
        divisor = bounded = None
        if name == "div" and eqn.outvars[0].aval.ndim == 0:
            above, below = operands
            if above.of_params and below.of_batch and not below.of_params:
                divisor = (below.bounded or _Bounded(eqn.invars[1])).weight(eqn.invars[1])
        elif name in _KEEP_WEIGHT:
            quotients = [x.divisor for x in operands if x.divisor is not None]
            if name in ("add", "sub") and len(quotients) == 2 and quotients[0][:2] == quotients[1][:2]:
                divisor = quotients[0]
            elif len(quotients) == 1 and num_of_batch == 1:
                divisor = quotients[0]
                if divisor.bound is not None and name in ("add", "sub"):
                    divisor = divisor._replace(divisor=divisor.count)
        if name in ("max", "add") and num_of_batch == 1:
            (x, atom), (_, other) = sorted(zip(operands, eqn.invars, strict=True), key=lambda x: not x[0].of_batch)
            known = x.bounded or _Bounded(atom)
            bounded = _with_bound(known, atom, other) if name == "max" else _with_epsilon(known, other)
        elif name == "convert_element_type":
            bounded = operands[0].bounded
        of_params = any(x.of_params for x in operands)
        # A mask of ones, as `jnp.ones_like(labels)` makes it, has the shape of the batch and none of its values.
        is_mask = name == "broadcast_in_dim" and not of_params and eqn.params["shape"][:1] in self.batch_dims
        return [_Quotient(of_params, num_of_batch > 0 or is_mask, divisor, bounded)] * len(eqn.outvars)


def _with_bound(known: _Bounded, atom: Any, other: Any) -> _Bounded:
    """Returns the larger of a divisor, which is `atom`, and of another bound."""
    if not jaxprs.is_literal(other) or not isinstance(known.bound, float):
        return _Bounded(atom, other)
    # max(max(count, a) + e, b) = max(count, a, b - e) + e
    return dataclasses.replace(known, bound=max(known.bound, float(other.val) - known.epsilon))


def _with_epsilon(known: _Bounded, other: Any) -> _Bounded | None:
    """Returns a divisor to which a number is added; None if that is no epsilon."""
    if not jaxprs.is_literal(other) or abs(other.val) > EPSILON:
        return None
    return dataclasses.replace(known, epsilon=known.epsilon + float(other.val))
