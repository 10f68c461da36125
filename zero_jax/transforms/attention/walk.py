"""The walk over a function's jaxpr that finds its attention cores and evaluates them by a kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import evaluate, flattened, run_region
from zero_jax.core.subcalls import Subcall, equations_of, subcall
from zero_jax.transforms.attention.core import AttentionCore, NotTheSame, make_core
from zero_jax.transforms.attention.find import find_cores
from zero_jax.transforms.attention.masks import Affine, Masked, View
from zero_jax.transforms.attention.prove import Prover
from zero_jax.transforms.attention.report import AttentionRow
from zero_jax.transforms.attention.scores import Attended, Logits, Product, RowShift, Scores, Weights
from zero_jax.transforms.attention.static import Known
from zero_jax.transforms.facts import Facts

_ENTERED = ("scan", "remat", "cond")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where a jaxpr is: how often it runs, and the line of the user's around it."""

    times: int
    line: str

    def inside(self, eqn: Any, times: int = 1) -> Site:
        """Returns the place of what is in an equation."""
        return Site(times=self.times * times, line=jaxprs.source_line(eqn) or self.line)


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr whose attention cores were found.

    Attributes:
      jaxpr: the open jaxpr, flat.
      consts: its constants.
      prover: what is known of its values.
      cores: by the variable of its result, each attention that the kernel computes.
      inner: by the `id` of an equation, the bodies of the jaxprs that it runs.
    """

    jaxpr: Any
    consts: Sequence[Any]
    prover: Prover
    cores: dict[Any, AttentionCore]
    inner: dict[int, list[Body]]

    @property
    def is_changed(self) -> bool:
        """Whether anything in it is computed by the kernel."""
        return bool(self.cores) or any(body.is_changed for bodies in self.inner.values() for body in bodies)


class AttentionSearch:
    """Finds the attention cores of jaxprs and decides which ones the kernel computes; notes all in `rows`."""

    def __init__(self) -> None:
        self.rows: list[AttentionRow] = []
        self.cores: dict[int, AttentionCore] = {}  # of `rows`, by their index

    def body(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], data: Sequence[bool], at: Site) -> Body:
        """Returns a jaxpr with its cores.

        Args:
          jaxpr: an open jaxpr.
          consts: its constants.
          inputs: what is known of its inputs, or None.
          data: for each input whether it is made of more than params and constants.
          at: where it is.
        """
        jaxpr, consts = flatten(jaxpr, consts)
        prover = Prover(jaxpr, consts, inputs)
        facts = Facts(jaxpr, ["value" if is_data else "param" for is_data in data])
        cores = self.choose(facts, prover, at)
        inner: dict[int, list[Body]] = {}
        for eqn in jaxpr.eqns:
            if (sub := subcall(eqn)) is not None and _may_attend(eqn):
                if sub.kind in _ENTERED:
                    inner[id(eqn)] = self.bodies(eqn, sub, prover, facts, at)
                else:
                    self.leave(eqn, at)
        return Body(jaxpr, consts, prover, cores, inner)

    def choose(self, facts: Facts, prover: Prover, at: Site) -> dict[Any, AttentionCore]:
        """Returns the cores that the kernel computes, by their results."""
        jaxpr = facts.jaxpr
        producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        cores: dict[Any, AttentionCore] = {}
        reasons: dict[Any, str] = {}
        for var, found in prover.found.items():
            try:
                cores[var] = make_core(found, producers, prover.known)
            except NotTheSame as error:
                reasons[var] = str(error)
        while (var := next(iter(used := _still_used(jaxpr, prover, cores)), None)) is not None:
            del cores[var]
            reasons[var] = used[var]
        done = {prover.found[var].result for var in (*cores, *reasons)}
        for var in find_cores(facts).results - done:
            lost = prover.lost.get(var)
            reasons[var] = lost.reason if lost is not None else "its equations are of no form that is known"
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                found = prover.found.get(var)
                where = at.inside(eqn if found is None else producers[found.result]).line
                if var in cores:
                    self.cores[len(self.rows)] = cores[var]
                    self.rows.append(AttentionRow(where=where, what=str(cores[var]), times=at.times))
                elif var in reasons:
                    self.rows.append(AttentionRow(where=where, what="", times=at.times, reason=reasons[var]))
        return cores

    def bodies(self, eqn: Any, sub: Subcall, prover: Prover, facts: Facts, at: Site) -> list[Body]:
        """Returns the bodies of the jaxprs that an equation runs."""
        known = [None if jaxprs.is_literal(atom) else _passed(prover.known[atom]) for atom in eqn.invars]
        data = [facts.kind(atom) == "value" for atom in eqn.invars]
        if sub.kind == "cond":
            branches = [jaxprs.open_jaxpr(branch) for branch in sub.branches]
            return [self.body(jaxpr, consts, known[1:], data[1:], at.inside(eqn)) for jaxpr, consts in branches]
        jaxpr, consts = jaxprs.open_jaxpr(sub.jaxpr)
        if sub.kind == "remat":
            return [self.body(jaxpr, consts, known, data, at.inside(eqn))]
        jaxpr, consts = flatten(jaxpr, consts)
        of_consts, carry, slices = sub.split(known)
        first = sub.num_consts
        for i in range(sub.num_carry):  # what an iteration passes on as it is
            if _origin(jaxpr, jaxpr.outvars[i]) is not jaxpr.invars[first + i]:
                carry[i] = None
        in_data = [*data[:first], *([True] * sub.num_carry), *data[first + sub.num_carry :]]
        inputs = [*of_consts, *carry, *(None for _ in slices)]
        return [self.body(jaxpr, consts, inputs, in_data, at.inside(eqn, sub.length))]

    def leave(self, eqn: Any, at: Site) -> None:
        """Notes the cores in an equation that is not looked into."""
        reason = f"it is inside {eqn.primitive.name}, which is not looked into"
        for inner in jaxprs.inner_jaxprs(eqn):
            jaxpr, _ = flatten(*jaxprs.open_jaxpr(inner))
            results = find_cores(Facts(jaxpr, ["value"] * len(jaxpr.invars))).results
            for result in jaxpr.eqns:
                if results.intersection(result.outvars):
                    where = at.inside(eqn).inside(result).line
                    self.rows.append(AttentionRow(where=where, what="", times=at.times, reason=reason))


def flatten(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr with its calls inlined, without what no result depends on."""
    opened, consts = jaxprs.open_jaxpr(flattened(jaxpr, consts))
    return jaxprs.without_dead_code(opened), consts


