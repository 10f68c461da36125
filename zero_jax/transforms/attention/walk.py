"""The walk over a function's jaxpr that finds its attention cores and evaluates them by a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened
from zero_jax.program.subcalls import Subcall, equations_of, subcall
from zero_jax.program.walk import Walk
from zero_jax.transforms.attention.core import AttentionCore, NotTheSame, make_core
from zero_jax.transforms.attention.followed import Followed, Product
from zero_jax.transforms.attention.prove import Prover
from zero_jax.transforms.attention.report import AttentionRow
from zero_jax.transforms.attention.tables import Leaf, Table, View
from zero_jax.transforms.facts import Facts, find_cores

_ENTERED = ("scan", "remat", "cond")

# Computes a core, from its operands and the abstract value of its result.
Kernel = Callable[[AttentionCore, Callable[[Any], Any], Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where a jaxpr is: how often it runs, and the line of the user's around it."""

    times: int
    line: str

    def inside(self, eqn: Any, times: int = 1) -> Site:
        """Returns the place of what is in an equation."""
        return Site(times=self.times * times, line=jaxprs.source_line(eqn) or self.line)


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedBody:
    """A jaxpr whose attention cores were found."""

    jaxpr: Any  # the open jaxpr, flat
    consts: Sequence[Any]  # its constants
    prover: Prover  # what is known of its values
    cores: dict[Any, AttentionCore]  # by the variable of its result, each attention that the kernel computes
    # By the `id` of an equation, the bodies of the jaxprs that it runs, by the `id` of each
    inner: dict[int, dict[int, SearchedBody]]

    @property
    def is_changed(self) -> bool:
        """Whether anything in it is computed by the kernel."""
        return bool(self.cores) or any(body.is_changed for bodies in self.inner.values() for body in bodies.values())


class AttentionSearch:
    """Finds the attention cores of jaxprs and decides which ones the kernel computes."""

    def __init__(self) -> None:
        self.rows: list[tuple[AttentionRow, AttentionCore | None]] = []  # each core, as the kernel computes it

    def body(self, jaxpr: Any, inputs: Sequence[Any], data: Sequence[bool], at: Site) -> SearchedBody:
        """Returns a jaxpr, open or closed, with its cores.

        `inputs` have what is known of its inputs, or None; `data` says which are of more than params and constants.
        """
        jaxpr, consts = flatten(jaxpr)
        prover = Prover(jaxpr, consts, inputs)
        facts = Facts(jaxpr, ["value" if is_data else "param" for is_data in data])
        cores = self.choose(facts, prover, at)
        inner: dict[int, dict[int, SearchedBody]] = {}
        for eqn in jaxpr.eqns:
            names = [each.primitive.name for each in equations_of(eqn)]
            if (sub := subcall(eqn)) is not None and names.count("dot_general") > 1:
                if sub.kind in _ENTERED:
                    inner[id(eqn)] = self.bodies(eqn, sub, prover, facts, at)
                else:
                    self.leave(eqn, at)
        return SearchedBody(jaxpr, consts, prover, cores, inner)

    def choose(self, facts: Facts, prover: Prover, at: Site) -> dict[Any, AttentionCore]:
        """Returns the cores that the kernel computes, by their results."""
        cores: dict[Any, AttentionCore] = {}
        reasons: dict[Any, str] = {}
        for var, found in prover.found.items():
            try:
                cores[var] = make_core(found, prover)
            except NotTheSame as error:
                reasons[var] = str(error)
        # One by one: without a core its equations run, and read what another core would have made needless.
        while used := _still_used(facts.jaxpr, prover, cores):
            var, reasons[var] = next(iter(used.items()))
            del cores[var]
        products = {var: prover.found[var].result for var in prover.found}
        for var in find_cores(facts)[1] - {*products.values()}:
            lost = prover.lost.get(var)
            reasons[var] = lost.reason if lost is not None else "its equations are of no form that is known"
        for var in prover.producers:
            if var in cores or var in reasons:
                core, product = cores.get(var), prover.producers[products.get(var, var)]
                where, what = at.inside(product).line, "" if core is None else str(core)
                row = AttentionRow(where=where, what=what, times=at.times, reason=reasons.get(var, ""))
                self.rows.append((row, core))
        return cores

    def bodies(self, eqn: Any, sub: Subcall, prover: Prover, facts: Facts, at: Site) -> dict[int, SearchedBody]:
        """Returns the bodies of the jaxprs that an equation runs."""
        values = [None if jaxprs.is_literal(atom) else prover.known[atom] for atom in eqn.invars]
        known = [value if isinstance(value, Table | View) else None for value in values]
        data = [facts.kind(atom) == "value" for atom in eqn.invars]
        inner = sub.branches or (sub.jaxpr,)
        if sub.kind == "cond":
            known, data = known[1:], data[1:]
        if sub.kind == "scan":
            jaxpr, _ = flatten(sub.jaxpr)
            of_consts, carry, slices = sub.split(known)
            for i in range(sub.num_carry):  # only what an iteration passes on as it is
                if _origin(jaxpr, jaxpr.outvars[i]) is not jaxpr.invars[sub.num_consts + i]:
                    carry[i] = None
            known = [*of_consts, *carry, *(None for _ in slices)]
            data[sub.num_consts : sub.num_consts + sub.num_carry] = [True] * sub.num_carry
        within = at.inside(eqn, sub.length)
        return {id(jaxpr): self.body(jaxpr, known, data, within) for jaxpr in inner}

    def leave(self, eqn: Any, at: Site, reason: str = "") -> None:
        """Notes the cores in an equation that is not looked into, and in those within it."""
        reason = reason or f"it is inside {eqn.primitive.name}, which is not looked into"
        for inner in jaxprs.inner_jaxprs(eqn):
            jaxpr, _ = flatten(inner)
            _, results = find_cores(Facts(jaxpr, ["value"] * len(jaxpr.invars)))
            for result in jaxpr.eqns:
                if results.intersection(result.outvars):
                    where = at.inside(eqn).inside(result).line
                    self.rows.append((AttentionRow(where=where, what="", times=at.times, reason=reason), None))
                self.leave(result, at.inside(eqn), reason)


