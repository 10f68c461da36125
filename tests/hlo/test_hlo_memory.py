"""Tests that the peak of a scheduled program's temporaries is found, on programs whose peak is worked out by hand."""

import re

import pytest

from zero_jax.hlo.layout import padded_elements, parse_shape
from zero_jax.hlo.memory import peak

KIB = 2**10


def program(body, *, header="", computations=""):
    """A scheduled program; if it returns one array, it is made a single number, in whose memory no temporary fits."""
    body = re.sub(r"(ROOT %\w+ = \w+)\[[\d,]+\]\{[^}]*\}", r"\1[1]{0}", body)
    entry = f"ENTRY %main (a: f32[256]) -> f32[256] {{\n{body}\n}}\n"
    return f"HloModule jit_f, is_scheduled=true{header}\n\n{computations}\n{entry}"


def names(heap):
    return {buffer.name for buffer in heap.live}


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("f32[3,5]{1,0}", 60),
        ("pred[7]{0}", 7),
        ("s4[3]{0}", 3),  # unpacked, a byte each
        ("s4[3]{0:E(4)}", 2),
        ("f32[]{:T(128)}", 512),
        ("bf16[]{:T(256)}", 512),
        ("f32[10,200]{1,0:T(8,128)}", 16 * 256 * 4),
        ("bf16[10,200]{1,0:T(8,128)(2,1)}", 16 * 256 * 2),
        ("bf16[10,200]{0,1:T(8,128)(2,1)}", 200 * 128 * 2),  # rows are minor: 200 x 10 -> 200 x 128
        ("f32[5,3,100]{2,1,0:T(4,128)S(1)}", 5 * 4 * 128 * 4),
        ("bf16[100]{0:T(256)(128)(2,1)}", 512),
        ("bf16[1,1,128]{2,1,0:T(2,128)(2,1)}", 512),
        ("f32[8,128]", 4096),
        ("token[]", 0),
    ],
)
def test_an_array_takes_its_padded_size(shape, num_bytes):
    assert parse_shape(shape).num_bytes == num_bytes


def test_memory_spaces_and_tuples_are_read():
    first, (second, third) = parse_shape("(f32[2]{0:T(128)S(1)}, /*index=1*/(u32[]{:S(2)}, bf16[4]{0:T(256)S(5)}))")
    assert (first.space, second.space, third.space) == (1, 2, 5)
    assert str(third) == "bf16[4]"


def test_padding_counts_a_merged_dim_once():
    assert padded_elements((2, 3, 128), "2,1,0:T(*,8,128)") == padded_elements((2, 3, 128), "2,1,0:T(1,8,128)")


def test_a_shape_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="unreadable shape"):
        parse_shape("(f32[2]{0}")


def test_a_program_that_is_not_scheduled_is_an_error():
    with pytest.raises(ValueError, match="not scheduled"):
        peak("HloModule jit_f\n\nENTRY %main () -> f32[] {\n}\n")


def test_a_chain_holds_what_is_still_to_be_read():
    # Each f32[256] is 1 KiB, %b 2 KiB. While %c is written, %b (2) is read, %c (1) written: 3 KiB. While %d is written
    # (transposes cannot work in place), %c (1) and %d (1) are alive, and %b is not. The result is no temporary.
    heap = peak(
        program("""
  %a = f32[256]{0} parameter(0)
  %b = f32[512]{0} concatenate(%a, %a), dimensions={0}
  %c = f32[256]{0} slice(%b), slice={[0:256]}
  %d = f32[256]{0} reverse(%c), dimensions={0}
  ROOT %e = f32[256]{0} reverse(%d), dimensions={0}""")
    )
    assert heap.peak_bytes == 3 * KIB
    assert names(heap) == {"b", "c"}


