"""Schedules played by hand, and costs counted by hand."""

import pathlib

import pytest

from zero_jax import hlo
from zero_jax.hlo import Program

DATA = pathlib.Path(__file__).parents[1] / "fixtures" / "hlo"
HEADER = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
GROUPS = "replica_groups={{0,1,2,3}}"


def play(body, seconds, links, *, links_of=None, **options):
    """Plays a program whose instructions take `seconds` by name, its collectives `links` by name, all else nothing."""
    text = HEADER + body
    found = hlo.collectives(text, **options)
    costs = hlo.Costs(
        instruction=lambda program, instruction: seconds.get(instruction.name, 0.0),
        collective=lambda one: links[one.name],
        is_kernel=lambda program, instruction: 'target="kernel"' in instruction.line,
        **({} if links_of is None else {"links_of": links_of}),
    )
    return hlo.play(Program(text), found, costs, **options)


GATHER = f"(f32[4], f32[16]) all-gather-start(f32[4] %p), {GROUPS}, dimensions={{0}}"


def test_computation_hides_what_is_scheduled_between_start_and_done():
    timeline = play(
        f"""ENTRY %main (p: f32[4]) -> f32[16] {{
  %p = f32[4] parameter(0)
  %start = {GATHER}
  %a = f32[4] add(f32[4] %p, f32[4] %p), metadata={{source_file="model.py" source_line=7}}
  %b = f32[4] add(f32[4] %p, f32[4] %p)
  %done = f32[16] all-gather-done((f32[4], f32[16]) %start)
  ROOT %c = f32[16] add(f32[16] %done, f32[16] %done)
}}
""",
        {"a": 3.0, "b": 1.0, "c": 2.0},
        {"start": 5.0},
    )
    # 0-5 on the wire; a and b end at 4, the done waits 1 second, c ends at 7.
    assert timeline.total_seconds == 7
    assert timeline.compute_seconds == 6
    assert timeline.exposed_seconds == 1
    assert timeline.collective_seconds == 5
    overlap = timeline.overlaps["main", "start"]
    assert overlap.seconds == 4
    assert overlap.instructions == ("a (model.py:7)", "b")


def test_collectives_of_the_same_devices_queue_up_and_others_do_not():
    def entry(second_groups):
        return f"""ENTRY %main (p: f32[4]) -> f32[16] {{
  %p = f32[4] parameter(0)
  %one = {GATHER}
  %two = (f32[4], f32[8]) all-gather-start(f32[4] %p), replica_groups={second_groups}, dimensions={{0}}
  %a = f32[4] add(f32[4] %p, f32[4] %p)
  %done.2 = f32[8] all-gather-done((f32[4], f32[8]) %two)
  ROOT %done.1 = f32[16] all-gather-done((f32[4], f32[16]) %one)
}}
"""

    links, seconds = {"one": 3.0, "two": 4.0}, {"a": 2.0}
    # One queue: `two` is on the wire from 3 to 7. Two queues: from 0 to 4, so that only 2 seconds stay exposed.
    assert play(entry("{{0,1,2,3}}"), seconds, links).exposed_seconds == 5
    assert play(entry("{{0,1},{2,3}}"), seconds, links).exposed_seconds == 2
    # Whoever knows the network says which links they take.
    sharing = {"links_of": lambda one: frozenset(one.replica_groups[0])}
    assert play(entry("{{0,1},{2,3}}"), seconds, links, **sharing).exposed_seconds == 5


