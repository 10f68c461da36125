"""Tests that collectives are read correctly out of HLO text.

`tests/fixtures/hlo` holds programs that the real compilers wrote, cut down to the instructions that matter: names that
begin with `tpu_`, `gpu_` and `cpu_` tell which compiler. The bytes that each should send are worked out by hand below
from the JAX program that was compiled; MiB = 2**20 bytes, and g devices in a ring each send (g - 1) / g of an array.
"""

import pathlib

import pytest

from zero_jax import hlo

DATA = pathlib.Path(__file__).parents[1] / "fixtures" / "hlo"
KIB, MIB = 2**10, 2**20

# kind, dtype, operations in the text, executions, bytes sent
PROGRAMS = {
    # JAX 0.12, v5p-16, data=16: a scan of 4 layers of two bf16 weights of 8 MiB (1024 x 4096), gathered in the forward
    # and in the rematerialized backward pass: 4 x 2 x 2 gathers. Their gradients are two 'windowed' matmuls: loops of 4
    # trips (0, 2, .. 8) with 4 permutes of a shard (0.5 MiB) each, and one more after the loop: 17 hops.
    "tpu_fsdp_scan": [
        ("all-gather", "bf16", 4, 16, 16 * 8 * MIB * 15 / 16),
        ("collective-permute", "bf16", 10, 4 * 2 * 17, 4 * 2 * 17 * MIB / 2),
    ],
    # JAX 0.10, v5p-16, replica=4 x data=4: one bf16 weight of 8 MiB (1024 x 4096) is gathered over 4; its gradient is
    # padded to 1152 rows (9 MiB), reduce-scattered over 4, shifted into place by a permute of 96 rows, and the shard of
    # 2 MiB all-reduced over the replicas.
    "tpu_hsdp": [
        ("reduce-scatter", "bf16", 1, 1, 9 * MIB * 3 / 4),
        ("all-gather", "bf16", 1, 1, 8 * MIB * 3 / 4),
        ("all-reduce", "bf16", 1, 1, 2 * 2 * MIB * 3 / 4),
        ("collective-permute", "bf16", 1, 1, 96 * 4096 * 2),
    ],
    # JAX 0.10, v5p:4x4x4, data over three axes of 4: four bf16 weights of 32 MiB (2048 x 8192), each gathered twice in
    # three stages (2, 8 and 32 MiB). Four gradients: reduce-scatter over one axis (two of them padded to 35 MiB and
    # shifted by permutes of 144 rows, which share a channel), then one all-reduce of 4 x 8 MiB over the other 16.
    "tpu_staged": [
        ("all-gather", "bf16", 24, 24, 8 * (2 + 8 + 32) * MIB * 3 / 4),
        ("reduce-scatter", "bf16", 4, 4, 2 * (32 + 35) * MIB * 3 / 4),
        ("all-reduce", "bf16", 1, 1, 2 * 32 * MIB * 15 / 16),
        ("collective-permute", "bf16", 2, 2, 2 * 144 * 8192 * 2),
    ],
    # JAX 0.12, v5e:2x4, data=8: two of the program's gathers of a 32 MiB weight, which start, run inside other fusions
    # (one of them through a loop) and end: printed three and four times. The loop: 2 trips (0, 2, 4) of 4 permutes of a
    # 4 MiB shard.
    "tpu_async_fusion": [
        ("all-gather", "bf16", 2, 2, 2 * 32 * MIB * 7 / 8),
        ("collective-permute", "bf16", 4, 8, 8 * 4 * MIB),
    ],
    # JAX 0.10, tpu7x:2x2x1, data=8 (two cores a chip): a gather and a reduce-scatter of a 32 MiB weight (2048 x 8192),
    # each in a computation that is started on the sparse cores.
    "tpu_sparsecore": [
        ("all-gather", "bf16", 1, 1, 32 * MIB * 7 / 8),
        ("reduce-scatter", "bf16", 1, 1, 32 * MIB * 7 / 8),
    ],
    # JAX 0.10, v5p-16: a scan of 3 microbatches around a scan of 6 layers of 2 MiB (1024 x 1024), gathered in both
    # passes; the gradients are all-reduced whole.
    "tpu_nested_loops": [
        ("all-gather", "bf16", 2, 36, 36 * 2 * MIB * 15 / 16),
        ("all-reduce", "bf16", 1, 18, 18 * 2 * 2 * MIB * 15 / 16),
    ],
    # JAX 0.12, 8 CPU devices: 4 layers of two weights of 128 x 256, which XLA:CPU widens to f32 (128 KiB); the two
    # gradients of a layer are combined in one all-reduce.
    "cpu_fsdp_scan": [
        ("all-gather", "f32", 4, 16, 16 * 128 * KIB * 7 / 8),
        ("all-reduce", "f32", 1, 4, 4 * 2 * 256 * KIB * 7 / 8),
    ],
    # JAX 0.10, 8 x H100: 4 layers of two bf16 weights of 4 MiB (1024 x 2048), the two combined in each collective.
    "gpu_fsdp_scan": [
        ("all-gather", "bf16", 2, 8, 8 * 8 * MIB * 7 / 8),
        ("reduce-scatter", "bf16", 1, 4, 4 * 8 * MIB * 7 / 8),
    ],
    # JAX 0.12, 8 x H100, data=2 x model=4: 4 layers; activations of 8 x 256 x 1024 bf16 (4 MiB) are all-reduced over
    # `model` in both passes, two gradients of 2 MiB together over `data`.
    "gpu_tensor_parallel": [
        ("all-reduce", "bf16", 3, 12, 8 * 2 * 4 * MIB * 3 / 4 + 4 * 2 * 4 * MIB * 1 / 2),
    ],
    # JAX 0.10, 8 x H100: one gather of bf16[1024] and f32[8192].
    "gpu_mixed_dtypes": [("all-gather", "bf16+f32", 1, 1, (2 + 32) * KIB * 7 / 8)],
    # JAX 0.10, 8 x H100: a branch that gathers 2 MiB, and one with two all-to-alls of 256 KiB, which sends less.
    "gpu_conditional": [("all-gather", "f32", 1, 1, 2 * MIB * 7 / 8)],
}


