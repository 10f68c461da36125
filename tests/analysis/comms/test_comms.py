"""Communication worked out by hand: from formulas, and from programs written for it."""

import gzip
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero
from zero_jax import comms
from zero_jax.analysis.comms.rows import spanned_axes
from zero_jax.analysis.leaves import STATE_GROUPS, argument_leaves
from zero_jax.hlo import Program

DATA = pathlib.Path(__file__).parents[2] / "fixtures" / "hlo"
F32 = jnp.float32


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("model",)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("data",)),
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("replica",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("data", "model")),
        ((tuple(range(8)),), ("replica", "data", "model")),
        (((0, 3), (1, 2), (4, 7), (5, 6)), ("data", "model")),  # a diagonal lies in no smaller set of axes
        (((0,), (1,)), ()),
    ],
)
def test_axes_are_the_smallest_set_that_spans_the_groups(groups, axes):
    assert spanned_axes(groups, (("replica", 2), ("data", 2), ("model", 2))) == axes
    with_ones = (("one", 1), ("replica", 2), ("data", 2), ("ones", 1), ("model", 2))
    assert spanned_axes(groups, with_ones) == axes


def program(lines, arguments=""):
    """Returns the text of a program of 4 devices with one argument of 16 x 64 shards of `w` and its moment."""
    return f"""HloModule jit_step, num_partitions=4

ENTRY %main (p: f32[16,64], m: f32[16,64]) -> f32[64,64] {{
  %p = f32[16,64]{{1,0}} parameter(0), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="state.params[\\'w\\']"}}
  %m = f32[16,64]{{1,0}} parameter(1), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="state.opt_state[0].mu[\\'w\\']"}}
{arguments}{lines}
}}
"""  # noqa: E501


def mesh_of_4():
    return zero.make_mesh(data=4, devices=jax.devices()[:4])


GATHER = (
    "  %g = bf16[64,64]{1,0} all-gather(%h), replica_groups={{0,1,2,3}}, dimensions={0}, "
    'metadata={op_name="OP" source_file="/home/me/model.py" source_line=7}'
)
HALF = "  %h = bf16[16,64]{1,0} convert(%p)\n"


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(step)/jvp(gather=w)/sharding_constraint", "forward"),
        ("jit(step)/jvp()/while/body/gather=w/sharding_constraint", "forward"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/gather=w/sharding_constraint", "backward"),
        ("jit(step)/gather=w/sharding_constraint", "update"),
    ],
)
def test_a_gather_is_told_by_its_name(op_name, phase):
    other = '  %other = f32[] constant(0), metadata={op_name="jit(step)/jvp()/mul"}\n'
    (row,) = comms.measure(program(other + HALF + GATHER.replace("OP", op_name)), mesh=mesh_of_4()).rows
    assert (row.param, row.is_named, row.phase, row.axes) == ("w", True, phase, ("data",))
    # 64 x 64 x 2 bytes, of which a device sends 3 / 4.
    assert (row.full_bytes, row.sent_bytes, row.num_executions) == (8192, 6144, 1)
    assert (row.source, row.dtypes, row.kind) == ("/home/me/model.py:7", ("bf16",), "all-gather")


@pytest.mark.parametrize(
    ("module", "op_name", "place"),
    [
        ("sharding/chains", "jit(step)/jvp(gather=w)/sharding_constraint", "its gather"),
        ("sharding/chains", "jit(step)/transpose(jvp())/checkpoint/rematted_computation/gather=w/x", "its gather"),
        ("transforms/gather/lookup", "jit(step)/transpose(jvp(gather=w))/sharding_constraint", "its gradient"),
        ("sharding/chains", "jit(step)/gather=w/sharding_constraint", "its new values"),
        ("training/grads/norm", "jit(step)/jit(_squares)/reduce_sum", "the gradient norm"),
        ("training/losses", "jit(step)/jvp(jvp())/reduce_max", "the cross entropy"),
        ("training/optimizer/matrices/dealing", "jit(step)/slice", "the optimizer"),
        ("sharding/chains", "jit(step)/jvp(sent_to_shards)/x", "activations sent to shards"),
        ("sharding/chains", "jit(step)/jvp(examples_of_all)/x", "examples of other devices"),
        ("sharding/chains", "jit(step)/jvp()/x", "zero_jax.sharding.chains"),
        ("models/decoder", "jit(step)/jvp()/x", "decoder.py:7"),
    ],
)
def test_what_zero_jax_sends_has_its_purpose_instead_of_a_line(module, op_name, place):
    source = pathlib.Path(zero.__file__).parent / f"{module}.py"
    assert source.is_file()
    other = '  %other = f32[] constant(0), metadata={op_name="jit(step)/jvp()/mul"}\n'
    gather = GATHER.replace("OP", op_name).replace("/home/me/model.py", str(source))
    report = comms.measure(program(other + HALF + gather), mesh=mesh_of_4())
    assert report.rows[0].place.rpartition("/")[2] == place
    assert f"{place})" in str(report) and str(report).splitlines()[1].endswith(place)


