"""The work of kernels: Pallas by the grid and the body, cuDNN's attention by its shapes; counted by hand."""

import base64

import numpy as np
import pytest

from zero_jax.hlo import Program, cycles, roofline
from zero_jax.hlo.kernels import Work, kernel_work
from zero_jax.planning.step_time import kernel_module

# A grid of 2 x 3 x 3 steps; a step multiplies [16, 8] by [8, 32] where the mask has the block, and begins with a zero.
BODY = """module attributes {stable_mosaic.version = 15 : i64} {
  "stable_mosaic.func.func"() ({
  ^bb0(%arg0: i32, %arg1: i32, %arg2: i32, %arg3: memref<3x3xi8, #tpu.memory_space<smem>>, %arg4: memref<16x8xf32>):
    %0 = "stable_mosaic.arith.constant"() {value = 0 : i32} : () -> i32
    %7 = "stable_mosaic.vector.load"() : () -> vector<16x8xbf16>
    %t = "stable_mosaic.vector.load"() : () -> vector<8x16xbf16>
    %8 = "stable_mosaic.vector.load"() : () -> vector<8x32xbf16>
    %acc = "stable_mosaic.vector.load"() : () -> vector<16x32xf32>
    %1 = "stable_mosaic.arith.cmpi"(%arg2, %0) {predicate = 0 : i64} : (i32, i32) -> i1
    "stable_mosaic.scf.if"(%1) ({
      "stable_mosaic.scf.yield"() : () -> ()
    }, {
      "stable_mosaic.scf.yield"() : () -> ()
    }) : (i1) -> ()
    %2 = "stable_mosaic.arith.index_cast"(%arg1) : (i32) -> index
    %3 = "stable_mosaic.arith.index_cast"(%arg2) : (i32) -> index
    %4 = "stable_mosaic.memref.load"(%arg3, %2, %3) : (memref<3x3xi8, #tpu.memory_space<smem>>, index, index) -> i8
    %5 = "stable_mosaic.arith.extsi"(%4) : (i8) -> i32
    %6 = "stable_mosaic.arith.cmpi"(%5, %0) {predicate = 4 : i64} : (i32, i32) -> i1
    "stable_mosaic.scf.if"(%6) ({
      LOOP
    }, {
      "stable_mosaic.scf.yield"() : () -> ()
    }) : (i1) -> ()
    "stable_mosaic.func.return"() : () -> ()
  }) {GRID, scalar_prefetch = 1 : i64, sym_name = "kernel"} : () -> ()
  "stable_mosaic.func.func"() ({
  ^bb0(%arg0: i32, %arg1: i32, %arg2: i32):
    "stable_mosaic.func.return"(%arg0, %arg1) : (i32, i32) -> ()
  }) {function_type = (i32, i32, i32) -> (i32, i32), sym_name = "transform_0"} : () -> ()
}
"""
TYPES = "(vector<16x8xbf16>, vector<8x32xbf16>, vector<16x32xf32>) -> vector<16x32xf32>"
MATMUL = (
    '%9 = "stable_mosaic.tpu.matmul"(%7, %8, %acc) {dimension_numbers = #tpu.dot_dimension_numbers<[1], [0], [0], [1], '
    f"[0, 0, 1, 1], [], []>, transpose_lhs = false, transpose_rhs = false}} : {TYPES}"
)
FLOPS = 2 * 16 * 8 * 32
CAUSAL = np.array([[1, 0, 0], [2, 1, 0], [2, 2, 1]])


def body(product=MATMUL, grid="2, 3, 3"):
    return BODY.replace("LOOP", product).replace("GRID", f"iteration_bounds = array<i64: {grid}>")


def work_of(text, scalars=()):
    return kernel_work(kernel_module(text), scalars)


def test_a_kernel_multiplies_at_the_steps_whose_block_the_mask_has():
    assert work_of(body(), [CAUSAL]) == Work(engine="pallas", flops=2 * 6 * FLOPS, is_exact=True)


def test_without_the_mask_all_blocks_count_and_it_says_so():
    assert work_of(body()) == Work(engine="pallas", flops=18 * FLOPS, is_exact=False)


def test_a_branch_on_the_grid_alone_is_decided():
    on_grid = body().replace('"stable_mosaic.scf.if"(%6)', '"stable_mosaic.scf.if"(%1)')
    assert work_of(on_grid) == Work(engine="pallas", flops=2 * 3 * FLOPS, is_exact=True)


def test_an_else_branch_counts_where_the_condition_fails():
    text = body("").replace(
        '    }, {\n      "stable_mosaic.scf.yield"() : () -> ()\n    }) : (i1) -> ()\n    %2',
        f"    }}, {{\n      {MATMUL}\n    }}) : (i1) -> ()\n    %2",
    )
    assert work_of(text, [CAUSAL]) == Work(engine="pallas", flops=2 * 3 * 2 * FLOPS, is_exact=True)


