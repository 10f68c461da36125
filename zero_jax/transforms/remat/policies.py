"""Remat policies by name: what a block keeps for its backward pass, and in which memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import brief

# The policies, and what each keeps in the words of a report; `regions._KEEPS` says it of values.
_KEPT: Mapping[str, str] = {
    "own": "what the model's own jax.checkpoint keeps",
    "none": "everything: nothing is recomputed",
    "full": "only the inputs of each block",
    "dots": "the inputs of each block and its products with weights",
    "attention": "everything but the core of attention",
    "names": "the inputs of each block and the values that the model named",
    "values": "the inputs of each block and the values of `save` and `offload`",
    "auto": "the inputs of each block and the values whose recomputation takes longest for their bytes",
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
        (Korthikanti et al., 2022); `names` keeps the values named in `names`; `values` those of `save` and `offload`,
        without which it need not be given; `auto` chooses these by what each value costs.
      residuals: `device` keeps residuals as they are computed; `sharded` shards them over `model` between the passes
        (the paper's P_a, section 6.1); `offloaded` moves these shards to pinned host memory (P_a+cpu).
      names: with policy `names`: the `jax.ad_checkpoint.checkpoint_name`s whose values are kept.
      save: values that are kept on the device, each by its `checkpoint_name`, or as `zero.remat_report` names them by
        what made them: `dot_general@model.py:120` (of several `dot_general@model.py:120#2`), `model.py:120` (all that
        the line makes), `products` (with weights), `attention` (the results of attention), `input` (of a block, which
        is kept in any case).
      offload: values that are kept in pinned host memory, likewise.
      budget_gb: with policy `auto`: GB (1e9 bytes) of a device's memory for all that blocks keep between the passes;
        None takes what the rest of the step leaves of the memory of the mesh's devices.

    Example:
      >>> zero.ZeroConfig(remat=zero.Remat(policy="dots", residuals="offloaded"))
      ZeroConfig(remat=Remat(policy='dots', residuals='offloaded'))
    """

    policy: str = "own"
    residuals: str = "device"
    names: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    budget_gb: float | None = None

    def __post_init__(self) -> None:
        for field in ("names", "save", "offload"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(value))
        if self.policy == "own" and (self.save or self.offload):
            object.__setattr__(self, "policy", "values")
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
        self._check_values()

    def _check_values(self) -> None:
        """Raises `ValueError` for values or a budget that do not go with the policy."""
        if bool(self.save or self.offload) != (self.policy == "values"):
            raise ValueError(
                f"Remat(policy={self.policy!r}, save={self.save}, offload={self.offload}): policy 'values' needs the "
                "values to keep, and no other policy takes any: leave policy out"
            )
        if self.policy in ("values", "auto") and self.residuals != "device":
            raise ValueError(
                f"Remat(policy={self.policy!r}, residuals={self.residuals!r}): each value has a place of its own: "
                "leave residuals out, and list in offload what is kept in host memory"
            )
        if twice := sorted({*self.save} & {*self.offload}):
            raise ValueError(f"Remat(save=..., offload=...): {twice} are in both: keep each in one place")
        if self.budget_gb is not None and self.policy != "auto":
            raise ValueError(
                f"Remat(policy={self.policy!r}, budget_gb={self.budget_gb}): a budget is for policy 'auto'"
            )
        if self.budget_gb is not None and not 0 <= self.budget_gb < math.inf:
            raise ValueError(f"Remat(budget_gb={self.budget_gb!r}): give GB of a device's memory, as 4.5")

    @property
    def name(self) -> str:
        """The name that `resolve_remat` takes for it, as `full_sharded`, `names:query,key` or `save:a,b+offload:c`."""
        if self.policy == "values":
            places = {"save": self.save, "offload": self.offload}
            return "+".join(f"{place}:{','.join(values)}" for place, values in places.items() if values)
        if self.budget_gb is not None:
            return f"auto:{self.budget_gb:.12g}"
        head = f"names:{','.join(self.names)}" if self.names else self.policy
        return head if self.residuals == "device" else f"{head}_{self.residuals}"

    @property
    def offloads(self) -> bool:
        """Whether residuals may be in host memory."""
        return self.residuals == "offloaded" or bool(self.offload) or self.policy == "auto"

    @property
    def is_own(self) -> bool:
        """Whether the model's regions stay exactly as they are."""
        return self.policy == "own" and self.residuals == "device"

    def __str__(self) -> str:
        return f"{self.name}: keeps {_KEPT[self.policy]}; residuals {_PLACES[self.residuals]}"


_PLAIN = [Remat(policy=policy) for policy in _KEPT if policy not in ("names", "values", "auto")]  # without arguments
_PLACED = [(x, place) for x in _PLAIN if x.policy != "none" for place in ("sharded", "offloaded")]
POLICIES: Mapping[str, Remat] = {
    remat.name: remat for remat in (*_PLAIN, *(dataclasses.replace(x, residuals=place) for x, place in _PLACED))
}
_VALUES = ("save", "offload")  # what begins the names of policies of values


def resolve_remat(remat: str | Remat) -> Remat:
    """Returns the policy for a name.

    That is one of `POLICIES`, `names:a,b` (which `_sharded` or `_offloaded` may follow), `save:a,b+offload:c` (or one
    of the two), `auto`, or `auto:4.5` with its budget in GB.

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
    if remat == "auto" or (colon and head == "auto"):
        return Remat(policy="auto", budget_gb=_gigabytes(rest) if colon else None)
    if colon and head in _VALUES:
        places = _values_of(str(remat))
        return Remat(policy="values", save=places.get("save", ()), offload=places.get("offload", ()))
    raise ValueError(
        f"unknown remat {remat!r}: {_nearest(str(remat), POLICIES)}, auto, names:<name>,<name> for values that the "
        "model names with jax.ad_checkpoint.checkpoint_name, save:<value>,<value>+offload:<value> for values by what "
        "made them (zero.remat_report lists them), or a zero.Remat"
    )


def _gigabytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"remat='auto:{text}': give the budget in GB of a device's memory, as auto:4.5") from None


def _values_of(remat: str) -> dict[str, tuple[str, ...]]:
    """Returns the values of `save:a,b+offload:c`."""
    places: dict[str, tuple[str, ...]] = {}
    for part in remat.split("+"):
        place, _, values = part.partition(":")
        if place not in _VALUES or place in places:
            raise ValueError(f"remat={remat!r}: give save:<value>,<value> or offload:<value>,<value>, or both with a +")
        places[place] = tuple(value.strip() for value in values.split(",") if value.strip())
    return places


def _nearest(value: str, table: Mapping[str, object]) -> str:
    return f"{did_you_mean(value, table)}choose one of {', '.join(table)}"
