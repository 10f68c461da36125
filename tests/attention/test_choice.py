"""Which attention gets a kernel, and what is said where it gets none."""

import jax
import jax.numpy as jnp
import pytest
from attention_cases import random_arrays

import zero_jax as zero
from zero_jax.attention import cudnn
from zero_jax.attention.function import Choice, choose
from zero_jax.attention.placement import KernelPlacement, current_placement, mesh_context
from zero_jax.attention.xla import Case

AMPERE, HOPPER, BLACKWELL, WORKSTATION = (
    KernelPlacement(platform="cuda", compute_capability=version) for version in ("8.0", "9.0", "10.0", "12.0")
)
IDS = jnp.zeros((2, 256), jnp.int32)


def chosen(platform, *, dtype=jnp.bfloat16, sizes=None, placement=None, wanted=None, **options):
    sizes = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 2, "h": 64} | (sizes or {})
    b, t, s, n, k, h = (sizes[name] for name in "btsnkh")
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, sizes.get("v", h)))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    placement = placement or KernelPlacement(platform=platform)
    return choose(*arrays, Case(**{"scale": 1.0} | options), wanted=wanted, placement=placement)


@pytest.fixture(autouse=True)
def _has_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "installed_version", lambda: 91200)


@pytest.mark.parametrize(
    ("platform", "kernel"), [("tpu", "splash"), ("cuda", "cudnn"), ("gpu", "cudnn"), ("cpu", "xla")]
)
def test_the_platform_has_a_kernel(platform, kernel):
    assert chosen(platform, is_causal=True).implementation == kernel
    assert chosen(platform, is_causal=True, wanted="xla").implementation == "xla"


def test_cudnn_needs_ampere():
    turing = KernelPlacement(platform="cuda", compute_capability="7.5")
    assert chosen("cuda", placement=AMPERE).implementation == "cudnn"
    assert chosen("cuda", placement=turing) == Choice(
        implementation="xla", reason="it needs compute capability 8.0, and the devices have 7.5"
    )


@pytest.mark.parametrize(
    ("case", "placements"),
    [
        ({"segment_ids": (IDS, IDS)}, (HOPPER, BLACKWELL)),
        ({"sizes": {"h": 192, "v": 128}}, (HOPPER, BLACKWELL)),
        ({"sizes": {"h": 256}}, (HOPPER,)),
        ({"sizes": {"h": 128}}, (AMPERE, HOPPER, BLACKWELL, WORKSTATION)),
    ],
    ids=str,
)
def test_segments_and_wide_heads_by_compute_capability(case, placements):
    for placement in placements:
        assert chosen("cuda", placement=placement, is_causal=True, **case) == Choice(implementation="cudnn")


@pytest.mark.parametrize(
    ("platform", "case", "reason"),
    [
        ("tpu", {"bias": jnp.zeros((2, 4, 256, 256))}, "bias"),
        ("tpu", {"mask": jnp.ones((2, 4, 256, 256), bool)}, "mask"),
        ("tpu", {"dtype": jnp.float16}, "float16"),
        ("tpu", {"local_window_size": (0, -1)}, "see no key"),
        ("tpu", {"sizes": {"t": 300}, "local_window_size": (3, 3)}, "see no key"),
        ("tpu", {"scale": jnp.float32(1)}, "scale is an array"),
        ("tpu", {"placement": KernelPlacement(platform="tpu", unknown="no mesh")}, "no mesh"),
        ("cuda", {"dtype": jnp.float32}, "float32"),
        ("cuda", {"sizes": {"h": 60}}, "multiples of 8"),
        ("cuda", {"sizes": {"h": 264}}, "up to 256"),
        ("cuda", {"sizes": {"v": 32}, "placement": AMPERE}, "64 and 32 wide"),
        ("cuda", {"sizes": {"h": 192}, "placement": AMPERE}, "up to 128"),
        (
            "cuda",
            {"sizes": {"h": 96, "v": 64}},
            "96 and 64 wide: it takes equal multiples of 8 up to 256 or 192 and 128",
        ),
        ("cuda", {"sizes": {"h": 256}, "placement": BLACKWELL}, "up to 128 or 192 and 128"),
        ("cuda", {"sizes": {"h": 192, "v": 128}, "placement": WORKSTATION}, "equal multiples of 8 up to 128"),
        ("cuda", {"segment_ids": (IDS, IDS), "placement": AMPERE}, "segments need compute capability 9 or 10"),
        ("cuda", {"segment_ids": (IDS, IDS), "placement": WORKSTATION}, "and the devices have 12.0"),
        ("cuda", {"segment_ids": (IDS, IDS + 1)}, "one array of segment_ids"),
        ("cuda", {"segment_ids": (IDS, IDS), "local_window_size": (9, 0), "is_causal": True}, "segments or windows"),
        ("cuda", {"logits_soft_cap": 1.0}, "for XLA alone on GPUs"),
        ("cuda", {"local_window_size": (9, 9)}, "windows are causal"),
        ("cuda", {"is_causal": True, "sizes": {"s": 512}}, "of one length"),
        ("cuda", {"local_window_size": (9, 0), "query_seq_lengths": jnp.ones(2, jnp.int32)}, "not both"),
        ("cuda", {"sizes": {"t": 0}}, "there is nothing in"),
    ],
)
def test_what_a_kernel_cannot_do_goes_to_xla_and_is_an_error_by_name(platform, case, reason):
    found = chosen(platform, **case)
    assert found.implementation == "xla" and reason in found.reason
    with pytest.raises(ValueError, match=r"cannot do this attention.*give implementation=None"):
        chosen(platform, wanted="splash" if platform == "tpu" else "cudnn", **case)