def test_a_loop_inside_counts_its_iterations():
    loop = f"""%a = "stable_mosaic.arith.constant"() {{value = 1 : i32}} : () -> i32
      %b = "stable_mosaic.arith.muli"(%arg2, %a) {{overflowFlags = #arith.overflow<none>}} : (i32, i32) -> i32
      "stable_mosaic.scf.for"(%0, %b, %a) ({{
      ^bb0(%arg9: i32):
        {MATMUL}
        "stable_mosaic.scf.yield"() : () -> ()
      }}) : (i32, i32, i32) -> ()"""
    # Of the rows of the causal mask, blocks 0, 0-1 and 0-2 run, with as many iterations as the block's number.
    assert work_of(body(loop), [CAUSAL]) == Work(engine="pallas", flops=2 * (0 + 1 + 3) * FLOPS, is_exact=True)


@pytest.mark.parametrize(
    "product",
    [
        f'%9 = "stable_mosaic.tpu.matmul"(%7, %8, %acc) {{transpose_lhs = false, transpose_rhs = false}} : {TYPES}',
        '%9 = "vector.contract"(%7, %8, %acc) {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, '
        "affine_map<(d0, d1, d2) -> (d2, d1)>, affine_map<(d0, d1, d2) -> (d0, d1)>], iterator_types = "
        f"[#vector.iterator_type<parallel>]}} : {TYPES}",
        '%9 = "stable_mosaic.tpu.matmul"(%t, %8, %acc) {transpose_lhs = true, transpose_rhs = false} : '
        "(vector<8x16xbf16>, vector<8x32xbf16>, vector<16x32xf32>) -> vector<16x32xf32>",
    ],
)
def test_products_in_other_forms(product):
    work = work_of(body(product), [CAUSAL])
    assert work is not None
    assert work.flops == 12 * FLOPS


def test_a_grid_of_unknown_size_is_not_known():
    assert work_of(body(grid="2, 3, -9223372036854775808"), [CAUSAL]) is None


def program(call, mask="{ { 1, 0, 0 }, { 2, 1, 0 }, { 2, 2, 1 } }"):
    """A program whose loop hands a mask and an operand to a kernel, the instruction broken as XLA breaks it."""
    return Program(f"""HloModule m, is_scheduled=true, num_partitions=1

%body (s: (s8[3,3], bf16[48,8])) -> (s8[3,3], bf16[48,8]) {{
  %s = (s8[3,3]{{1,0}}, bf16[48,8]{{1,0}}) parameter(0)
  %mask = s8[3,3]{{1,0}} get-tuple-element(%s), index=0
  %x = bf16[48,8]{{1,0}} get-tuple-element(%s), index=1
  %copy-start = (s8[3,3]{{1,0:S(5)}}, s8[3,3]{{1,0}}, u32[]) copy-start(%mask)
  %copy-done = s8[3,3]{{1,0:S(5)}} copy-done(%copy-start)
  {call}
  ROOT %out = (s8[3,3]{{1,0}}, bf16[48,8]{{1,0}}) tuple(%mask, %x)
}}

%condition (s: (s8[3,3], bf16[48,8])) -> pred[] {{
  %s = (s8[3,3], bf16[48,8]) parameter(0)
  ROOT %go = pred[] constant(false)
}}

ENTRY %main (p: bf16[48,8]) -> (s8[3,3], bf16[48,8]) {{
  %p = bf16[48,8]{{1,0}} parameter(0)
  %constant = s8[3,3]{{1,0}} constant({mask})
  %t = (s8[3,3]{{1,0}}, bf16[48,8]{{1,0}}) tuple(%constant, %p)
  ROOT %loop = (s8[3,3], bf16[48,8]) while(%t), condition=%condition, body=%body
}}
""")


CALL = """%k = bf16[48,32]{1,0} custom-call(%copy-done, %x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}, backend_config={"custom_call_config":{"body":"BODY"ESTIMATE}CYCLES}"""


def kernel(text="", estimate="", cycles="", mask="{ { 1, 0, 0 }, { 2, 1, 0 }, { 2, 2, 1 } }"):
    call = CALL.replace("BODY", base64.b64encode(text.encode()).decode())
    loaded = program(call.replace("ESTIMATE", estimate).replace("CYCLES", cycles), mask)
    return loaded, loaded.computations["body"]["k"]


def test_the_body_and_the_mask_of_a_kernel_are_read_from_the_program():
    loaded, call = kernel(body())
    work = roofline(loaded, call, decode=kernel_module)
    assert (work.flops, work.engine, work.is_known, work.is_exact) == (12 * FLOPS, "pallas", True, True)
    assert work.bytes == 9 + 2 * 48 * 8 + 2 * 48 * 32
    loaded, call = kernel(body(), mask="{...}")  # as `as_text()` prints it
    assert roofline(loaded, call, decode=kernel_module).flops == 18 * FLOPS
    assert not roofline(loaded, call, decode=kernel_module).is_exact