def test_a_loop_holds_up_what_is_in_flight_over_its_links():
    body = f"""%body (b: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %b = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element((s32[], f32[16]) %b), index=0
  %x = f32[16] get-tuple-element((s32[], f32[16]) %b), index=1
  %sum = f32[16] all-reduce(f32[16] %x), {GROUPS}, to_apply=%add
  ROOT %out = (s32[], f32[16]) tuple(s32[] %i, f32[16] %sum)
}}

ENTRY %main (p: f32[4], q: (s32[], f32[16])) -> f32[16] {{
  %p = f32[4] parameter(0)
  %q = (s32[], f32[16]) parameter(1)
  %start = {GATHER}
  %loop = (s32[], f32[16]) while((s32[], f32[16]) %q), condition=%less, body=%body, {KNOWN}
  ROOT %done = f32[16] all-gather-done((f32[4], f32[16]) %start)
}}
"""
    links = {"start": 20.0, "sum": 2.0}
    # 3 iterations of 2 seconds: the gather ends at 20 over links of its own, at 26 where they are the loop's too.
    own = {"links_of": lambda one: frozenset([one.kind])}
    shared = {"links_of": lambda one: frozenset([one.kind, "all"])}
    assert play(body, {}, links, **own).total_seconds == 20
    assert play(body, {}, links, **shared).total_seconds == 26
    assert play(body, {}, links, **shared).collective_seconds == 26


def test_a_synchronous_collective_is_all_exposed():
    timeline = play(
        f"""ENTRY %main (p: f32[16]) -> f32[16] {{
  %p = f32[16] parameter(0)
  %a = f32[16] add(%p, %p)
  ROOT %sum = f32[16] all-reduce(%a), {GROUPS}, to_apply=%add
}}
""",
        {"a": 1.0},
        {"sum": 2.5},
    )
    assert (timeline.total_seconds, timeline.exposed_seconds, timeline.overlaps) == (3.5, 2.5, {})


LOOP = """%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%s), index=1
  %start.1 = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %start.2 = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{1,0},{2,1},{3,2},{0,3}}
  %work = f32[4] add(%x, %x)
  %done.1 = f32[4] collective-permute-done(%start.1)
  %done.2 = f32[4] collective-permute-done(%start.2)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %out = (s32[], f32[4]) tuple(%i, %done.1)
}

%condition (s: (s32[], f32[4])) -> pred[] {
  %s = (s32[], f32[4]) parameter(0)
  ROOT %go = pred[] custom-call(%s), custom_call_target="unknown"
}

ENTRY %main (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  ROOT %loop = (s32[], f32[4]) while(%s), condition=%condition, body=%body, BACKEND
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"3"}}'


def test_a_loop_repeats_its_body():
    # Both directions of the ring at once: 2 seconds on the wire, 1.5 of work, so 0.5 exposed in each of 3 iterations.
    timeline = play(LOOP.replace("BACKEND", KNOWN), {"work": 1.5}, {"start.1": 2.0, "start.2": 2.0})
    assert timeline.total_seconds == 6
    assert timeline.exposed_seconds == 1.5
    assert timeline.collective_seconds == 12
    assert timeline.kernel_seconds == 0
    assert timeline.overlaps["body", "start.1"].instructions == ("work",)
    kernel = LOOP.replace("BACKEND", KNOWN).replace("add(%x, %x)", 'custom-call(%x), custom_call_target="kernel"')
    timeline = play(kernel, {"work": 1.5}, {"start.1": 2.0, "start.2": 2.0})
    assert (timeline.total_seconds, timeline.kernel_seconds) == (6, 4.5)


def test_an_unknown_trip_count_is_asked_for():
    body, links = LOOP.replace(", BACKEND", ""), {"start.1": 2.0, "start.2": 2.0}
    assert play(body, {"work": 1.5}, links, unknown_trip_count=5).total_seconds == 10
    text = HEADER + body.replace("collective-permute-", "copy-")
    with pytest.raises(ValueError, match=r"'loop' of 'main' takes time.*unknown_trip_count"):
        hlo.play(Program(text), (), hlo.Costs(instruction=lambda *_: 1.0, collective=lambda _: 1.0))


def test_of_a_conditional_the_slower_branch_counts():
    timeline = play(
        f"""%small (x: f32[4]) -> f32[16] {{
  %x = f32[4] parameter(0)
  ROOT %quick = f32[16] broadcast(%x)
}}

%large (y: f32[4]) -> f32[16] {{
  %y = f32[4] parameter(0)
  ROOT %sum = f32[16] all-gather(%y), {GROUPS}, dimensions={{0}}
}}

