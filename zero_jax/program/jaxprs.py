"""What zero_jax knows of JAX's internals: how jaxprs are opened and bound, and primitives differentiated.

Everything here that differs between JAX releases is hidden behind one small function and tested on the oldest and the
newest supported release. No other module looks into an equation's parameters by release. `subcalls` lists the
primitives that run other jaxprs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import ad, mlir, partial_eval

from zero_jax.core.extras import pip_install
from zero_jax.core.tracebacks import path_in_package

_MAX_FRAMES = 32  # in which a line of the model's is looked for
OLDEST_JAX, NEWEST_JAX = (0, 10), (0, 12)  # the releases that the tests run on, and those in between


def _check_release(version: str, release: tuple[int, ...]) -> None:
    """Refuses a JAX that is too old, and warns of one that is newer than those that are tested."""
    if release < OLDEST_JAX:
        command = pip_install("--upgrade jax")
        raise ImportError(f"zero_jax needs JAX 0.10 or newer, but this is {version}: run `{command}`")
    if release[:2] > NEWEST_JAX:
        newest = ".".join(map(str, NEWEST_JAX))
        warnings.warn(
            f"JAX {version} is newer than tested: this zero_jax is tested up to JAX {newest}. If something fails or "
            f"numbers differ, look for a newer zero_jax, or try `{pip_install(f'jax=={newest}.*')}`",
            stacklevel=2,
        )


_check_release(jax.__version__, jax.__version_info__)  # once a process, when JAX is first used

# Makes a function that is traced once for arguments of the same shapes, of which the caller's jaxpr has the equations:
# `inline=True` does that until JAX 0.11, and inlines when lowering from JAX 0.12 on.
inline_jit = functools.partial(jax.jit, inline=getattr(getattr(jax, "Inline", None), "JAX_EARLY", True))


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns an open jaxpr and its constants, from an open or a closed one (JAX 0.12 merged the two types)."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def with_results(jaxpr: Any, atoms: Sequence[Any], **parts: Any) -> Any:
    """Returns a jaxpr, open or closed, with other variables or literals for its results, and other `parts` of it."""
    if not hasattr(jaxpr, "consts"):
        return jaxpr.replace(outvars=list(atoms), **parts)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(outvars=list(atoms), **parts))


def alone(closed: Any, atoms: Sequence[Any], **parts: Any) -> Any:
    """Returns a closed jaxpr with other results (`with_results`), without what they do not depend on."""
    closed = with_results(closed, atoms, **parts)
    return with_results(closed, atoms, eqns=without_dead_code(closed).eqns)


def conditional(pred: jax.Array, closed: Any, operands: Sequence[Any], *, otherwise: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr where `pred`, else some of its operands: `lax.cond` of what is traced.

    `otherwise` are these operands, of the shapes and dtypes of the results.
    """
    jaxpr, _ = open_jaxpr(closed)
    variables = dict(zip(map(id, operands), jaxpr.invars, strict=True))
    old = [variables[id(x)] for x in otherwise]
    changed = {i for i, (var, same) in enumerate(zip(jaxpr.outvars, old, strict=True)) if var is not same}
    new = closed if len(changed) == len(old) else with_results(closed, [jaxpr.outvars[i] for i in sorted(changed)])
    branches = with_results(closed, [old[i] for i in sorted(changed)], eqns=[]), new
    made = iter(lax.cond_p.bind(lax.convert_element_type(pred, np.int32), *operands, branches=branches))
    return [next(made) if i in changed else x for i, x in enumerate(otherwise)]


def literal(value: Any) -> Any:
    """Returns a scalar as an atom of a jaxpr."""
    return Literal(value, jax.typeof(value))


