"""A mixture of experts: which experts a token goes to, and what they make of it.

Names end in the letters of their dims: `B` batch, `T` tokens, `D` model, `E` experts, `k` experts of a token, `C`
tokens that an expert takes of a sequence, `S` the `E x C` places of these, `F` hidden.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from zero_jax.models.fields import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How tokens choose experts by the sigmoid of a score for each (DeepSeek-V3, section 2.1.2).

    Each expert has a bias, which counts for the choice and not for the weight. It is no param of the loss: its gradient
    is `bias_rate` times the relative error of the expert's load, so that an optimizer lowers the bias of experts with
    too many tokens. `optax.sign_sgd(speed)` on these leaves is the published rule.
    """

    num_groups: int = 1  # groups of experts
    num_kept: int = 1  # groups that a token chooses from, those with the largest sums of their two best scores
    scale: float = 1.0  # what the weights of a token's experts are multiplied by
    bias_rate: float = 0.001  # what the gradients of the biases are multiplied by; 0 leaves the biases as they are

    def __post_init__(self) -> None:
        """Refuses numbers that do not fit."""
        check_fields(self, may_be_zero=("bias_rate",))
        if self.num_kept > self.num_groups:
            raise ValueError(f"num_kept={self.num_kept} is more than num_groups={self.num_groups}: keep at most all")

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raises `ValueError` for a number of experts that does not divide into the groups, or that are too few."""
        if num_experts % self.num_groups:
            raise ValueError(f"num_experts={num_experts} do not divide into num_groups={self.num_groups}")
        num_left = num_experts // self.num_groups * self.num_kept
        if experts_per_token > num_left:
            raise ValueError(
                f"experts_per_token={experts_per_token} is more than the {num_left} experts of num_kept="
                f"{self.num_kept} groups: keep more groups"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routes:
    """Which experts the tokens go to."""

    experts_BTk: Array  # the experts of each token, int32
    weights_BTk: Array  # their weights, float32
    is_chosen_BTE: Array  # 1 where a token goes to an expert, else 0, float32
    shares_BTE: Array  # what the router gives each expert, of 1 for all, float32

    @property
    def load_BE(self) -> Array:
        """The tokens of a sequence that an expert gets, as a multiple of an even share."""
        return self.is_chosen_BTE.mean(axis=1) * (self.is_chosen_BTE.shape[-1] / self.experts_BTk.shape[-1])

    def balance(self) -> Array:
        """Returns the loss `[B]` that balances the experts of a sequence (DeepSeek-V3, equation 17, no factor)."""
        return (self.load_BE * self.shares_BTE.mean(axis=1)).sum(axis=-1)

    def bias_term(self, bias_E: Array) -> Array:
        """Returns 0 `[B]`, whose gradient in the biases is the relative error of the experts' load in a sequence."""
        error_BE = jax.lax.stop_gradient(self.load_BE - 1)
        bias_E = bias_E.astype(jnp.float32)
        return (error_BE * (bias_E - jax.lax.stop_gradient(bias_E))).sum(axis=-1)


def softmax_routes(logits_BTE: Array, k: int, *, normalize: bool) -> Routes:
    """Returns the `k` experts of each token with the largest probabilities, which are their weights."""
    shares_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32))
    weights_BTk, experts_BTk = jax.lax.top_k(shares_BTE, k)
    if normalize:
        weights_BTk /= weights_BTk.sum(axis=-1, keepdims=True)
    is_chosen_BTE = jax.nn.one_hot(experts_BTk, logits_BTE.shape[-1]).sum(axis=2)
    return Routes(experts_BTk=experts_BTk, weights_BTk=weights_BTk, is_chosen_BTE=is_chosen_BTE, shares_BTE=shares_BTE)