def test_a_gather_without_a_name_is_told_by_its_dims():
    """As in programs of several slices, where shards are beside one another in a dim of their own."""
    parts = GATHER.replace("[64,64]{1,0}", "[4,16,64]{2,1,0}").replace("OP", "jit(step)/jvp()/dot")
    (row,) = comms.measure(program(HALF + parts), mesh=mesh_of_4()).rows
    assert (row.param, row.is_named) == ("w", False)


def test_without_gradients_all_is_forward_and_without_a_mesh_axes_are_unknown():
    report = comms.measure(program(HALF + GATHER.replace("OP", "jit(evaluate)/dot")))
    assert [(row.phase, row.axes, row.group_size) for row in report.rows] == [("forward", ("?",), 4)]
    assert (report.rows[0].param, report.rows[0].is_named) == ("w", False)
    assert report.by_axes == {"?": 6144}


def test_a_cast_belongs_to_the_pass_that_uses_it():
    use = '\n  %use = bf16[64,64] negate(%g), metadata={op_name="jit(step)/jvp()/dot_general"}'
    text = program(HALF + GATHER.replace("OP", "jit(step)/convert_element_type") + use)
    assert comms.measure(text, mesh=mesh_of_4()).by_phase == {"forward": 6144}


def test_a_reduction_after_the_passes_belongs_to_the_update():
    """Whatever uses its result: the loss may be the nearest name of a pass."""
    use = '\n  %use = f32[] reduce(%g), metadata={op_name="jit(step)/jvp()/reduce_sum"}'
    text = program(reduce("jit(step)/reduce") + use)
    assert comms.measure(text, mesh=mesh_of_4()).by_phase == {"update": 12288}


def state_leaves(text):
    return [leaf for leaf in argument_leaves(Program(text), None) if leaf.group in STATE_GROUPS]


def test_state_leaves_are_read_from_the_names_of_arguments():
    leaves = state_leaves(program(HALF + GATHER))
    assert [(leaf.group, leaf.path_in_group, leaf.global_dims, leaf.dims) for leaf in leaves] == [
        ("params", "w", (64, 64), (16, 64)),
        ("opt_state", "0/mu/w", (64, 64), (16, 64)),
    ]


@pytest.mark.parametrize(
    ("name", "group", "path"),
    [
        ("state.params['blocks'][0]['up']", "params", "blocks/0/up"),
        ("params['params']['Dense_0']['kernel']", "params", "params/Dense_0/kernel"),
        ("state['params'].layers[1].weight", "params", "layers/1/weight"),
        ("args[0].master['w']", "master", "w"),
        ("params", "params", ""),
    ],
)
def test_names_of_arguments_of_several_frameworks(name, group, path):
    quoted = name.replace("'", "\\'")
    text = program(f'  %x = f32[2] parameter(2), sharding={{replicated}}, metadata={{op_name="{quoted}"}}')
    (*_, leaf) = state_leaves(text)
    assert (leaf.group, leaf.path_in_group, leaf.global_dims) == (group, path, (2,))


def test_arguments_that_are_no_state_are_passed_over():
    lines = "  %x = f32[2] parameter(2), metadata={op_name=\"batch[\\'params_of_mine\\']\"}"
    assert len(state_leaves(program(lines))) == 2


def test_params_may_be_given_where_arguments_have_other_names():
    text = program(HALF + GATHER.replace("OP", "")).replace("state.", "first.x_")
    assert comms.measure(text).num_params == 0
    given = jax.ShapeDtypeStruct((64, 64), F32, sharding=zero.batch_sharding(mesh_of_4()))
    report = comms.measure(text, mesh=mesh_of_4(), param_shapes={"table": given})
    assert (report.num_params, report.rows[0].param) == (4096, "table")


