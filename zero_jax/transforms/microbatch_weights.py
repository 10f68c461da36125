"""The weight of a microbatch: what its mean loss is a mean over.

The mean of means is the mean of the whole only if every part weighs the same. A loss that is a mean over something
uneven, such as the tokens that a mask leaves, ends in a division by a value of the batch; that divisor is the weight.
The same holds for each entry of aux.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.core.tree import PyTree
from zero_jax.dims import ELEMENTWISE, SAME_ELEMENTS, SCATTERS, known_primitives
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened, inlining, trace_flat
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.passes import Dependence, Pass
from zero_jax.program.subcalls import equations
from zero_jax.sharding.precision import wide

# A linear operation on a quotient makes another quotient by the same divisor.
_LINEAR = {name: known.linear for name, known in known_primitives().items() if known.linear}
_OF_OTHERS = frozenset({"add_any", "dynamic_slice", "dynamic_update_slice", "gather", "pad"}) | SCATTERS
_KEEP_WEIGHT = (_LINEAR.keys() - _OF_OTHERS) | {"select_n"}
_PARAMS = frozenset({0})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartWeight:
    """The weight of parts of a batch: a scalar for one part, or arrays of those of several.

    A divisor is often a function of a count, as `jnp.maximum(count, 1)` is. Such divisors of parts do not add up to
    that of the batch, which is the same function of the sum of their counts.

    Attributes:
      count: what the loss is a mean over, such as a number of tokens: 0 for an empty part.
      divisor: what the loss is divided by.
      others: scalars that the divisor is made of beside the count: the same in all parts.
      guards: what chooses between the quotient and 0, by the count (`_Guard`).
      function: the divisor as a function of `count` and `others`; None where it is the count.
      power: the count of the batch is the sum of those of n parts, divided by `n ** power`.
    """

    count: Any
    divisor: Any
    others: tuple[Any, ...] = ()
    guards: tuple[Any, ...] = ()
    function: DivisorFunction | None = dataclasses.field(default=None, metadata={"static": True})
    power: Fraction = dataclasses.field(default=Fraction(0), metadata={"static": True})

    def joined(self) -> PartWeight:
        """Returns the weight of all parts together, as a part of more: a divisor of 0 is 1, as those of parts are."""
        divisor, *_ = self.divisors()
        divisor = jnp.where((self.divisor == 0).all(), divisor, nonzero(divisor))
        return dataclasses.replace(self, count=self._count, divisor=divisor, others=self._others, guards=())

    def total(self, *, of_grads: bool = False, nested: bool = False) -> Any:
        """Returns what the weighed sum of the parts' values is divided by.

        Args:
          of_grads: whether they are gradients.
          nested: whether all parts together are one of more parts.
        """
        divisor = self.joined().divisor if nested else self.divisors()[2 if of_grads else 1]
        return divisor * self._scale

    def divisors(self) -> tuple[Any, Any, Any]:
        """Returns the divisor of the batch, as it is, as one of losses and as one of gradients (`DivisorFunction`)."""
        return (self._count,) * 3 if self.function is None else self.function(self._count, self._others)

    @property
    def _count(self) -> Any:
        return jnp.sum(self.count) / self._scale

    @property
    def _others(self) -> tuple[Any, ...]:
        return tuple(jnp.ravel(x)[0] for x in self.others)

    @property
    def _scale(self) -> float:
        return float(np.size(self.count)) ** float(self.power)


@dataclasses.dataclass(frozen=True, eq=False)
class DivisorFunction:
    """The divisor of a batch as a function of its count, by the equations that make it of the count.

    Attributes:
      eqns: the equations.
      quotient: what is divided.
      others: the variables that they read beside the count.
    """

    eqns: Sequence[Any]
    quotient: _Quotient
    others: Sequence[Any]

    def __call__(self, count: Any, others: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns the divisor, what the sum of the parts' losses is divided by, and that of their gradients."""
        given = {self.quotient.count: count, **dict(zip(self.others, others, strict=True))}
        env = {var: jnp.asarray(x, var.aval.dtype) for var, x in given.items()}
        read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]  # noqa: E731
        for eqn in self.eqns:
            env.update(zip(eqn.outvars, jaxprs.bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        divisor = env[self.quotient.divisor]
        value = of_grads = divisor = divisor.astype(wide(divisor.dtype))
        for guard in self.quotient.guards:
            is_empty = env[guard.which].astype(np.int32) != guard.case
            # Divided by infinity it is 0; the gradient of what `jnp.where` did not choose is 0 / 0 all the same.
            of_empty = jnp.inf if guard.is_branch else jnp.where(divisor == 0, jnp.nan, jnp.inf)
            value, of_grads = jnp.where(is_empty, jnp.inf, value), jnp.where(is_empty, of_empty, of_grads)
        return divisor, value, of_grads


def with_weight(loss_fn: Callable[..., Any], loss_weight: str | None) -> LossProgram:
    """Returns `loss_fn` with its `PartWeight` and those of the leaves of its aux (None for one that is no quotient).

    They are `(variables, batch, key) -> (loss, (aux, model_state, weight, aux_weights))`.

    Args:
      loss_fn: a `LossFunction`, or what was made of one: `(variables, batch, key) -> (loss, (aux, model_state))`.
      loss_weight: name of an entry of aux; `auto` finds the divisor that the loss ends in, and gives 1 where it ends in
        none; None gives 1.
    """

    def add_weight(traced: Traced) -> Traced:
        num_params, num_aux = traced.num_params, len(jax.tree.leaves(traced.out_shape[1][0]))
        closed = _without_duplicates(traced.closed, num_params=num_params)
        if loss_weight == "auto" and any(_empty_case(eqn) is not None for eqn in equations(closed)):
            closed = _without_duplicates(_with_cases(closed), num_params=num_params)
        closed, (found, *weights) = _find_weights(closed, num_params, num_aux, guards=loss_weight == "auto")
        one = jaxprs.literal(np.float32(1))
        weight = PartWeight(one, one) if found is None or loss_weight != "auto" else found
        loss, (aux, model_state) = jax.tree.unflatten(
            jax.tree.structure(traced.out_shape), jaxprs.open_jaxpr(closed)[0].outvars
        )
        if loss_weight not in ("auto", None):
            weight = PartWeight(*[_named(aux, loss_weight)] * 2)
        results, tree = jax.tree.flatten((loss, (aux, model_state, weight, weights)))
        out_shape = jax.tree.unflatten(tree, [atom.aval for atom in results])
        return traced.rewritten(jaxprs.with_results(closed, results), out_shape)

    return LossProgram.of(loss_fn).then(add_weight)


def divided_by_nonzero(weighted: LossProgram) -> LossProgram:
    """Divides the sums of parts whose divisor is 0 by 1, which is their divisor then: the batch's sum has them, too.

    So it is in detection, where a part without objects has a loss, and divides it by 0. What is added to such a mean
    counts by the divisor itself, and is 0 in these parts.

    Args:
      weighted: what `with_weight` returned.
    """

    def rewrite(traced: Traced) -> Traced:
        num_params, tree = traced.num_params, jax.tree.structure(traced.out_shape)
        opened, consts = jaxprs.open_jaxpr(traced.closed)
        quotients = _Quotients.of(opened, num_params)
        if any(quotients.env[var].quotient for eqn in opened.eqns if jaxprs.inner_jaxprs(eqn) for var in eqn.outvars):
            opened, consts = jaxprs.open_jaxpr(flattened(opened, consts))  # terms are added in a nested `jit`
            quotients = _Quotients.of(opened, num_params)
        casts = {x.outvars[0]: x.invars[0] for x in opened.eqns if x.primitive.name == "convert_element_type"}
        divisors, may_be_zero = set(), list[bool]()
        for known, weight in zip(quotients.results, _weights(jax.tree.unflatten(tree, opened.outvars)), strict=False):
            found = known.quotient
            is_weight = found and weight and _origin(found.count, casts) is _origin(weight.count, casts)
            flag = found is not None and bool(is_weight) and not quotients.env[found.divisor].is_positive
            may_be_zero.append(flag)
            divisors |= {found.divisor} if found is not None and flag else set()
        if not divisors:
            return traced

        def function(*arrays: Any) -> list[Any]:
            division = _NonzeroDivision(divisors, quotients)
            results = evaluate(opened, consts, arrays, division.equation, division.values)
            loss, (aux, model_state, *_) = made = jax.tree.unflatten(tree, results)
            weight, *others = (
                dataclasses.replace(x, divisor=nonzero(x.divisor)) if x is not None and flag else x
                for x, flag in zip(_weights(made), may_be_zero, strict=True)
            )
            return jax.tree.leaves((loss, (aux, model_state, weight, others)))

        return traced.rewritten(trace_flat(function, [var.aval for var in opened.invars]))

    return weighted.then(rewrite)


def _weights(results: Any) -> list[PartWeight | None]:
    """Returns the weights of the loss and of the leaves of aux among the results of `with_weight`."""
    _, (*_, weight, aux_weights) = results
    return [weight, *aux_weights]


class _NonzeroDivision:
    """Evaluates equations, divisions by any of some `divisors` by 1 where it is 0."""

    def __init__(self, divisors: Collection[Any], quotients: _Quotients):
        self.divisors, self.quotients = divisors, quotients
        self.values: dict[Any, Any] = {}

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, found = eqn.primitive.name, self.quotients.env[eqn.outvars[0]].quotient if eqn.outvars else None
        if found is None or found.divisor not in self.divisors:
            return jaxprs.bind(eqn, values)
        if eqn.outvars[0] in self.quotients.divisions:
            values = [*values[:-1], nonzero(values[-1])]
        elif name in ("add", "sub"):
            none = self.values[found.divisor] == 0
            values = [
                x if self.is_mean(atom) else jnp.where(none, jnp.zeros_like(x), x)
                for atom, x in zip(eqn.invars, values, strict=True)
            ]
        return jaxprs.bind(eqn, values)

    def is_mean(self, atom: Any) -> bool:
        return not jaxprs.is_literal(atom) and self.quotients.env[atom].quotient is not None


def _origin(atom: Any, casts: Mapping[Any, Any]) -> Any:
    while not jaxprs.is_literal(atom) and atom in casts:
        atom = casts[atom]
    return atom


def nonzero(total: jax.Array) -> jax.Array:
    """Returns a sum of weights to divide by: 1 where it is 0."""
    return jnp.where(total == 0, 1, total)


def weight_alone(
    weighted: LossProgram, variables: PyTree, batch: PyTree, key: Any, *, power: Fraction = Fraction(0)
) -> Callable[..., Any] | None:
    """Returns the `PartWeight` of a part of a batch as a function of that and a key; None if all parts weigh the same.

    Args:
      weighted: what `with_weight` returned.
      variables: the params, or `Variables`.
      batch: a batch.
      key: a key.
      power: `PartWeight.power`.

    Raises:
      NotImplementedError: the weight depends on the params.
    """

    def jaxpr_of(*args: Any) -> tuple[Any, Any, Any]:
        traced = weighted.trace(*args)
        closed, tree = traced.closed, jax.tree.structure(traced.out_shape)
        weight, *_ = _weights(jax.tree.unflatten(tree, jaxprs.open_jaxpr(closed)[0].outvars))
        atoms, tree = jax.tree.flatten(weight)
        return jaxprs.without_dead_code(jaxprs.with_results(closed, atoms)), jaxprs.open_jaxpr(closed)[1], tree

    def weigh(batch: PyTree, key: Any) -> PartWeight:
        jaxpr, consts, tree = jaxpr_of(variables, batch, key)
        arrays = evaluate(jaxpr, consts, jax.tree.leaves((variables, batch, key)), inlining())
        weight = jax.tree.unflatten(tree, [jnp.asarray(x, wide(x.dtype)) for x in arrays])
        return dataclasses.replace(weight, power=power)

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
            first = known.setdefault((*jaxprs.operation_key(eqn), *map(_key, eqn.invars)), eqn)
            if first is not eqn:
                same.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        eqns.append(eqn)
    results = [x if jaxprs.is_literal(x) else same.get(x, x) for x in opened.outvars]
    return jaxprs.with_results(closed, results, eqns=eqns) if same else closed


def _key(atom: Any) -> Any:
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if jaxprs.is_literal(atom) else atom


def _is_zero(atom: Any) -> bool:
    return jaxprs.is_literal(atom) and not np.shape(atom.val) and bool(atom.val == 0)


def _empty_case(eqn: Any) -> int | None:
    """Returns which branch of a `lax.cond` returns the number 0 and nothing else; None if none or both do."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2 or len(eqn.outvars) != 1:
        return None
    if eqn.outvars[0].aval.shape or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    is_empty = []
    for branch in eqn.params["branches"]:
        opened, _ = jaxprs.open_jaxpr(branch)
        made = {x.outvars[0]: x.invars[0] for x in opened.eqns if x.primitive.name in SAME_ELEMENTS}
        is_empty.append(_is_zero(_origin(opened.outvars[0], made)))
    return is_empty.index(True) if sum(is_empty) == 1 else None


def _with_cases(closed: Any) -> Any:
    """Returns a jaxpr in which branches that may be 0 are cases that are chosen from, and calls are inlined."""
    inline = inlining()

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        if _empty_case(eqn) is not None:
            cases = [evaluate(*jaxprs.open_jaxpr(x), values[1:], equation)[0] for x in eqn.params["branches"]]
            cases = [jnp.asarray(x, eqn.outvars[0].aval.dtype) for x in cases]
            with jaxprs.source_context(eqn):
                return [jax.lax.select_n(values[0], *cases)]
        return list(inline(eqn, values))

    opened, consts = jaxprs.open_jaxpr(flattened(*jaxprs.open_jaxpr(closed)))
    return trace_flat(lambda *xs: evaluate(opened, consts, xs, equation), [var.aval for var in opened.invars])


def _find_weights(closed: Any, num_params: int, num_aux: int, *, guards: bool) -> tuple[Any, list[PartWeight | None]]:
    """Returns the weights of the first results, loss and aux, or None, and a jaxpr of which their atoms are.

    In the jaxpr a quotient is not guarded by 0 any more (with `guards`); its weight is.
    """
    weights: list[PartWeight | None] = []
    for _ in range(2):
        opened, consts = jaxprs.open_jaxpr(closed)
        quotients = _Quotients.of(opened, num_params)
        known = zip(opened.outvars[: 1 + num_aux], quotients.results, strict=False)
        weights = [quotients.weight(atom, x, opened) for atom, x in known]
        if not quotients.is_nested:
            break
        closed = flattened(opened, consts)  # it has a variable of a nested `jit`
    opened, _ = jaxprs.open_jaxpr(closed)
    loss, *auxes = ([] if x.quotient is None else x.quotient.guards for x in quotients.results[: 1 + num_aux])
    if not guards:
        unguarded = [None if x else weight for x, weight in zip((loss, *auxes), weights, strict=True)]
        return closed, unguarded
    values, results = {guard.result: guard.value for guard in loss}, list(opened.outvars)
    for i, own in enumerate(auxes, 1):
        if any(guard.result not in values for guard in own):
            if results[i] is own[-1].result and len(own) == 1:  # it is chosen for this entry alone
                results[i] = own[0].value
            else:
                weights[i] = None

    def read(atom: Any) -> Any:
        return atom if jaxprs.is_literal(atom) or atom not in values else read(values[atom])

    eqns = [x.replace(invars=[*map(read, x.invars)]) for x in opened.eqns if values.keys().isdisjoint(x.outvars)]
    return jaxprs.with_results(closed, [*map(read, results)], eqns=eqns if values else opened.eqns), weights


@dataclasses.dataclass(frozen=True)
class _Guard:
    """A choice between a quotient and 0 by the quotient's count: `jnp.where(count > 0, total / count, 0)`.

    Attributes:
      which: the variable that chooses.
      case: the number of the quotient among the cases.
      value: the quotient.
      result: what is chosen.
      is_branch: whether it is a `lax.cond`, in whose gradient no 0 / 0 is.
    """

    which: Any
    case: int
    value: Any
    result: Any
    is_branch: bool


@dataclasses.dataclass(frozen=True)
class _Quotient:
    """A value that was divided by the scalar `divisor`, a function of the scalar `count` of the batch.

    The count may be a cast of the one that it is `made_of`, which chooses between the cases of `guards`.
    `has_term`: a term was added to the quotient. If the divisor is clamped, as `jnp.maximum(count, 1)` is, a part is
    weighed by the unclamped count then: the clamped one would overweight the term in nearly empty parts.
    """

    count: Any
    divisor: Any
    made_of: Any = None
    guards: tuple[_Guard, ...] = ()
    has_term: bool = False


@dataclasses.dataclass(frozen=True)
class _Known:
    """What a value depends on, and the divisor if it is a quotient by a scalar of the batch.

    Scalars of a batch are the same in all its parts: `of_batch` is what depends on its examples, or on their number.

    Attributes:
      of_params: whether it depends on params.
      of_batch: whether it depends on the batch.
      count: the scalar of the batch that it is a function of; of the batch it depends on nothing else.
      is_count: whether it is the count itself.
      scalar: the scalar that it is, or is broadcast from.
      is_positive: whether it is sure to be above 0.
      is_zero: whether it is the number 0.
      quotient: what it was divided by.
    """

    of_params: bool = False
    of_batch: bool = False
    count: Any = None
    is_count: bool = False
    scalar: Any = None
    is_positive: bool = False
    is_zero: bool = False
    quotient: _Quotient | None = None


class _Quotients(Pass[_Known]):
    """Which values are quotients; divisors are variables of the jaxpr that divides.

    Attributes:
      batch_dims: the leading dims of the batch's leaves.
      env: what is known of each variable.
      results: what is known of each result.
      divisions: the results of divisions.
      is_nested: whether `weight` was asked for one with variables of a nested `jit`.
    """

    enters = frozenset({"call"})

    def __init__(self, batch_dims: Collection[tuple[int, ...]]):
        super().__init__()
        self.batch_dims = batch_dims
        self.env: dict[Any, _Known] = {}
        self.results: list[_Known] = []
        self.divisions: set[Any] = set()
        self.is_nested = False

    @classmethod
    def of(cls, opened: Any, num_params: int) -> _Quotients:
        """Returns what is known of an open jaxpr, of which the first inputs are params, and others the batch."""
        params, batch = opened.invars[:num_params], opened.invars[num_params:]
        inputs = [_Known(of_params=True)] * len(params)
        inputs += [_Known(of_batch=var.aval.ndim > 0) for var in batch]
        found = cls({var.aval.shape[:1] for var in batch if var.aval.ndim})
        found.results = found.run(opened, inputs, found.env)
        return found

    def weight(self, atom: Any, known: _Known, opened: Any) -> PartWeight | None:
        """Returns the weight of a result; None if it is none, or is made in a nested jaxpr (`is_nested`)."""
        found = known.quotient
        if found is None and known.count is not None and not known.is_count and not atom.aval.ndim:
            found = _Quotient(known.count, atom)  # it is a function of a count itself
        if found is None:
            return None
        of_guards = ((guard.which, guard.value, guard.result) for guard in found.guards)
        atoms = {found.count, found.divisor, *itertools.chain.from_iterable(of_guards)}
        made = self.made_of(found, opened) if self.env.keys() >= atoms else None
        if made is None:
            self.is_nested = True
            return None
        divisor = found.count if found.has_term else found.divisor
        if not made[0] and not found.guards and found.count is found.divisor:
            return PartWeight(found.count, divisor)
        eqns, others = made
        guards = tuple(guard.which for guard in found.guards)
        return PartWeight(found.count, divisor, others, guards, DivisorFunction(eqns, found, others))

    def made_of(self, found: _Quotient, opened: Any) -> tuple[list[Any], tuple[Any, ...]] | None:
        """Returns the equations between count and divisor, and the other scalars that they read; None if others."""
        needed, eqns = {found.divisor, *(guard.which for guard in found.guards)}, []
        for eqn in reversed(opened.eqns):
            is_made = not needed.isdisjoint(eqn.outvars) and found.count not in eqn.outvars
            if is_made and any(self.env[var].of_batch for var in eqn.outvars):
                eqns.insert(0, eqn)
                needed.update(jaxprs.variables(eqn))
        made = {found.count, *(var for eqn in eqns for var in eqn.outvars)}
        others = tuple(dict.fromkeys(var for eqn in eqns for var in jaxprs.variables(eqn) if var not in made))
        fits = [not (var.aval.shape or self.env[var].of_batch or self.env[var].of_params) for var in others]
        return (eqns, others) if all(fits) and needed - set(others) <= made else None

    def constant(self, atom: Any) -> _Known:
        is_number = jaxprs.is_literal(atom) and not np.shape(atom.val) and np.asarray(atom.val).dtype.kind in "biuf"
        return _Known(is_positive=is_number and bool(atom.val > 0), is_zero=_is_zero(atom))

    def operation(self, eqn: Any, operands: list[_Known]) -> list[_Known]:
        name, of_params = eqn.primitive.name, any(x.of_params for x in operands)
        # A mask of ones, as `jnp.ones_like(labels)` makes it, has the shape of the batch and none of its values.
        is_mask = name == "broadcast_in_dim" and not of_params and eqn.params["shape"][:1] in self.batch_dims
        of_batch = is_mask or any(x.of_batch for x in operands)
        positive = [x.is_positive for x in operands]
        is_positive = (any(positive) if name == "max" else all(positive)) and (
            name in ("max", "add", "mul") or (name in SAME_ELEMENTS and is_floating(eqn))
        )
        known = _Known(
            of_params,
            of_batch,
            is_positive=is_positive,
            is_zero=name in SAME_ELEMENTS and operands[0].is_zero,
            quotient=self.quotient(eqn, operands),
        )
        is_scalar_of_batch = of_batch and not of_params
        return [self.counted(var, known, eqn, operands) if is_scalar_of_batch else known for var in eqn.outvars]

    def counted(self, var: Any, known: _Known, eqn: Any, operands: list[_Known]) -> _Known:
        """Returns a value of the batch with the count that it is a function of; of a scalar that may be itself."""
        name, of_batch = eqn.primitive.name, [x for x in operands if x.of_batch]
        counts = {x.count for x in of_batch}
        is_move, is_number = name in SAME_ELEMENTS, not getattr(var.aval, "shape", ())
        if is_move and of_batch and of_batch[0].count is not None:
            (x,) = of_batch
            return dataclasses.replace(known, count=x.count, is_count=x.is_count, scalar=var if is_number else x.scalar)
        if not is_number:
            return known
        # A count that is scaled is another one, of which the parts' add up to the whole's or to a multiple of it.
        is_scaled = name in ("mul", "div", "neg") and len(of_batch) == 1 and of_batch[0].is_count
        is_function = name in ELEMENTWISE or (name == "cond" and not any(x.aval.shape for x in eqn.invars))
        if is_function and len(counts) == 1 and None not in counts and not is_scaled:
            return dataclasses.replace(known, count=counts.pop(), scalar=var)
        return dataclasses.replace(known, count=var, is_count=True, scalar=var)

    def quotient(self, eqn: Any, operands: list[_Known]) -> _Quotient | None:
        """Returns what the result of an equation was divided by."""
        name, below = eqn.primitive.name, operands[-1] if operands else _Known()
        if name == "div" and not below.of_batch:
            return operands[0].quotient if not below.of_params else None
        if name == "div" or (name == "integer_pow" and eqn.params["y"] == -1):
            if below.count is None or any(x.quotient for x in operands[:-1]):
                return None
            self.divisions.add(eqn.outvars[0])
            divisor = eqn.invars[-1] if not eqn.invars[-1].aval.shape else below.scalar
            return _Quotient(divisor if below.is_count else below.count, divisor, made_of=below.count)
        quotients = [x.quotient for x in operands if x.quotient is not None]
        if name not in _KEEP_WEIGHT or not quotients or any(x != quotients[0] for x in quotients):
            return None
        found, num_of_batch = quotients[0], sum(x.of_batch for x in operands)
        if _LINEAR.get(name) == "product":
            return found if len(quotients) == 1 else None
        if name in ("add", "sub") and len(quotients) < 2:
            return None if num_of_batch > 1 or found.guards else dataclasses.replace(found, has_term=True)
        which = operands[0]
        if name == "select_n" and which.of_batch and not eqn.outvars[0].aval.shape:
            return self.guarded(eqn, operands, found)
        return found

    def guarded(self, eqn: Any, operands: list[_Known], found: _Quotient) -> _Quotient | None:
        """Returns the quotient that a scalar is chosen from, if the other case is 0 and the count chooses."""
        cases = [i for i, x in enumerate(operands[1:]) if x.quotient is not None]
        is_zero = all(x.is_zero for x in operands[1:] if x.quotient is None)
        if len(cases) != 1 or not is_zero or operands[0].count is not found.made_of:
            return None
        is_branch = eqn.invars[0].aval.dtype != bool
        guard = _Guard(eqn.invars[0], cases[0], eqn.invars[1 + cases[0]], eqn.outvars[0], is_branch)
        return dataclasses.replace(found, count=found.made_of, guards=(*found.guards, guard))


def is_floating(eqn: Any) -> bool:
    """Tells whether the result of an equation is floating."""
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
