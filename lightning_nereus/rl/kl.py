"""Estimators of KL(policy || reference) from tokens that the policy sampled (Schulman 2020, "Approximating KL").

With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As *values*, k1 and
k3 are unbiased and k2 is not. As *loss terms*, what counts is the gradient in expectation: k1's is 0
whatever the policies, k2's is that of KL(policy || reference), k3's that of KL(reference || policy).
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from lightning_nereus.errors import ConfigurationError

_MAX_LOG_RATIO = 20.0


class KLEstimator(StrEnum):
    """Which estimate of the divergence from the reference."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def estimate_kl(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """The estimate of each token, in the shape of both inputs; for token rewards any of them may serve."""
    difference = (log_probs - reference_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case KLEstimator.K1:
            return difference
        case KLEstimator.K2:
            return difference.square() / 2
        case KLEstimator.K3:
            return torch.expm1(-difference) + difference


def check_loss_estimator(estimator: KLEstimator) -> None:
    """Refuse an estimator that teaches nothing as a loss term.

    Raises:
        ConfigurationError: for k1.
    """
    if estimator is KLEstimator.K1:
        raise ConfigurationError(
            "kl_estimator",
            "k1 as a loss term has a gradient of 0 in expectation, it would not hold the policy back",
            "Use k2 or k3 in the loss, or k1 in the rewards",
        )


def kl_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    weights: Tensor,
    estimator: KLEstimator,
    statistic_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence as a loss term; masks, weights and results as in ``losses.policy_loss``.

    Returns:
        This part's share of the term, and of the statistic ``kl``; both additive.
    """
    check_loss_estimator(estimator)
    reference_log_probs = torch.where(mask, reference_log_probs, log_probs.detach())
    estimate = torch.where(mask, estimate_kl(log_probs, reference_log_probs, estimator), 0.0)
    loss = (estimate * weights.to(estimate.dtype)).sum()
    shares = weights if statistic_weights is None else statistic_weights
    return loss, {"kl": (estimate.detach() * shares.to(estimate.dtype)).sum()}