def test_a_missing_cudnn_names_the_extra(monkeypatch):
    monkeypatch.setattr(cudnn, "installed_version", lambda: 0)
    assert "zero-jax[gpu-compiler]" in chosen("cuda").reason
    with pytest.raises(ValueError, match=r"zero-jax\[cuda\]"):
        chosen("cuda", wanted="cudnn")


def test_names_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"implementation='flash': .*give one of fused, splash, cudnn, xla or None"):
        zero.dot_product_attention(*random_arrays(), implementation="flash")
    with pytest.raises(ValueError, match="the devices are cpu"):
        zero.dot_product_attention(*random_arrays(), implementation="cudnn")


def test_short_sequences_are_left_to_xla_unless_asked_for():
    found = chosen("tpu", sizes={"t": 100})
    assert found.implementation == "xla" and "less than 128" in found.reason
    assert chosen("tpu", sizes={"t": 100}, wanted="splash").implementation == "splash"


def test_the_mesh_is_an_argument_or_that_of_the_step_or_that_of_jax():
    sizes = (4, 2), (2, 1), (8, 1)
    of_step, of_jax, own = (zero.make_mesh(data=n, model=m, devices=jax.devices()[: n * m]) for n, m in sizes)
    assert current_placement() == KernelPlacement(platform="cpu")
    with jax.set_mesh(of_jax):
        assert jax.jit(lambda: current_placement().mesh.size)() == 2
        with mesh_context(of_step):
            placement = current_placement()
            assert placement.mesh is of_step
            assert (placement.batch, placement.heads) == (("replica", "data"), ("model",))
            assert current_placement(own).mesh is own
    odd = jax.sharding.Mesh(jax.devices(), "x")
    assert "none of them carries `data`" in current_placement(odd).unknown


def test_a_jitted_function_in_a_loss_is_traced_again_for_another_mesh():
    seen = []
    inner = jax.jit(lambda x: seen.append(current_placement().mesh) or x)
    for num_devices in (4, 8):
        with mesh_context(zero.make_mesh(devices=jax.devices()[:num_devices])):
            inner(1.0)
    assert [mesh.size for mesh in seen] == [4, 8]


def test_small_batches_and_few_heads_are_sharded_over_what_divides():
    mesh = zero.make_mesh(replica=2, data=2, model=2)
    placement = KernelPlacement(platform="tpu", mesh=mesh, batch=("replica", "data"), heads=("model",))
    free = frozenset(mesh.axis_names)
    assert placement.axes_of(4, [4, 2], free) == {"batch": ("replica", "data"), "heads": ("model",)}
    assert placement.axes_of(2, [4, 1], free) == {"batch": ("replica",), "heads": ()}
    assert placement.axes_of(3, [4, 4], free - {"model"}) == {"batch": (), "heads": ()}
