"""The compiler options of a step: by hardware and config, what the environment and the user say, what is not known."""

import contextlib
import functools
import types
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero
from zero_jax import hlo
from zero_jax.sharding.spec import named
from zero_jax.sharding.topology import HARDWARE
from zero_jax.training.xla_options import step_options, wanted_options

MIB = 2**20
GUARD, WRONG_PASS = "xla_disable_hlo_passes", "while-loop-all-reduce-code-motion"
OFF = {"overlap": False}


def device(name, platform=None, version=""):
    hardware = HARDWARE[name]
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(
        platform=platform or hardware.platform, device_kind=hardware.device_kind, client=client
    )


def wanted(where, environment=None, *, has_many=True, **config):
    options = wanted_options(where, zero.ZeroConfig(**config), environment or {}, has_many=has_many)
    return {option.name: option.value for option in options if option.name != GUARD}


def guard(where, environment=None, **config):
    """The passes that are disabled, and those in a program without scatters in loops; None without that option."""
    options = wanted_options(where, zero.ZeroConfig(**config), environment or {})
    return next(((option.value, option.unguarded) for option in options if option.name == GUARD), None)


CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu", client=None)
UNKNOWN = types.SimpleNamespace(platform="tpu", device_kind="TPU v99", client=None)


def test_hardware_without_an_entry_has_no_options():
    for where in (CPU, UNKNOWN, device("v3"), device("h100", platform="gpu", version="rocm 7")):
        assert wanted(where) == {}


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="mended in JAX 0.12")
def test_a_pass_that_makes_wrong_programs_is_disabled_beside_others():
    for where in (UNKNOWN, device("v4"), device("tpu7x"), device("h100"), device("h100", platform="gpu")):
        assert guard(where) == guard(where, **OFF) == (WRONG_PASS, "")
        assert guard(where, compiler_options={GUARD: "dce"}) == (f"dce,{WRONG_PASS}", "dce")
        assert guard(where, {"XLA_FLAGS": f"--{GUARD}=cse,dce"}) == (f"cse,dce,{WRONG_PASS}", "cse,dce")
        assert guard(where, compiler_options={GUARD: None}) is None
    assert guard(CPU) is None


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="mended in JAX 0.12")
@pytest.mark.tpu_compiler
def test_a_step_that_writes_by_index_in_no_loop_keeps_the_pass():
    """The option is told from the jitted function that lowers the step."""
    mesh = zero.make_mesh(topology="v5e:2x2")
    config, tx = zero.ZeroConfig(stage=0), optax.sgd(0.1)
    batch = jax.ShapeDtypeStruct((8, 4), jnp.int32)

    def scanned(params, tokens, in_loop):
        xs = tokens.T if in_loop else params[tokens.T]
        body = lambda h, x: (jnp.tanh(h @ params + (params[x] if in_loop else x)), None)  # noqa: E731
        return jax.lax.scan(body, jnp.zeros((8, 16)), xs)[0].mean()

    for in_loop in (True, False):
        loss_fn = functools.partial(scanned, in_loop=in_loop)
        step = zero.make_train_step(lambda params, batch, f=loss_fn: f(params, batch), tx, mesh=mesh, config=config)
        state = zero.abstract_state(lambda key: jnp.ones((16, 16)), tx, mesh=mesh, config=config)
        compiled = step.compiled(state)
        assert compiled.function(state, batch) is (compiled.jitted if in_loop else compiled.unguarded)
        outer = jax.jit(lambda state, batch, step=step: step(state, batch))  # which takes its own options alone
        with pytest.warns(match="add.* by index in a loop") if in_loop else contextlib.nullcontext():
            outer.trace(state, batch)


def test_overlap_is_one_switch():
    for name in ("v5p", "h100", "b200"):
        assert wanted(device(name))
        assert wanted(device(name), **OFF) == {}


@pytest.mark.parametrize(
    ("hardware", "name"),
    [("v6e", "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"), ("tpu7x", "xla_shardy_options")],
)
def test_what_steps_of_collectives_rest_on_is_no_part_of_overlap(hardware, name):
    """Without it they send twice as much; a config that names an option has the last word."""
    on, off = wanted(device(hardware)), wanted(device(hardware), **OFF)
    assert off.items() < on.items() and off[name]
    assert name not in wanted(device(hardware), compiler_options={name: None})
    assert name not in wanted(device("v5p"))
    assert (name in wanted(device(hardware), has_many=False)) == (hardware == "v6e")