def _passed(value: Any) -> Any:
    """Returns what is known of a value within another jaxpr."""
    return value if isinstance(value, Known | Affine | Masked | View) else None


def _origin(jaxpr: Any, atom: Any) -> Any:
    """Returns the variable that a variable is equal to, if a `jax.checkpoint` returns what it takes."""
    for eqn in reversed(jaxpr.eqns):
        if atom in eqn.outvars and (sub := subcall(eqn)) is not None and sub.kind == "remat":
            inner, _ = flatten(*jaxprs.open_jaxpr(sub.jaxpr))
            result = _origin(inner, inner.outvars[eqn.outvars.index(atom)])
            atom = eqn.invars[inner.invars.index(result)] if result in inner.invars else atom
    return atom


def _may_attend(eqn: Any) -> bool:
    names = [each.primitive.name for each in equations_of(eqn)]
    return names.count("dot_general") > 1


def _product_of(value: Any) -> Product | None:
    """Returns the product of queries and keys that a value is made of."""
    if isinstance(value, Scores | Weights | Attended):
        return value.logits.product
    of_row = [symbol.logits for symbol, _ in value.shift] if isinstance(value, RowShift) else []
    return next((logits.product for logits in of_row if isinstance(logits, Logits)), None)


def _still_used(jaxpr: Any, prover: Prover, cores: dict[Any, AttentionCore]) -> dict[Any, str]:
    """Returns the cores whose logits or weights are needed for something else, too, and for what."""
    needed = {atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)}
    used: dict[Product, str] = {}
    products = {prover.found[var].logits.product for var in cores}

    def use(atom: Any, what: str) -> None:
        value = None if jaxprs.is_literal(atom) else prover.known.get(atom)
        product = _product_of(value)
        if product in products:
            used.setdefault(product, f"its {'logits' if isinstance(value, Scores) else 'weights'} are {what}")

    for atom in jaxpr.outvars:
        use(atom, "results, too")
    for eqn in reversed(jaxpr.eqns):
        core = next((cores[var] for var in eqn.outvars if var in cores), None)
        if core is not None:
            needed.update(var for var, _ in core.operands)
            if not needed.intersection(eqn.outvars):
                continue
        elif eqn.effects or needed.intersection(eqn.outvars):
            follows = _product_of(prover.known.get(eqn.outvars[0])) if eqn.outvars else None
            for atom in eqn.invars:
                if not jaxprs.is_literal(atom):
                    needed.add(atom)
                    if follows is None:
                        use(atom, f"used elsewhere, too ({jaxprs.source_line(eqn) or eqn.primitive.name})")
    return {var: used[product] for var in cores if (product := prover.found[var].logits.product) in used}


# --- evaluation ----------------------------------------------------------------------------------------------------


def run(body: Body, arrays: Sequence[Any], kernel: Callable[..., Any]) -> list[Any]:
    """Evaluates a body; `kernel(core, read, aval)` computes its cores."""
    jaxpr, leaves, env = body.jaxpr, body.prover.leaves, {}
    read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]  # noqa: E731

    def note(variables: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        for var, value in zip(variables, values, strict=True):
            if var in leaves:
                leaves[var].array = value
        return values

    def equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
        inner = body.inner.get(id(eqn), [])
        if eqn.outvars and eqn.outvars[0] in body.cores:
            with jaxprs.source_context(eqn):
                values = [kernel(body.cores[eqn.outvars[0]], read, eqn.outvars[0].aval)]
        elif any(each.is_changed for each in inner):
            values = run_region(eqn, [functools.partial(_call, each, kernel) for each in inner], values)
        else:
            values = jaxprs.bind(eqn, values)
        return note(eqn.outvars, values)

    note((*jaxpr.constvars, *jaxpr.invars), (*body.consts, *arrays))
    return evaluate(jaxpr, body.consts, arrays, equation, env)


def _call(body: Body, kernel: Callable[..., Any], *arrays: Any) -> list[Any]:
    return run(body, arrays, kernel)