def test_an_elementwise_operation_writes_over_what_nobody_reads_again():
    # %c over %b, %d over %c: 1 KiB. With another reader of %b after it, %c needs its own: 2 KiB.
    text = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} negate(%b)
  %d = f32[256]{0} add(%c, %LAST)
  ROOT %e = f32[256]{0} reverse(%d), dimensions={0}"""
    assert peak(program(text.replace("LAST", "c"))).peak_bytes == KIB
    assert peak(program(text.replace("LAST", "b"))).peak_bytes == 2 * KIB


def test_an_argument_is_never_written_over_unless_donated():
    heap = peak(
        program("  %a = f32[256]{0} parameter(0)\n  %b = f32[256]{0} negate(%a)\n  ROOT %c = f32[256]{0} negate(%b)")
    )
    assert heap.donated == (False,)


def test_tuples_and_bitcasts_cost_nothing():
    # %b and %c, 1 KiB each, live on through the tuple until %f and %g read them.
    heap = peak(
        program(
            """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} reverse(%a), dimensions={0}
  %t = (f32[256]{0}, (f32[256]{0})) tuple(%b, %u)
  %big = f32[1024]{0} broadcast(%a), dimensions={0}
  %v = f32[16,16]{1,0} bitcast(%x)
  ROOT %f = f32[256]{0} reverse(%y), dimensions={0}""".replace("(%b, %u)", "(%b, %c)").replace(
                "  %v = f32[16,16]{1,0} bitcast(%x)",
                "  %x = f32[256]{0} get-tuple-element(%t), index=1\n  %v = f32[16,16]{1,0} bitcast(%x)\n"
                "  %y = f32[256]{0} bitcast(%v)",
            )
        )
    )
    # At %big (4 KiB): %c is alive through the tuple; %b is not, nobody reads it.
    assert heap.peak_bytes == 5 * KIB
    assert names(heap) == {"big", "c"}


LOOP = """
%body (s: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %s = (s32[], f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %row = f32[1,256]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,256}
  %row2 = f32[1,256]{1,0} reverse(%row), dimensions={1}
  %update = f32[4,256]{1,0} dynamic-update-slice(%stack, %row2, %i, %zero)
  ROOT %t = (s32[], f32[4,256]{1,0}) tuple(%next, %update)
}

