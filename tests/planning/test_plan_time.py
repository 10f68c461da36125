"""The time of a step, from schedules whose time is worked out by hand."""

import types

import numpy as np
import pytest

from zero_jax import comms, memory
from zero_jax.hlo import Program
from zero_jax.planning import links
from zero_jax.planning import step_time as plan_time
from zero_jax.planning.job import CompiledText
from zero_jax.sharding import topology

V5P = topology.HARDWARE["v5p"]
# 1750 cycles at 1.75 GHz: 1 us. The all-gather makes 4 MB of 16 parts: 3.75 MB sent by each device.
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=16

ENTRY %main (p: bf16[131072]) -> bf16[2097152] {
  %p = bf16[131072]{0} parameter(0)
  %f = bf16[131072]{0} fusion(%p), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"1750"}
  ROOT %all-gather = bf16[2097152]{0} all-gather(%f), channel_id=1, replica_groups=[1,16]<=[16], dimensions={0}
}

%inner (q: bf16[131072]) -> bf16[131072] {
  %q = bf16[131072]{0} parameter(0)
  ROOT %negate = bf16[131072]{0} negate(%q)
}
"""


def fake_mesh(shape, *, slices=1):
    """A mesh of devices that know where they are, and nothing else."""
    coords = [tuple(map(int, np.unravel_index(i, shape))) for i in range(int(np.prod(shape)))]
    devices = [
        types.SimpleNamespace(coords=c, slice_index=number, process_index=number)
        for number in range(slices)
        for c in coords
    ]
    return types.SimpleNamespace(devices=np.array(devices), size=len(devices))


def estimate(name, mesh, text=PROGRAM):
    work = plan_time.ModelWork(model_flops=16 * 459e6, num_tokens=1600)
    return plan_time.estimate_time(Program(text), work, mesh=mesh, topology=topology.parse(name))


def test_cycles_and_links_of_an_open_torus():
    """2 x 2 x 4 chips of v5p: three dims, none of them closed: 3 x 90 GB/s, and 4 hops of the longest dim."""
    found = estimate("v5p:2x2x4", fake_mesh((2, 2, 4)))
    gather = 4_194_304 * 15 / 16 / 270e9 + 4e-6
    assert found.compute_seconds == pytest.approx(1e-6)
    assert found.exposed_seconds == pytest.approx(gather)
    assert found.step_seconds == pytest.approx(1e-6 + gather)
    assert found.tokens_per_second == pytest.approx(1600 / (1e-6 + gather))
    # 459 MFLOP a device at 459 TFLOP/s are 1 us.
    assert found.mfu == pytest.approx(1e-6 / found.step_seconds)


def test_a_closed_ring_works_both_ways():
    """A dim of 16 of v5e is closed, so that both directions carry: 2 x 45 GB/s."""
    found = estimate("v5e:16x1", fake_mesh((16, 1)))
    assert found.exposed_seconds == pytest.approx(4_194_304 * 15 / 16 / 90e9 + 16e-6)


def test_slices_talk_over_the_network():
    """Each of the 8 rings, one for each device of a slice, crosses with the share of one device."""
    found = estimate("2xv5e:2x4", fake_mesh((2, 4), slices=2))
    assert found.exposed_seconds == pytest.approx(4_194_304 * 15 / 16 / (8 * 3.1e9) + 16e-6)


def test_one_device_of_each_host_has_its_own_share_and_eight_have_no_more_than_nvlink():
    hosts = links.Links(fake_mesh((8,), slices=4), topology.parse("h100:4x8"))
    assert hosts.bandwidth((0, 8, 16, 24), kind="all-gather") == (50e9, 4)
    assert hosts.bandwidth((0, 1, 8, 9), kind="all-gather") == (100e9, 4)
    assert hosts.bandwidth(tuple(range(32)), kind="all-reduce") == (400e9, 32)
    assert hosts.bandwidth(tuple(range(32)), kind="all-to-all") == (50e9, 32)


def test_gpus_have_no_cycles_but_bytes():
    """0.5 MB through 88% of 3.352 TB/s, and a kernel's start; the gather at NVLink's speed."""
    found = estimate("h100:1x16", fake_mesh((16,)))
    assert found.compute_seconds == pytest.approx(2 * 262_144 / (0.88 * 3.352e12) + 3e-6)
    assert found.exposed_seconds == pytest.approx(4_194_304 * 15 / 16 / 450e9 + 2e-6)


def test_assumptions_are_told():
    text = "\n".join(estimate("v5p:2x2x4", fake_mesh((2, 2, 4))).assumptions)
    for figure in ("1.75 GHz", "459 TFLOP/s", "2,765 GB/s", "90 GB/s a direction"):
        assert figure in text


@pytest.mark.parametrize(
    ("name", "dim", "extent", "closed"),
    [
        ("v5p:4x4x8", 2, 8, True),
        ("v5p:4x4x8", 2, 4, False),  # half of the ring
        ("v5p:2x2x4", 2, 4, False),  # less than a cube
        ("v5p:4x4x6", 0, 4, False),
        ("v5e:16x16", 0, 16, True),
        ("v5e:8x16", 0, 8, False),
    ],
)
def test_which_dims_close(name, dim, extent, closed):
    torus = links.Links(fake_mesh((1,)), topology.parse(name))
    assert torus.is_ring(dim, extent) is closed


def test_groups_share_the_torus_dims_that_they_are_spread_over():
    torus = links.Links(fake_mesh((2, 2, 4)), topology.parse("v5p:2x2x4"))
    last, plane = [tuple(range(4))], [(0, 4, 8, 12)]
    taken = [torus.taken(types.SimpleNamespace(source_target_pairs=(), replica_groups=g)) for g in (last, plane)]
    assert taken == [{("torus dim", 2)}, {("torus dim", 0), ("torus dim", 1)}]
    hosts = links.Links(fake_mesh((8,), slices=4), topology.parse("h100:4x8"))
    inside, across = ([tuple(range(8))], [(0, 8, 16, 24)])
    own = [hosts.taken(types.SimpleNamespace(source_target_pairs=(), replica_groups=g)) for g in (inside, across)]
    assert not own[0] & own[1]


def test_a_program_is_parsed_once_for_memory_traffic_and_time(monkeypatch):
    parsed = []
    init = Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda self, text: (parsed.append(text), init(self, text))[1])
    stats = dict.fromkeys(("argument", "output", "alias", "temp", "generated_code"), 0)
    stats = {f"{name}_size_in_bytes": size for name, size in stats.items()}
    compiled = CompiledText(text=PROGRAM, stats=stats, compile_seconds=0.0, from_cache=True)
    mesh, v5p = fake_mesh((2, 2, 4)), topology.parse("v5p:2x2x4")
    memory.measure(compiled)
    comms.measure(compiled)
    work = plan_time.ModelWork(model_flops=1.0, num_tokens=1)
    plan_time.estimate_time(compiled.program, work, mesh=mesh, topology=v5p)
    assert parsed == [PROGRAM]
    for measure in (memory.measure, comms.measure):
        measure(types.SimpleNamespace(as_text=lambda: PROGRAM, memory_analysis=compiled.memory_analysis))
    assert len(parsed) == 3  # what is not a plan's program is parsed by each measure


KERNEL = PROGRAM.replace(
    "  ROOT %all-gather",
    """  %k = bf16[131072]{0} custom-call(%f), custom_call_target="tpu_custom_call", CONFIG
  ROOT %all-gather""",
)
OWN_COST = 'backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"321300000","bytes_accessed":"1"}}'


def test_a_kernel_takes_its_flops_over_a_stated_share_of_the_peak():
    """321.3 MFLOP at 70% of 459 TFLOP/s are 1 us."""
    text = KERNEL.replace("CONFIG", OWN_COST + "}")
    found = estimate("v5p:2x2x4", fake_mesh((2, 2, 4)), text)
    assert found.kernel_seconds == pytest.approx(1e-6)
    assert found.compute_seconds == pytest.approx(2e-6)
    assert "at 70% of 459 TFLOP/s" in "\n".join(found.assumptions)


def test_a_sentinel_in_place_of_cycles_takes_no_centuries():
    text = KERNEL.replace("CONFIG", OWN_COST + ',"window_config":{"estimated_cycles":"9223372036854775807"}}')
    assert estimate("v5p:2x2x4", fake_mesh((2, 2, 4)), text).compute_seconds == pytest.approx(2e-6)


def test_cycles_far_above_the_roofline_are_not_believed():
    """An hour for 0.5 MB: by its bytes it takes 0.19 us, and the assumptions name it."""
    found = estimate("v5p:2x2x4", fake_mesh((2, 2, 4)), PROGRAM.replace('"1750"', f'"{1_750_000_000 * 3600}"'))
    assert found.compute_seconds == pytest.approx(2 * 262_144 / 2.765e12)
    assert "1 instructions have impossible cycles" in "\n".join(found.assumptions)
    slow = estimate("v5p:2x2x4", fake_mesh((2, 2, 4)), PROGRAM.replace('"1750"', '"1750000000"'))
    assert slow.compute_seconds == pytest.approx(1.0)


def test_mfu_by_both_counts():
    """Attention with half of the operations: by half, three quarters of them count."""
    mesh, v5p = fake_mesh((2, 2, 4)), topology.parse("v5p:2x2x4")
    work = plan_time.ModelWork(model_flops=16 * 459e6, attention_flops=16 * 459e6 / 2, num_tokens=1)
    found = plan_time.estimate_time(Program(PROGRAM), work, mesh=mesh, topology=v5p)
    assert found.mfu == pytest.approx(1e-6 / found.step_seconds)
    assert found.mfu_causal == pytest.approx(0.75 * found.mfu)
    assert found.causal_model_flops == pytest.approx(0.75 * found.model_flops)
    assert found.device_flops_per_second == pytest.approx(found.mfu * 459e12)
    assert f"MFU {found.mfu:.1%} ({found.mfu_causal:.1%} with attention by half)" in str(found)


TWO_SLICES = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[131072]) -> bf16[1048576] {
  %p = bf16[131072]{0} parameter(0)
  %key = token[] after-all()
  %send = (bf16[131072]{0}, u32[], token[]) send(%p, %key), channel_id=1, is_host_transfer=true, DATA
  %recv = (bf16[262144]{0}, u32[], token[]) recv(%key), channel_id=2, is_host_transfer=true, DATA
  %received = (bf16[262144]{0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %all-gather = bf16[1048576]{0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}
""".replace(
    "DATA",
    'frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0",_xla_megascale_target="{1,2}x{0:7}",'
    '_xla_megascale_transfer_type="ALL_GATHER"}',
)


@pytest.mark.parametrize("order", ["slices are major", "slices are minor"])
def test_a_program_of_two_slices_gathers_in_its_own_and_exchanges_over_the_network(order):
    """0.25 MB go to the other slice at 3.1 GB/s; the gather of 8 chips stays inside, whatever the mesh's order."""
    mesh = fake_mesh((2, 4), slices=2)
    if order == "slices are minor":
        mesh.devices = mesh.devices.reshape(2, 8).T
    found = estimate("2xv5e:2x4", mesh, TWO_SLICES)
    network = 262_144 / 3.1e9 + 20e-6
    assert found.network_bytes == 262_144
    assert found.network_seconds == pytest.approx(network)
    assert found.exposed_seconds == pytest.approx(network + 2_097_152 * 7 / 8 / 90e9 + 4e-6)
    assert "each transfer between slices" in "\n".join(found.assumptions)