@pytest.mark.parametrize("hardware", ["v4", "v5e"])
def test_products_are_whole_without_overlap_too(hardware):
    assert wanted(device(hardware)) == wanted(device(hardware), **OFF) != {}


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x4"])
def test_gradients_beside_copies_are_made_by_one_product_on_older_tpus(topology):
    """A reduce-scatter over one dim of the torus was a loop of products of a part of the columns each."""

    def loss_fn(params, batch):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ x["up"]) @ x["down"], None), batch, params)
        return jnp.square(h).mean()

    def largest_window(**options):
        config = zero.ZeroConfig(stage=3, compiler_options=options)
        init_fn = lambda key: {"up": jnp.zeros((2, 4096, 16384)), "down": jnp.zeros((2, 16384, 4096))}  # noqa: E731
        batch = jax.ShapeDtypeStruct((32, 2048, 4096), jnp.float32)
        job = {"topology": topology, "replica": 2, "config": config, "quick": True, "cache": None}
        plan = zero.plan(loss_fn, init_fn, optax.sgd(0.1), batch=batch, **job)
        return max((row.full_bytes for row in plan.comms.rows if "windowed" in row.kind), default=0)

    # What is left are edges of rows that the parts of a ring pass on.
    assert largest_window() < 8e6 < 32e6 < largest_window(xla_jf_spmd_threshold_for_windowed_einsum_mib=None)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_gathers_over_three_dims_of_a_torus_run_beside_computation():
    """Below 64 chips of v5p `data` is one axis over all of them; gathers over it were synchronous."""
    mesh = zero.make_mesh(topology="v5p:2x2x2")
    shard, unsharded = named(mesh, (("data",), ())), named(mesh, ())

    def product(x, weight):
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(weight, unsharded)).sum()

    x, weight = (jax.ShapeDtypeStruct((n, 2048), jnp.bfloat16, sharding=shard) for n in (8192, 2048))
    lowered = jax.jit(product).lower(x, weight)

    def gather(**options):
        config = zero.ZeroConfig(stage=3, compiler_options=options)
        found = hlo.collectives(lowered.compile(compiler_options=zero.compiler_options(mesh=mesh, config=config)))
        (gather,) = (each for each in found if each.kind == "all-gather")
        return gather

    beside, after = gather(), gather(xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=None)
    assert beside.is_async and not after.is_async
    assert beside.total_sent_bytes == after.total_sent_bytes == 2 * 2048**2 * 7 // 8


def test_options_are_the_same_at_every_stage():
    name = "xla_tpu_enable_sparse_core_offload_queuing_in_lhs"
    assert [name in wanted(device(hardware)) for hardware in ("v5p", "v6e", "tpu7x", "v5e")] == [1, 1, 0, 0]
    for hardware in ("v5p", "v6e", "tpu7x", "h100"):
        assert all(wanted(device(hardware), stage=stage) == wanted(device(hardware)) for stage in range(4))


@pytest.mark.parametrize(
    ("config", "is_verified"),
    [({}, False), ({"offload": "state"}, False), ({"offload": "all"}, True), ({"remat": "full_offloaded"}, True)],
)
def test_rows_of_host_memory_in_loops_are_verified_on_gpus(config, is_verified):
    name, is_old = "xla_gpu_experimental_dynamic_slice_fusion_verify_offsets", jax.__version_info__ < (0, 12)
    assert (name in wanted(device("h100"), **config, **OFF)) == (is_verified and is_old)
    assert name not in wanted(device("v5p"), **config)


def test_gpus_of_one_host_have_double_buffered_loops():
    one, several = (
        {option.name for option in wanted_options(device("h100"), zero.ZeroConfig(), {}, is_one_host=is_one_host)}
        for is_one_host in (True, False)
    )
    assert one - several == {"xla_gpu_enable_while_loop_double_buffering"} and several < one
    assert not wanted_options(CPU, zero.ZeroConfig(), {}, is_one_host=True)


@pytest.mark.parametrize("name", HARDWARE)
def test_no_default_is_one_that_its_maker_warns_of(name):
    fused = {option for option, value in wanted(device(name)).items() if "async_collective_fusion" in option and value}
    assert not fused or name == "v5e"


def test_a_gpu_has_an_option_for_each_kind_that_is_combined():
    options = wanted(device("h100"), combine_bytes=3, **OFF)
    assert set(options.values()) == {3}
    assert {name.split("xla_gpu_")[1].split("_combine")[0] for name in options} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    assert wanted(device("h100", platform="gpu"), combine_bytes=3, **OFF) == options
    assert wanted(device("h100"), combine_bytes=3).items() > options.items()  # over the table's own


def test_combine_bytes_is_refused_for_a_platform_that_is_not_known():
    quantum = types.SimpleNamespace(platform="quantum", device_kind="quantum", client=None)
    assert wanted(quantum) == {}
    with pytest.raises(ValueError, match=r"'quantum'.*leave it None"):
        wanted(quantum, combine_bytes=MIB)


def test_the_config_names_options_one_by_one():
    h100 = device("h100")
    first, second, *rest = wanted(h100)
    changed = wanted(h100, compiler_options={first: None, second: "False", "xla_other": 3})
    assert changed == {**{name: wanted(h100)[name] for name in rest}, second: False, "xla_other": 3}
    assert wanted(h100, compiler_options={"xla_other": "TRUE"}, **OFF) == {"xla_other": True}


