import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.advantages import Scale, gae, group_relative, token_rewards, whiten


def test_group_relative_by_hand():
    rewards = torch.tensor([0.0, 1.0, 2.0, 10.0, 10.0, 13.0])
    assert group_relative(rewards, 3).tolist() == pytest.approx([-1, 0, 1, -1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5])
    assert group_relative(rewards, 3, Scale.NONE).tolist() == [-1, 0, 1, -1, -1, 2]


@given(st.floats(-1e4, 1e4, width=32), st.integers(2, 9), st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_zero(reward, samples, dtype):
    rewards = torch.full((2 * samples,), reward, dtype=dtype)
    for scale in Scale:
        assert (group_relative(rewards, samples, scale) == 0).all()


def test_rounding_residues_are_no_advantage():
    exact = torch.full((8,), 1234.567)
    residue = torch.nextafter(exact, torch.tensor(float("inf")))
    assert (group_relative(torch.where(torch.arange(8) % 2 == 0, exact, residue), 8) == 0).all()


@pytest.mark.parametrize(("n", "samples", "field"), [(4, 1, "samples"), (5, 2, "rewards")])
def test_rows_that_are_no_groups(n, samples, field):
    with pytest.raises(ConfigurationError, match=field):
        group_relative(torch.ones(n), samples)


def test_score_goes_to_the_last_response_token():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    kl = torch.full((3, 4), 0.5)
    kl[0, 3] = float("nan")
    rewards = token_rewards(torch.tensor([5.0, 7.0, 9.0]), kl, mask, 0.1)
    expected = [[-0.05, 4.95, 0, 0], [-0.05, -0.05, -0.05, 6.95], [0, 0, 0, 0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert token_rewards(torch.tensor([5.0]), None, mask[:1], 0.1).tolist() == [[0, 5, 0, 0]]


def _gae_by_definition(rewards, values, gamma, lam):
    """Sums of discounted temporal differences, straight from the paper's equation 16."""
    count = len(rewards)
    after = [*values[1:], 0.0][:count]
    deltas = [r + gamma * a - v for r, a, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]


@given(st.data(), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_definition_over_the_masked_tokens(data, width, gamma, lam):
    numbers = st.lists(st.floats(-3, 3), min_size=width, max_size=width)
    rewards, values = data.draw(numbers), data.draw(numbers)
    mask = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
    advantages, returns = gae(
        *(torch.tensor([v], dtype=torch.float64) for v in (rewards, values)), torch.tensor([mask]), gamma, lam
    )
    inside = [i for i in range(width) if mask[i]]
    expected = _gae_by_definition([rewards[i] for i in inside], [values[i] for i in inside], gamma, lam)
    assert advantages[0, inside].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[0, inside].tolist() == pytest.approx(
        [a + values[i] for a, i in zip(expected, inside, strict=True)], abs=1e-9
    )
    outside = [i for i in range(width) if not mask[i]]
    assert (advantages[0, outside] == 0).all()
    assert (returns[0, outside] == 0).all()


def test_gae_ignores_values_on_padding():
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[True, True, False]])
    clean = gae(rewards, torch.tensor([[0.5, 0.25, 0.0]]), mask, 0.9, 0.8)
    dirty = gae(rewards, torch.tensor([[0.5, 0.25, float("nan")]]), mask, 0.9, 0.8)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    # By hand: the last token has 1 - 0.25; the first 0 + 0.9*0.25 - 0.5 + 0.72*0.75.
    torch.testing.assert_close(clean[0], torch.tensor([[0.265, 0.75, 0.0]]))


def test_whiten_is_over_all_rows():
    advantages = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    torch.testing.assert_close(whiten(advantages, mask), torch.tensor([[-1.0, 0, 0], [1, 0, 0]]))
    assert (whiten(torch.full((2, 3), 0.1), mask) == 0).all()
    assert (whiten(advantages, torch.zeros_like(mask)) == 0).all()