STEP = "jit(step)/transpose(jvp())/"
PERMUTE = (
    "  %s = (bf16[16,64], bf16[16,64], u32[], u32[]) collective-permute-start(%h), "
    'source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, metadata={op_name="OP"}\n'
    "  %d = bf16[16,64] collective-permute-done(%s)"
)


@pytest.mark.parametrize(
    ("op_name", "kind", "param"),
    [
        (STEP + "dot_general", "reduce-scatter (windowed)", "w"),
        (STEP + "checkpoint/rematted_computation/dot_general", "all-gather (windowed)", "w"),
        ("jit(step)/jvp()/dot_general", "all-gather (windowed)", "w"),
        (STEP + "roll", "collective-permute", ""),
    ],
)
def test_permutes_of_a_matrix_product_are_windowed(op_name, kind, param):
    (row,) = comms.measure(program(HALF + PERMUTE.replace("OP", op_name)), mesh=mesh_of_4()).rows
    assert (row.kind, row.param, row.is_async) == (kind, param, True)


def test_a_collective_without_a_name_is_of_the_pass_around_it():
    """As programs of several slices are: what is between the passes and the update is of the update."""
    named = lambda name, opcode, operand, op_name: (  # noqa: E731
        f'  %{name} = bf16[64,64] {opcode}(%{operand}), metadata={{op_name="jit(step)/{op_name}"}}\n'
    )
    sent = lambda name, kind, operand: (  # noqa: E731
        f"  %{name} = bf16[64,64] {kind}(%{operand}), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}\n"
    )
    lines = named("cast", "convert", "p", "convert_element_type") + sent("before", "all-gather", "cast")
    lines += named("y", "negate", "before", "jvp()/dot_general") + named("g", "negate", "y", "transpose(jvp())/dot")
    lines += sent("within", "all-to-all", "g") + named("sum", "negate", "within", "transpose(jvp())/dot")
    lines += named("parts", "convert", "sum", "convert_element_type") + sent("exchange", "all-to-all", "parts")
    lines += named("new", "negate", "exchange", "mul") + sent("after", "all-gather", "new")
    phases = {row.name: row.phase for row in comms.measure(program(lines), mesh=mesh_of_4()).rows}
    assert phases == {"before": "forward", "within": "backward", "exchange": "update", "after": "update"}


def test_activations_between_the_stages_of_a_pipeline_are_no_finding():
    text = program(HALF + PERMUTE.replace("OP", STEP + "roll"))
    assert [x.kind for x in comms.measure(text, mesh=mesh_of_4()).findings] == ["moved activations"]
    staged = jax.sharding.Mesh(mesh_of_4().devices.reshape(1, 4), ("data", "pipe"))
    assert not comms.measure(text, mesh=staged).findings


def reduce(op_name, dtype="bf16", groups="{{0,1,2,3}}"):
    return (
        f"  %h = {dtype}[64,64] negate(%p)\n"
        f"  %g = {dtype}[64,64] all-reduce(%h), replica_groups={groups}, to_apply=%a, "
        f'metadata={{op_name="{op_name}" source_file="gpt.py" source_line=129}}'
    )


def test_an_all_reduced_gradient_is_named():
    report = comms.measure(program(reduce(STEP + "dot_general")), mesh=mesh_of_4())
    assert [str(finding) for finding in report.findings] == [
        "all-reduce of 8.2 KB (bf16) over data in the backward pass of 'w' (gpt.py:129): "
        "expected a reduce-scatter, which sends half"
    ]
    # An all-reduce of 8 kB sends 2 x 3 / 4 of it, a reduce-scatter half of that.
    assert report.findings[0].extra_bytes == 6144
    assert "warning: all-reduce of" in str(report)
    assert str(report).endswith("look at a program of your hardware (zero.plan)")


def test_an_emulated_gather_is_named():
    (finding,) = comms.measure(program(reduce("jit(step)/jvp(gather=w)/x")), mesh=mesh_of_4()).findings
    assert finding.kind == "emulated gather"
    assert finding.param == "w"


@pytest.mark.parametrize("changed", ["whole", "replica", "small"])
def test_all_reduces_that_belong_there_are_no_findings(changed):
    text, mesh = program(reduce(STEP + "dot_general")), mesh_of_4()
    if changed == "whole":  # stage 0
        text = text.replace("{devices=[4,1]<=[4]}", "{replicated}")
    elif changed == "replica":
        mesh = zero.make_mesh(data=2, replica=2, devices=jax.devices()[:4])
        text = program(reduce(STEP + "dot_general", groups="{{0,2},{1,3}}"))
    else:  # of a vector of 8 elements
        text = text.replace("[64,64]", "[8]")
    assert not comms.measure(text, mesh=mesh).findings