@pytest.mark.parametrize("flags", ["--{}=false", "--other=1 --no{}", "--{}"])
@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_a_flag_of_the_environment_is_not_replaced_by_a_default(variable, flags):
    v5p = device("v5p")
    first, *rest = wanted(v5p)
    flags = flags.format(first)
    assert list(wanted(v5p, {variable: flags})) == rest
    assert wanted(v5p, {variable: flags}, compiler_options={first: False})[first] is False


def test_flags_in_a_file_count_as_well(tmp_path):
    first, *rest = wanted(device("h100"))
    (tmp_path / "flags").write_text(f"--{first}=false\n")
    assert list(wanted(device("h100"), {"XLA_FLAGS": str(tmp_path / "flags")})) == rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("a", 1)], "give a dict of compiler options, or None"),
        ({"--a": 1}, "'--a' is no name of an option: give one without dashes"),
        ({1: 1}, "1 is no name"),
        ({"a": [1]}, r"a=\[1\]: give a boolean, number or text, or None"),
        ({"a": float("nan")}, "a=nan"),
        ({"a": ""}, "a=''"),
    ],
)
def test_what_is_no_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero.ZeroConfig(compiler_options=options)


def linear(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def step_and_state(**config):
    mesh, tx = zero.make_mesh(), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=2, min_shard_size=0, **config)
    state = zero.init_state(lambda key: {"w": jnp.ones((8, 8))}, tx, jax.random.key(0), mesh=mesh, config=config)
    batch = {"x": jnp.ones((8, 8))}
    return zero.make_train_step(linear, tx, mesh=mesh, config=config), state, batch, {"mesh": mesh, "config": config}


def test_an_option_that_the_compiler_does_not_know_is_left_out_with_one_warning():
    unknown = {"xla_nonsense_of_test_xla_options": True}
    step, state, batch, rest = step_and_state(compiler_options=unknown)
    with pytest.warns(UserWarning, match=r"for cpu does not know the option 'xla_nonsense.*ZeroConfig\(compiler_opt"):
        state, metrics = step(state, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert zero.make_eval_step(linear, **rest)(state, batch).loss < metrics.loss
    assert step_options(**rest).unknown == tuple(unknown)
    assert zero.compiler_options(**rest) == {}


KNOWN = {"xla_cpu_enable_fast_math": False}


def test_a_wrong_value_is_the_compilers_error():
    step, state, batch, _ = step_and_state(compiler_options=dict.fromkeys(KNOWN, "maybe"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_enable_fast_math"):
        step(state, batch)


def test_a_step_within_a_jitted_function_leaves_the_options_to_that():
    step, state, batch, rest = step_and_state(compiler_options=KNOWN)
    assert zero.compiler_options(**rest) == KNOWN
    batches = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
    evaluate = zero.make_eval_step(linear, **rest)

    def both(state):
        state, metrics = jax.lax.scan(step, state, batches)
        return metrics.loss, evaluate(state, batch).loss

    losses, after = jax.jit(both, compiler_options=zero.compiler_options(**rest))(state)
    assert losses[0] > losses[1] > after


def test_whoever_compiles_the_lowered_step_can_name_other_options():
    step, state, batch, _ = step_and_state(compiler_options=KNOWN)
    compiled = step.lower(state, batch).compile(compiler_options={"xla_cpu_enable_fast_math": True})
    assert compiled(state, zero.shard_batch(batch, mesh=zero.make_mesh()))[1].loss > 0


def test_a_cpu_program_compiles_with_combine_bytes():
    step, state, batch, rest = step_and_state(combine_bytes=MIB)
    assert zero.compiler_options(**rest) == {}
    assert step(state, batch)[1].loss > 0


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_the_compiler_knows_the_defaults(topology):
    mesh, unknown = zero.make_mesh(topology=topology), "xla_nonsense_of_a_tpu"
    with pytest.warns(UserWarning, match=unknown):
        options = step_options(mesh, zero.ZeroConfig(stage=2, compiler_options={unknown: 1}))
    assert options.unknown == (unknown,)
    values = {name: value for name, value in options.values.items() if name != GUARD}
    assert values == wanted(device(topology.partition(":")[0]), stage=2) != {}
    assert options.unguarded == (values if jax.__version_info__ < (0, 12) else None)


@pytest.mark.tpu_compiler
def test_a_tpu_program_joins_all_reduces_up_to_the_size():
    mesh = zero.make_mesh(topology="v5e:2x2")
    stacks = [jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16, sharding=named(mesh, (("data",), (), ())))] * 6
    add = jax.jit(lambda xs: [x.sum(0) for x in xs], out_shardings=named(mesh, ()))
    lowered = add.lower(stacks)

    def largest(combine_bytes):
        options = zero.compiler_options(mesh=mesh, config=zero.ZeroConfig(combine_bytes=combine_bytes))
        found = hlo.collectives(lowered.compile(compiler_options=options).as_text())
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.full_bytes for c in found) == 6 * MIB // 2
        return max(c.full_bytes for c in found)

    assert largest(0) == MIB // 2
    assert largest(MIB) == MIB
    assert largest(64 * MIB) == 3 * MIB
