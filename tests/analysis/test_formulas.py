"""The formulas of the paper, against figures worked by hand."""

import pathlib

import paper_formulas
import pytest
from paper_formulas import (
    PAPER_CASES,
    TransformerResiduals,
    max_params,
    model_state_bytes,
    moved_elements,
    transformer_params,
)

from zero_jax.analysis import paper

ALL = {"params", "grads", "opt_state"}


@pytest.mark.parametrize(
    ("sharded", "expected"),
    [
        # 1000 parameters on 10 devices: 2 x 1000, 2 x 1000 and 12 x 1000 bytes, a tenth of what is sharded.
        (set(), (2000, 2000, 12000)),
        ({"opt_state"}, (2000, 2000, 1200)),
        ({"master", "opt_state"}, (2000, 2000, 1200)),
        ({"opt_state", "grads"}, (2000, 200, 1200)),
        (ALL, (200, 200, 1200)),
    ],
)
def test_model_states_by_group(sharded, expected):
    states = model_state_bytes(1000, sharded=sharded, num_devices=10)
    assert states == dict(zip(("params", "grads", "opt_state"), expected, strict=True))


def test_model_states_of_other_optimizers_and_dtypes():
    # SGD with momentum in float32: 4 + 4 + 4 bytes a parameter, the last third over 2 devices.
    states = model_state_bytes(10, sharded={"opt_state"}, num_devices=2, optimizer_bytes=4, param_bytes=4, grad_bytes=4)
    assert sum(states.values()) == 40 + 40 + 20


def test_largest_model_fills_the_device():
    for sharded in PAPER_CASES.values():
        largest = max_params(32e9, sharded=sharded, num_devices=64, model=2)
        held = model_state_bytes(largest / 2, sharded=sharded, num_devices=64)
        assert sum(held.values()) == pytest.approx(32e9)


def test_residuals():
    sizes = {"num_layers": 3, "d_model": 8, "batch_size": 2, "seq_len": 5}
    # 3 x 8 x 2 x 5 = 240 elements with remat, 12 times as many without, 2 bytes each.
    assert TransformerResiduals(**sizes).device_bytes == 480
    assert TransformerResiduals(**sizes, remat=False).device_bytes == 5760
    assert TransformerResiduals(**sizes, bytes_per_element=4).device_bytes == 960
    assert TransformerResiduals(**sizes, model=4).device_bytes == 120
    offloaded = TransformerResiduals(**sizes, model=4, offload=True)
    assert (offloaded.device_bytes, offloaded.host_bytes) == (0, 120)
    assert TransformerResiduals(**sizes).host_bytes == 0


def test_traffic():
    assert moved_elements(100, sharded=set()) == moved_elements(100, sharded={"opt_state", "grads"}) == 200
    assert moved_elements(100, sharded=ALL) == 300


def test_params_of_a_transformer():
    # 2 blocks of 12 x 4 x 4, and 10 + 3 rows of 4.
    assert transformer_params(num_layers=2, d_model=4, vocab_size=10, seq_len=3) == 384 + 52


def test_refuses():
    with pytest.raises(ValueError, match="d_model=0 is not positive"):
        TransformerResiduals(num_layers=1, d_model=0, batch_size=1, seq_len=1)


def test_the_tables_of_the_library_are_those_of_the_formulas():
    file = pathlib.Path(paper.__file__).with_name("paper_tables.json")
    assert file.read_text(encoding="utf-8") == paper_formulas.as_text(paper_formulas.tables()), "run the script"
