import numpy as np
import pytest
import torch

from lightning_nereus.errors import RewardError
from lightning_nereus.rl.rewards import call_reward

ROWS = (["p", "q"], ["one", "two"], [{"a": 1}, {"a": 2}])


@pytest.mark.parametrize(
    "answer", [[0.5, 1], (True, False), np.array([1.5, 2.5], dtype=np.float32), torch.tensor([1, 2]), [np.int64(3), 4]]
)
def test_numbers_of_any_kind_become_float64(answer):
    rewards = call_reward(lambda *_: answer, *ROWS)
    assert rewards.dtype == torch.float64
    assert rewards.tolist() == [float(v) for v in answer]


def test_the_function_sees_prompts_responses_and_meta():
    seen = []

    def reward(prompts, responses, meta):
        seen.append((prompts, responses, meta))
        return [len(r) for r in responses]

    assert call_reward(reward, *ROWS).tolist() == [3, 3]
    assert seen == [ROWS]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "1 rewards for 2 responses"),
        ([1.0, float("nan")], r"nan for row 1 \('two'\)"),
        ([float("-inf"), 0.0], "-inf for row 0"),
        ([1.0, None], "None.*row 1"),
        (["1", 2], "str.*row 0"),
        ([1 + 2j, 2], "complex.*row 0"),
        (torch.ones(2, 2), "Tensor.*row 0"),
        (torch.tensor(1.0), "single number"),
        (None, "NoneType"),
        ("ab", "str"),
        ({0: 1, 1: 2}, "dict"),
        (3.0, "float"),
    ],
)
def test_what_is_no_reward_names_the_row(answer, message):
    def my_reward(prompts, responses, meta):
        return answer

    with pytest.raises(RewardError, match=f"my_reward gave .*{message}"):
        call_reward(my_reward, *ROWS)


def test_an_exception_inside_comes_out_as_it_is():
    problem = KeyError("no such answer")

    def reward(prompts, responses, meta):
        raise problem

    with pytest.raises(KeyError) as caught:
        call_reward(reward, *ROWS)
    assert caught.value is problem
    assert caught.value.__cause__ is None
