"""The table of primitives: JAX has all that it names, and it has all of `jax.lax`, but for those named here."""

import gc
import importlib
import pkgutil

import jax._src.lax
from jax.extend.core import Primitive

from zero_jax.dims import known_primitives
from zero_jax.program.subcalls import KINDS

# Of one supported release only.
OF_ONE_RELEASE = {"log2", "one_minus_square"}
# Primitives of `jax.lax` without an entry: a new one of JAX gets an entry, or a place here by its reason.
WITHOUT = {
    "no operand, or none of which a dim is taken": "axis_index empty empty2 iota platform_index rng_uniform",
    "random bits, which are each example's own": "rng_bit_generator",
    "between devices, within a shard_map": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start "
        "all_to_all all_to_all_done all_to_all_start pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start "
        "pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant "
        "psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start "
        "unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter "
        "unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p"
    ),
    "tokens, and what orders effects": "after_all create_token dce_sink program_order tie",
    "dtypes of keys": "from_edtype to_edtype",
    "runs jaxprs of its own": "composite custom_linear_solve stage",
    "which dims it keeps is not known": (
        "cholesky_update geqp3 ormqr polynomial ragged_dot_general scaled_dot select_and_scatter"
    ),
}


def of_jax_lax():
    """Returns the names of all primitives of `jax.lax`."""
    names = [m.name for m in pkgutil.walk_packages(jax._src.lax.__path__, "jax._src.lax.")]
    modules = map(importlib.import_module, names)
    return {x.name for module in modules for x in vars(module).values() if isinstance(x, Primitive)}


def of_all_modules():
    """Returns the names of all primitives that any module of JAX or of this library has."""
    for name in (
        "jax._src.shard_map",
        "jax.random",
        "jax.experimental.sparse",
        "equinox.internal",
        "zero_jax.transforms",
    ):
        importlib.import_module(name)
    return {x.name for x in gc.get_objects() if isinstance(x, Primitive)}


def test_every_primitive_of_jax_lax_has_an_entry_or_a_reason():
    reasons = {name for names in WITHOUT.values() for name in names.split()}
    assert of_jax_lax() - known_primitives().keys() - KINDS.keys() - reasons == set()
    assert not reasons & known_primitives().keys()


def test_entries_are_primitives():
    assert known_primitives().keys() - of_all_modules() - OF_ONE_RELEASE == set()
