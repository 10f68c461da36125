"""What the TPU compiler writes before it generates code is read as the text of the whole program."""

from zero_jax import hlo
from zero_jax.hlo import scheduled

HEAD = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
CALLED = """%gather.on (y: f32[4], k: token[]) -> f32[16] {
  %y = f32[4]{0} parameter(0)
  %k = token[] parameter(1)
  ROOT %g = f32[16]{0} all-gather(%y), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"
"""
STARTED = """
%calls_it (z: f32[4], l: token[]) -> f32[16] {
  %z = f32[4]{0} parameter(0)
  %l = token[] parameter(1)
  ROOT %inner = f32[16]{0} call(%z, %l), to_apply=%gather.on, metadata={op_name="jit(step)/g"}
}, execution_thread="sparsecore"

%slices (w: f32[8,4]) -> f32[1,4] {
  %w = f32[8,4]{1,0} parameter(0)
  ROOT %s = f32[1,4]{1,0} slice(%w), slice={[0:1], [0:4]}, backend_config={}
}
"""
ENTRY = """
ENTRY %main (p: f32[4], q: f32[8,4]) -> f32[16] {
  %p = f32[4]{0} parameter(0)
  %q = f32[8,4]{1,0:T(8,128)S(5)} parameter(1)
  %both = (f32[4]{0}, /*index=1*/(f32[4]{0}, f32[4]{0})) fusion(%p), kind=kLoop, calls=%f
  %x = f32[4]{0} custom-call(%p), custom_call_target="mine", backend_config="a
b"
SHORT  %one = f32[4]{0} add(TWO, FIRST)
  %start = ((f32[4]{0}, token[]), f32[16]{0}) GATHER_START
  %cut = ((f32[8,4]{1,0:S(5)}), f32[1,4]{1,0}, u32[]) SLICE_START
  %row = f32[1,4]{1,0} SLICE-done(%cut)
  ROOT %all = f32[16]{0} CALL-done(%start), metadata={op_name="jit(step)/g"}
}
"""


def text(**parts):
    result = ENTRY
    for name, part in parts.items():
        result = result.replace(name, part)
    return result


WRITTEN = {
    "SHORT": "", "TWO": "%both#1#0", "FIRST": "%both#0", "SLICE-": "async-", "CALL-": "async-",
    "GATHER_START": 'async-start(%one, %k), async_execution_thread="sparsecore", calls=%calls_it',
    "SLICE_START": "async-start(%q), calls=%slices",
}  # fmt: skip
PRINTED = {
    "SHORT": "  %both#1 = (f32[4]{0}, f32[4]{0}) get-tuple-element(%both), index=1\n"
    "  %both#1#0 = f32[4]{0} get-tuple-element(%both#1), index=0\n"
    "  %both#0 = f32[4]{0} get-tuple-element(%both), index=0\n",
    "TWO": "%both#1#0", "FIRST": "%both#0", "SLICE-": "slice-", "CALL-": "call-",
    "GATHER_START": 'call-start(%one, %k), async_execution_thread="sparsecore", to_apply=%gather.on',
    "SLICE_START": "slice-start(%q), slice={[0:1], [0:4]}",
}  # fmt: skip
ASSIGNED = """BufferAssignment:
allocation 0: size 512, parameter 0, shape |f32[4]| at ShapeIndex {}:
 value: <1 p @0> (size=16,offset=0): f32[4]{0}
allocation 1: size 1024, color 5, parameter 1, shape |f32[8,4]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 256, maybe-live-out:
allocation 3: size 64, parameter 2, shape |f32[4]| at ShapeIndex {}, maybe-live-out:
allocation 4: size 4096, preallocated-temp:
 value: <2 one @0> (size=16,offset=4080): f32[4]{0}
allocation 5: size 99, color 1, preallocated-temp:
"""
NAME = "module_0003.jit_step.cl_9.after_optimizations"


def test_the_schedule_is_read_as_the_program_prints(tmp_path):
    program = tmp_path / f"{NAME}_after_buffer_assignment.txt"
    (tmp_path / f"{NAME}-buffer-assignment.txt").write_text(ASSIGNED)
    assert hlo.read_scheduled(tmp_path) is None
    whole = HEAD + CALLED + STARTED + text(**WRITTEN)
    for size in (len(HEAD + CALLED), len(whole) - 3):  # as long as it is being written
        program.write_text(whole[:size])
        assert hlo.read_scheduled(tmp_path) is None
    program.write_text(whole)
    found, sizes, layout = hlo.read_scheduled(tmp_path)
    assert [line for line in found.splitlines() if line] == [
        line for line in (HEAD + CALLED + text(**PRINTED)).splitlines() if line
    ]
    (gather,) = hlo.collectives(found)
    assert gather.is_async and gather.num_executions == 1
    assert layout == hlo.read_layout(tmp_path)
    assert sizes == {
        "argument_size_in_bytes": 576, "output_size_in_bytes": 320, "alias_size_in_bytes": 64,
        "temp_size_in_bytes": 4096, "host_argument_size_in_bytes": 1024, "host_output_size_in_bytes": 1024,
        "host_alias_size_in_bytes": 1024, "peak_memory_in_bytes": 576 + 4096 + 1024,
    }  # fmt: skip


def test_a_program_without_such_names_stays_as_it_is():
    assert scheduled._with_elements(HEAD + CALLED) == HEAD + CALLED
    assert scheduled._with_calls(HEAD + CALLED) == HEAD + CALLED