def test_a_wide_gather_beside_narrow_ones_is_named():
    wide = GATHER.replace("%g", "%wide").replace("%h", "%p").replace("bf16", "f32").replace("OP", "jit(step)/jvp()/x")
    text = program(HALF + GATHER.replace("OP", "jit(step)/jvp(gather=w)/x") + "\n" + wide)
    (finding,) = comms.measure(text, mesh=mesh_of_4()).findings
    assert finding.kind == "wide"
    assert "all-gather of 16.4 KB (f32) over data in the forward pass of 'w' (model.py:7)" in str(finding)
    only_wide = program(wide)
    assert not comms.measure(only_wide, mesh=mesh_of_4()).findings
    # Gradients are summed in the dtype of the policy, float32 where a model casts its params by itself.
    summed = wide.replace("all-gather(", "reduce-scatter(").replace("f32[64,64]", "f32[16,64]").replace("jvp()", STEP)
    text = program(HALF + GATHER.replace("OP", "jit(step)/jvp(gather=w)/x") + "\n" + summed)
    assert {(row.kind, row.dtype) for row in comms.measure(text).rows} >= {("reduce-scatter", "f32")}
    assert not comms.measure(text, mesh=mesh_of_4()).findings


def test_scales_of_codes_are_no_wide_gathers():
    def gather(name, dtype):
        text = GATHER.replace("%g", f"%g.{name}").replace("OP", f"jit(step)/jvp(gather=base.{name})/x")
        return text.replace("%h", f"%{name}").replace("bf16", dtype)

    arguments = "".join(
        f"  %{name} = {dtype}[16,64] parameter({i}), sharding={{devices=[4,1]<=[4]}}, "
        f"metadata={{op_name=\"state.params[\\'base\\'][\\'{name}\\']\"}}\n"
        for i, (name, dtype) in enumerate([("codes", "u8"), ("scales", "f32")], 2)
    )
    narrow, codes, scales = (
        GATHER.replace("OP", "jit(step)/jvp(gather=w)/x"),
        gather("codes", "u8"),
        gather("scales", "f32"),
    )
    kinds = lambda *gathers: [  # noqa: E731
        x.kind for x in comms.measure(program(HALF + "\n".join(gathers), arguments), mesh=mesh_of_4()).findings
    ]
    assert kinds(narrow, scales) == ["wide"]
    assert not kinds(narrow, codes, scales)


def test_a_param_that_is_gathered_more_often_than_others_is_named():
    arguments = "".join(
        f"  %{name} = f32[16,64] parameter({i}), sharding={{devices=[4,1]<=[4]}}, "
        f"metadata={{op_name=\"state.params[\\'{name}\\']\"}}\n"
        for i, name in enumerate("xyz", 2)
    )
    times = {"w": 7, "x": 2, "y": 2, "z": 2}
    gathers = [
        GATHER.replace("%g", f"%g.{name}.{i}").replace("OP", f"jit(step)/jvp(gather={name})/c")
        for name, count in times.items()
        for i in range(count)
    ]
    (finding,) = comms.measure(program(HALF + "\n".join(gathers), arguments), mesh=mesh_of_4()).findings
    assert finding.kind == "gathered often"
    assert "'w' is gathered 7 times in a step (8.2 KB each), others 2 times" in str(finding)


@pytest.mark.parametrize(("stack", "cut"), [("8,16,64", "1,4,1"), ("2,4,16,64", "1,1,4,1")])
def test_a_stack_that_is_gathered_by_layer_is_gathered_once(stack, cut):
    """Or by each of several weights that a layer has in one array."""
    arguments = "".join(
        f"  %{name} = f32[{shape}] parameter({i}), sharding={{devices=[{shards}]<=[4]}}, "
        f"metadata={{op_name=\"state.params[\\'{name}\\']\"}}\n"
        for i, (name, shape, shards) in enumerate([("x", "16,64", "4,1"), ("stack", stack, cut)], 2)
    )
    gathers = [
        GATHER.replace("%g", f"%g.{name}.{i}").replace("OP", f"jit(step)/gather={name}/c")
        for name, count in {"w": 1, "x": 1, "stack": 8}.items()
        for i in range(count)
    ]
    text = program(HALF + "\n".join(gathers), arguments)
    assert not comms.measure(text, mesh=mesh_of_4()).findings
    (finding,) = comms.measure(text.replace(stack, "16,64"), mesh=mesh_of_4()).findings
    assert "'stack' is gathered 8 times" in str(finding)