def saved(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def named(name: str, instruction: str) -> hlo.Collective:
    (found,) = [one for one in hlo.collectives(saved(name)) if one.name == instruction]
    return found


def module(*body: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return f"HloModule m, num_partitions=8\n\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


def only(line: str) -> hlo.Collective:
    (found,) = hlo.collectives(module(line))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_saved_programs_send_the_bytes_worked_out_by_hand(name):
    found = hlo.collectives(saved(name))
    groups = {}
    for one in found:
        groups.setdefault((one.kind, "+".join(sorted(set(one.dtypes)))), []).append(one)
    rows = [(*k, len(v), sum(one.num_executions for one in v), hlo.sent_bytes(v)) for k, v in groups.items()]
    assert sorted(rows) == sorted(PROGRAMS[name])
    assert hlo.sent_bytes(found) == sum(row[-1] for row in PROGRAMS[name])


def test_every_saved_program_is_tested():
    assert {path.stem for path in DATA.glob("*.txt")} == set(PROGRAMS)


def test_attributes_of_a_gather_in_a_loop():
    gather = named("tpu_fsdp_scan", "all-gather.9")
    assert gather.full_bytes == 8 * MIB
    assert gather.sent_bytes == 7.5 * MIB
    assert gather.num_executions == 4
    assert gather.total_sent_bytes == 30 * MIB
    assert (gather.group_size, len(gather.replica_groups)) == (16, 1)
    assert gather.dtypes == ("bf16",)
    assert gather.channel_id == 1
    assert gather.computation == "wide.region_0.1_spmd.sunk"
    assert gather.op_name.startswith("jit(step)/jvp()/while/body/")
    assert gather.source == "train.py:32"
    assert not gather.is_async


def test_reduce_scatter_that_is_spelled_as_a_fused_all_reduce():
    scatter = named("tpu_hsdp", "all-reduce.2")
    assert scatter.kind == "reduce-scatter"
    assert scatter.full_bytes == 9 * MIB
    assert scatter.replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


def test_groups_follow_the_mesh_and_its_device_order():
    rows = tuple(tuple(range(start, start + 4)) for start in (0, 4, 8, 12))
    assert named("tpu_hsdp", "all-gather").replica_groups == rows
    assert named("tpu_hsdp", "all-reduce.1").replica_groups == tuple(zip(*rows, strict=True))
    assert len(named("tpu_staged", "all-reduce.12").replica_groups) == 4


def test_permutes_are_grouped_by_their_rings_and_chains():
    ring = named("tpu_fsdp_scan", "collective-permute-start.1")
    assert ring.replica_groups == (tuple(range(16)),)
    assert ring.source_target_pairs[:2] == ((0, 15), (1, 0))
    assert ring.is_async
    assert ring.sent_bytes == ring.full_bytes == MIB // 2
    chain = named("tpu_hsdp", "collective-permute-start")
    assert chain.replica_groups[0] == (0, 1, 2, 3)
    assert len(chain.replica_groups) == 4


def test_synchronous_starts_are_not_asynchronous():
    assert named("gpu_fsdp_scan", "all-gather-start").is_async
    assert not named("gpu_fsdp_scan", "all-gather-start.1").is_async
    for name in ("tpu_async_fusion", "tpu_sparsecore"):
        assert all(one.is_async for one in hlo.collectives(saved(name)))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("@mesh<a=2,b=4> {a}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        # 'a' as 2 x 2 x 2: the middle factor, then the last one.
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_replica_groups(groups, expected):
    found = only(f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert found.replica_groups == expected
    assert found.group_size == len(expected[0])


@pytest.mark.parametrize(
    ("shape", "full_bytes"),
    [
        ("f32[]", 4),
        ("pred[1000]{0}", 1000),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("f8e4m3fn[8,128]{1,0:T(8,128)(4,1)}", 1024),
        ("s4[8,128]{1,0:T(8,128)(8,1)E(4)}", 512),
        ("u2[3]{0}", 1),
        ("f4e2m1fn[5]{0}", 3),
        ("c64[2]{0}", 16),
        ("f32[<=8,2]{1,0}", 64),
        ("(f32[2]{0}, /*index=1*/bf16[2]{0:T(256)})", 12),
    ],
)
def test_shapes(shape, full_bytes):
    found = only(f"ROOT %r = {shape} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%add")
    assert found.full_bytes == full_bytes
    assert found.sent_bytes == full_bytes


@pytest.mark.parametrize(
    ("operation", "full_bytes", "sent_bytes"),
    [
        ("f32[32]{0} all-gather(%p)", 128, 96),
        ("(f32[8]{0}, f32[32]{0}) all-gather-start(%p)", 128, 96),
        ("((f32[8]{0}, bf16[8]{0}), (f32[32]{0}, bf16[32]{0})) all-gather-start(%p, %q)", 192, 144),
        ("f32[8]{0} reduce-scatter(%p)", 128, 96),
        ("((f32[32]{0}), f32[8]{0}) reduce-scatter-start(%p)", 128, 96),
        ("f32[32]{0} all-reduce-start(%p)", 128, 192),
        ("(f32[32]{0}, f32[16]{0}) all-reduce-start(%p, %q)", 192, 288),
        ("((f32[32]{0}), f32[32]{0}) all-reduce-start(%p)", 128, 192),
        ("f32[4,8]{1,0} all-to-all(%p)", 128, 96),
        ("(f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}) all-to-all(%a, %b, %c, %d)", 128, 96),
        ("((f32[32]{0}), f32[32]{0}) all-to-all-start(%p)", 128, 96),
    ],
)
def test_kinds_and_their_starts(operation, full_bytes, sent_bytes):
    found = only(f"%r = {operation}, channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}")
    assert (found.full_bytes, found.sent_bytes) == (full_bytes, sent_bytes)


@pytest.mark.parametrize(
    ("operation", "sent_bytes"),
    [
        ("f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 32),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}", 32),
        ("f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}", 0),
        # In place: only slices of the array are sent.
        (
            "(f32[8,8], f32[8,8], u32[]) collective-permute-start(%a, %b, %c, %d), source_target_pairs={{0,1},{1,0}}, "
            "slice_sizes={{2,8}}",
            64,
        ),
    ],
)
def test_permutes(operation, sent_bytes):
    assert only(f"%r = {operation}").sent_bytes == sent_bytes


def test_a_group_of_one_device_sends_nothing():
    assert only("%r = f32[8]{0} all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add").sent_bytes == 0


def test_start_that_wraps_a_computation_counts_once():
    wrapped = """
%wrapped (q: f32[32]) -> f32[8] {
  %q = f32[32]{0} parameter(0)
  ROOT %scatter = f32[8]{0} reduce-scatter(%q), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}, execution_thread="main"
"""
    text = module(
        "%start = ((f32[32]{0}), f32[8]{0}) async-start(%p), calls=%wrapped",
        "ROOT %done = f32[8]{0} async-done(%start), calls=%wrapped",
        before=wrapped,
    )
    (scatter,) = hlo.collectives(text)
    assert (scatter.kind, scatter.sent_bytes, scatter.is_async) == ("reduce-scatter", 96, True)


def test_only_computations_that_run_count_and_each_call_counts():
    called = "%{0} (q: f32[8]) -> f32[8] {{\n  ROOT %r = f32[8]{{0}} all-reduce(%q), replica_groups={{}}\n}}\n"
    text = module(
        "%a = f32[8]{0} call(%p), to_apply=%used",
        "ROOT %b = f32[8]{0} fusion(%a), kind=kLoop, calls=%used",
        before=called.format("used") + called.format("unused"),
    )
    (one,) = hlo.collectives(text)
    assert one.num_executions == 2


def loop(*, start: str = "0", step: str = "1", limit: str = "10", direction: str = "LT", annotation: str = "") -> str:
    """A loop with an all-reduce, whose step is in a fusion and whose limit is passed in with the loop's state."""
    before = f"""
%step (i: s32[]) -> s32[] {{
  %i = s32[] parameter(0)
  %c = s32[] constant({step})
  ROOT %add = s32[] add(%i, %c)
}}

%body (s: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %s = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s), index=0
  %next = s32[] fusion(%i.1), kind=kLoop, calls=%step
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %r = f32[8]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%sum
  %limit.1 = s32[] get-tuple-element(%s), index=2
  ROOT %t = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %r, %limit.1)
}}

%condition (s: (s32[], f32[8], s32[])) -> pred[] {{
  %s.1 = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i.2 = s32[]{{:T(128)}} get-tuple-element(%s.1), index=0
  %limit.2 = s32[] get-tuple-element(%s.1), index=2
  ROOT %go = pred[] compare(%i.2, %limit.2), direction={direction}
}}
"""
    return module(
        "%p = f32[8]{0} parameter(0)",
        f"%start = s32[] {start}",
        "%start.copy = s32[] copy(%start)",
        f"%limit = s32[] constant({limit})",
        "%init = (s32[], f32[8]{0}, s32[]) tuple(%start.copy, %p, /*index=2*/%limit)",
        f"%w = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%condition, body=%body{annotation}",
        before=before,
    )


@pytest.mark.parametrize(
    ("settings", "trips"),
    [
        ({}, 10),
        ({"direction": "LE"}, 11),
        ({"start": "constant(3)", "step": "2"}, 4),
        ({"start": "constant(9)", "step": "-1", "limit": "0", "direction": "GE"}, 10),
        ({"start": "constant(9)", "step": "-1", "limit": "0", "direction": "GT"}, 9),
        ({"start": "constant(5)", "limit": "1000000000"}, 999_999_995),
        ({"start": "constant(10)"}, 0),
        ({"start": "parameter(1)", "annotation": ', backend_config={"known_trip_count":{"n":"7"}}'}, 7),
    ],
)
def test_trip_counts(settings, trips):
    text = loop(**({"start": "constant(0)"} | settings))
    assert hlo.sent_bytes(hlo.collectives(text)) == trips * 32
    assert [one.num_executions for one in hlo.collectives(text)] == ([trips] if trips else [])


@pytest.mark.parametrize("settings", [{"start": "parameter(1)"}, {"step": "0"}, {"step": "-1"}, {"direction": "NE"}])
def test_unknown_trip_counts_are_an_error_unless_given(settings):
    text = loop(**({"start": "constant(0)"} | settings))
    with pytest.raises(ValueError, match=r"loop 'w' of 'main'.*unknown_trip_count"):
        hlo.collectives(text)
    assert hlo.collectives(text, unknown_trip_count=5)[0].num_executions == 5


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[what]{0} all-reduce(%p), replica_groups={{0,1}}",
        "%r = strange[8]{0} all-reduce(%p), replica_groups={{0,1}}",
        "%r = f32[8]{0} collective-permute(%p), source_target_pairs=ring(8)",
        "%r = f32[8]{0} all-reduce(%p), replica_groups=all(8)",
        "%r = () all-reduce(%p), replica_groups={{0,1}}",
        "all-gather without a result: all-gather(%p)",
        "%r = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=8] {'b'}",
        "%r = f32[8]{0} all-gather(%p), replica_groups=[3,4]<=[8]",
    ],
)
def test_unreadable_collectives_are_errors_that_quote_the_line(line):
    with pytest.raises(ValueError, match="unreadable collective") as error:
        hlo.collectives(module(line))
    assert repr(line) in str(error.value)


def test_text_without_an_entry_computation_is_an_error():
    with pytest.raises(ValueError, match=r"compiled\.as_text\(\)"):
        hlo.collectives("module @jit_step {\n}\n")


def test_names_and_metadata_that_mention_collectives_are_not_collectives():
    text = module(
        '%all-gather.1 = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/ all-gather(x)" source_file="a.py"}',
        "ROOT %r = f32[8]{0} fusion(%all-gather.1), kind=kLoop, calls=%all-reduce_fusion",
    )
    assert hlo.collectives(text) == ()


def test_source_from_the_older_metadata():
    metadata = 'metadata={op_name="f/\\"x\\"" source_file="a.py" source_line=3}'
    found = only(f"%r = f32[8]{{0}} all-reduce(%p), replica_groups={{}}, {metadata}")
    assert (found.source, found.op_name) == ("a.py:3", 'f/\\"x\\"')