%condition (s: (s32[], f32[4,256])) -> pred[] {
  %s = (s32[], f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""
LOOP_ENTRY = """
  %a = f32[256]{0} parameter(0)
  %start = s32[] constant(0)
  %copied = s32[] copy(%start)
  %zeros = f32[4,256]{1,0} broadcast(%a), dimensions={1}
  %init = (s32[], f32[4,256]{1,0}) tuple(%copied, %zeros)
  %while = (s32[], f32[4,256]{1,0}) while(%init), condition=%condition, body=%body
  %stacked = f32[4,256]{1,0} get-tuple-element(%while), index=1
  ROOT %sum = f32[256]{0} slice(%stacked), slice={[0:1], [0:256]}"""


def test_a_loop_updates_its_state_in_place_and_adds_its_own_temporaries():
    # The stack of 4 KiB once, the counter's 4 bytes (written over in place), in the body %row and %row2, 1 KiB each.
    heap = peak(program(LOOP_ENTRY, computations=LOOP))
    assert heap.peak_bytes == 6 * KIB + 4
    stack = heap.live[0]
    assert (stack.num_bytes, stack.shape) == (4 * KIB, "f32[4,256]")
    assert {buffer.name for buffer in heap.live[1:3]} == {"row", "row2"}
    assert stack.name == "zeros"  # at that point of the first trip nothing else has written it


@pytest.mark.parametrize(
    ("shape", "aliasing"),
    [("f32[4,256]{1,0}", "{}: (0, {})"), ("((f32[4,256]{1,0}), f32[4,256]{1,0})", "{1}: (0, {})")],
)
def test_what_is_reduced_asynchronously_enters_a_loop(shape, aliasing):
    """XLA:GPU reduces in place; newer releases give the operands of a start before its results."""
    reduced = f"""
  %begun = {shape} all-reduce-start(%zeros), to_apply=%add, output_to_operand_aliasing={{{aliasing}}}
  %reduced = f32[4,256]{{1,0}} all-reduce-done(%begun)
  %init"""
    entry = LOOP_ENTRY.replace("\n  %init", reduced).replace("tuple(%copied, %zeros)", "tuple(%copied, %reduced)")
    assert peak(program(entry, computations=LOOP)).peak_bytes == 6 * KIB + 4


def test_a_copy_in_a_loop_is_a_second_buffer():
    copied = (
        LOOP.replace("dynamic-update-slice(%stack", "dynamic-update-slice(%twin")
        .replace("  %row = ", "  %twin = f32[4,256]{1,0} copy(%stack)\n  %row = ")
        .replace("dynamic-slice(%stack", "dynamic-slice(%twin")
        .replace("  %row2 = ", "  %keep = f32[4,256]{1,0} reverse(%stack), dimensions={0}\n  %row2 = ")
    )
    # %keep reads %stack after the copy: %stack 4, %twin 4, %row 1, and %keep 4 for that moment, the counter 4 bytes.
    assert peak(program(LOOP_ENTRY, computations=copied)).peak_bytes == 13 * KIB + 4


def test_a_donated_argument_takes_its_result():
    # %c is written over %a: no temporary and no memory of its own. Without the donation it is an output beside it.
    text = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} reverse(%b), dimensions={0}
  ROOT %t = (f32[256]{0}) tuple(%c)"""
    heap = peak(
        program(text, header=", input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={...}")
    )
    assert (heap.peak_bytes, heap.donated) == (KIB, (True,))
    assert peak(program(text)).donated == (False,)


def test_a_temporary_lies_in_a_donated_argument_that_is_free():
    # %a is last read by %b and written again by %e. %b (1 KiB) is alive with %a's reader, %c (1 KiB) and %d (2 KiB)
    # after it: %c fits into %a, %d does not. %b 1 + %c 0, then %c 0 + %d 2: the peak is 2 KiB; without donation 3 KiB.
    text = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} reverse(%b), dimensions={0}
  %d = f32[512]{0} concatenate(%c, %c), dimensions={0}
  %e = f32[256]{0} slice(%d), slice={[0:256]}
  ROOT %t = (f32[256]{0}) tuple(%e)"""
    heap = peak(program(text, header=", input_output_alias={ {0}: (0, {}, may-alias) }"))
    assert heap.peak_bytes == 2 * KIB
    assert [buffer.name for buffer in heap.in_arguments] == ["c"]
    assert peak(program(text)).peak_bytes == 3 * KIB


def test_a_temporary_lies_in_the_memory_of_a_result_that_is_not_written_yet():
    # %b and %c are 1 KiB each, as is the result %d: the first of them of the same size goes there, and is dead when it
    # is written. (Seen on XLA:CPU and XLA:TPU, whose buffer assignments this follows to the byte.)
    text = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %c = f32[256]{0} reverse(%b), dimensions={0}
  %d = f32[256]{0} reverse(%c), dimensions={0}
  ROOT %t = (f32[256]{0}) tuple(%d)"""
    heap = peak(program(text))
    assert heap.peak_bytes == KIB
    assert (names(heap), [buffer.name for buffer in heap.in_arguments]) == ({"c"}, ["b"])


def test_what_the_forward_pass_keeps_for_the_backward_pass():
    # %x (1 KiB) and %y (2 KiB) are written by the forward pass; the backward pass reads %y, and %x through a copy
    # without a name. %g is a gathered param, %z is read by the forward pass alone.
    stack = lambda name: f', metadata={{op_name="jit(f)/{name}"}}'  # noqa: E731
    forward, backward, gather = stack("jvp()/mul"), stack("transpose(jvp())/mul"), stack("jvp(gather=w)/all_gather")
    heap = peak(
        program(f"""
  %a = f32[256]{{0}} parameter(0)
  %x = f32[256]{{0}} reverse(%a), dimensions={{0}}{forward}
  %y = f32[512]{{0}} concatenate(%a, %a), dimensions={{0}}{forward}
  %g = f32[1024]{{0}} broadcast(%a), dimensions={{0}}{gather}
  %z = f32[2048]{{0}} broadcast(%y), dimensions={{0}}{forward}
  %w = f32[256]{{0}} slice(%z), slice={{[0:256]}}{forward}
  %p = f32[256]{{0}} slice(%y), slice={{[0:256]}}{backward}
  %q = f32[256]{{0}} concatenate(%g, %p), dimensions={{0}}{backward}
  %c = f32[256]{{0}} reverse(%x), dimensions={{0}}
  ROOT %e = f32[256]{{0}} dot(%c, %q){backward}""")
    )
    assert [(one.name, one.num_bytes) for one in heap.residuals] == [("y", 2 * KIB), ("x", KIB)]


def test_an_asynchronous_update_is_in_place_too():
    # A stack of 4 KiB in the host's memory, as residuals are offloaded to: once, and not once for each update.
    body = """
  %a = f32[256]{0} parameter(0)
  %i = s32[] constant(0)
  %stack = f32[4,256]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %row = f32[1,256]{1,0} reverse(%a), dimensions={0}
  %start = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[], s32[]), f32[4,256]{1,0:S(5)}, u32[]) dynamic-update-slice-start(%stack, %row, %i, %i)
  %done = f32[4,256]{1,0:S(5)} dynamic-update-slice-done(%start)
  ROOT %e = f32[256]{0} slice(%done), slice={[0:1], [0:256]}"""  # noqa: E501
    assert peak(program(body)).host_peak_bytes == 4 * KIB


def test_an_asynchronous_update_of_a_gpu_is_in_place_too():
    # Two updates of a donated array, one after the other, as of a loop that runs two iterations at a time.
    text = """HloModule m, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%update (p: f32[4,256], q: f32[1,256], n: s32[], z: s32[]) -> f32[4,256] {
  %p = f32[4,256]{1,0:S(5)} parameter(0)
  %q = f32[1,256]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %z = s32[] parameter(3)
  ROOT %u = f32[4,256]{1,0:S(5)} dynamic-update-slice(%p, %q, %n, %z)
}

