"""What moves inside TPU slices and between them, with replicas and with a secondary shard, on the compiled program."""

import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

from measure_replicas import measure

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]


@pytest.mark.parametrize("topology", ["2xv5e:16x16", "2xv5p:4x4x4"])
@pytest.mark.parametrize("fields", [{"replica": 2}, {"secondary": True}])
def test_each_network_moves_what_the_formula_says(topology, fields):
    networks = measure(topology, **fields)["networks"]
    assert set(networks) == {"ici", "dcn"}
    for sent, formula in networks.values():
        assert 0 < sent <= 1.05 * formula
