"""The path of a gathered param in the `op_name` of an instruction."""

import pytest

from zero_jax.hlo import gathered_path


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(step)/jvp(gather:embed)/sharding_constraint", "embed"),
        ("jit(step)/jvp(params:layers.0)/checkpoint/gather:::.mlp.w/sharding_constraint", "layers.0.mlp.w"),
        ("jit(step)/transpose(jvp(params:h_3))/jvp(params:h_3)/checkpoint/gather:::.w/convert", "h_3.w"),
        ("jit(step)/jvp(params:layers.0)/checkpoint/mul", None),
    ],
)
def test_a_path_in_a_region_continues_that_of_the_region(op_name, path):
    assert gathered_path(op_name) == path