ENTRY %main (p: pred[], x: f32[4]) -> f32[16] {{
  %p = pred[] parameter(0)
  %x = f32[4] parameter(1)
  ROOT %either = f32[16] conditional(%p, %x, %x), true_computation=%small, false_computation=%large
}}
""",
        {"quick": 1.0},
        {"sum": 2.0},
    )
    assert timeline.total_seconds == 2


def test_wrapped_collectives_end_at_their_done():
    timeline = play(
        f"""%wrapped (y: f32[16]) -> f32[4] {{
  %y = f32[16] parameter(0)
  ROOT %inner = f32[4] reduce-scatter(%y), {GROUPS}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (x: f32[16]) -> f32[4] {{
  %x = f32[16] parameter(0)
  %start = ((f32[16]), f32[4], s32[]) async-start(%x), calls=%wrapped
  %a = f32[16] add(%x, %x)
  %update = ((f32[16]), f32[4], s32[]) async-update(%start)
  %done = f32[4] async-done(%update)
  ROOT %b = f32[4] add(%done, %done)
}}
""",
        {"a": 2.0, "b": 1.0},
        {"inner": 3.0},
    )
    assert timeline.total_seconds == 4
    assert timeline.overlaps["wrapped", "inner"].seconds == 2


# XLA:TPU's own form: a fusion starts the gather, one with computation drives it on, one ends it.
DRIVEN = """%begin (p.1: f32[4]) -> (f32[4], f32[16]) {
  %p.1 = f32[4] parameter(0)
  %gather.1 = f32[16] all-gather(%p.1), channel_id=7, GROUPS, dimensions={0}, ATTRIBUTES
  ROOT %call.1 = (f32[4], f32[16]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%between (p.2: f32[4]) -> f32[4] {
  %p.2 = f32[4] parameter(0)
  %gather.2 = f32[16] all-gather(%p.2), channel_id=7, GROUPS, dimensions={0}, ATTRIBUTES
  ROOT %sum = f32[4] add(%p.2, %p.2)
}

%end (p.3: f32[4]) -> f32[16] {
  %p.3 = f32[4] parameter(0)
  %gather.3 = f32[16] all-gather(%p.3), channel_id=7, GROUPS, dimensions={0}, ATTRIBUTES
  ROOT %call.3 = f32[16] custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[4]) -> f32[16] {
  %p = f32[4] parameter(0)
  %start = (f32[4], f32[16]) fusion(%p), kind=kCustom, calls=%begin
  %x = f32[4] fusion(%p), kind=kLoop, calls=%between
  %copy-start = (f32[4], f32[4], u32[]) copy-start(%p)
  %copy-done = f32[4] copy-done(%copy-start)
  ROOT %done = f32[16] fusion(%p), kind=kCustom, calls=%end
}
""".replace("GROUPS", GROUPS).replace(
    "ATTRIBUTES",
    'frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}',
)


def test_collectives_driven_on_inside_fusions_overlap_with_them():
    timeline = play(DRIVEN, {"x": 2.0, "start": 9.0, "done": 9.0, "copy-start": 9.0}, {"gather.1": 5.0})
    assert timeline.total_seconds == 5
    assert timeline.compute_seconds == 2
    assert timeline.overlaps["begin", "gather.1"].instructions == ("x",)


def test_fusions_of_the_same_channel_end_in_the_order_of_their_starts():
    start, done = (line for line in DRIVEN.split("\n") if "calls=%begin" in line or "calls=%end" in line)
    again = DRIVEN.replace(start, f"{start}\n{start.replace('%start', '%second')}")
    again = again.replace(done, f"{done.replace('ROOT %done', '%first')}\n  %y = f32[4] negate(%p)\n{done}")
    # Both take 5 on one link; the first done waits until 5, y runs until 9, the second waits until 10.
    timeline = play(again, {"x": 2.0, "y": 4.0}, {"gather.1": 5.0})
    assert (timeline.total_seconds, timeline.compute_seconds, timeline.exposed_seconds) == (10, 6, 4)


def work_of(name, body):
    program = Program(HEADER + body)
    return hlo.roofline(program, next(x for x in program.instructions() if x.name == name))


def test_a_dot_costs_two_flops_a_multiply_add_and_its_operands():
    work = work_of(
        "d",
        """ENTRY %main (a: bf16[8,32,64], b: bf16[8,64,16]) -> f32[8,32,16] {
  %a = bf16[8,32,64] parameter(0)
  %b = bf16[8,64,16] parameter(1)
  ROOT %d = f32[8,32,16] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}
}
""",
    )
    assert work.flops == 2 * 8 * 32 * 64 * 16
    assert work.bytes == 2 * 8 * 32 * 64 + 2 * 8 * 64 * 16 + 4 * 8 * 32 * 16


@pytest.mark.parametrize(
    ("left", "kernel", "out", "window", "labels", "flops"),
    [
        # A plain matrix product, [2, 256, 512] x [512, 128].
        ("2,256,512", "512,128,1", "2,256,128", "size=1", "0bf_io0->0bf", 2 * 2 * 256 * 512 * 128),
        # As XLA:TPU writes a product with two batch dims: 2 x 4 products of [256, 128] x [128, 256].
        ("2,256,4,128", "2,256,4,128", "2,4,256,256", "size=2x4 stride=1x3 lhs_dilate=2x4", "0b1f_0o1i->01bf",
         2 * 2 * 4 * 256 * 256 * 128),
        # A real convolution: a 3-wide kernel over 5 positions padded by 1 meets 3 x 5 - 2 elements.
        ("1,5,8", "3,8,16", "1,5,16", "size=3 pad=1_1", "b0f_0io->b0f", 2 * 13 * 8 * 16),
        # In groups of features the kernel has the inputs of one; in groups of examples the result has the examples of
        # one, each with the output features of its group alone.
        ("1,5,8", "3,4,16", "1,5,16", "size=3 pad=1_1", "b0f_0io->b0f, feature_group_count=2", 2 * 13 * 4 * 16),
        ("4,5,8", "3,8,16", "2,5,16", "size=3 pad=1_1", "b0f_0io->b0f, batch_group_count=2", 2 * 13 * 2 * 8 * 16),
    ],
)  # fmt: skip
def test_convolutions_count_real_elements_only(left, kernel, out, window, labels, flops):
    body = f"""ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
  %a = f32[{left}] parameter(0)
  %b = f32[{kernel}] parameter(1)
  ROOT %c = f32[{out}]{{2,1,0:T(8,128)}} convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""
    assert work_of("c", body).flops == flops


@pytest.mark.parametrize(
    ("target", "first", "second", "out"),
    [
        ("Forward", "32,56,56,64", "128,3,3,64", "32,28,28,128"),
        ("BiasActivationForward", "32,56,56,64", "128,3,3,64", "32,28,28,128"),
        # XLA:GPU has the labels and the window of the forward convolution in its gradients: of other operands.
        ("BackwardInput", "32,28,28,128", "128,3,3,64", "32,56,56,64"),
        ("BackwardFilter", "32,56,56,64", "32,28,28,128", "128,3,3,64"),
    ],
)
def test_the_gradients_of_a_gpu_convolution_take_as_many_operations(target, first, second, out):
    how = "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f"
    body = f"""ENTRY %main (a: bf16[1], b: bf16[1]) -> bf16[1] {{
  %a = bf16[{first}]{{3,2,1,0}} parameter(0)
  %b = bf16[{second}]{{3,2,1,0}} parameter(1)
  ROOT %c = (bf16[{out}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), {how}, custom_call_target="__cudnn$conv{target}"
}}
"""
    # Of 28 places of a window of 3 in each dim, the last meets the padding once.
    assert work_of("c", body).flops == 2 * 32 * (28 * 3 - 1) ** 2 * 64 * 128


def test_a_gpu_gemm_and_an_unknown_custom_call():
    dims = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    body = """ENTRY %main (a: bf16[32,64], b: bf16[64,16]) -> bf16[32,16] {
  %a = bf16[32,64]{1,0} parameter(0)
  %b = bf16[64,16]{1,0} parameter(1)
  %g = (bf16[32,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", CONFIG
  ROOT %u = bf16[32,16]{1,0} custom-call(%a), custom_call_target="mine"
}
""".replace("CONFIG", dims)
    assert work_of("g", body).flops == 2 * 32 * 64 * 16
    assert work_of("g", body).is_known
    assert work_of("u", body) == hlo.Work(flops=0, bytes=2 * (32 * 64 + 32 * 16), is_known=False)


def test_of_what_is_sliced_or_updated_in_place_only_the_slice_moves():
    body = """%fused (stack: f32[8,64], new: f32[1,64], i: s32[]) -> f32[8,64] {
  %stack = f32[8,64] parameter(0)
  %new = f32[1,64] parameter(1)
  %i = s32[] parameter(2)
  ROOT %into = f32[8,64] dynamic-update-slice(%stack, %new, %i, %i)
}

%picked (table: f32[8,64], j: s32[]) -> f32[1,64] {
  %table = f32[8,64] parameter(0)
  %j = s32[] parameter(1)
  %one = f32[1,64] dynamic-slice(%table, %j, %j), dynamic_slice_sizes={1,64}
  ROOT %neg = f32[1,64] negate(%one)
}

%both (first: f32[8,64], second: f32[8,64], k: s32[]) -> (f32[1,64], f32[8,64]) {
  %first = f32[8,64] parameter(0)
  %second = f32[8,64] parameter(1)
  %k = s32[] parameter(2)
  %got = f32[1,64] fusion(%first, %k), kind=kLoop, calls=%picked
  %put = f32[8,64] fusion(%second, %got, %k), kind=kLoop, calls=%fused
  ROOT %pair = (f32[1,64], f32[8,64]) tuple(%got, %put)
}

ENTRY %main (x: f32[8,64], y: f32[1,64], n: s32[]) -> f32[8,64] {
  %x = f32[8,64] parameter(0)
  %y = f32[1,64] parameter(1)
  %n = s32[] parameter(2)
  %b = f32[64] bitcast(%y)
  %p = f32[1,64] fusion(%x, %n), kind=kLoop, calls=%picked
  %t = (f32[1,64], f32[8,64]) fusion(%x, %x, %n), kind=kOutput, calls=%both
  ROOT %u = f32[8,64] fusion(%x, %p, %n), kind=kLoop, calls=%fused
}
"""
    row = 4 * 64
    assert work_of("p", body).bytes == row + row + 4  # the slice, the result, the index
    assert work_of("u", body).bytes == row + row + 4  # the new row read and written, the index
    assert work_of("t", body).bytes == row + row + row + 4  # in fusions of a fusion: the slice, both results
    assert work_of("b", body).bytes == 0


def test_a_fusion_moves_neither_what_its_collective_moves_nor_what_it_hands_through():
    body = f"""%driven (shard: f32[4,64], buffer: f32[16,64], a: f32[32,64]) -> (f32[32,64], f32[4,64], f32[16,64]) {{
  %shard = f32[4,64] parameter(0)
  %buffer = f32[16,64] parameter(1)
  %a = f32[32,64] parameter(2)
  %g = f32[16,64] all-gather(%shard), channel_id=3, {GROUPS}, dimensions={{0}}
  %neg = f32[32,64] negate(%a)
  %shape = f32[4,64] bitcast(%shard)
  ROOT %all = (f32[32,64], f32[4,64], f32[16,64]) tuple(%neg, %shape, %g)
}}

%ended (shard.1: f32[4,64], buffer.1: f32[16,64]) -> f32[16,64] {{
  %shard.1 = f32[4,64] parameter(0)
  %buffer.1 = f32[16,64] parameter(1)
  %g.1 = f32[16,64] all-gather(%shard.1), channel_id=3, {GROUPS}, dimensions={{0}}
  ROOT %end = f32[16,64] custom-call(%shard.1, %buffer.1, %g.1), custom_call_target="AsyncCollectiveDone"
}}

%copied (c: f32[4,64]) -> f32[4,64] {{
  %c = f32[4,64] parameter(0)
  ROOT %own = f32[4,64] copy(%c)
}}

ENTRY %main (x: f32[4,64], y: f32[16,64], z: f32[32,64]) -> f32[4,64] {{
  %x = f32[4,64] parameter(0)
  %y = f32[16,64] parameter(1)
  %z = f32[32,64] parameter(2)
  %f = (f32[32,64], f32[4,64], f32[16,64]) fusion(%x, %y, %z), kind=kOutput, calls=%driven
  %e = f32[16,64] fusion(%x, %y), kind=kCustom, calls=%ended
  ROOT %k = f32[4,64] fusion(%x), kind=kLoop, calls=%copied
}}
"""
    row = 4 * 64
    assert work_of("f", body).bytes == (32 + 32) * row  # `negate` alone
    assert work_of("e", body).bytes == 0
    assert work_of("k", body).bytes == (4 + 4) * row


@pytest.mark.parametrize("moved", ["copy", "reshape", "transpose"])
def test_a_fusion_writes_a_copy_whatever_the_shape_that_it_has_in_the_result(moved):
    body = f"""%copied (a: f32[4,64], b: f32[64,4]) -> (f32[256], f32[64,4]) {{
  %a = f32[4,64] parameter(0)
  %b = f32[64,4] parameter(1)
  %moved = f32[64,4] {moved}(%a)
  %flat = f32[256] bitcast(%moved)
  %same = f32[64,4] bitcast(%b)
  ROOT %both = (f32[256], f32[64,4]) tuple(%flat, %same)
}}

ENTRY %main (x: f32[4,64], y: f32[64,4]) -> (f32[256], f32[64,4]) {{
  %x = f32[4,64] parameter(0)
  %y = f32[64,4] parameter(1)
  ROOT %f = (f32[256], f32[64,4]) fusion(%x, %y), kind=kLoop, calls=%copied
}}
"""
    assert work_of("f", body).bytes == 2 * 4 * 4 * 64


def test_what_a_fusion_within_a_fusion_hands_through_is_read_where_it_is_used_and_written_where_it_is_made():
    """As XLA:TPU has the operands of its products: each is a fusion of a bitcast alone."""
    body = """%shaped (s: f32[4,64]) -> f32[256] {
  %s = f32[4,64] parameter(0)
  ROOT %shape = f32[256] bitcast(%s)
}

%shaped.1 (s.1: f32[256]) -> f32[4,64] {
  %s.1 = f32[256] parameter(0)
  ROOT %shape.1 = f32[4,64] bitcast(%s.1)
}

%outer (a: f32[4,64], b: f32[4,64]) -> (f32[4,64], f32[256]) {
  %a = f32[4,64] parameter(0)
  %b = f32[4,64] parameter(1)
  %flat = f32[256] fusion(%a), kind=kLoop, calls=%shaped
  %neg = f32[256] negate(%flat)
  %back = f32[4,64] fusion(%neg), kind=kLoop, calls=%shaped.1
  %same = f32[256] fusion(%b), kind=kLoop, calls=%shaped
  ROOT %both = (f32[4,64], f32[256]) tuple(%back, %same)
}

ENTRY %main (x: f32[4,64], y: f32[4,64]) -> (f32[4,64], f32[256]) {
  %x = f32[4,64] parameter(0)
  %y = f32[4,64] parameter(1)
  ROOT %f = (f32[4,64], f32[256]) fusion(%x, %y), kind=kOutput, calls=%outer
}
"""
    assert work_of("f", body).bytes == 2 * 4 * 4 * 64


def test_a_fusion_writes_its_result_in_its_own_dtype():
    body = """%narrow (a: bf16[8,64], b: bf16[1,64], i: s32[]) -> (bf16[8,64], bf16[8,64]) {
  %a = bf16[8,64] parameter(0)
  %b = bf16[1,64] parameter(1)
  %i = s32[] parameter(2)
  %wide = f32[8,64] convert(%a)
  %twice = f32[8,64] add(%wide, %wide)
  %half = bf16[8,64] convert(%twice)
  %new = f32[1,64] convert(%b)
  %into = f32[8,64] dynamic-update-slice(%wide, %new, %i, %i)
  %rows = bf16[8,64] convert(%into)
  ROOT %both = (bf16[8,64], bf16[8,64]) tuple(%half, %rows)
}

ENTRY %main (x: bf16[8,64], y: bf16[1,64], n: s32[]) -> (bf16[8,64], bf16[8,64]) {
  %x = bf16[8,64] parameter(0)
  %y = bf16[1,64] parameter(1)
  %n = s32[] parameter(2)
  ROOT %f = (bf16[8,64], bf16[8,64]) fusion(%x, %y, %n), kind=kLoop, calls=%narrow
}
"""
    row = 2 * 64
    # Read: the rows, the new row, its number; written: the rows, and the new row in place.
    assert work_of("f", body).bytes == 8 * row + row + 4 + 8 * row + row


@pytest.mark.parametrize("path", sorted(DATA.glob("*.txt")), ids=lambda path: path.stem)
def test_real_programs_take_what_their_parts_take(path):
    """Of all compilers: every collective is played as often as it runs, and no time is lost."""
    text = path.read_text(encoding="utf-8")
    found = hlo.collectives(text, unknown_trip_count=2)
    costs = hlo.Costs(
        instruction=lambda *instruction: hlo.roofline(*instruction).bytes + 1.0, collective=lambda one: one.sent_bytes
    )
    timeline = hlo.play(Program(text), found, costs, unknown_trip_count=2)
    assert timeline.collective_seconds == pytest.approx(hlo.sent_bytes(found))
    assert timeline.total_seconds == pytest.approx(timeline.compute_seconds + timeline.exposed_seconds)
    assert timeline.exposed_seconds <= timeline.collective_seconds * (1 + 1e-9)
    assert set(timeline.overlaps) == {(one.computation, one.name) for one in found if one.is_async}


# A gather on a SparseCore: JAX 0.10 starts it with its operand, JAX 0.12 hands the operand over in an update.
ON_SPARSE_CORE = f"""%sparse (y: f32[4]) -> f32[16] {{
  %y = f32[4] parameter(0)
  ROOT %gather = f32[16] all-gather(%y), channel_id=3, {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"

ENTRY %main (p: f32[4]) -> f32[16] {{
  %p = f32[4] parameter(0)
  %prepare = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  START
  %b = f32[4] add(%p, %p)
  %done = f32[16] DONE
  ROOT %c = f32[16] add(%done, %done)
}}
"""
CALLS = {
    "0.10": (
        "%a = f32[4] add(%p, %p)\n  %s = ((f32[4], token[]), f32[16]) call-start(%p, %prepare), "
        'async_execution_thread="sparsecore", to_apply=%sparse',
        "call-done(%s)",
    ),
    "0.12": (
        '%s = ((), (), (s32[8], s32[0])) custom-call-start(), async_execution_thread="sparsecore", '
        'custom_call_target="TODO", called_computations={%sparse}\n  %a = f32[4] add(%p, %p)\n'
        "  %u = ((f32[4]), f32[16], (s32[8])) custom-call-update(%s, %a)",
        "custom-call-done(%u)",
    ),
}


@pytest.mark.parametrize("release", CALLS)
def test_a_collective_on_a_sparse_core_begins_where_it_gets_its_operand(release):
    start, done = CALLS[release]
    text = ON_SPARSE_CORE.replace("START", start).replace("DONE", done)
    timeline = play(text, {"a": 3.0, "b": 1.0, "c": 2.0}, {"gather": 5.0})
    # It runs from 3 to 8; b ends at 4, so that 4 seconds stay exposed; c ends at 10. Nothing counts twice.
    assert (timeline.total_seconds, timeline.compute_seconds, timeline.exposed_seconds) == (10, 6, 4)
    assert timeline.collective_seconds == 5
    assert timeline.overlaps["sparse", "gather"].instructions == ("b",)
    (found,) = hlo.collectives(HEADER + text)
    assert found.is_async
    assert found.num_executions == 1


def test_the_sparse_cores_run_one_collective_at_a_time():
    def call(name):
        return (
            f"%{name} = ((f32[4], token[]), f32[16]) call-start(%p, %prepare), "
            f'async_execution_thread="sparsecore", to_apply=%{name}.on\n'
        )

    def computation(name, channel, groups, thread):
        return f"""%{name}.on (y: f32[4]) -> f32[16] {{
  %y = f32[4] parameter(0)
  ROOT %{name}.g = f32[16] all-gather(%y), channel_id={channel}, replica_groups={groups}, dimensions={{0}}
}}, execution_thread="{thread}"

"""

    def entry(thread):
        start = call("one") + "  " + call("two")
        start = start if thread == "sparsecore" else start.replace(', async_execution_thread="sparsecore"', "")
        done = "call-done(%one)\n  %done.2 = f32[16] call-done(%two)"
        text = ON_SPARSE_CORE[ON_SPARSE_CORE.index("ENTRY") :].replace("START", start).replace("DONE", done)
        return computation("one", 1, "{{0,1,2,3}}", thread) + computation("two", 2, "{{0,1},{2,3}}", thread) + text

    links = {"one.g": 3.0, "two.g": 4.0}
    assert play(entry("sparsecore"), {}, links).total_seconds == 7
    assert play(entry("main"), {}, links).total_seconds == 4


def megascale(kind, key):
    return (
        f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{key}",'
        f'_xla_megascale_target="{{1,4}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"}}'
    )


BETWEEN_SLICES = f"""ENTRY %main (p: f32[4]) -> f32[16] {{
  %p = f32[4]{{0}} parameter(0)
  %key = token[] after-all()
  %send.1 = (f32[4]{{0}}, u32[], token[]) send(%p, %key), channel_id=1, {megascale("ALL_GATHER", "all-gather.1_0")}
  %send.2 = (f32[4]{{0}}, u32[], token[]) send(%p, %key), channel_id=2, {megascale("ALL_REDUCE", "all-reduce.2_0")}
  %a = f32[4]{{0}} add(%p, %p)
  %recv.1 = (f32[16]{{0}}, u32[], token[]) recv(%key), channel_id=3, {megascale("ALL_GATHER", "all-gather.1_0")}
  %sent.1 = token[] send-done(%send.1), channel_id=1, is_host_transfer=true
  %sent.2 = token[] send-done(%send.2), channel_id=2, is_host_transfer=true
  %done.1 = (f32[16]{{0}}, token[]) recv-done(%recv.1), channel_id=3, is_host_transfer=true
  %b = f32[4]{{0}} add(%p, %p)
  %recv.2 = (f32[4]{{0}}, u32[], token[]) recv(%key), channel_id=4, {megascale("ALL_REDUCE", "all-reduce.2_0")}
  %done.2 = (f32[4]{{0}}, token[]) recv-done(%recv.2), channel_id=4, is_host_transfer=true
  ROOT %c = f32[16]{{0}} get-tuple-element(%done.1), index=0
}}
"""


def test_transfers_between_slices_go_from_their_send_to_the_end_of_their_receive():
    program = Program(HEADER + BETWEEN_SLICES)
    transfers = hlo.network_transfers(program)
    # Of 4 slices: 16 bytes go to 3 others; all-reduced, 2 x 3/4 of 16 are sent.
    assert [(one.kind, one.num_slices, one.total_sent_bytes) for one in transfers] == [
        ("all-gather", 4, 48),
        ("all-reduce", 4, 24),
    ]
    costs = hlo.Costs(
        instruction=lambda program, instruction: {"a": 1.0, "b": 3.0}.get(instruction.name, 0.0),
        collective=lambda _: 0.0,
        transfer=lambda transfer: transfer.sent_bytes / 12,
    )
    timeline = hlo.play(program, (), costs, transfers=transfers)
    # The gather has the network from 0 to 4, of which 1 is hidden; the sum until 6, while b runs until 7.
    assert (timeline.total_seconds, timeline.compute_seconds, timeline.exposed_seconds) == (7, 4, 3)
    assert (timeline.collective_seconds, timeline.network_seconds) == (6, 6)
    assert timeline.overlaps["main", "send.2"].seconds == 4