def test_a_combined_gather_is_a_row_for_each_param():
    """XLA:GPU merges the names of what it combines: `a/(b:c)` for `a/b` and `a/c`."""
    combined = GATHER.replace("bf16[64,64]{1,0} all-gather(%h)", "(bf16[64,64], bf16[64,16], s32[8]) all-gather(%a)")
    merged = "(jvp(gather=w)/x:transpose(jvp())/rematted_computation/gather=v/x:transpose(jvp())/y)"
    report = comms.measure(program(combined.replace("OP", f"jit(step)/{merged}")), mesh=mesh_of_4())
    rows = [(row.param, row.phase, row.dtype, row.full_bytes, row.sent_bytes) for row in report.rows]
    assert rows == [
        ("w", "forward", "bf16", 8192, 6144),
        ("v", "backward", "bf16", 2048, 1536),
        ("", "backward", "s32", 32, 24),
    ]
    # Of one that joins its operands before, the first name stands for all.
    joined = GATHER.replace("OP", "jit(step)/(jvp(gather=w)/x:transpose(jvp())/y)")
    (row,) = comms.measure(program(HALF + joined), mesh=mesh_of_4()).rows
    assert (row.param, row.phase, row.sent_bytes) == ("w", "forward", 6144)


def test_moved_activations_are_named_and_moved_rows_of_a_lookup_are_not():
    move = (
        "  %a = bf16[8,4,32] negate(%p)\n  %t = bf16[8,4,32] all-to-all(%a), replica_groups={{0,1,2,3}}, "
        'dimensions={0}, metadata={op_name="OP" source_file="gpt.py" source_line=3}'
    )
    (finding,) = comms.measure(program(move.replace("OP", "jit(step)/jvp()/reshape")), mesh=mesh_of_4()).findings
    assert finding.kind == "moved activations"
    assert "all-to-all of 2.0 KB (bf16) over data in the forward pass (gpt.py:3)" in str(finding)
    for scope in ("gather=w", "sent_to_shards"):
        text = program(move.replace("OP", f"jit(step)/jvp({scope})/c"))
        assert not comms.measure(text, mesh=mesh_of_4()).findings
    # In programs of several slices it has no name, but what it moves has one.
    lookup = '%a = bf16[8,4,32] negate(%p), metadata={op_name="jit(step)/jvp(gather=w)/c"}'
    nameless = move.replace("%a = bf16[8,4,32] negate(%p)", lookup).partition(', metadata={op_name="OP')[0]
    (row,) = comms.measure(program(nameless), mesh=mesh_of_4()).rows
    assert (row.kind, row.param) == ("all-to-all", "w")
    assert not comms.measure(program(nameless), mesh=mesh_of_4()).findings


def abstract(config, mesh, shapes):
    return zero.abstract_state(lambda key: {k: jnp.zeros(s) for k, s in shapes.items()}, TX, mesh=mesh, config=config)


TX = optax.adam(1e-3)
W = {"w": (64, 128)}  # 8192 elements


def estimated(shapes=W, mesh=None, **options):
    mesh = mesh or zero.make_mesh(data=8)
    config = zero.ZeroConfig(min_shard_size=1, **options)
    return comms.estimate(abstract(config, mesh, shapes), mesh=mesh, config=config)


