"""Segments as cuDNN takes them: so many at once, each of tokens that lie side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_arrays

from zero_jax.attention import cudnn, fused, xla
from zero_jax.attention.placement import KernelPlacement
from zero_jax.attention.xla import Band, Case, Operands

B, T = 2, 48
FEW = np.repeat([[0, 1, 2, 3], [4, 4, 5, 9]], 12, axis=1)
SEGMENTS = {
    "one": np.zeros((B, T), np.int32),
    "few": FEW,
    "as many as are taken at once": np.repeat(np.arange(16).reshape(2, 8), 6, axis=1),
    "more": np.broadcast_to(np.arange(T) // 2, (B, T)),
    "each token": np.arange(B * T).reshape(B, T),
    "again after another": np.repeat([[0, 1, 0, 2], [1, 0, 0, 1]], 12, axis=1),
    "in no order": np.random.default_rng(0).integers(0, 20, (B, T)),
    "of 8 bits": FEW.astype(np.uint8),
}


def of_tokens(lengths, starts):
    """Returns the segment of each token, -1 for those of none, and its place there."""
    tokens = jnp.arange(B * T)
    is_in = (tokens >= starts[:-1, None]) & (tokens < (starts[:-1] + lengths)[:, None])
    segment = jnp.where(is_in.any(0), is_in.argmax(0), -1)
    return segment, tokens - starts[segment]


def attended(query, key, value, call, segment):
    """Returns the attention, and log-sum-exps `[B * T, N]`, over all tokens as one sequence."""
    query, key, value = (x.reshape(1, B * T, *x.shape[2:]) for x in (query, key, value))
    in_order = xla.in_band(call.band, B * T, B * T)[None, None]
    case = Case(scale=call.scale, mask=in_order, segment_ids=(segment[None], segment[None]))
    out, lse = xla.attention(query, key, value, case), xla.log_sum_exp(query, key, case)
    return out.reshape(B, T, *out.shape[2:]), lse[0].T


def run_forward(arrays, call, *, lengths, starts, is_training):
    """Does what cuDNN does: what it does not write is anything, here NaN."""
    segment, place = of_tokens(lengths[0], starts)
    out, lse = attended(*arrays, call, segment)
    out = jnp.where((segment < 0).reshape(B, T, 1, 1), jnp.nan, out)
    at = jnp.where(segment < 0, lengths[0].size, segment)
    by_segment = jnp.full((lengths[0].size, lse.shape[1], T), jnp.nan).at[at, :, place].set(lse, mode="drop")
    return [out, by_segment]


def run_backward(arrays, call, by_segment, out, cotangent, *, lengths, starts):
    segment, place = of_tokens(lengths[0], starts)
    is_there = (segment >= 0).reshape(B, T, 1, 1)
    (own, own_lse), pull = jax.vjp(lambda *xs: attended(*xs, call, segment), *arrays)
    moved = jnp.where(is_there, cotangent, 0)
    cotangents = pull((moved, jnp.zeros_like(own_lse)))
    # Whatever else is handed over has to be what the forward pass has made of these tokens.
    agrees = jnp.allclose(jnp.where(is_there, out - own, 0), 0, atol=1e-5)
    agrees &= jnp.allclose(jnp.where(segment[:, None] < 0, 0, by_segment[segment, :, place] - own_lse), 0, atol=1e-5)
    return [jnp.where(is_there & agrees, x, jnp.nan) for x in cotangents]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        pytest.param(name, right, marks=() if name == "in no order" and right == 0 else pytest.mark.slow)
        for name in SEGMENTS
        for right in (0, None)
    ],
)
def test_packed_segments_are_attention_within_them(name, right, monkeypatch):
    kernels = {"fwd": run_forward, "bwd": run_backward}
    monkeypatch.setattr(cudnn, "_run", lambda kernel, *arrays, **where: kernels[kernel](*arrays, **where))
    query, key, value = random_arrays(b=B, t=T, s=T)
    ids, band = jnp.asarray(SEGMENTS[name]), Band(None, right)
    call = fused.Call(kernel="cudnn", scale=0.3, band=band, soft_cap=None, placement=KernelPlacement(platform="cuda"))
    case = Case(scale=0.3, is_causal=right == 0, segment_ids=(ids, ids))
    expected, pull = jax.vjp(lambda *xs: xla.attention(*xs, case), query, key, value)

    @jax.jit
    def both(query, key, value, cotangent):
        of = Operands(query, key, value, [ids])
        out, lse = cudnn.forward(of, call)
        return out, lse, cudnn.backward(of, call, out=out, lse=lse, cotangent=cotangent)

    out, lse, cotangents = both(query, key, value, jnp.cos(expected * 9))
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5)  # noqa: E731
    close(out, expected)
    close(lse, xla.log_sum_exp(query, key, case))
    jax.tree.map(close, cotangents, list(pull(jnp.cos(expected * 9))))
