"""The estimate of all stages is that of real states, and needs neither devices nor arrays."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero


def init_fn(key):
    return {"kernel": jax.random.normal(key, (512, 256)), "bias": jnp.zeros(256), "count": jnp.int32(0)}


def test_it_is_what_the_states_take():
    estimates = zero.memory.estimate_stages(init_fn, num_devices_per_host=4, num_hosts=2)
    mesh = zero.make_mesh()
    for stage, found in estimates.by_stage.items():
        config = zero.ZeroConfig(stage=stage, precision="bf16")
        state = zero.init_state(init_fn, optax.adam(1e-3), jax.random.key(0), mesh=mesh, config=config)
        measured = zero.memory.measure_arrays(state)
        assert found.state_bytes == measured.device_bytes
    psi = 512 * 256 + 256
    assert (estimates.num_params, estimates.largest_leaf) == (psi, 512 * 256)
    assert estimates.by_stage[0].total_bytes == pytest.approx(16 * psi, rel=1e-3)
    assert estimates.by_stage[3].total_bytes == pytest.approx(14 * psi / 8, rel=0.02)


def test_a_partial_function_with_arrays_is_a_function():
    """As for `init_state`: its arrays are what it makes params of, and no params."""
    scaled = jax.tree_util.Partial(lambda scale, key: jax.tree.map(lambda x: x * scale, init_fn(key)), jnp.float32(2))
    assert zero.memory.estimate_stages(scaled).num_params == zero.memory.estimate_stages(init_fn).num_params + 1


def test_the_table():
    big = {"a": jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)}  # 40 GB, which no test makes
    estimates = zero.memory.estimate_stages(big, num_devices_per_host=8, num_hosts=16)
    lines = str(estimates).splitlines()
    assert lines[1:3] == [
        "HW: 16 hosts, 8 devices per host",
        "SW: 10,000.0M params, 10,000.0M in the largest leaf, bf16",
    ]
    assert lines[3].split() == ["stage", "per", "device", "per", "host", "params", "master", "grads", "opt_state"]
    assert lines[4].split()[:3] == ["0", "160.00", "GB"]
    assert "Nothing of this is in host memory" in lines[-1]
    assert estimates.to_json()["by_stage"][3]["total_bytes"] == estimates.by_stage[3].total_bytes


def test_the_optimizer_and_its_precision_count():
    params = init_fn(jax.random.key(0))
    adam, sgd = (zero.memory.estimate_stages(params, tx).by_stage[0].total_bytes for tx in (None, optax.sgd(0.1)))
    wide = zero.memory.estimate_stages(params, config=zero.ZeroConfig(precision="fp32")).by_stage[0]
    psi = 512 * 256 + 256
    assert adam - sgd == pytest.approx(8 * psi, abs=100) and wide.by_group["master"] == 0


@pytest.mark.parametrize("arguments", [{"num_hosts": 0}, {"num_devices_per_host": -1}, {"num_hosts": 1.5}])
def test_numbers_that_are_none_of_devices(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        zero.memory.estimate_stages(init_fn, **arguments)


@pytest.mark.parametrize(("offload", "bytes_per_param"), [("optimizer", (8, 8)), ("state", (12, 8)), ("all", (12, 12))])
def test_what_is_in_host_memory_has_a_column(offload, bytes_per_param):
    init = lambda key: {"w": jnp.zeros((64, 64))}  # noqa: E731
    config = zero.ZeroConfig(precision="bf16", offload=offload)
    found = zero.memory.estimate_stages(init, num_devices_per_host=4, config=config)
    sizes = [found.by_stage[stage].host_bytes for stage in (2, 3)]
    assert sizes == [64 * 64 / 4 * size for size in bytes_per_param]
    assert "in host memory, per host" in str(found)
