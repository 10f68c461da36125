"""`gather_on_use` of plain functions: the same values and gradients, and gathers where they are used."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from gather_cases import CASES, mean_square
from gathering import FEATURES, HIDDEN, check, early, examples, normal
from jax.sharding import NamedSharding
from reference import mesh_of

import zero_jax as zero


@pytest.mark.parametrize("name", CASES)
def test_equals_the_untransformed_function(name):
    case = CASES[name]
    options = dict(case.options)
    if "specs" in options:
        options["specs"] = jax.tree.map(functools.partial(NamedSharding, mesh_of("8")), options["specs"])
    report = check(case.fn, case.params, *case.args, mesh=mesh_of("8"), **options)
    assert early(report) == sorted(case.early)
    assert report.events


# Each kind of gather once: by use, in a scan, in remat, hoisted, in a branch, a lookup, derived, local.


@pytest.mark.parametrize("axis", [0, 1])
def test_weight_normalization(axis):
    params = {"v": normal(FEATURES, HIDDEN), "g": normal(*((1, HIDDEN) if axis == 0 else (FEATURES, 1)))}

    def loss_fn(params, x):
        norm = jnp.linalg.norm(params["v"], axis=axis, keepdims=True)
        return mean_square(x @ (params["g"] * params["v"] / norm))

    assert not check(loss_fn, params, examples(), mesh=mesh_of("8")).early


KINDS = (
    "loop, kept",
    "loop, remat",
    "nested_scans",
    "scan_over_layer_numbers",
    "rnn, gathered once",
    "recurrent_params_in_many_forms",
    "recurrent_params_in_nested_loops",
    "recurrent_params_of_each_example",
    "cond",
    "custom_vjp",
    "tied_embedding",
    "position_tables",
    "vmapped_lookup",
    "attention",
    "concatenations",
    "reshapes",
    "lora",
    "regularizers",
    "experts",
    "activations_of_the_params_shape",
)
QUICK = [
    ("staged222", "tied_embedding"),
    ("replica", "loop, kept"),
    ("staged24", "attention"),
    ("model", "scan, remat"),
]
MESHES = itertools.cycle(("staged222", "staged24", "replica", "model"))
# Two other meshes for each kind, by turns.
OTHERS = [(next(MESHES), name) for name in (*KINDS, *KINDS) if name != "loop, kept"]


@pytest.mark.parametrize(("mesh", "name"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_meshes(mesh, name):
    case = CASES[name]
    mesh = zero.make_mesh(data=4, model=2) if mesh == "model" else mesh_of(mesh)
    check(case.fn, case.params, *case.args, mesh=mesh, **case.options)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("loop, kept", "scan, kept") else pytest.mark.slow) for name in KINDS]
    + ["scan, kept"],
)
def test_keep_gathered(name):
    case = CASES[name]
    check(case.fn, case.params, *case.args, mesh=mesh_of("8"), keep_gathered=True, **case.options)


def test_a_use_within_a_function_that_jax_jits_has_the_line_of_the_model_around_it():
    """And a mask that a param is chosen by is no param that is used in a wider dtype."""
    params = {"w": normal(FEATURES, HIDDEN)}

    def loss_fn(params, x):
        chosen = jnp.where(x[0, 0] > 0, params["w"], 0.0)
        return mean_square(x @ chosen) + jax.nn.log_softmax(params["w"] * x.sum()).mean()

    report = check(loss_fn, params, examples(), mesh=mesh_of("8"))
    assert all("test_gather.py" in event.where for event in report.events) and not report.wide
