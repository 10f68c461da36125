"""One size of buffers, mapped to the options of each compiler."""

import jax
import jax.numpy as jnp
import pytest

import zero_jax as zero
from zero_jax import hlo
from zero_jax.sharding.spec import named
from zero_jax.training.collective_combining import compiler_options

MIB = 2**20


def test_none_leaves_the_compiler_its_own():
    assert compiler_options("tpu", None) == compiler_options("gpu", None) == compiler_options("quantum", None) == {}


def test_a_gpu_compiler_has_an_option_for_each_kind():
    options = compiler_options("gpu", 3)
    assert set(options.values()) == {3}
    assert {name.split("xla_gpu_")[1].split("_combine")[0] for name in options} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    assert compiler_options("cuda", 3) == options


def test_a_cpu_program_compiles_with_its_options():
    compiled = jax.jit(lambda x: x + 1, compiler_options=compiler_options("cpu", MIB))
    assert compiled(1) == 2


@pytest.mark.parametrize("size", [-1, 1.5, "64", True, 2**63])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match="give an integer of at least 0"):
        compiler_options("gpu", size)


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match=r"'quantum'.*leave it None"):
        compiler_options("quantum", MIB)


@pytest.mark.tpu_compiler
def test_a_tpu_program_joins_all_reduces_up_to_the_size():
    mesh = zero.make_mesh(topology="v5e:2x2")
    stacks = [jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16, sharding=named(mesh, (("data",), (), ())))] * 6
    add = jax.jit(lambda xs: [x.sum(0) for x in xs], out_shardings=named(mesh, ()))
    lowered = add.lower(stacks)

    def largest(combine_bytes):
        options = compiler_options(mesh.devices.flat[0].platform, combine_bytes)
        found = hlo.collectives(lowered.compile(compiler_options=options).as_text())
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.full_bytes for c in found) == 6 * MIB // 2
        return max(c.full_bytes for c in found)

    assert largest(0) == MIB // 2
    assert largest(MIB) == MIB
    assert largest(64 * MIB) == 3 * MIB