@pytest.mark.parametrize(("second", "blocks"), [("{ 1, 0 }, { 2, 1 }", 3), ("{ 1, 1 }, { 1, 1 }", 4)])
def test_of_a_mask_that_is_sharded_by_heads_each_device_has_the_same(second, blocks):
    """The device's row is a slice: if all rows are the same it is known, else all blocks count."""
    text = BODY.replace("LOOP", MATMUL).replace("GRID", "iteration_bounds = array<i64: 1, 2, 2>")
    loaded = Program(f"""HloModule m, is_scheduled=true, num_partitions=2

%sliced (masks: s8[2,2,2], i: s32[]) -> s8[1,2,2] {{
  %masks = s8[2,2,2]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = s8[1,2,2]{{2,1,0}} dynamic-slice(%masks, %i, %zero, %zero), dynamic_slice_sizes={{1,2,2}}
}}

ENTRY %main (p: bf16[48,8], i: s32[]) -> bf16[48,32] {{
  %p = bf16[48,8]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %constant = s8[2,2,2]{{2,1,0}} constant({{ {{ {{ 1, 0 }}, {{ 2, 1 }} }}, {{ {second} }} }})
  %mask = s8[1,2,2]{{2,1,0}} fusion(%constant, %i), kind=kLoop, calls=%sliced
  ROOT %k = bf16[48,32]{{1,0}} custom-call(%mask, %p), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"body":"{base64.b64encode(three_dims(text)).decode()}"}}}}
}}
""")
    work = roofline(loaded, loaded.computations["main"]["k"], decode=kernel_module)
    assert (work.flops, work.is_exact) == (blocks * FLOPS, blocks == 3)


def three_dims(text):
    """The body for a mask `[1, rows, columns]`."""
    loads = 'memref.load"(%arg3, %2, %3) : (memref<3x3xi8, #tpu.memory_space<smem>>, '
    return text.replace(loads, loads.replace("%2", "%0, %2") + "i32, ").encode()


def test_a_kernels_own_estimate_comes_first():
    own = ',"cost_estimate":{"flops":"777","transcendentals":"5","bytes_accessed":"999"}'
    loaded, call = kernel(body(), own)
    work = roofline(loaded, call, decode=kernel_module)
    assert (work.flops, work.bytes, work.engine) == (777, 999, "pallas")


def test_a_kernel_that_cannot_be_decoded_is_unknown():
    loaded, call = kernel(body())
    assert not roofline(loaded, call).is_known
    assert not roofline(loaded, call, decode=lambda _: None).is_known


@pytest.mark.parametrize(("number", "read"), [(2123, 2123), (2**63 - 1, None), (2**62, None), (-1, None)])
def test_cycles_that_cannot_be_are_none(number, read):
    """The compiler of JAX 0.12 writes the largest integer where it knows nothing of a kernel."""
    _, call = kernel(cycles=f',"window_config":{{"estimated_cycles":"{number}"}}')
    assert cycles(call) == read


CUDNN = """HloModule m, is_scheduled=true, num_partitions=1

ENTRY %main (q: bf16[2,64,4,32], k: bf16[2,128,1,32]) -> bf16[2,4,64,32] {
  %q = bf16[2,64,4,32]{3,2,1,0} parameter(0)
  %k = bf16[2,128,1,32]{3,2,1,0} parameter(1)
  ROOT %a = (bf16[2,4,64,32]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$TARGET", \
backend_config={"cudnn_fmha_backend_config":{"fmha_scale":0.17,"intermediate_tensor_shape":{"element_type":"BF16",\
"dimensions":["2","4","64","128"],"tuple_shapes":[]},"is_flash_attention":true,"mask_type":"MASK"WINDOW}}
}
"""


@pytest.mark.parametrize(
    ("target", "mask", "window", "products", "width", "exact"),
    [
        ("fmhaSoftmax", "NO_MASK", "", 2, 128, True),
        ("fmhaSoftmax", "CAUSAL", "", 2, 64, True),
        ("fmhaScaleBiasSoftmaxBackward", "NO_MASK", "", 5, 128, True),
        ("fmhaSoftmaxBackward", "CAUSAL", ',"sliding_window_length":16', 5, 16, True),
        ("fmhaSoftmax", "PADDING", "", 2, 128, False),
    ],
)
@pytest.mark.parametrize("colon", [":", ": "], ids=["as XLA writes it", "as JAX writes it"])
def test_attention_of_cudnn_counts_by_its_scores(target, mask, window, products, width, exact, colon):
    text = CUDNN.replace("TARGET", target).replace("MASK", mask).replace("WINDOW", window)
    loaded = Program(text.replace('":', f'"{colon}'))
    work = roofline(loaded, loaded.computations["main"]["a"])
    assert work.flops == products * 2 * 2 * 4 * 64 * 32 * width
    assert work.engine == ("cudnn attention backward" if products == 5 else "cudnn attention")
    assert work.is_exact is exact