@pytest.mark.parametrize(
    ("options", "by_phase"),
    [
        # 2 psi (n - 1) / n of 4 bytes: 2 x 8192 x 7 / 8 x 4 = 57344; gathers and reductions 28672 each.
        ({"stage": 0}, {"backward": 57344}),
        ({"stage": 1}, {"backward": 28672, "update": 28672}),
        ({"stage": 2}, {"backward": 28672, "update": 28672}),
        ({"stage": 3}, {"backward": 57344, "forward": 28672}),
        ({"stage": 3, "keep_gathered": True}, {"backward": 28672, "forward": 28672}),
        # Half of it in 16 bits.
        ({"stage": 0, "precision": "bf16"}, {"backward": 28672}),
        ({"stage": 2, "precision": "bf16"}, {"backward": 14336, "update": 14336}),
        ({"stage": 3, "precision": "bf16"}, {"backward": 28672, "forward": 14336}),
        # Microbatches: stages 0 and 1 reduce once, 2 and 3 each time, 3 gathers each time.
        ({"stage": 0, "num_microbatches": 4}, {"update": 57344}),
        ({"stage": 1, "num_microbatches": 4}, {"update": 57344}),
        ({"stage": 2, "num_microbatches": 4}, {"backward": 4 * 28672, "update": 28672}),
        ({"stage": 3, "num_microbatches": 4}, {"backward": 4 * 57344, "forward": 4 * 28672}),
    ],
)
def test_the_formula_by_stage(options, by_phase):
    estimate = estimated(**options)
    assert dict(estimate.by_phase) == by_phase
    assert estimate.sent_bytes == sum(by_phase.values())
    assert dict(estimate.by_axes) == {"data": estimate.sent_bytes}
    assert set(estimate.by_dtype) == {"bf16" if options.get("precision") == "bf16" else "f32"}
    assert estimate.num_params == 8192


def test_dtypes_of_a_mixed_policy():
    precision = zero.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, reduce=F32, master=F32)
    # The gather after the update in 2 bytes, the gradients in 4.
    assert estimated(stage=2, precision=precision).by_dtype == {"f32": 28672, "bf16": 14336}


@pytest.mark.parametrize(("fields", "passes"), [({"stage": 3}, 3), ({"stage": 1, "num_microbatches": 4}, 2)], ids=str)
def test_complex_params_move_as_they_are(fields, passes):
    mesh, config = zero.make_mesh(data=8), zero.ZeroConfig(min_shard_size=1, precision="bf16", **fields)
    state = zero.abstract_state(lambda key: {"w": jnp.zeros(W["w"], jnp.complex64)}, TX, mesh=mesh, config=config)
    assert comms.estimate(state, mesh=mesh, config=config).by_dtype == {"c64": passes * 8192 * 7 / 8 * 8}


def test_staged_gathers_split_by_axis():
    mesh = zero.make_mesh(data=8, data_layout=(2, 4))
    estimate = estimated(mesh=mesh, stage=1)
    # The last axis is gathered first: shards of 1024 elements grow to 4096 by 3 x 1024, then to 8192 by 4096.
    gathers = {row.axes: row.total_sent_bytes for row in estimate.rows if row.kind == "all-gather"}
    assert gathers == {("data_1",): 3 * 1024 * 4, ("data_0",): 4096 * 4}
    # Gradients take the same way back.
    scatters = {row.axes: row.total_sent_bytes for row in estimate.rows if row.kind == "reduce-scatter"}
    assert scatters == gathers


def test_of_three_axes_gradients_take_the_first_two_at_once():
    mesh = zero.make_mesh(data=8, data_layout=(2, 2, 2))
    estimate = estimated({"w": (64, 128)}, mesh=mesh, stage=1)
    scatters = {row.axes: row.total_sent_bytes for row in estimate.rows if row.kind == "reduce-scatter"}
    assert scatters == {("data_0", "data_1"): 3 * 2048 * 4, ("data_2",): 1024 * 4}


def test_leaves_left_whole_are_all_reduced():
    # 3 elements do not divide: 2 x 3 x 7 / 8 x 4 bytes.
    estimate = estimated({"b": (3,)}, stage=3)
    assert [(row.kind, row.phase, row.total_sent_bytes) for row in estimate.rows] == [("all-reduce", "backward", 21)]


def test_replicas_sum_the_shard_of_the_gradient():
    estimate = estimated(mesh=zero.make_mesh(data=4, replica=2), stage=2)
    # Shards of 2048 elements: 2 x 2048 x 1 / 2 x 4 bytes over `replica`.
    assert estimate.by_axes == {"data": 2 * 8192 * 3 / 4 * 4, "replica": 2048 * 4}


def test_a_share_of_the_model_axis_is_what_is_moved():
    mesh = zero.make_mesh(data=4, model=2)
    estimate = estimated(mesh=mesh, stage=1, param_specs={"w": jax.sharding.PartitionSpec(None, "model")})
    assert estimate.by_axes == {"data": 2 * 4096 * 3 / 4 * 4}
    assert estimate.num_params == 4096


