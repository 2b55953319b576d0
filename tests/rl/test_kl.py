"""The policy is one categorical distribution, so that expectations are exact sums."""

import pytest
import torch

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.kl import KLEstimator, estimate_kl, kl_loss

LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.1], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.4, 1.0], dtype=torch.float64), 0)


def divergence(a, b):
    return (a.exp() * (a - b)).sum()


def expected_gradient(estimator):
    """Of the estimate as a loss term: the sampling probabilities are constants."""
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    loss = (policy.detach().exp() * estimate_kl(policy, REFERENCE, estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


def true_gradient(function):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(function(torch.log_softmax(logits, 0)), logits)[0]


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_k1_and_k3_have_the_right_expectation(estimator):
    policy = torch.log_softmax(LOGITS, 0)
    expected = (policy.exp() * estimate_kl(policy, REFERENCE, estimator)).sum()
    torch.testing.assert_close(expected, divergence(policy, REFERENCE))


def test_gradients_in_expectation():
    zero = torch.zeros_like(LOGITS)
    torch.testing.assert_close(expected_gradient(KLEstimator.K1), zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        expected_gradient(KLEstimator.K2), true_gradient(lambda policy: divergence(policy, REFERENCE))
    )
    torch.testing.assert_close(
        expected_gradient(KLEstimator.K3), true_gradient(lambda policy: divergence(REFERENCE, policy))
    )


@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3])
def test_estimates_are_never_negative(estimator):
    policy, reference = -torch.rand(2, 1000) * 30
    assert (estimate_kl(policy, reference, estimator) >= 0).all()


def test_k1_as_a_loss_term_is_refused_with_the_reason():
    ones = torch.ones(1, 1)
    with pytest.raises(ConfigurationError, match=r"kl_estimator: .*gradient of 0"):
        kl_loss(ones, ones, ones.bool(), ones, KLEstimator.K1)


def test_padding_has_no_effect():
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss, statistics = kl_loss(policy, torch.tensor([[-1.5, float("-inf")]]), mask, mask.float(), KLEstimator.K2)
    loss.backward()
    assert loss.item() == statistics["kl"].item() == pytest.approx(0.125)
    assert policy.grad.tolist() == [[0.5, 0.0]]
