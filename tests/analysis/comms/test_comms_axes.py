"""Traffic by mesh axis: the comparison's sums, and findings of states that only the model's own axes cut."""

import json
import math

import jax
import pytest

from zero_jax import comms
from zero_jax.analysis.comms.estimated import CommsEstimate, EstimateRow
from zero_jax.analysis.comms.findings import carries_batch, carries_data, find
from zero_jax.analysis.comms.rows import Row
from zero_jax.analysis.leaves import ArgumentLeaf


def row(kind="all-reduce", axes=("data",), phase="backward", sent=3e6, dtype="bf16"):
    return Row(
        kind=kind, name="%r", axes=axes, group_size=4, dtypes=(dtype,), phase=phase, param="", is_named=False,
        sent_bytes=sent, num_executions=1, full_bytes=int(sent), is_async=False, overlap=None, op_name="", source="",
    )  # fmt: skip


def ideal(axes, phase, sent):
    return EstimateRow(kind="all-reduce", axes=axes, dtype="bf16", phase=phase, total_sent_bytes=sent)


def test_the_comparison_sums_phases_by_axes():
    estimate = CommsEstimate(
        rows=(ideal(("data",), "forward", 1e6), ideal(("data",), "backward", 3e6), ideal(("model",), "forward", 2e6)),
        num_params=10,
        data_axes=("data",),
        not_counted="some of what moves over model: none",
    )
    report = comms.CommsReport(
        rows=(row(sent=6e6), row(axes=("model",), phase="forward", sent=2e6)), num_params=10, findings=()
    )
    compared = comms.compare(estimate, report)
    assert {one.axes: (one.estimated_bytes, one.ratio) for one in compared.by_axes} == {
        "data": (4e6, 1.5),
        "model": (2e6, 1.0),
    }
    assert "not counted by the estimate: some of what moves over model" in str(compared)
    assert [line.split()[:2] for line in str(compared).splitlines()[4:6]] == [["data", "all"], ["model", "all"]]
    assert {one["axes"] for one in json.loads(json.dumps(compared.to_json()))["by_axes"]} == {"data", "model"}


@pytest.mark.parametrize(
    ("axes", "batch", "data"),
    [
        (("data",), True, True),
        (("data_1", "model"), True, True),
        (("replica",), True, False),
        (("model",), False, False),
        (("model_0", "model_1"), False, False),
        (("?",), True, True),
    ],
)
def test_axes_by_their_roles(axes, batch, data):
    assert (carries_batch(axes), carries_data(axes)) == (batch, data)


def leaf(local_shape):
    return ArgumentLeaf(
        path="params/w", group="params", dtype="bf16", dims=local_shape, num_bytes=0, unpadded_bytes=0,
        whole_dims=(512, 512),
    )  # fmt: skip


def test_a_state_cut_by_the_model_alone_is_not_sharded_over_data():
    """At stage 0 gradients are all-reduced: that is no finding, even where the model's axes cut the params."""
    mesh = jax.sharding.Mesh([[*jax.devices()[:4]], [*jax.devices()[4:]]], ("data", "model"))
    reduced = [row(sent=math.prod((512, 128)) * 2.0)]
    assert find(reduced, [leaf((512, 128))], mesh=mesh) == ()
    (finding,) = find(reduced, [leaf((256, 128))], mesh=mesh)
    assert finding.kind == "all-reduced gradient"
    assert find([row(axes=("model",))], [leaf((256, 128))], mesh=mesh) == ()