def test_integers_are_not_counted():
    mesh, config = zero.make_mesh(data=8), zero.ZeroConfig(stage=0)
    state = zero.abstract_state(lambda key: {"n": jnp.arange(8), "w": jnp.zeros(8)}, TX, mesh=mesh, config=config)
    assert comms.estimate(state, mesh=mesh, config=config).num_params == 8


def test_prng_keys_are_not_counted_among_params_and_move_as_words_of_model_state():
    mesh, config = (
        zero.make_mesh(data=8),
        zero.ZeroConfig(stage=3, overrides={".*keys": jax.sharding.PartitionSpec("data")}),
    )

    def init(key):
        params = {"noise": jax.random.key(1), "w": jnp.zeros(8)}
        return zero.Variables(params=params, model_state={"keys": jax.random.split(key, 16)})

    estimate = comms.estimate(zero.abstract_state(init, TX, mesh=mesh, config=config), mesh=mesh, config=config, tx=TX)
    assert estimate.num_params == 8
    assert [row.total_sent_bytes for row in estimate.rows if row.dtype == "uint32"] == [14 * 2 * 4]


def test_sharded_residuals():
    # Paper section 8: batch x seq x hidden a block, (m - 1) / m of it sent, 2 bytes.
    sent = comms.sharded_residual_bytes(num_layers=3, batch=2, seq=16, hidden=8, model=4)
    assert sent == 3 * 2 * 16 * 8 * 2 * 3 / 4