def stands_for(fn: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of a function that calls `fn` on other arguments: JAX's errors are to name `fn`."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(wrapper)
        functools.update_wrapper(wrapper, fn)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


_PLAIN = frozenset({type(None), bool, int, float, str})  # the types of most parameters


def inner_jaxprs(eqn: Any) -> tuple[Any, ...]:
    """Returns the jaxprs among an equation's parameters, branches included."""
    found: tuple[Any, ...] = ()
    for value in eqn.params.values():  # passes ask this of each equation several times: no generators
        if type(value) in _PLAIN:
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if type(item) not in _PLAIN and hasattr(item, "eqns"):
                found += (item,)
    return found


# An input of an equation that is no variable; passes compare types, as calls of `is_literal` would add up
Literal = jex_core.Literal


def is_literal(atom: Any) -> bool:
    """Tells whether an input of an equation is a literal rather than a variable."""
    return isinstance(atom, Literal)


def new_variable(var: Any) -> Any:
    """Returns another variable of the same type."""
    return type(var)(var.aval)


def variables(eqn: Any) -> list[Any]:
    """Returns the inputs of an equation that are variables, not literals."""
    return [atom for atom in eqn.invars if type(atom) is not Literal]


_MADE_AT = "it was made at"


@contextlib.contextmanager
def source_context(eqn: Any, *, names: bool = True) -> Iterator[None]:
    """Gives what is traced inside the source line, name stack (`names`) and trace-time settings of an equation."""
    name_stack = source_info_util.current_name_stack()
    name_stack = name_stack + eqn.source_info.name_stack if names else name_stack
    # Within JAX's own jitted functions there is no line of the user's: the one around them stays.
    traceback = eqn.source_info.traceback if source_line(eqn) else None
    with source_info_util.user_context(traceback, name_stack=name_stack), eqn.ctx.manager:
        try:
            yield
        except FloatingPointError as error:  # of `jax_debug_nans`: JAX drops the cause that has the line
            if traceback is not None and not any(_MADE_AT in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"{_MADE_AT} {source_line(eqn)}")
            raise


def source_within(eqn: Any, around: Sequence[Any]) -> Any:
    """Returns the source line and names of an equation that stands in the jaxprs of others, outermost first."""
    lines = [each.source_info.traceback for each in (*around, eqn) if source_info_util.summarize(each.source_info)]
    stack = eqn.source_info.name_stack
    for each in reversed(around):
        stack = each.source_info.name_stack + stack
    return eqn.source_info.replace(traceback=lines[-1] if lines else None, name_stack=stack)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on values and returns its results, always as a list."""
    with source_context(eqn):
        result = bind_primitive(eqn.primitive, eqn.params, *values)
    return list(result) if eqn.primitive.multiple_results else [result]


def bind_mapped(eqn: Any, values: Sequence[Any], in_axes: Sequence[int | None], out_axes: int = 0, **how: Any) -> Any:
    """Evaluates an equation of one result by `jax.vmap`, over a dim of some values."""
    return jax.vmap(lambda *xs: bind(eqn, xs)[0], in_axes=tuple(in_axes), out_axes=out_axes, **how)(*values)


def draws_alike(eqns: Sequence[Any]) -> bool:
    """Tells whether `jax.vmap` over keys draws what each key draws alone, as it does of the keys of Threefry only."""
    dtypes = {str(getattr(atom.aval, "dtype", "")) for eqn in eqns for atom in (*eqn.invars, *eqn.outvars)}
    has_other_keys = any(dtype.startswith("key<") and dtype != "key<fry>" for dtype in dtypes)
    return not has_other_keys and all(eqn.primitive.name != "rng_bit_generator" for eqn in eqns)


def of_some(function: Callable[..., Any], values: Sequence[Any], which: Sequence[int]) -> Callable[..., Any]:
    """Returns a function of some of its arguments, those with the numbers `which`; the others are these values."""

    def call(*chosen: Any) -> Any:
        arguments = dict(zip(which, chosen, strict=True))
        return function(*(arguments.get(i, x) for i, x in enumerate(values)))

    return call


def bind_primitive(primitive: Any, params: dict[str, Any], *values: Any) -> Any:
    """Applies a primitive to values, with the parameters that its equation has."""
    params = primitive.get_bind_params(params)
    # Releases before 0.10.1 returned the subfunctions apart.
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    if primitive.name.startswith("custom_"):  # jaxprs keep constants as numpy's, which rules of the user cannot index
        values = tuple(map(jax.numpy.asarray, values))
    return primitive.bind(*subfuns, *values, **params)


def source_line(eqn: Any) -> str:
    """Returns `file:line (function)` of the user's code that an equation came from, or of the first in it with one.

    JAX traces the body of some equations with no line of the user's in sight: a scan's that is a `jax.checkpoint`, say.
    """
    if line := _line_of(eqn.source_info.traceback):
        return line
    within = (inner_eqn for inner in inner_jaxprs(eqn) for inner_eqn in open_jaxpr(inner)[0].eqns)
    return next(filter(None, map(source_line, within)), "")


@functools.lru_cache(maxsize=4096)
def _line_of(traceback: Any) -> str:
    """Returns the line of a traceback; those of equal layers are equal, and passes ask for that of each equation."""
    return source_info_util.summarize(source_info_util.new_source_info().replace(traceback=traceback))


def line_within(eqn: Any) -> str:
    """Returns the line of an equation that is evaluated in a walk, or of the call around it (`source_context`).

    Of functions that JAX itself jits, as `jax.nn.log_softmax`, equations have no line of the user's.
    """
    context = importlib.import_module("jax._src.source_info_util")._source_info_context.context
    return source_line(eqn) or source_info_util.summarize(context)


def model_line(eqn: Any) -> str:
    """Returns `file:line (function)` of the model's code that an equation came from, not of a library that it uses."""
    lines = source_info_util.summarize(eqn.source_info, num_frames=_MAX_FRAMES).splitlines()
    return next(filter(_is_model, reversed(lines)), "") or source_line(eqn)


def _is_model(line: str) -> bool:
    """Tells whether a line is in no library: not in `site-packages` or `dist-packages`, nor zero_jax's own."""
    return "-packages" not in line and not path_in_package(line)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns how many constants and carries a `scan` equation has (JAX 0.12 keeps the counts in a tree, `ft_in`)."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    return num_consts, num_carry


def has_explicit_shardings(eqn: Any) -> bool:
    """Tells whether a `jit` equation fixes the sharding of an argument or a result."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


def new_primitive(
    name: str, run: Callable[..., Any] = _first, *, aval: Callable[..., Any] = _first, several: bool = False
) -> Any:
    """Returns a primitive of JAX that `run` evaluates, from arrays and parameters, and that is compiled as it.

    Its result has the shape that `aval` returns, or the shapes if it has `several`. Those of the first operand, which
    it is too if `run` is left out.
    """
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = several
    primitive.def_abstract_eval(aval)
    params = [key for key, x in inspect.signature(run).parameters.items() if x.kind is x.KEYWORD_ONLY]
    primitive.def_impl(run if run is _first else jax.jit(run, static_argnames=params))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=several))
    return primitive


def define_tangents(primitive: Any, results: Callable[..., Any], tangents: Callable[..., Any]) -> None:
    """Defines the derivatives of a primitive whose tangents do not depend on its inputs.

    From a rule of forward mode alone, JAX would trace each of its equations apart in reverse mode. `results` and
    `tangents` are functions of inputs, or of their tangents (`ad.Zero` among them), and of the parameters: to the
    result and the tangent of the first input, or to one for each input.
    """

    def jvp(primals: Sequence[Any], dots: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return results(*primals, **params), tangents(*dots, **params)

    # What a rule of reverse mode keeps for its tangents, by release; others than these may ask for something else.
    by_release: dict[Any, tuple[Any, ...]] = {(0, 10): ((),), (0, 12): ((), None)}
    residuals = by_release.get(jax.__version_info__[:2], ())

    def linearize(_: bool, has_tangent: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, ...]:
        flags = list(has_tangent) if primitive.multiple_results else has_tangent[0]
        return results(*primals, **params), flags, *residuals, lambda *xs: tangents(*xs[len(residuals) :], **params)

    ad.primitive_jvps[primitive] = jvp
    if residuals:
        importlib.import_module("jax._src.interpreters.ad").primitive_linearizations[primitive] = linearize


def used_inputs(jaxpr: Any) -> list[bool]:
    """Tells which inputs of a jaxpr, open or closed, its results depend on."""
    opened, _ = open_jaxpr(jaxpr)
    _, used = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars))
    return list(used)


def is_traced(x: Any) -> bool:
    """Tells whether a value is of a trace, rather than an array with a place."""
    return isinstance(x, core.Tracer)


def is_array(x: Any) -> bool:
    """Tells whether a value is an array on devices."""
    return isinstance(x, jax.Array) and not is_traced(x)


def name_stack(eqn: Any) -> str:
    """Returns the names that an equation was traced under, inside its own jaxpr: `jit(f)/transpose(jvp())`."""
    return str(eqn.source_info.name_stack)


def without_dead_code(jaxpr: Any) -> Any:
    """Returns an open jaxpr of the same inputs and results, without what no result depends on, loops included."""
    opened, _ = open_jaxpr(jaxpr)
    return partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)[0]


def kernel_program(eqn: Any) -> Any:
    """Returns the body of a `pallas_call` as a closed jaxpr, of what its references hold before and behind it."""
    jaxpr = eqn.params["jaxpr"]
    closed = jaxpr if hasattr(jaxpr, "consts") else jex_core.ClosedJaxpr(jaxpr, ())
    discharge = importlib.import_module("jax._src.state.discharge").discharge_state
    # In newer releases values, too, have a memory space, if it is not left out.
    options = {"strip_memory_space": True} if "strip_memory_space" in inspect.signature(discharge).parameters else {}
    with eqn.params["grid_mapping"].trace_env():  # in which a program may ask for its place
        return discharge(closed, **options)


def effects_of_once(jaxpr: Any) -> list[Any]:
    """Returns the effects of an open jaxpr that `jax.checkpoint` refuses to repeat: all but those of `jax.debug`."""
    return list(importlib.import_module("jax._src.effects").remat_allowed_effects.filter_not_in(jaxpr.effects))


def operation_key(eqn: Any) -> tuple[Any, ...]:
    """Returns what is equal for equations of the same primitive and parameters, and has a hash."""
    try:
        hash(key := (eqn.primitive, tuple(eqn.params.items())))
    except TypeError:  # a parameter that has no hash
        return (object(),)  # equal to itself alone
    return key


def equation_key(eqn: Any) -> tuple[Any, ...]:
    """Returns what is equal for equations that do the same and come from the same line and names."""
    avals = tuple(var.aval for var in eqn.invars)
    return (*operation_key(eqn), avals, eqn.ctx, name_stack(eqn), source_line(eqn))


def jaxpr_key(jaxpr: Any) -> tuple[Any, ...]:
    """Returns what is equal for open jaxprs that do the same and come from the same lines and names."""
    numbers = {var: i for i, var in enumerate((*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)))}
    described = lambda atom: (str(atom.val), atom.aval) if is_literal(atom) else numbers[atom]  # noqa: E731
    eqns = tuple((equation_key(eqn), tuple(map(described, eqn.invars))) for eqn in jaxpr.eqns)
    return eqns, tuple(var.aval for var in jaxpr.invars), tuple(map(described, jaxpr.outvars))


def kept_arguments(compiled: Any) -> list[int]:
    """Returns which of a function's flat arguments its compiled program has: JAX leaves out those it does not read."""
    return sorted(compiled._executable._kept_var_idx)


def hlo_text(compiled: Any) -> str:
    """Returns the text of a compiled program with all constants, of which `as_text()` leaves out the large ones.

    Raises:
      ValueError: This release or backend does not print them.
    """
    try:
        options: Any = importlib.import_module("jaxlib._hlo").HloPrintOptions()
        options.print_large_constants = True
        modules = compiled.runtime_executable().hlo_modules()
        return "\n\n".join(module.to_string(options) for module in modules)
    except (ImportError, AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"JAX {jax.__version__} does not print this program with its constants ({error})") from error
