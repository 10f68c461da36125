"""The roofline before compiling: seconds of kernels and of collectives that can be worked out by hand."""

import pytest

import zero_jax as zero
from zero_jax.planning import links
from zero_jax.sharding import topology
from zero_jax.transforms import Kernel, Roofline

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
V5P = topology.parse("v5p:4x4x4")
FLOPS, MEMORY = 459e12 * 0.88, 2765e9 * 0.5  # what products and memory reach


def kernel(**fields):
    nothing = {"flops": 0.0, "vector_ops": 0.0, "split_bytes": 0.0, "other_bytes": 0.0, "is_split": True}
    return Kernel(**(nothing | fields))


def test_a_kernel_takes_the_longest_of_products_memory_and_elementwise_work():
    seconds = Roofline(V5P.hardware, overlaps=False).compute_seconds
    assert seconds([kernel(flops=FLOPS, split_bytes=MEMORY / 2)], 1) == pytest.approx(1)
    assert seconds([kernel(flops=FLOPS / 2, split_bytes=MEMORY)], 1) == pytest.approx(1)
    assert seconds([kernel(vector_ops=459e12 / 32)], 1) == pytest.approx(1)
    # Of eight parts each has an eighth of the examples, and all of the params; it runs three times.
    shared = kernel(split_bytes=MEMORY, other_bytes=MEMORY, times=3)
    assert seconds([shared], 8) == pytest.approx(3 * (1 / 8 + 1))


def test_products_with_on_chip_memory_reach_the_peak_but_for_reading_their_operands():
    seconds = Roofline(V5P.hardware, overlaps=True).compute_seconds
    assert seconds([kernel(flops=459e12)], 1) == pytest.approx(1)
    assert seconds([kernel(flops=459e12, split_bytes=2765e9 / 10)], 1) == pytest.approx(1.037)
    assert seconds([kernel(flops=459e12, split_bytes=2765e9)], 1) == pytest.approx(2)  # its bytes take longer


@pytest.mark.parametrize(
    ("name", "tokens", "inner", "features", "cycles"),
    [
        # XLA:TPU's own cycles of one bf16 product, with the options of `overlap` (libtpu of JAX 0.10.2).
        ("v5p", 8192, 4096, 14336, 3728408), ("v5p", 32768, 14336, 4096, 14984089), ("v5p", 2048, 4096, 4096, 293912),
        ("v6e", 8192, 4096, 14336, 1995400), ("v6e", 32768, 14336, 4096, 8320252), ("v6e", 2048, 4096, 4096, 153766),
        ("tpu7x", 8192, 4096, 14336, 1922670), ("tpu7x", 32768, 14336, 4096, 7821180),
        ("tpu7x", 2048, 4096, 4096, 157877),
    ],
)  # fmt: skip
def test_products_take_the_compilers_cycles(name, tokens, inner, features, cycles):
    hardware = topology.HARDWARE[name]
    num_bytes = 2.0 * (tokens * inner + inner * features + tokens * features)
    product = kernel(flops=2.0 * tokens * inner * features, split_bytes=num_bytes)
    found = Roofline(hardware, overlaps=True).compute_seconds([product], 1)
    assert found == pytest.approx(cycles / hardware.clock_hz, rel=0.08)


def test_copies_slices_and_sums_have_shares_of_the_bandwidth_of_their_own_and_kernels_of_the_peak():
    seconds = Roofline(V5P.hardware, overlaps=False).compute_seconds
    assert seconds([kernel(flops=FLOPS, engine="attention")], 1) == pytest.approx(0.88 / 0.7)
    assert seconds([kernel(split_bytes=2765e9, engine="slice")], 1) == pytest.approx(1 / 0.36)
    assert seconds([kernel(split_bytes=2765e9, engine="layout")], 1) == pytest.approx(1 / 0.36)
    assert seconds([kernel(split_bytes=2765e9, engine="sum")], 1) == pytest.approx(1 / 0.1)
    of_gpu = Roofline(topology.parse("h100:1x8").hardware, overlaps=False).compute_seconds
    assert of_gpu([kernel(split_bytes=2765e9, engine="layout")], 1) == 0  # it has no tiles


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [
        # 4 x 4 x 4 chips: a ring of four each, both directions of 90 GB/s. The last axis carries 3/4 of a sixteenth,
        # the first two, two dims at once, 15/16 of all.
        ("v5p:4x4x4", ("data_0", "data_1", "data_2"), 180e9 * (3 / 64 / 180e9 + 15 / 16 / 360e9)),
        ("v5p:4x4x4", ("data_1",), 180e9 * 3 / 4 / 180e9),
        ("v5p:4x4x4", (), 0.0),
        # 2-D tori go one axis at a time: of 16 x 16, both closed, 2 x 45 GB/s.
        ("v5e:16x16", ("data_0", "data_1"), 180e9 * (15 / 256 + 15 / 16) / 90e9),
        # Those of v6e go at once: four links of 90 GB/s.
        ("v6e:16x16", ("data_0", "data_1"), 180e9 * 255 / 256 / 360e9),
    ],
)
def test_collectives_go_over_the_dims_of_the_torus_as_the_steps_of_a_gather(name, axes, expected):
    mesh_links = links.Links(zero.make_mesh(topology=name), topology.parse(name))
    assert mesh_links.gather_seconds(180e9, axes) == pytest.approx(expected)


def test_an_axis_over_several_dims_is_gathered_along_each():
    """`data` of 16 along 2 x 2 x 4 chips, none of them closed."""
    mesh_links = links.Links(zero.make_mesh(topology="v5p:2x2x4", data_layout=(16,)), topology.parse("v5p:2x2x4"))
    assert mesh_links.gather_seconds(270e9, ("data",)) == pytest.approx(15 / 16)


def test_the_options_of_overlap_hide_collectives_that_computation_can_hide():
    synchronous, overlapping = (Roofline(V5P.hardware, overlaps=overlaps) for overlaps in (False, True))
    assert synchronous.exposed_seconds(1.0, 10.0) == 1.0
    assert overlapping.exposed_seconds(1.0, 10.0) == pytest.approx(0.15)
    assert overlapping.exposed_seconds(20.0, 10.0) == pytest.approx(20 - 5)


def test_what_does_not_fit_on_the_chip_moves_at_the_bandwidth_at_most():
    hardware = topology.parse("v6e:2x2").hardware
    roofline = Roofline(hardware, overlaps=True)
    small, large = (roofline.moved_seconds(num_bytes) * hardware.memory_bytes_per_second for num_bytes in (1e8, 1e9))
    assert small < 1e8 and large == pytest.approx(1e9)