def flatten(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr with its calls inlined, without what no result depends on, as an open one and its constants."""
    opened, consts = jaxprs.open_jaxpr(flattened(jaxpr))
    return jaxprs.without_dead_code(opened), consts


def _origin(jaxpr: Any, atom: Any) -> Any:
    """Returns the variable that a variable is equal to, if a `jax.checkpoint` returns what it takes."""
    for eqn in reversed(jaxpr.eqns):
        if atom in eqn.outvars and (sub := subcall(eqn)) is not None and sub.kind == "remat":
            inner, _ = flatten(sub.jaxpr)
            result = _origin(inner, inner.outvars[eqn.outvars.index(atom)])
            atom = eqn.invars[inner.invars.index(result)] if result in inner.invars else atom
    return atom


def _still_used(jaxpr: Any, prover: Prover, cores: dict[Any, AttentionCore]) -> dict[Any, str]:
    """Returns the cores whose logits or weights are needed for something else, too, and for what."""
    needed = {atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)}
    used: dict[Product, str] = {}
    products = {var: prover.found[var].product for var in cores}

    def followed(atom: Any) -> Followed | None:
        value = None if jaxprs.is_literal(atom) else prover.known.get(atom)
        return value if isinstance(value, Followed) and value.product in products.values() else None

    def use(atom: Any, what: str) -> None:
        if (value := followed(atom)) is not None and value.product is not None:
            kind = "logits" if value.logits and not value.is_exp else "weights"
            used.setdefault(value.product, f"its {kind} are {what}")

    for atom in jaxpr.outvars:
        use(atom, "results, too")
    for eqn in reversed(jaxpr.eqns):
        core = next((cores[var] for var in eqn.outvars if var in cores), None)
        if core is not None:  # in the place of all that is between its operands and its result
            needed.update(var for var, _ in core.operands)
        elif eqn.effects or needed.intersection(eqn.outvars):
            needed.update(jaxprs.variables(eqn))
            if not eqn.outvars or followed(eqn.outvars[0]) is None:
                for atom in eqn.invars:
                    use(atom, f"used elsewhere, too ({jaxprs.source_line(eqn) or eqn.primitive.name})")
    return {var: used[product] for var, product in products.items() if product in used}


class _Fused(Walk[Mapping[int, SearchedBody]]):
    """Evaluates bodies, their cores by a kernel. A frame has the bodies of the jaxprs of an equation, by their `id`."""

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.leaves: dict[Leaf, Any] = {}  # the arrays of leaves, of bodies around, too

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: Mapping[int, SearchedBody]) -> bool:
        return any(body.is_changed for body in frame.values())

    def run(self, jaxpr: Any, values: Sequence[Any], frame: Mapping[int, SearchedBody]) -> list[Any]:
        body, env = frame[id(jaxpr)], dict[Any, Any]()

        def note(variables: Sequence[Any], arrays: Sequence[Any]) -> Sequence[Any]:
            pairs = zip(variables, arrays, strict=True)
            self.leaves.update((body.prover.leaves[var], x) for var, x in pairs if var in body.prover.leaves)
            return arrays

        def read(x: Any) -> Any:
            return self.leaves[x] if isinstance(x, Leaf) else env[x]

        def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            core, inner = body.cores.get(eqn.outvars[0]) if eqn.outvars else None, body.inner.get(id(eqn), {})
            if core is not None:
                with jaxprs.source_context(eqn):
                    return note(eqn.outvars, [self.kernel(core, read, eqn.outvars[0].aval)])
            return note(eqn.outvars, self.equation(eqn, operands, inner))

        note((*body.jaxpr.constvars, *body.jaxpr.invars), (*body.consts, *values))
        return evaluate(body.jaxpr, body.consts, values, equation, env)


def run(body: SearchedBody, arrays: Sequence[Any], kernel: Kernel) -> list[Any]:
    """Evaluates a body; `kernel(core, read, aval)` computes its cores, and `read` returns its operands and leaves."""
    return _Fused(kernel).run(body.jaxpr, arrays, {id(body.jaxpr): body})
