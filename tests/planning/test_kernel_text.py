"""A real program of the TPU compiler with JAX's splash attention: its body and its mask are read."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero
from zero_jax.hlo import Program, roofline
from zero_jax.planning.job import program_text
from zero_jax.planning.step_time import kernel_module

LENGTH, HEADS, HEAD_DIM, BLOCK = 512, 2, 128, 128


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("mask", "blocks"), [("causal", 10), ("full", 16)])
def test_splash_attention_counts_the_blocks_of_its_mask(mask, blocks):
    mesh = zero.make_mesh(topology="v5e:2x2")
    shape = (LENGTH, LENGTH)
    of_head = splash_attention_mask.CausalMask(shape) if mask == "causal" else splash_attention_mask.FullMask(shape)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK,
        block_q_dkv=BLOCK, block_kv_dkv=BLOCK, block_kv_dkv_compute=BLOCK, use_fused_bwd_kernel=True,
    )  # fmt: skip
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([of_head] * HEADS), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )
    batch = PartitionSpec("data")
    attend = jax.shard_map(
        lambda x: jax.vmap(kernel)(x, x, x), mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False
    )
    x = jax.ShapeDtypeStruct((4, HEADS, LENGTH, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, batch))
    gradient = jax.jit(jax.grad(lambda x: attend(x).astype(jnp.float32).sum()))
    program = Program(program_text(gradient.trace(x).lower(lowering_platforms=("tpu",)).compile()))
    works = [
        roofline(program, instruction, decode=kernel_module)
        for instruction in program.instructions()
        if "tpu_custom_call" in instruction.line and instruction.opcode == "custom-call"
    ]
    one = 2 * BLOCK * BLOCK * HEAD_DIM * HEADS * blocks  # a product of one example, on each of four devices
    assert sorted(work.flops for work in works) == [2 * one, 5 * one]
    assert all(work.is_exact and work.engine == "pallas" for work in works)
