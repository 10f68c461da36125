"""Tables and numbers of bytes for people."""

import math

import pytest

from zero_jax.core.text_tables import aligned, format_bytes, format_figure


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (-324, "-324 bytes"),
        (12e3, "12.00 KB"),
        (2**20, "1.05 MB"),
        (-49e6, "-49.00 MB"),
        (40.58e9, "40.58 GB"),
        (6_059_226e6, "6,059.23 GB"),
    ],
)
def test_bytes_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_bytes_with_fewer_digits():
    assert format_bytes(134.2e6, decimals=1) == "134.2 MB"


def test_small_figures_keep_their_digits():
    shown = {2.71828: "2.718", 0.1: "0.100", 0.0012345: "0.00123", -3e-7: "-3e-07", 0.0: "0", math.inf: "inf"}
    assert {x: format_figure(x, decimals=3) for x in shown} == shown
    assert format_figure(math.nan, decimals=2) == "nan" and format_figure(-12.345, decimals=2) == "-12.35"


def test_columns_are_aligned():
    table = aligned([("name", "size", "text"), ("a", "12", "of it"), ("long name", "3", "")], right=(1,))
    assert table.splitlines() == ["name       size  text", "a            12  of it", "long name     3"]
