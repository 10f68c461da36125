"""The pictures of the stages: the shards that they draw, read from real arrays."""

import draw_stages
import pytest

WHOLE = ((0.0, 1.0), (0.0, 1.0))
SHARDED = {
    0: set(),
    1: {"master", "opt_state"},
    2: {"master", "opt_state", "grads"},
    3: {"opt_state", "grads", "params"},
}
# psi = 65,536 params in matrices, and 64 of the vector `norm`, which is replicated; bf16 params at stages 0 to 2.
MATRICES, VECTOR = 65_536, 64


STAGES = [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3]


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: f"stage {stage}")
def stage_and_leaves(request):
    return request.param, draw_stages.state_at(request.param)


def test_the_groups_of_the_stage_are_divided(stage_and_leaves):
    stage, leaves = stage_and_leaves
    matrices = [leaf for leaf in leaves if len(leaf.dims) == 2]
    divided = {leaf.group for leaf in matrices if all(part.spans != WHOLE for part in leaf.parts)}
    assert divided == SHARDED[stage]
    assert {leaf.group for leaf in matrices if all(part.spans == WHOLE for part in leaf.parts)} == {
        leaf.group for leaf in leaves
    } - divided


def test_parts_of_a_divided_leaf_cover_it_once(stage_and_leaves):
    for leaf in stage_and_leaves[1]:
        areas = [(part.spans[0][1] - part.spans[0][0]) * (part.spans[-1][1] - part.spans[-1][0]) for part in leaf.parts]
        assert len({part.spans for part in leaf.parts}) in (1, 8)
        if len({part.spans for part in leaf.parts}) == 8:
            assert sum(areas) == pytest.approx(1)


def test_bytes_of_a_device_are_those_of_the_formula(stage_and_leaves):
    stage, leaves = stage_and_leaves
    bytes_each = (
        {"params": 2, "master": 4, "grads": 4, "opt_state": 8}
        if stage < 3
        else {"params": 4, "grads": 4, "opt_state": 8}
    )
    expected = sum(
        size * (MATRICES / (8 if group in SHARDED[stage] else 1) + VECTOR) for group, size in bytes_each.items()
    )
    assert draw_stages.bytes_by_device(leaves) == {device: expected for device in range(8)}


@pytest.mark.parametrize("stage_and_leaves", [3], indirect=True, ids=["stage 3"])
def test_pictures_are_drawn(stage_and_leaves, tmp_path):
    stage, leaves = stage_and_leaves
    draw_stages.draw_map(tmp_path / "map.png", stage, leaves)
    draw_stages.draw_bars(tmp_path / "bars.png", {stage: leaves})
    assert min((tmp_path / name).stat().st_size for name in ("map.png", "bars.png")) > 10_000
