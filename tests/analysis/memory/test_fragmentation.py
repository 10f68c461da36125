"""The heap of temporaries as the compiler laid it out: read from its own account, and against what the text tells."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero
from zero_jax import memory
from zero_jax.models import gpt

pytestmark = pytest.mark.usefixtures("compiled_anew")

# Two heaps of the device's memory, of 1,000 and 200 bytes, and one on the chip, which does not count. In the first %a
# and %b share a place (0 to 300) and are never alive together; %c lies from 400 on: the most is %b with %c, 300 + 500.
# %loop{1} and %inner are one buffer: it counts once. The second has %d, 200.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 p @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 1000, preallocated-temp:
 value: <2 a @0> (size=300,offset=0): f32[75]{0}
 value: <3 b{0} @0> (size=200,offset=0): f32[50]{0}
 value: <4 loop{1} (phi) @0> (size=100,offset=200): f32[25]{0}
 value: <5 inner @0> (size=100,offset=200): f32[25]{0}
 value: <6 c @0> (size=500,offset=400): f32[125]{0}
allocation 2: size 5000, color 1, preallocated-temp:
 value: <7 v @1> (size=5000,offset=0): f32[1250]{0:S(1)}
allocation 3: size 200, preallocated-temp:
 value: <8 d @0> (size=200,offset=0): f32[50]{0}
"""
LIVES = """HloLiveRange (max 1500):
  InstructionSequence:
    0:a
  BufferLiveRange:
    a{}:0-2
    b{0}:3-6
    loop{1}:3-9
    inner{}:4-5
    c{}:5-8
    d{}:1-9
  Live ranges at 5 (peak):
    c{}: 500 bytes (cumulative: 500 bytes)
"""
NAME = "module_0001.jit_step.after_optimizations"


def write(folder, *, lives=LIVES, name=NAME):
    (folder / f"{name}-buffer-assignment.txt").write_text(ASSIGNMENT)
    if lives is not None:
        (folder / f"{name}-live-range.txt").write_text(lives)


def test_a_layout_worked_out_by_hand(tmp_path):
    write(tmp_path)
    assert memory.read_layout(tmp_path) == memory.HeapLayout(allocated_bytes=1200, live_bytes=800 + 200)


@pytest.mark.parametrize("lives", [None, LIVES.replace("    inner{}:4-5\n", "")])
def test_lives_that_are_not_told_are_not_made_up(tmp_path, lives):
    write(tmp_path, lives=lives)
    assert memory.read_layout(tmp_path) == memory.HeapLayout(allocated_bytes=1200, live_bytes=None)


def test_a_folder_of_no_compile_or_of_several_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"has 0 buffer assignments.*layout_options"):
        memory.read_layout(tmp_path)
    write(tmp_path)
    write(tmp_path, name="module_0002.jit_other.after_optimizations")
    with pytest.raises(ValueError, match="has 2 buffer assignments"):
        memory.read_layout(tmp_path)


def compile_with_layout(lowered, folder):
    compiled = lowered.compile(compiler_options=memory.layout_options(folder))
    return memory.measure(compiled, layout=memory.read_layout(folder))


def saved(x, weights):
    """A loss that keeps one activation a layer, `[8, 64]` of 2 KiB, for the backward pass."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def test_the_heap_of_a_cpu_program_is_known_exactly(tmp_path):
    shapes = jax.ShapeDtypeStruct((8, 64), jnp.float32), [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    lowered = jax.jit(jax.grad(saved, argnums=1)).lower(*shapes)
    told = compile_with_layout(lowered, tmp_path)
    # XLA:CPU says how large the heap is without being asked; what is alive is then worked out from the text.
    alone = memory.measure(lowered.compile())
    assert alone.allocated_bytes == told.allocated_bytes == alone.temp_bytes
    assert 1 <= told.fragmentation < 1.2
    assert alone.fragmentation == pytest.approx(told.fragmentation, rel=0.03)
    assert alone.residual_bytes == pytest.approx(4 * 8 * 64 * 4, rel=0.3)  # the activations that tanh has made


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_the_heap_of_a_tpu_program(tmp_path):
    mesh, tx = zero.make_mesh(topology="v5p:2x2x4"), optax.adamw(3e-4)
    config = gpt.GPTConfig(vocab_size=8192, seq_len=512, num_layers=4, d_model=512)
    zero_config = zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=0, overlap=False)
    state = zero.abstract_state(functools.partial(gpt.init, config), tx, mesh=mesh, config=zero_config)
    step = zero.make_train_step(gpt.loss_fn(config), tx, mesh=mesh, config=zero_config)
    tokens = jax.ShapeDtypeStruct((32, config.seq_len), jnp.int32)
    report = compile_with_layout(step.lower(state, {"inputs": tokens, "targets": tokens}), tmp_path)
    # Seen: -1.6%, with a fragmentation of 1.10.
    assert report.live_peak_bytes == pytest.approx(report.layout.live_bytes, rel=0.05)
    assert 1 <= report.fragmentation < 1.3
    assert report.layout.live_bytes <= report.allocated_bytes <= report.temp_bytes
    # Logits of 2 x 512 x 8192 in bf16 are kept; the four residual streams of 1 MiB partly lie on the chip.
    assert 16 * 2**20 <= report.residual_bytes < 0.6 * report.live_peak_bytes


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_offloaded_residuals_are_host_bytes_and_no_device_bytes():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    mesh = zero.make_mesh(topology="v5p:2x2x1")
    num_layers, width, batch = 8, 1024, 4096

    def block(x, weight):
        return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x, "kept") @ weight), None

    def loss(weights, x, policy):
        x, _ = jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights = jax.ShapeDtypeStruct((num_layers, width, width), jnp.bfloat16, sharding=whole)
    x = jax.ShapeDtypeStruct((batch, width), jnp.bfloat16, sharding=whole)
    plain, offloaded = (
        memory.measure(jax.jit(jax.grad(functools.partial(loss, policy=one))).lower(weights, x).compile())
        for one in (None, policy)
    )
    stack = num_layers * batch * width * 2
    assert (plain.host_bytes, plain.host_temp_bytes) == (0, 0)
    assert offloaded.host_temp_bytes == offloaded.host_bytes == stack
    assert offloaded.residual_bytes <= plain.residual_bytes - stack + batch * width * 2
    assert "host memory" in str(offloaded)
