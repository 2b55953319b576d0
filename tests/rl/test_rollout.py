import pytest
import torch

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.data import PromptSet
from lightning_nereus.rl.rollout import Rollout
from lightning_nereus.rl.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("abc=")


@pytest.fixture
def rollout():
    batch = PromptSet([{"prompt": "ab=", "n": 1}, {"prompt": "c=", "n": 2}], TOKENIZER).batch([1, 0])
    prompts = {k: batch[k].repeat_interleave(2, dim=0) for k in ("prompt_ids", "prompt_mask")}
    ids = torch.tensor([[2, 1, 0], [3, 3, 3], [1, 0, 0], [4, 2, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.uint8)
    shared = {"response_ids": ids, "response_mask": mask, "log_probs": -mask.float()}
    return Rollout.of(batch, prompts, shared, samples=2)


def test_rows_are_samples_of_their_prompts(rollout):
    assert len(rollout) == 4
    assert rollout.prompt_index.tolist() == [1, 1, 0, 0]
    assert rollout.prompts == ["c=", "c=", "ab=", "ab="]
    assert [m["n"] for m in rollout.meta] == [2, 2, 1, 1]
    assert rollout.response_mask.dtype == torch.bool
    assert rollout.lengths.tolist() == [2, 3, 1, 3]
    assert rollout.text(TOKENIZER) == ["a", "bbb", "", "ca"]


def test_model_rows_put_responses_behind_prompts(rollout):
    rows = rollout.model_rows()
    assert rows["prompt_width"] == 3
    assert rows["input_ids"][0].tolist() == [0, 4, 5, 2, 1, 0]
    assert rows["attention_mask"].int()[0].tolist() == [0, 1, 1, 1, 1, 0]


def test_select_keeps_every_field_together(rollout):
    part = rollout.select(torch.tensor([3, 0]))
    assert part.prompt_index.tolist() == [0, 1]
    assert part.text(TOKENIZER) == ["ca", "a"]
    assert [m["n"] for m in part.meta] == [1, 2]
    assert part.prompts == ["ab=", "c="]
    assert torch.equal(part.rollout_log_probs, rollout.rollout_log_probs[[3, 0]])
    assert len(rollout.select(torch.arange(0))) == 0


def test_pad_may_be_the_end_token():
    class OneSpecial(CharTokenizer):
        pad_token_id = 1

    tokenizer = OneSpecial("ab")
    batch = PromptSet([{"prompt": "a"}], tokenizer, max_prompt_length=2).batch([0])
    shared = {
        "response_ids": torch.tensor([[2, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "log_probs": torch.zeros(1, 3),
    }
    rollout = Rollout.of(batch, batch, shared, samples=1)
    assert rollout.lengths.tolist() == [2]
    assert rollout.prompt_mask.tolist() == [[False, True]]


def test_shapes_are_checked(rollout):
    with pytest.raises(ConfigurationError, match="rollout_log_probs"):
        Rollout(
            rollout.prompt_ids,
            rollout.prompt_mask,
            rollout.response_ids,
            rollout.response_mask,
            rollout.rollout_log_probs[:2],
            rollout.prompt_index,
            2,
            rollout.meta,
        )


def test_tokenizer_round_trip_and_faults():
    ids = TOKENIZER.encode("cab=", add_special_tokens=True)
    assert ids == [4, 2, 3, 5, 1]
    assert TOKENIZER.vocab_size == 6
    assert TOKENIZER.decode(torch.tensor([*ids, 0]), skip_special_tokens=True) == "cab="
    assert TOKENIZER.decode([1, 0, 6]) == "<eos><pad>\ufffd"
    with pytest.raises(ConfigurationError, match="'x' at 1"):
        TOKENIZER.encode("ax")
    with pytest.raises(ConfigurationError, match="alphabet"):
        CharTokenizer("aa")