def mlp_step(mesh, **options):
    """Compiles a step of two layers for simulated CPU devices."""
    config = zero.ZeroConfig(min_shard_size=1, **options)
    state = abstract(config, mesh, {"a": (64, 128), "b": (128, 64)})

    def loss_fn(params, batch):
        return ((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2).mean()

    batch = jax.ShapeDtypeStruct((64, 64), F32)
    compiled = zero.make_train_step(loss_fn, TX, mesh=mesh, config=config).lower(state, batch).compile()
    return comms.estimate(state, mesh=mesh, config=config), comms.measure(compiled)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_gathers_of_a_compiled_step_are_those_of_the_formula(stage):
    """XLA:CPU makes no reduce-scatters, so only the gathers are compared; the last use is not gathered twice."""
    estimate, report = mlp_step(zero.make_mesh(data=8, data_layout=(2, 4)), stage=stage)
    gathers = [row for row in report.rows if row.kind == "all-gather"]
    assert {row.param for row in gathers} == {"a", "b"}
    assert all(row.is_named for row in gathers)
    phase = {1: "update", 3: "forward"}[stage]
    for axis in ("data_0", "data_1"):
        ideal = sum(
            r.total_sent_bytes for r in estimate.rows if (r.kind, r.axes, r.phase) == ("all-gather", (axis,), phase)
        )
        found = sum(r.total_sent_bytes for r in gathers if (r.axes, r.phase) == ((axis,), phase))
        assert found == ideal > 0
    assert {row.source.rpartition("/")[2] != "" for row in gathers} == {True}
    json.dumps([estimate.to_json(), report.to_json(), comms.compare(estimate, report).to_json()])


def test_a_comparison_has_a_row_for_each_axis_and_phase():
    estimate = estimated(stage=3)
    report = comms.measure(program(HALF + GATHER.replace("OP", "jit(step)/jvp(gather=w)/c")), mesh=mesh_of_4())
    comparison = comms.compare(estimate, report)
    assert [(row.axes, row.phase, row.estimated_bytes, row.measured_bytes) for row in comparison.rows] == [
        ("data", "backward", 57344, 0),
        ("data", "forward", 28672, 6144),
    ]
    assert str(comparison).splitlines()[2].split() == ["data", "forward", "0.029", "0.006", "0.214"]
    assert comparison.total.ratio == 6144 / (57344 + 28672)
    reversed_ = comms.compare(comms.CommsEstimate(rows=(), num_params=0), report)
    assert reversed_.rows[0].ratio is None
    assert reversed_.to_json()["total"]["measured_bytes"] == 6144


def test_reports_print():
    text = str(comms.measure(program(HALF + GATHER.replace("OP", "jit(step)/jvp(gather=w)/c")), mesh=mesh_of_4()))
    assert "all-gather  data (4)  bf16   forward  w          1  0.006                 model.py:7" in text
    assert "largest buffer: 0.008 MB, all-gather of 'w' (/home/me/model.py:7)" in text
    assert "a device sends 0.006 MB, 1.500 bytes a param" in text  # 6144 bytes for 4096 params
    assert "reduce-scatter" in str(estimated(stage=1))


def test_a_program_of_the_gpu_compiler():
    """A stage 3 step of a 271M GPT in bf16 for 8 H100s: combined, asynchronous collectives without names."""
    text = gzip.decompress((DATA / "gpu_zero3_step.txt.gz").read_bytes()).decode()
    layers, width = 4, 2048
    shapes = {
        "e": (32768, width), "nf": (width,), "layers_n1": (layers, width), "layers_n2": (layers, width),
        "layers_o": (layers, width, width), "layers_qkv": (layers, width, 3 * width),
        "layers_w1": (layers, width, 4 * width), "layers_w2": (layers, 4 * width, width),
    }  # fmt: skip
    mesh, config = zero.make_mesh(data=8), zero.ZeroConfig(stage=3, precision="bf16")
    estimate = comms.estimate(abstract(config, mesh, shapes), mesh=mesh, config=config)
    report = comms.measure(text, mesh=mesh)
    assert report.num_params == estimate.num_params == sum(math.prod(shape) for shape in shapes.values())
    # The embedding (a quarter of the params) is gathered once and its rows move: under the ideal.
    comparison = comms.compare(estimate, report)
    assert 0.88 < comparison.total.ratio < 1, comparison
    assert {row.phase for row in comparison.rows if row.measured_bytes > 1e6} == {"forward", "backward"}
    # It was compiled before lookups had names, so that the rows they move count as activations, once each way.
    assert [(finding.kind, finding.source) for finding in report.findings] == 2 * [("moved activations", "gpt.py:24")]
    largest = report.largest_buffer
    assert largest.full_bytes == 2 * (32768 + 1) * width  # the gradients of `e` and `nf`, combined
    assert largest.param.startswith("e | nf")
    assert all(row.overlap is not None and row.overlap.cycles is None for row in report.rows)
    # XLA:TPU, stopped before the code, has cycles of some scalars alone.
    few = r'\1, backend_config={"estimated_cycles":"5"}'
    some = re.sub(r"^(.* = f32\[\]\S* add\(.*\))", few, text, flags=re.MULTILINE)
    assert some != text
    assert [row.overlap for row in comms.measure(some, mesh=mesh).rows] == [row.overlap for row in report.rows]


def test_of_many_findings_the_costliest_are_printed():
    move = (
        "  %a.N = bf16[8,4,N] negate(%p)\n"
        "  %t.N = bf16[8,4,N] all-to-all(%a.N), replica_groups={{0,1,2,3}}, dimensions={0}, "
        'metadata={source_file="gpt.py" source_line=N}'
    )
    lines = "\n".join(move.replace("N", str(size)) for size in range(100, 115))
    report = comms.measure(program(lines), mesh=mesh_of_4())
    assert len(report.findings) == 15
    assert str(report).count("warning: ") == 11
    assert str(report).splitlines()[-1] == "warning: 5 more, of 0.024 MB"  # 32 x 2 bytes x 3 / 4 x (100 + ... + 104)


def test_bad_text_is_refused():
    with pytest.raises(ValueError, match=r"no ENTRY computation.*compiled\.as_text"):
        comms.measure("not a program")


# XLA:TPU's program for one of several slices: the network's part is host transfers, not collectives.
ONE_OF_TWO_SLICES = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[8,256]) -> bf16[8,256] {
  %p = bf16[8,256]{1,0} parameter(0)
  %after-all = token[] after-all()
  %send = (bf16[8,256]{1,0}, u32[], token[]) send(%p, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  ROOT %copy = bf16[8,256]{1,0} copy(%p)
}
"""  # noqa: E501


def test_transfers_between_slices_of_unknown_axes_are_a_finding():
    report = comms.measure(ONE_OF_TWO_SLICES)
    assert not report.rows
    (finding,) = report.findings
    assert finding.kind == "not counted"
    assert "1 x all-gather" in str(finding)


@pytest.mark.tpu_compiler
def test_transfers_between_slices_are_rows_of_the_axis_over_slices():
    mesh = zero.make_mesh(topology="2xv5e:2x2")
    report = comms.measure(ONE_OF_TWO_SLICES, mesh=mesh)
    assert not report.findings
    (row,) = report.rows
    assert math.prod(mesh.shape[axis] for axis in row.axes) == 2
    assert (row.kind, row.dtype, row.group_size, row.total_sent_bytes) == ("all-gather", "bf16", 2, 8 * 256 * 2)
