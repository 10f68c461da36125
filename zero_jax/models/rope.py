"""Places of tokens, and rotary positions: the frequencies of a head's pairs of features, as they are or stretched."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from zero_jax.models.fields import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of the pretraining.

    One of three ways: YaRN (Peng et al. 2023) if `beta_fast` is given, Llama 3's if `low_freq_factor` is, else linear.
    """

    factor: float  # what wavelengths are multiplied by
    # Wavelengths over `original_seq_len / low_freq_factor` are stretched by the full factor; None stretches all
    # wavelengths (linear scaling).
    low_freq_factor: float | None = None
    # Wavelengths under `original_seq_len / high_freq_factor` stay; those between are interpolated.
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192  # context length of the pretraining
    beta_fast: float | None = None  # features that turn more often than this within `original_seq_len` stay
    # Features that turn less often than this are stretched by the full factor; those between by a share that grows with
    # the feature.
    beta_slow: float = 1.0
    truncate: bool = True  # whether the first and the last of the features between are whole numbers
    # What turned features are multiplied by; None follows from `mscale` and `mscale_all_dim`, or from the factor alone.
    attention_factor: float | None = None
    # Of the magnitude of turned features, `0.1 * mscale * log(factor) + 1`; None: not given.
    mscale: float | None = None
    # The same of all features, by which the former is divided; latent attention multiplies its logits by the square of
    # it. None: not given.
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        """Refuses factors that cannot be applied."""
        check_fields(self, may_be_zero=("mscale", "mscale_all_dim"))
        if self.low_freq_factor is not None and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}: give "
                "a smaller one, or None for linear scaling"
            )
        if self.beta_fast is not None and (self.low_freq_factor is not None or self.beta_fast < self.beta_slow):
            raise ValueError(
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}, low_freq_factor={self.low_freq_factor}: give "
                "a beta_fast of at least beta_slow and no low_freq_factor (YaRN), or no beta_fast"
            )

    @property
    def magnitude(self) -> float:
        """What turned features are multiplied by."""
        if self.attention_factor is not None or self.beta_fast is None:
            return 1.0 if self.attention_factor is None else self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def logits_factor(self) -> float:
        """What logits of latent attention are multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def rope_frequencies(theta: float, num_features: int, scaling: RopeScaling | None = None) -> Array:
    """Returns how far each pair of features turns from a token to the next, `[num_features / 2]`, in radians."""
    frequencies = theta ** (-jnp.arange(0, num_features, 2) / num_features)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.beta_fast is not None:
        share = _yarn_share(theta, num_features, scaling)
    elif scaling.low_freq_factor is not None:
        # How often each pair turns within the context of the pretraining.
        turns = scaling.original_seq_len * frequencies / (2 * jnp.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = jnp.clip((turns - low) / (high - low), 0, 1)
    else:
        return stretched
    return share * frequencies + (1 - share) * stretched


def _yarn_share(theta: float, num_features: int, scaling: RopeScaling) -> Array:
    """Returns the share of each frequency that stays as it is (YaRN, equation 23, with transformers' rounding)."""
    assert scaling.beta_fast is not None

    def feature(num_turns: float) -> float:
        turns = scaling.original_seq_len / (num_turns * 2 * math.pi)
        return num_features * math.log(turns) / (2 * math.log(theta))

    first, last = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, num_features - 1)
    # As transformers does: a width of 0 would be NaN.
    width = last - first or 0.001
    return 1 - jnp.clip((jnp.arange(num_features // 2) - first) / width, 0, 1)


def places(tokens_BT: Array, segments_BT: Array | None) -> slice | Array:
    """Returns the places of tokens: a slice, or `[B, T]`, from 0 in each segment."""
    if segments_BT is None:
        return slice(tokens_BT.shape[1])
    places_T = jnp.arange(tokens_BT.shape[1])
    # What is put before differs from the first token, which so begins a segment.
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return places_T - jax.lax.cummax(jnp.where(begins_BT, places_T, 0), axis=1)
