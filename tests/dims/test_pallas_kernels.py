"""Kernels of Pallas: of which it is proven that they compute each example by itself, and of which it is not."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from test_relations import cases, check

import zero_jax as zero
from zero_jax.dims import SAME, Kind, TraceComparison, rows
from zero_jax.program.jaxprs import kernel_program
from zero_jax.program.subcalls import equations

X = ((4, 3, 2), "f")


def call(kernel, block, index, *, num=1, out=None, alias=False, scratch=(), kinds=None, grid=None):
    """Returns a function of arrays `[examples, ...]` by a kernel on blocks; `grid` is of the shape of the first."""

    def fn(*arrays):
        first = arrays[0]
        block_shape = block(first) if callable(block) else block
        specs = [pl.BlockSpec(block_shape, index(first))] * num
        specs += [pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n) for x in arrays[num:]]
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid(first) if grid else (len(first),),
            in_specs=specs,
            out_specs=out or specs[0],
            scratch_shapes=scratch,
        )
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(first.shape, first.dtype),
            grid_spec=grid_spec,
            interpret=True,
            input_output_aliases={0: 0} if alias else {},
            compiler_params=pltpu.CompilerParams(dimension_semantics=kinds) if kinds else None,
        )(*arrays)

    return fn


def sine(x, out):
    out[...] = jnp.sin(x[...]) * 2


def running_sum(x, out, total):
    """Sums up over the last axis of the grid; along an axis before, over what another program left behind."""
    total[...] += x[...]
    out[...] = total[...]


def sum_of_row(x, out, total):
    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += x[...]
    out[...] = total[...]


def by_place(x, out):
    out[...] = x[...] * (pl.program_id(0) + 1)


def by_number(x, out):
    out[...] = x[...] + pl.num_programs(0)


def times_all(x, all_rows, out):
    out[...] = x[...] + all_rows[...].sum(0, keepdims=True)


def add(x, out):
    out[...] += x[...]


ROW, OWN = (1, 3, 2), lambda _: lambda i: (i, 0, 0)
COLUMNS = {"grid": lambda x: (len(x), 3), "scratch": [pltpu.VMEM((1, 1, 2), jnp.float32)]}
PROVEN = {
    "mapped": jax.vmap(lambda x: pl.pallas_call(sine, out_shape=x, interpret=True)(x)),
    "mapped twice": jax.vmap(jax.vmap(lambda x: pl.pallas_call(sine, out_shape=x, interpret=True)(x))),
    "mapped over another dim": lambda x: jax.vmap(PROVEN["mapped"], 2, 2)(x),
    "a grid of rows": call(sine, ROW, OWN),
    "parallel rows": call(sum_of_row, (1, 1, 2), lambda _: lambda i, j: (i, j, 0), kinds=("parallel",) * 2, **COLUMNS),
    "mapped sums": lambda x: jax.vmap(
        call(sum_of_row, (1, 1, 2), lambda _: lambda i, j: (i, j, 0), **COLUMNS),
    )(x[:, None])[:, 0],
}
MAY_MIX = {
    "two rows": call(sine, (2, 3, 2), OWN, grid=lambda x: (len(x) // 2,)),
    "all rows": call(sine, lambda x: x.shape, lambda _: lambda i: (0, 0, 0), grid=lambda x: (1,)),
    "from behind": call(sine, ROW, lambda x: lambda i: (len(x) - 1 - i, 0, 0), out=pl.BlockSpec(ROW, OWN(0))),
    "the row before": call(sine, ROW, lambda x: lambda i: (jnp.maximum(i - 1, 0), 0, 0), out=pl.BlockSpec(ROW, OWN(0))),
    "a running sum": call(running_sum, ROW, OWN, scratch=[pltpu.VMEM(ROW, jnp.float32)]),
    "sums of rows that are not said to be parallel": call(
        sum_of_row, (1, 1, 2), lambda _: lambda i, j: (i, j, 0), kinds=("arbitrary",) * 2, **COLUMNS
    ),
    "by place": call(by_place, ROW, OWN),
    "by number": call(by_number, ROW, OWN),
    "in one block": call(add, ROW, OWN, out=pl.BlockSpec(ROW, lambda i: (0, 0, 0))),
    "in place": call(sine, ROW, OWN, alias=True),
    "all rows beside each": lambda x: call(times_all, ROW, OWN)(x, x),
}


@pytest.mark.parametrize("name", [*PROVEN, *MAY_MIX])
def test_kernels_of_single_examples_are_proven_and_no_others(name):
    fn, seen = (PROVEN | MAY_MIX)[name], 0
    for dims, whole, parts, _, (relation,) in cases((fn, X)):
        seen += 1
        if name in MAY_MIX:
            assert relation.kind is Kind.UNKNOWN and relation.why
            continue
        assert (relation.kind, relation.dim) == (Kind.ROWS, dims[0])
        values = [np.asarray(fn(part[0])) for part in parts]
        check(relation, np.asarray(fn(whole[0])), values, name)
    assert seen


def of_power(kernel):
    """Returns the relation of what a kernel makes of rows that are divided by the number of examples."""
    call = jax.vmap(lambda x: pl.pallas_call(kernel, out_shape=x, interpret=True)(x))
    traces = [jax.make_jaxpr(lambda x: call(x / len(x)))(jnp.ones((n, 3))) for n in (8, 4)]
    return TraceComparison(2).run(*traces, [rows(0)])[0]


def double(x, out):
    out[...] = jnp.zeros_like(out)
    for i in range(2):
        out[i : i + 2] += 2 * x[i : i + 2]


def clipped(x, out):
    out[...] = jnp.clip(x[...], -1, 1)


def plus_one(x, out):
    out[...] = x[...] + 1


def test_what_is_linear_in_a_mean_stays_one():
    assert of_power(double).power == of_power(lambda x, out: out.__setitem__(..., x[...])).power != 0
    assert {of_power(kernel).kind for kernel in (clipped, plus_one, sine)} == {Kind.UNKNOWN}


def test_a_kernel_of_no_example_is_the_same_on_parts():
    fn = lambda w, x: pl.pallas_call(sine, out_shape=w, interpret=True)(w) * x.sum()  # noqa: E731
    traces = [jax.make_jaxpr(fn)(jnp.ones(3), jnp.ones(n)) for n in (8, 4)]
    assert TraceComparison(2).run(*traces, [SAME, rows(0)])[0].kind is Kind.SUM


def test_the_program_of_a_kernel_is_of_what_its_references_hold():
    jaxpr = jax.make_jaxpr(call(sine, ROW, OWN))(jnp.ones((4, 3, 2)))
    (eqn,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call"]
    body = jax.extend.core.jaxpr_as_fun(kernel_program(eqn))
    x = jnp.full(ROW, 0.5)
    np.testing.assert_allclose(body(x, jnp.zeros(ROW)), [x, 2 * jnp.sin(x)])


def attend(kind, mesh):
    """Returns the attention kernels of JAX for TPUs, as users call them: on the shards of a mesh, if there is one."""

    def flash(q, k, v):
        return flash_attention.flash_attention(q, k, v, causal=True)

    def splash(q, k, v):
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask(q.shape[2:3] * 2)] * q.shape[1])
        return jax.vmap(splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1))(q, k, v)

    fn = {"flash": flash, "splash": splash}[kind]
    if mesh is None:
        return fn
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


@pytest.mark.parametrize("on_shards", [False, True])
@pytest.mark.parametrize("kind", ["flash", "splash"])
def test_attention_kernels_of_jax_are_of_single_examples_forward_and_backward(kind, on_shards):
    """Losses with these were warned of as others on microbatches. Nothing is compiled: the kernels are for TPUs."""
    mesh = reference.mesh_of("8") if on_shards else None

    def loss_fn(params, tokens):
        x = params["table"][tokens].reshape(*tokens.shape, 2, -1).swapaxes(1, 2)
        x = attend(kind, mesh)(x, x * params["scale"], x).swapaxes(1, 2).reshape(*tokens.shape, -1)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, tokens).mean()

    params = {"table": jnp.zeros((32, 256)), "scale": jnp.ones(128)}
    traces = [jax.make_jaxpr(loss_fn)(params, jnp.zeros((n, 128), int)) for n in (32, 16)]
    of_params = dataclasses.replace(SAME, of_params=True)
    (relation,) = TraceComparison(2, 16).run(*traces, [of_params, of_params, rows(0)])
    assert (relation.kind, relation.power) == (Kind.SUM, 1)


def test_a_step_with_a_kernel_of_each_example_is_that_of_one_device():
    """No warning says that gradients are summed in each microbatch: warnings are errors."""

    @jax.custom_vjp
    def doubled(x):
        return PROVEN["mapped"](x)

    def backward(x, g):
        return (jax.vmap(lambda x, g: pl.pallas_call(times_cosine, out_shape=x, interpret=True)(x, g))(x, g),)

    def times_cosine(x, g, out):
        out[...] = 2 * jnp.cos(x[...]) * g[...]

    doubled.defvjp(lambda x: (doubled(x), x), backward)

    def loss_fn(params, batch):
        return jnp.square(doubled(reference.predict(params, batch["tokens"])) - batch["targets"]).mean()

    tx, batches = optax.sgd(0.1), reference.make_batches(2)
    state, _ = reference.run_zero(loss_fn, tx, batches, mesh=reference.mesh_of("8"), stage=1, num_microbatches=2)
    params, _, _ = reference.run_plain(loss_fn, tx, batches)
    reference.assert_close(state.params, params, tolerance=1e-5)
    mesh, config = reference.mesh_of("8"), zero.ZeroConfig(stage=1, num_microbatches=2, precision="fp32")
    state = zero.init_state(reference.init_params, tx, jax.random.key(0), mesh=mesh, config=config)
    lowered = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batches[0])
    assert "manual_computation" in lowered.as_text()  # each device runs it on its own examples


@pytest.mark.tpu_compiler
def test_kernels_for_tpus_need_no_shard_map_where_each_device_has_its_own_examples():
    """Elsewhere JAX refuses them: "Mosaic kernels cannot be automatically partitioned"."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

    @jax.custom_vjp
    def doubled(x):
        return jax.vmap(lambda x: pl.pallas_call(sine, out_shape=x)(x))(x)

    doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (2 * jnp.cos(x) * g,))
    loss_fn = lambda params, batch: jnp.square(doubled(batch["x"] @ params["w"])).mean()  # noqa: E731
    mesh, tx = zero.make_mesh(topology="v5p:2x2x1"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=1, num_microbatches=2, precision="fp32")
    state = zero.abstract_state(lambda _: {"w": jnp.zeros((128, 128))}, tx, mesh=mesh, config=config)
    batch = {"x": jax.ShapeDtypeStruct((16, 8, 128), jnp.float32)}
    assert (
        "tpu_custom_call" in zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).as_text()
    )
