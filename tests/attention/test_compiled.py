"""Programs for hardware that is not there contain the kernel, and no collective over activations."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero
from zero_jax.attention import cudnn
from zero_jax.training.same_program import program_text

COLLECTIVES = re.compile(r"(all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)[\w-]*\(")
HAS_CUDA = importlib.util.find_spec("jax_cuda13_plugin") is not None


def lowered(mesh, *, num_examples=8, num_tokens=200, num_heads=4, num_key_heads=4, **options):
    """Returns the lowered gradients of an attention, whose operands are sharded over examples and heads."""
    batch = tuple(name for name in mesh.axis_names if name != "model")
    sharding = NamedSharding(mesh, PartitionSpec(batch, None, "model"))
    q = jax.ShapeDtypeStruct((num_examples, num_tokens, num_heads, 64), jnp.bfloat16, sharding=sharding)
    k = jax.ShapeDtypeStruct((num_examples, num_tokens, num_key_heads, 64), jnp.bfloat16, sharding=sharding)

    def total(q, k, v):
        out = zero.dot_product_attention(q, k, v, is_causal=True, mesh=mesh, **options)
        return jnp.square(out.astype(jnp.float32)).sum(axis=(1, 3))

    def grads(q, k, v):
        out, pull = jax.vjp(total, q, k, v)
        return pull(out)

    return jax.jit(grads).lower(q, k, k)


def compiled_text(mesh, **options):
    return lowered(mesh, **options).compile().as_text()


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "options", [{}, {"num_key_heads": 2, "segment_ids": jnp.zeros((8, 200), jnp.int32), "local_window_size": (50, 0)}]
)
def test_a_tpu_runs_splash_attention_on_its_own_examples_and_heads(options):
    text = compiled_text(zero.make_mesh(topology="v5p:2x2x2", data=4, model=2), **options)
    assert "splash_mha_fwd" in text and "splash_mha_dkv" in text
    assert not COLLECTIVES.search(text)


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_tpu_adds_the_parts_of_the_queries_cotangent_and_does_not_reduce_a_leading_dim():
    text = compiled_text(zero.make_mesh(topology="v5p:1x1x1"), num_tokens=2048)
    assert re.search(r"bf16\[8,4,4,2048,64\]", text)  # four parts, one a block of keys
    assert not re.search(r"\breduce\(.*dimensions=\{1\}", text)


@pytest.mark.tpu_compiler
def test_what_processes_compare_has_constants_but_no_bodies_of_kernels_which_have_names_of_files():
    segments = jax.random.randint(jax.random.key(0), (8, 200), 0, 9)
    program = lowered(zero.make_mesh(topology="v5p:2x2x2", data=4, model=2), segment_ids=segments)
    whole, compared = program.as_text(), program_text(program)
    bodies = [line for line in whole.splitlines() if "tpu_custom_call" in line]
    assert bodies and all(len(line) > 2000 for line in bodies)
    assert all(len(line) < 2000 for line in compared.splitlines() if "tpu_custom_call" in line)
    (constant,) = re.findall(r"stablehlo.constant dense<.{3000,}", whole)
    assert constant in compared


@pytest.mark.skipif(not (HAS_CUDA and cudnn.installed_version()), reason="needs the extra gpu-compiler")
@pytest.mark.parametrize("options", [{}, {"segment_ids": jnp.arange(1600, dtype=jnp.int32).reshape(8, 200) // 9}])
def test_a_gpu_runs_cudnn_on_its_own_examples_and_heads(options):
    text = compiled_text(zero.make_mesh(topology="h100:1x8", data=4, model=2), num_key_heads=2, **options)
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
    assert not COLLECTIVES.search(text)
