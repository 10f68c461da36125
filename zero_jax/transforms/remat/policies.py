"""Remat policies by name: what a block keeps for its backward pass, and in which memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import brief

_KEPT: Mapping[str, str] = {
    "own": "what the model's own jax.checkpoint keeps",
    "none": "everything: nothing is recomputed",
    "full": "only the inputs of each block",
    "dots": "the inputs of each block and its products with weights",
    "attention": "everything but the core of attention",
    "names": "the inputs of each block and the values that the model named",
}
_PLACES: Mapping[str, str] = {
    "device": "as they are",
    "sharded": "sharded over `model`",
    "offloaded": "sharded over `model`, in host memory",
}


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """What is recomputed in the backward pass, and where the other residuals are kept.

    Attributes:
      policy: `own` leaves the model's `jax.checkpoint` regions as they are; `none` removes them; `full` recomputes each
        block from its inputs; `dots` keeps products with weights too; `attention` recomputes only the core of attention
        (Korthikanti et al., 2022); `names` keeps the values named in `names`.
      residuals: `device` keeps residuals as they are computed; `sharded` shards them over `model` between the passes
        (the paper's P_a, section 6.1); `offloaded` moves these shards to pinned host memory (P_a+cpu).
      names: with policy `names`: the `jax.ad_checkpoint.checkpoint_name`s whose values are kept.

    Example:
      >>> zero.ZeroConfig(remat=zero.Remat(policy="dots", residuals="offloaded"))
      ZeroConfig(remat=Remat(policy='dots', residuals='offloaded'))
    """

    policy: str = "own"
    residuals: str = "device"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", (self.names,) if isinstance(self.names, str) else tuple(self.names))
        for field, table in (("policy", _KEPT), ("residuals", _PLACES)):
            value = getattr(self, field)
            if value not in table:
                raise ValueError(f"Remat({field}={value!r}) is unknown: {_nearest(value, table)}")
        if self.policy == "none" and self.residuals != "device":
            raise ValueError(
                f"Remat(policy='none', residuals={self.residuals!r}): nothing is recomputed, so every activation is a "
                f"residual and none is placed: choose policy='full', 'dots' or 'attention'"
            )
        if bool(self.names) != (self.policy == "names"):
            raise ValueError(
                f"Remat(policy={self.policy!r}, names={self.names}): policy 'names' needs the names of the values to "
                "keep, and no other policy takes any"
            )

    @property
    def name(self) -> str:
        """The name that `resolve_remat` takes for it, as `full_sharded` or `names:query,key`."""
        head = f"names:{','.join(self.names)}" if self.names else self.policy
        return head if self.residuals == "device" else f"{head}_{self.residuals}"

    @property
    def is_own(self) -> bool:
        """Whether the model's regions stay exactly as they are."""
        return self.policy == "own" and self.residuals == "device"

    def __str__(self) -> str:
        return f"{self.name}: keeps {_KEPT[self.policy]}; residuals {_PLACES[self.residuals]}"


def _table() -> dict[str, Remat]:
    kinds = [Remat()] + [Remat(policy=policy) for policy in ("none", "full", "dots", "attention")]
    placed = [
        dataclasses.replace(kind, residuals=place)
        for kind in kinds
        if kind.policy != "none"
        for place in ("sharded", "offloaded")
    ]
    return {remat.name: remat for remat in (*kinds, *placed)}


POLICIES: Mapping[str, Remat] = _table()


def resolve_remat(remat: str | Remat) -> Remat:
    """Returns the policy for a name: one of `POLICIES`, or `names:a,b`, which `_sharded` or `_offloaded` may follow.

    Raises:
      ValueError: there is no policy of that name.
    """
    if isinstance(remat, Remat):
        return remat
    if remat in POLICIES:
        return POLICIES[remat]
    head, colon, rest = str(remat).partition(":")
    if colon and head == "names":
        place = next((place for place in _PLACES if rest.endswith(f"_{place}")), "device")
        names = rest.removesuffix(f"_{place}").split(",")
        return Remat(policy="names", residuals=place, names=tuple(name.strip() for name in names if name.strip()))
    raise ValueError(
        f"unknown remat {remat!r}: {_nearest(str(remat), POLICIES)}, names:<name>,<name> for values that the model "
        "names with jax.ad_checkpoint.checkpoint_name, or a zero.Remat"
    )


def _nearest(value: str, table: Mapping[str, object]) -> str:
    return f"{did_you_mean(value, table)}choose one of {', '.join(table)}"
