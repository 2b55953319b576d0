import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.kl import KLEstimator, kl_loss
from lightning_nereus.rl.losses import Aggregation, aggregation_weights, policy_loss, value_loss


def weights_of(mask, aggregation):
    return aggregation_weights(mask, aggregation, 10 if aggregation is Aggregation.CONSTANT else None)


def prefix_mask(lengths, width):
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.TOKEN_MEAN, [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4], [0, 0, 0]]),
        (Aggregation.SEQUENCE_MEAN, [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6], [0, 0, 0]]),
        (Aggregation.CONSTANT, [[1 / 20, 0, 0], [1 / 20, 1 / 20, 1 / 20], [0, 0, 0]]),
    ],
)
def test_weights_by_hand_and_empty_rows_count_nowhere(aggregation, expected):
    weights = weights_of(prefix_mask([1, 3, 0], 3), aggregation)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_minibatch_without_tokens_has_loss_zero(aggregation):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    log_probs = torch.full((2, 3), float("nan"), requires_grad=True)
    weights = weights_of(mask, aggregation)
    loss, statistics = policy_loss(log_probs, log_probs.detach(), torch.ones(2), mask, weights, 0.2, 0.2)
    loss.backward()
    assert loss == 0
    assert all(s == 0 for s in statistics.values())
    assert (log_probs.grad == 0).all()


def test_constant_needs_the_limit():
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        aggregation_weights(torch.ones(1, 1).bool(), Aggregation.CONSTANT)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped", "slope"),
    [
        (1.0, 2.0, -2.0, 0, -2.0),
        (1.5, 2.0, -2.56, 1, 0.0),  # gains stop at 1 + 0.28
        (1.5, -2.0, 3.0, 0, 3.0),  # losses do not
        (0.5, 2.0, -1.0, 0, -1.0),
        (0.5, -2.0, 1.6, 1, 0.0),  # 1 - 0.2
    ],
)
def test_clipping_by_hand(ratio, advantage, expected, clipped, slope):
    log_probs = torch.tensor([[math.log(ratio), 7.0]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 2, dtype=torch.float64)
    mask = torch.tensor([[True, False]])
    weights = aggregation_weights(mask, Aggregation.TOKEN_MEAN)
    loss, statistics = policy_loss(log_probs, old, torch.tensor([advantage]), mask, weights, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert log_probs.grad.tolist() == [[pytest.approx(slope), 0.0]]
    assert statistics["ratio"].item() == pytest.approx(ratio)
    assert statistics["clip_fraction"].item() == clipped
    assert statistics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_the_first_ratio_is_exactly_one():
    log_probs = -torch.rand(3, 4).double() * 9
    mask = prefix_mask([4, 2, 1], 4)
    weights = aggregation_weights(mask, Aggregation.TOKEN_MEAN).double()
    _, statistics = policy_loss(log_probs, log_probs.clone(), torch.randn(3), mask, weights, 0.2, 0.2)
    assert statistics["ratio"] == weights.sum()
    assert statistics["approx_kl"] == statistics["clip_fraction"] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_ratio_gives_finite_gradients(advantage):
    log_probs = torch.tensor([[0.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy_loss(log_probs, torch.tensor([[-200.0]]), torch.tensor([advantage]), mask, mask.float(), 0.2, 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_probs.grad).all()


def test_value_clipping_clips():
    mask = torch.ones(1, 1, dtype=torch.bool)
    values = torch.tensor([[2.0]], requires_grad=True)
    # The value ran past the old one's range towards the return: the bounded one's larger error counts, without slope.
    loss, statistics = value_loss(values, torch.zeros(1, 1), torch.tensor([[3.0]]), mask, mask.float(), clip=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 2.5**2)
    assert values.grad.item() == 0
    assert statistics["value_clip_fraction"] == 1
    assert statistics["value_error"] == 1
    free, _ = value_loss(values, torch.zeros(1, 1), torch.tensor([[3.0]]), mask, mask.float())
    assert free.item() == pytest.approx(0.5)


def test_the_critics_mask_is_the_responses():
    mask = torch.tensor([[True, True, False]])
    values = torch.tensor([[1.0, 2.0, float("nan")]], requires_grad=True)
    returns = torch.tensor([[0.0, 4.0, float("nan")]])
    weights = aggregation_weights(mask, Aggregation.TOKEN_MEAN)
    loss, statistics = value_loss(values, values.detach(), returns, mask, weights, clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1 + 4) / 2)
    assert values.grad.tolist() == [[0.5, -1.0, 0.0]]
    assert statistics["value"].item() == pytest.approx(1.5)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=8),
    st.sampled_from(list(Aggregation)),
    st.lists(st.integers(1, 7), max_size=3),
    st.integers(0, 10_000),
)
def test_no_split_changes_a_loss(lengths, aggregation, cuts, seed):
    torch.manual_seed(seed)
    n, width = len(lengths), 5
    mask = prefix_mask(lengths, width)
    weights = weights_of(mask, aggregation)
    log_probs = (-torch.rand(n, width).double()).requires_grad_()
    values = torch.randn(n, width).double().requires_grad_()
    old, reference, returns, old_values = (torch.randn(n, width).double() - 1 for _ in range(4))
    advantages = torch.randn(n).double()

    def objective(rows):
        policy, a = policy_loss(log_probs[rows], old[rows], advantages[rows], mask[rows], weights[rows], 0.2, 0.2)
        value, b = value_loss(values[rows], old_values[rows], returns[rows], mask[rows], weights[rows], 0.2)
        kl, c = kl_loss(log_probs[rows], reference[rows], mask[rows], weights[rows], KLEstimator.K3)
        return policy + value + kl, a | b | c

    def gradients(loss):
        return torch.autograd.grad(loss, (log_probs, values))

    whole, statistics = objective(slice(0, n))
    expected = gradients(whole)
    bounds = sorted({0, n, *(c for c in cuts if c < n)})
    parts = [objective(slice(a, b)) for a, b in pairwise(bounds)]
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    for name, value in statistics.items():
        torch.testing.assert_close(torch.stack([s[name] for _, s in parts]).sum(), value, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(total), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