def sigmoid_routes(logits_BTE: Array, bias_E: Array, k: int, routing: SigmoidRouting, *, normalize: bool) -> Routes:
    """Returns the `k` experts of each token with the largest biased scores, of the groups with the largest ones."""
    scores_BTE = jax.nn.sigmoid(logits_BTE.astype(jnp.float32))
    # For the choice alone, which has no gradient: the weights are of the scores without bias.
    biased_BTE = jax.lax.stop_gradient(scores_BTE + bias_E.astype(jnp.float32))
    num_experts, num_groups = bias_E.shape[0], routing.num_groups
    if routing.num_kept < num_groups:
        grouped = biased_BTE.reshape(*biased_BTE.shape[:2], num_groups, -1)
        # The two best of a group, as DeepSeek-V3 does; a group may have a single one.
        best = jax.lax.top_k(grouped, min(2, num_experts // num_groups))[0].sum(axis=-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, routing.num_kept)[1], num_groups).sum(axis=2)
        biased_BTE = jnp.where(kept[..., None] > 0, grouped, -jnp.inf).reshape(biased_BTE.shape)
    experts_BTk = jax.lax.top_k(biased_BTE, k)[1]
    chosen_BTkE = jax.nn.one_hot(experts_BTk, num_experts)
    weights_BTk = jnp.einsum("BTE,BTkE->BTk", scores_BTE, chosen_BTkE)
    if normalize:
        # As transformers does: sigmoids may all be 0.
        weights_BTk /= weights_BTk.sum(axis=-1, keepdims=True) + 1e-20
    return Routes(
        experts_BTk=experts_BTk,
        weights_BTk=weights_BTk * routing.scale,
        is_chosen_BTE=chosen_BTkE.sum(axis=2),
        shares_BTE=scores_BTE / (scores_BTE.sum(axis=-1, keepdims=True) + 1e-20),
    )


class Experts(NamedTuple):
    """The weights of experts, each a gated MLP."""

    gate_EDF: Array
    up_EDF: Array
    down_EFD: Array
    activate: Callable[[Array], Array]


def run_all(y_BTD: Array, routes: Routes, experts: Experts) -> Array:
    """Returns the weighted sum of each token's experts `[B, T, D]`; every expert computes every token."""
    gate_EDF, up_EDF, down_EFD, activate = experts
    chosen_BTkE = jax.nn.one_hot(routes.experts_BTk, gate_EDF.shape[0])
    weights_BTE = jnp.einsum("BTk,BTkE->BTE", routes.weights_BTk, chosen_BTkE)
    hidden_BTEF = activate(jnp.einsum("BTD,EDF->BTEF", y_BTD, gate_EDF))
    hidden_BTEF *= jnp.einsum("BTD,EDF->BTEF", y_BTD, up_EDF)
    # Before the last product, which so adds up the experts: their outputs `[B, T, E, D]` are never made.
    hidden_BTEF *= weights_BTE[..., None].astype(y_BTD.dtype)
    return jnp.einsum("BTEF,EFD->BTD", hidden_BTEF, down_EFD)


def run_dispatched(y_BTD: Array, routes: Routes, experts: Experts, *, capacity: float) -> Array:
    """Returns what `run_all` does, but an expert takes no more than the first `capacity` even shares of a sequence."""
    gate_EDF, up_EDF, down_EFD, activate = experts
    (B, T, D), E, k = y_BTD.shape, gate_EDF.shape[0], routes.experts_BTk.shape[-1]
    # No expert can get more tokens than there are.
    C = min(T, math.ceil(capacity * k * T / E))
    # How many tokens before this one have chosen the expert.
    places_BTE = jnp.cumsum(routes.is_chosen_BTE, axis=1) - routes.is_chosen_BTE
    places_BTk = jnp.take_along_axis(places_BTE, routes.experts_BTk, axis=-1).astype(jnp.int32)
    # Past the capacity there is no place: the number of one that there is none of.
    slots_BTk = jnp.where(places_BTk < C, routes.experts_BTk * C + places_BTk, E * C)
    choices = jnp.broadcast_to(jnp.arange(T * k, dtype=jnp.int32), (B, T * k))
    # A place that nobody takes has the number of a choice that there is none of, of which `_rows` makes zeros.
    place = jax.vmap(lambda slots, choices: jnp.full(E * C, T * k, jnp.int32).at[slots].set(choices, mode="drop"))
    choices_BS = place(slots_BTk.reshape(B, T * k), choices)
    taken_BECD = _dispatch(y_BTD, slots_BTk, choices_BS).reshape(B, E, C, D)
    hidden_BECF = activate(jnp.einsum("BECD,EDF->BECF", taken_BECD, gate_EDF))
    hidden_BECF *= jnp.einsum("BECD,EDF->BECF", taken_BECD, up_EDF)
    made_BSD = jnp.einsum("BECF,EFD->BECD", hidden_BECF, down_EFD).reshape(B, E * C, D)
    made_BTkD = _collect(made_BSD, slots_BTk, choices_BS)
    return jnp.einsum("BTk,BTkD->BTD", routes.weights_BTk.astype(y_BTD.dtype), made_BTkD)


def _rows(x_BND: Array, indices_BM: Array) -> Array:
    """Returns rows `[B, M, D]` by their numbers, 0 for a number that there is no row of."""
    return jax.vmap(lambda x, indices: x.at[indices].get(mode="fill", fill_value=0))(x_BND, indices_BM)


# JAX makes a scatter-add of a gather's gradient. As no token is twice with an expert, it is a gather too.


def _of_places(y_BTD: Array, slots_BTk: Array, choices_BS: Array) -> Array:
    """Returns the token of each place `[B, S, D]`."""
    return _rows(y_BTD, choices_BS // slots_BTk.shape[-1])  # choices are numbered token by token


def _of_tokens(made_BSD: Array, slots_BTk: Array, choices_BS: Array) -> Array:
    """Returns what the experts of each token made of it `[B, T, k, D]`, 0 where an expert did not take it."""
    B, T, k = slots_BTk.shape
    return _rows(made_BSD, slots_BTk.reshape(B, T * k)).reshape(B, T, k, -1)


def _dispatch_backward(residuals: tuple[Array, Array], g_BSD: Array) -> tuple[Array, None, None]:
    return _of_tokens(g_BSD, *residuals).sum(axis=2), None, None


def _collect_backward(residuals: tuple[Array, Array], g_BTkD: Array) -> tuple[Array, None, None]:
    _, choices_BS = residuals
    B, T, k, D = g_BTkD.shape
    return _rows(g_BTkD.reshape(B, T * k, D), choices_BS), None, None


_dispatch, _collect = jax.custom_vjp(_of_places), jax.custom_vjp(_of_tokens)
_dispatch.defvjp(lambda *xs: (_of_places(*xs), xs[1:]), _dispatch_backward)
_collect.defvjp(lambda *xs: (_of_tokens(*xs), xs[1:]), _collect_backward)
