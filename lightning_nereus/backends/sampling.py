"""Sampling that no plan, batch composition or restart can change (design §9).

Each token draws from one counter-based stream: a hash of (seed, RL step, row, position) gives a
uniform number, the inverse of the cumulative distribution gives the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nereus.errors import ConfigurationError

# SplitMix64 (Steele, Lea, Flood 2014): its increment and its two multipliers, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. ``temperature`` 0 is greedy; log-probs are then those at temperature 1."""

    max_new_tokens: int
    eos_token_id: int
    pad_token_id: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigurationError("max_new_tokens", f"{self.max_new_tokens} is too few", "Use at least 1")
        if not self.temperature >= 0:
            raise ConfigurationError("temperature", f"{self.temperature} is negative", "Use 0 (greedy) or more")

    @property
    def scale(self) -> float:
        """What logits are divided by for log-probs."""
        return self.temperature or 1.0


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finalizer over int64, whose products wrap."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seed: int, step: int, rows: Tensor, position: int) -> Tensor:
    """One number of [0, 1) for each row [n] (int64), as float64 [n]."""
    state = torch.tensor(seed, dtype=torch.int64)
    for counter in (step, rows, position):
        state = _mix(state + _INCREMENT + counter)
    return _shift(state, 64 - _MANTISSA_BITS).to(torch.float64) / float(1 << _MANTISSA_BITS)


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their log-probs [n] from logits [n, vocabulary] and uniform numbers [n]."""
    log_probs = torch.log_softmax(logits.double() / sampling.scale, dim=-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = log_probs.exp().cumsum(dim=-1)
        target = (uniform * cumulative[:, -1]).unsqueeze(-1)
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).to(logits.dtype)
