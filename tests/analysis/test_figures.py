"""Pictures are files of their kind, and say what they show."""

import re

import pytest
from paper_formulas import PAPER_CASES, model_state_bytes

from zero_jax.analysis.figures import plot_memory


def paper_bars(*, measured=True):
    """Returns the bars of the paper's Figure 1, with invented temporaries as measured."""
    bars = {}
    for case, sharded in PAPER_CASES.items():
        groups = model_state_bytes(7.5e9, sharded=sharded, num_devices=64)
        more = {**groups, "residuals": 4e9, "gathered params": 2e9, "other temporaries": 1e9}
        bars[case] = groups, more if measured else None
    return bars


def texts(path):
    """Returns the texts of an SVG, drawn as such and not as outlines."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_memory_as_svg_has_labels_and_totals(tmp_path):
    path = tmp_path / "memory.svg"
    plot_memory(path, paper_bars(), title="7.5B params", capacity_bytes=95e9)
    found = texts(path)
    for label in (
        "P_os", "P_os+g", "P_os+g+p", "baseline", "params", "gradients", "optimizer state",
        "residuals", "other temporaries", "formula", "measured", "7.5B params", "memory of a device (95 GB)",
    ):  # fmt: skip
        assert label in found, label
    # By formula, and with 4 + 2 + 1 GB measured on top: 31.4 and 38.4, 16.6 and 23.6, 1.88 and 8.88.
    assert {"120", "127", "31.4", "38.4", "16.6", "23.6", "1.88", "8.88"} <= set(found)


def test_memory_by_formula_alone(tmp_path):
    path = tmp_path / "memory.svg"
    plot_memory(path, paper_bars(measured=False))
    found = texts(path)
    assert "formula" in found and "31.4" in found
    assert not {"measured", "residuals", "other temporaries"} & set(found)


def test_master_params_are_part_of_the_optimizer_state(tmp_path):
    path = tmp_path / "memory.svg"
    plot_memory(path, {"stage 1": ({"master": 4e9, "opt_state": 8.5e9}, None)})
    found = texts(path)
    assert "optimizer state" in found and "12.5" in found and "params" not in found


@pytest.mark.parametrize("suffix", ["png", "pdf", "PNG"])
def test_other_formats(tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    plot_memory(path, paper_bars())
    magic = {"png": b"\x89PNG", "pdf": b"%PDF"}[suffix.lower()]
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5000


def test_same_data_same_file(tmp_path):
    for name in ("a", "b"):
        plot_memory(tmp_path / f"{name}.svg", paper_bars())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.svg"):
        plot_memory(tmp_path / "memory.jpeg", paper_bars())
    with pytest.raises(ValueError, match="no bars"):
        plot_memory(tmp_path / "memory.png", {})
    assert not list(tmp_path.iterdir())
