"""Losses as sums over tokens, each token weighted beforehand.

``aggregation_weights`` sees the whole minibatch and puts every denominator into the weights. What is
left is a plain sum over rows, so that replicas and micro-batches may cut the rows anywhere: loss,
gradient and statistics of the parts add up to those of the whole, and nobody divides twice.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from lightning_nereus.errors import ConfigurationError

# exp(20) is beyond every clip range; past it fp32 would overflow and 0 * inf make NaN gradients.
_MAX_LOG_RATIO = 20.0


class Aggregation(StrEnum):
    """How the losses of tokens become one number."""

    TOKEN_MEAN = "token_mean"
    """Every response token of the minibatch weighs the same (DAPO)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every response weighs the same, whatever its length (GRPO)."""
    CONSTANT = "constant"
    """Sums over each response, divided by the response limit: no length bias (Dr. GRPO)."""


def aggregation_weights(mask: Tensor, aggregation: Aggregation, max_new_tokens: int | None = None) -> Tensor:
    """The weight of each token's loss, denominators included.

    Args:
        mask: [n, R] bool, of the **whole** minibatch. Tokens outside it count nowhere, rows without
            a token do not count as rows.
        aggregation: how tokens become one number.
        max_new_tokens: the response limit, for ``constant`` only; not the width R, which may follow
            the longest response.

    Returns:
        [n, R] float32; all 0 for a mask that is all false. They sum to 1 but for ``constant``.
    """
    tokens = mask.sum(dim=1, keepdim=True).double()
    rows = (tokens > 0).sum().clamp(min=1)
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            weight = 1 / tokens.sum().clamp(min=1).expand_as(tokens)
        case Aggregation.SEQUENCE_MEAN:
            weight = 1 / (rows * tokens.clamp(min=1))
        case Aggregation.CONSTANT:
            if max_new_tokens is None or max_new_tokens < 1:
                raise ConfigurationError(
                    "max_new_tokens", f"{max_new_tokens} cannot divide", "Give the response limit with `constant`"
                )
            weight = 1 / (rows * max_new_tokens).double().expand_as(tokens)
    return (weight * mask).float()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    statistic_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO.

    Args:
        log_probs: [n, R] of the policy that learns.
        old_log_probs: [n, R] of the policy before the update, at the same temperature.
        advantages: [n, R], or [n] for one a response.
        mask: [n, R] bool. What stands outside it, NaN included, has no effect.
        weights: [n, R] from ``aggregation_weights`` over the whole minibatch.
        clip_low: the ratio is clipped below ``1 - clip_low``,
        clip_high: and above ``1 + clip_high``.
        statistic_weights: weights of the statistics where ``weights`` do not sum to 1 (``constant``).

    Returns:
        This part's share of the loss, and of ``ratio`` (mean), ``clip_fraction`` (tokens whose
        clipped branch was taken) and ``approx_kl`` (old against new, k3); all of them additive.
    """
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    advantages = torch.where(mask, advantages.to(log_probs.dtype), 0.0)
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    weights = weights.to(log_probs.dtype).masked_fill(~mask, 0.0)
    loss = (torch.maximum(free, clipped) * weights).sum()
    shares = weights if statistic_weights is None else statistic_weights.to(weights.dtype).masked_fill(~mask, 0.0)
    with torch.no_grad():
        statistics = {
            "ratio": (ratio * shares).sum(),
            "clip_fraction": ((clipped > free) * shares).sum(),
            "approx_kl": ((ratio - 1 - log_ratio) * shares).sum(),
        }
    return loss, statistics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, the worse of the free and the clipped value's.

    Args:
        values: [n, R] of the critic that learns.
        old_values: [n, R] of before the update.
        returns: [n, R].
        mask: [n, R] bool.
        weights: [n, R] from ``aggregation_weights`` over the whole minibatch.
        clip: how far a value may move from its old one; None does not clip.

    Returns:
        This part's share of the loss, and of ``value`` (mean), ``value_error`` (mean absolute error)
        and ``value_clip_fraction``; all of them additive.
    """
    weights = weights.to(values.dtype).masked_fill(~mask, 0.0)
    error = torch.where(mask, values - returns.to(values.dtype), 0.0)
    free = clipped = error.square()
    if clip is not None:
        moved = values - old_values
        # Not old + moved inside the range, whose rounding would tell two equal errors apart.
        bounded = torch.where(moved.abs() > clip, old_values + moved.clamp(-clip, clip), values)
        clipped = torch.where(mask, bounded - returns.to(values.dtype), 0.0).square()
    loss = 0.5 * (torch.maximum(free, clipped) * weights).sum()
    with torch.no_grad():
        statistics = {
            "value": (torch.where(mask, values, 0.0) * weights).sum(),
            "value_error": (error.abs() * weights).sum(),
            "value_clip_fraction": ((clipped > free) * weights).sum(),
        }
    return loss, statistics