ENTRY %main (a: f32[4,256], b: f32[1,256], i: s32[]) -> f32[4,256] {
  %a = f32[4,256]{1,0:S(5)} parameter(0)
  %b = f32[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %s = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[], s32[]), f32[4,256]{1,0:S(5)}, u32[]) fusion-start(%a, %b, %i, %i), kind=kLoop, calls=%update
  %d = f32[4,256]{1,0:S(5)} fusion-done(%s)
  %t = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[], s32[]), f32[4,256]{1,0:S(5)}, u32[]) fusion-start(%d, %b, %i, %i), kind=kLoop, calls=%update
  ROOT %e = f32[4,256]{1,0:S(5)} fusion-done(%t)
}
"""  # noqa: E501
    assert peak(text).host_peak_bytes == 0


def test_memory_on_the_chip_and_of_the_host_is_counted_apart():
    # bf16[10,200] in tiles is 16 x 256 x 2 = 8 KiB: once in HBM (%b), in VMEM (%c) and in the host's memory (%d).
    body = """
  %a = bf16[10,200]{1,0:T(8,128)(2,1)} parameter(0)
  %h = bf16[10,200]{1,0:T(8,128)(2,1)S(5)} parameter(1)
  %b = bf16[10,200]{1,0:T(8,128)(2,1)} reverse(%a), dimensions={0}
  %start = (bf16[10,200]{1,0:T(8,128)(2,1)S(1)}, bf16[10,200]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %c = bf16[10,200]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %d = bf16[10,200]{1,0:T(8,128)(2,1)S(5)} copy(%c)
  ROOT %e = bf16[10,200]{1,0:T(8,128)(2,1)} reverse(%d), dimensions={0}"""
    heap = peak(program(body))
    assert (heap.peak_bytes, heap.host_peak_bytes, heap.on_chip_peak_bytes) == (8 * KIB, 8 * KIB, 8 * KIB + 4)
    assert heap.host_argument_bytes == 8 * KIB


def test_memory_space_1_of_a_gpu_is_its_memory():
    body = "  %a = f32[256]{0} parameter(0)\n  %b = f32[256]{0:S(1)} reverse(%a), dimensions={0}\n"
    body += "  ROOT %c = f32[256]{0} reverse(%b), dimensions={0}"
    assert peak(program(body)).peak_bytes == KIB


def test_a_start_holds_its_operand_until_it_is_done():
    # %b 1 KiB and the gathered 8 KiB from the start to the end; %work, 2 KiB, in between; then %b is free.
    body = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %start = (f32[256]{0}, f32[2048]{0}) all-gather-start(%b), dimensions={0}
  %work = f32[512]{0} concatenate(%a, %a), dimensions={0}
  %done = f32[2048]{0} all-gather-done(%start)
  ROOT %e = f32[256]{0} slice(%done), slice={[0:256]}"""
    heap = peak(program(body))
    assert heap.peak_bytes == 11 * KIB
    assert names(heap) == {"b", "start", "work"}


def test_a_conditional_takes_its_larger_branch():
    # %b (1 KiB) goes into both branches. The first makes 2 KiB and the result of 1 KiB, the second the result alone,
    # which is the same buffer: 1 + 2 + 1.
    branches = """
%first (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %wide = f32[512]{0} concatenate(%x, %x), dimensions={0}
  ROOT %narrow = f32[256]{0} slice(%wide), slice={[0:256]}
}

%second (y: f32[256]) -> f32[256] {
  %y = f32[256]{0} parameter(0)
  ROOT %same = f32[256]{0} reverse(%y), dimensions={0}
}
"""
    body = """
  %a = f32[256]{0} parameter(0)
  %p = s32[] parameter(1)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %either = f32[256]{0} conditional(%p, %b, %b), branch_computations={%first, %second}
  ROOT %e = f32[256]{0} reverse(%either), dimensions={0}"""
    heap = peak(program(body, computations=branches))
    assert heap.peak_bytes == 4 * KIB
    assert names(heap) == {"b", "wide", "narrow"}


def test_a_fusion_that_updates_writes_in_place_and_allocates_nothing_inside():
    # %stack 4 KiB once: the fusion's inner %twice costs nothing, its result is written over %stack. %row is 1 KiB.
    fused = """
%fused (p: f32[4,256], q: f32[1,256]) -> f32[4,256] {
  %p = f32[4,256]{1,0} parameter(0)
  %q = f32[1,256]{1,0} parameter(1)
  %twice = f32[1,256]{1,0} add(%q, %q)
  %z = s32[] constant(0)
  ROOT %u = f32[4,256]{1,0} dynamic-update-slice(%p, %twice, %z, %z)
}
"""
    body = """
  %a = f32[256]{0} parameter(0)
  %stack = f32[4,256]{1,0} broadcast(%a), dimensions={1}
  %row = f32[1,256]{1,0} broadcast(%a), dimensions={1}
  %f = f32[4,256]{1,0} fusion(%stack, %row), kind=kLoop, calls=%fused
  ROOT %e = f32[256]{0} slice(%f), slice={[0:1], [0:256]}"""
    assert peak(program(body, computations=fused)).peak_bytes == 5 * KIB


def test_the_tpu_compiler_says_what_is_written_over_what():
    # Two operands, two results, 2 and 3 being the results: the second result over the first operand. Buffers of
    # 8 x 128 x 4 = 4 KiB: %b and %c, and %f's first result: 12 KiB instead of 16.
    body = """
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)} reverse(%a), dimensions={0}
  %c = f32[8,128]{1,0:T(8,128)} reverse(%a), dimensions={1}
  %f = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) fusion(%b, %c), kind=kLoop, calls=%g, CONFIG
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%f), index=0
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%f), index=1
  ROOT %e = f32[8,128]{1,0:T(8,128)} dot(%x, %y)"""
    config = 'backend_config={"flag_configs":[],"aliasing_operands":{"lists":[LISTS]},"window_config":{"bounds":["1"]}}'
    body = body.replace("CONFIG", config)
    assert peak(program(body.replace("LISTS", '{"indices":["0","3"]}'))).peak_bytes == 12 * KIB
    assert peak(program(body.replace("LISTS", '{"indices":["0","3"]},{"indices":["1","2"]}'))).peak_bytes == 8 * KIB
    assert peak(program(body.replace("LISTS", ""))).peak_bytes == 16 * KIB


def test_a_custom_call_says_what_it_writes_over():
    body = """
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} reverse(%a), dimensions={0}
  %k = f32[256]{0} custom-call(%a, %b), custom_call_target="add"ALIASING
  ROOT %e = f32[256]{0} reverse(%k), dimensions={0}"""
    assert peak(program(body.replace("ALIASING", ", output_to_operand_aliasing={{}: (1, {})}"))).peak_bytes == KIB
    assert peak(program(body.replace("ALIASING", ""))).peak_bytes == 2 * KIB


def test_a_buffer_is_named_after_what_wrote_it():
    body = """
  %a = f32[256]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %b = f32[256]{0} copy(%a)
  %c = f32[256]{0} reverse(%b), dimensions={0}, metadata={op_name="jit(f)/mul" source_file="model.py" source_line=7}
  ROOT %e = f32[256]{0} reverse(%c), dimensions={0}"""
    heap = peak(program(body))
    b, c = sorted(heap.live, key=lambda buffer: buffer.name)
    assert (b.op_name, b.source, b.last_read_by) == ("state.params['w']", "", "jit(f)/mul")
    assert (c.op_name, c.source, c.opcode) == ("jit(f)/mul", "model.py:7", "reverse")
