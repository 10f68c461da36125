"""Latent attention (DeepSeek-V2, section 2.1): keys and values from one narrow vector a token, positions beside it."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from zero_jax.models.fields import check_fields
from zero_jax.models.layers import rms_norm, rotate
from zero_jax.models.rope import RopeScaling, rope_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """The sizes of latent attention; a query or key head has `head_dim` features, the last ones of which are turned."""

    # Width of the vector that queries are made of; None: they are made of the residual stream.
    query_rank: int | None = None
    key_rank: int  # width of the vector that keys and values are made of
    rotary_dim: int  # features of a head that rotary positions turn; the keys of all heads share them
    value_dim: int  # width of a value head
    interleaved: bool = True  # whether pairs of turned features are side by side

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be built."""
        check_fields(self)
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} is odd: rotary positions rotate pairs of features")

    def shapes(self, d_model: int, num_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's params."""
        narrow, keys = self.query_rank, head_dim - self.rotary_dim
        shapes: dict[str, tuple[int, ...]] = {
            "query": (narrow or d_model, num_heads * head_dim),
            "latent": (d_model, self.key_rank),
            "key_turned": (d_model, self.rotary_dim),
            "key": (self.key_rank, num_heads * keys),
            "value": (self.key_rank, num_heads * self.value_dim),
            "out": (num_heads * self.value_dim, d_model),
            "latent_norm": (self.key_rank,),
        }
        return shapes | ({"query_latent": (d_model, narrow), "query_latent_norm": (narrow,)} if narrow else {})

    def heads(
        self, y_BTD: Array, params: dict[str, Array], *, num_heads: int, theta: float, scaling: RopeScaling | None
    ) -> tuple[Array, Array, Array]:
        """Returns queries, keys `[B, T, N, head_dim]` and values `[B, T, N, value_dim]`, with rotary positions."""
        shape_BTN = (*y_BTD.shape[:2], num_heads, -1)
        queries_BTR = y_BTD
        if self.query_rank is not None:
            queries_BTR = rms_norm(y_BTD @ params["query_latent"], params["query_latent_norm"])
        latent_BTR = rms_norm(y_BTD @ params["latent"], params["latent_norm"])
        query_BTNH = (queries_BTR @ params["query"]).reshape(shape_BTN)
        key_BTNH = (latent_BTR @ params["key"]).reshape(shape_BTN)
        value_BTNH = (latent_BTR @ params["value"]).reshape(shape_BTN)
        turn = {
            "frequencies": rope_frequencies(theta, self.rotary_dim, scaling),
            "interleaved": self.interleaved,
            "magnitude": 1.0 if scaling is None else scaling.magnitude,
        }
        # As in DeepSeek's checkpoints the features that are turned are a head's last ones.
        keys = query_BTNH.shape[-1] - self.rotary_dim
        query_BTNH = jnp.concatenate([query_BTNH[..., :keys], rotate(query_BTNH[..., keys:], **turn)], axis=-1)
        # One for all heads.
        turned_BT1H = rotate((y_BTD @ params["key_turned"])[:, :, None], **turn)
        turned_BTNH = jnp.broadcast_to(turned_BT1H, (*turned_BT1H.shape[:2], num_heads, self.rotary_dim))
        return query_BTNH, jnp.concatenate([key_BTNH, turned_BTNH], axis=-1), value_BTNH
