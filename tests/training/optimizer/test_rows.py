"""Chunks of arrays in host memory: every element once, in slices that XLA:TPU can copy."""

import itertools
import math

import numpy as np
import pytest

from zero_jax.training.optimizer.rows import Rows

SHAPES = [
    (1,),
    (5000,),
    (7, 5),
    (50257, 8),
    (8, 4000),
    (3, 50, 100),
    (4, 16, 40),
    (40, 12, 24),
    (5, 1, 1),
    (0, 4),
    (2, 3, 4, 8),
]


@pytest.mark.parametrize("itemsizes", [[4, 4, 4], [4, 2], [1]])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_cover_each_row_once(shape, itemsizes, monkeypatch):
    monkeypatch.setattr("zero_jax.training.optimizer.rows._SMALL_BYTES", 256)
    for order in itertools.permutations(range(len(shape))):
        rows = Rows.of(shape, [order] * len(itemsizes))
        assert math.prod(rows.shape) == math.prod(shape)
        pieces = rows.pieces(itemsizes, 4096)
        covered = [row for p in pieces for i in range(p.num_chunks) for row in range(p.offset(i), p.offset(i) + p.size)]
        assert sorted(covered) == list(range(rows.shape[0]))
        if len(pieces) > 1 or pieces[0].num_chunks > 1:
            assert len(shape) > 1  # one dim is all lanes
            for piece in pieces if rows.tile > 1 else ():
                assert piece.start % 8 == 0 or piece.start % piece.size == 0
                assert piece.size % 8 == 0 or (piece.size in (1, 2, 4) and piece.size * min(itemsizes) >= 4)
        x = np.arange(math.prod(shape)).reshape(shape)
        np.testing.assert_array_equal(rows.unview(rows.view(x)), x)


def test_other_layouts_of_other_dtypes_are_not_cut():
    rows = Rows.of((64, 64), [(0, 1), (1, 0)])
    assert [(p.size, p.num_chunks) for p in rows.pieces([4, 2], 64)] == [(64, 1)]


def test_chunks_fit_the_window():
    rows = Rows.of((40, 5120, 1024), [(0, 1, 2)] * 3)
    (piece,) = rows.pieces([4] * 3, 1 << 26)
    assert rows.shape == (40 * 5120, 1024)
    assert (1 << 25) < piece.size * 1024 * 12 <= 1 << 26
