"""The path of a gathered param in the `op_name` of an instruction, and the phase of an instruction without one."""

import pytest

from zero_jax.hlo import Instruction, gathered_path, parse
from zero_jax.hlo.op_names import Phases

# As newer XLA:TPU starts a collective on the SparseCores: its operands are those of the update, and it has no name.
STARTED = """HloModule jit_step, is_scheduled=true, num_partitions=4

%called (param_0: f32[512,512]) -> f32[128,512] {
  %param_0 = f32[512,512]{1,0} parameter(0)
  ROOT %reduce-scatter = f32[128,512]{1,0} reduce-scatter(%param_0), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[512,512]) -> f32[128,512] {
  %x = f32[512,512]{1,0} parameter(0)
  %grad = f32[512,512]{1,0} negate(%x), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %update = ((f32[512,512]{1,0}), f32[128,512]{1,0}) call-update(%start, %grad)
  ROOT %done = f32[128,512]{1,0} call-done(%update)
}
"""


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(step)/jvp(gather=embed)/sharding_constraint", "embed"),
        ("jit(step)/jvp(params=layers.0)/checkpoint/gather=~~.mlp.w/sharding_constraint", "layers.0.mlp.w"),
        ("jit(step)/transpose(jvp(params=h_3))/jvp(params=h_3)/checkpoint/gather=~~.w/convert", "h_3.w"),
        ("jit(step)/jvp(params=layers.0)/checkpoint/mul", None),
    ],
)
def test_a_path_in_a_region_continues_that_of_the_region(op_name, path):
    assert gathered_path(op_name) == path


@pytest.mark.parametrize(
    ("merged", "names"),
    [
        (
            "jit(step)/(jvp(gather=w)/x:transpose(jvp())/y)",
            ["jit(step)/jvp(gather=w)/x", "jit(step)/transpose(jvp())/y"],
        ),
        (
            "jit(step)/jvp(net/(gather=w)/x:gather=v)/x)",
            ["jit(step)/jvp(net/gather=w)/x", "jit(step)/jvp(net/gather=v)/x"],
        ),
        ("jit(step)/(x)/(gather=w/x:gather=v/x)", ["jit(step)/(x)/gather=w/x", "jit(step)/(x)/gather=v/x"]),
        ("jit(step)/(a:b)/(gather=w/x:gather=v/x)", ["jit(step)/(a:b)/gather=w/x", "jit(step)/(a:b)/gather=v/x"]),
        ("jit(step)/jvp(gather=w)/x", ["jit(step)/jvp(gather=w)/x"] * 2),
        ("jit(step)/(b,c)->d/dot", ["jit(step)/(b,c)->d/dot"] * 2),
    ],
)
def test_merged_names_are_those_of_each_array(merged, names):
    instruction = Instruction(
        "x", "all-gather", "f32[]", f'%x = f32[] all-gather(), metadata={{op_name="{merged}"}}', 0, "main"
    )
    assert instruction.op_names(2) == names


def test_what_is_started_without_operands_is_of_the_phase_of_those_of_its_update():
    program = parse(STARTED)
    phases, scatter = Phases(program), program.computations["called"]["reduce-scatter"]
    before = phases.op_name_before(scatter)
    assert before == "jit(step)/transpose(jvp())/neg"
    assert phases.of(scatter, before) == "backward"
