"""Advantages: how much better a response, or a token of it, was than expected.

Everything here is over all rows of a rollout, on every rank alike, before any row is given to a
replica; so no plan can change a mean or a variance.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from lightning_nereus.errors import ConfigurationError

# Rewards of one group that differ by less than this share of their size differ by fp32 rounding only.
# Divided by their own standard deviation, such residues would become advantages of full size.
_ROUNDING = 8 * torch.finfo(torch.float32).eps


class Scale(StrEnum):
    """What centred rewards are divided by."""

    GROUP = "group"
    """The group's standard deviation (GRPO)."""
    NONE = "none"
    """Nothing (Dr. GRPO): questions of any difficulty weigh the same."""


def group_relative(rewards: Tensor, samples: int, scale: Scale = Scale.GROUP) -> Tensor:
    """Each reward against those of the same prompt.

    Args:
        rewards: [n], row ``r`` belonging to prompt ``r // samples``.
        samples: responses to each prompt, at least 2.
        scale: what the centred rewards are divided by; the standard deviation is the unbiased one.

    Returns:
        [n], in the rewards' dtype, computed in float64. A group of equal rewards gives exactly 0.

    Raises:
        ConfigurationError: one sample a prompt, or rows that are no whole groups.
    """
    if samples < 2:
        raise ConfigurationError("samples", f"a group of {samples} has nothing to compare with", "Use at least 2")
    if rewards.dim() != 1 or len(rewards) % samples:
        raise ConfigurationError(
            "rewards", f"shape {tuple(rewards.shape)} is no whole number of groups of {samples}", "Give [n] in groups"
        )
    groups = rewards.double().view(-1, samples)
    spread = groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True)
    equal = spread <= _ROUNDING * groups.abs().amax(dim=1, keepdim=True)
    # Against the first one before the mean, whose own rounding would else leave a residue.
    centred = groups - groups[:, :1]
    centred = (centred - centred.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)
    if scale is Scale.GROUP:
        centred = centred / centred.std(dim=1, keepdim=True).masked_fill(equal, 1.0)
    return centred.reshape(-1).to(rewards.dtype)


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards [n, R] of tokens: ``-kl_coef * kl`` each, and the row's score on its last response token.

    Args:
        scores: [n].
        kl: [n, R] per-token estimate against the reference, or None.
        mask: [n, R] bool, true on response tokens. A row without any gets no reward.
        kl_coef: the weight of ``kl``.
    """
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if kl is not None:
        rewards = rewards - kl_coef * kl.to(scores.dtype)
    rewards = rewards.masked_fill(~mask, 0.0)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    return rewards + torch.where(positions == last, scores.unsqueeze(1), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016) over response tokens.

    Args:
        rewards: [n, R] of each token.
        values: [n, R] of the state before each token.
        mask: [n, R] bool. A token outside it is no step in time: its neighbours meet across it.
        gamma: discount.
        lam: GAE's lambda.

    Returns:
        Advantages and returns (advantages + values), each [n, R] and 0 outside the mask. The state
        after the last response token is worth 0, whether the response ended or was cut off.
    """
    advantages = torch.zeros_like(values)
    after = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(after)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * after - values[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        after = torch.where(here, values[:, t], after)
        advantages[:, t] = torch.where(here, running, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 (unbiased) over all tokens of all rows inside the mask; 0 outside.

    Fewer than two tokens, or equal ones, give 0.
    """
    count = int(mask.sum())
    inside = advantages.double().masked_fill(~mask, 0.0)
    if count < 2:
        return torch.zeros_like(advantages)
    centred = (inside - inside.sum() / count).masked_fill(~mask, 0.0)
    deviation = (centred.square().sum() / (count - 1)).sqrt()
    if deviation <= _ROUNDING * inside.abs().amax():
        return torch.zeros_like(advantages)
    return (centred / deviation).to(advantages.dtype)
