import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.data import PromptDataModule
from lightning_nereus.rl.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("0123456789=")


def rows(count):
    return [{"prompt": f"{i}=", "answer": i} for i in range(count)]


def module(count=7, batch_size=2, **options):
    return PromptDataModule(rows(count), TOKENIZER, batch_size, **options)


def test_batches():
    batch = next(iter(module(12, 3, max_prompt_length=5).train_dataloader()))
    assert batch["prompt_ids"].shape == batch["prompt_mask"].shape == (3, 5)
    assert batch["prompt_ids"].dtype == torch.int64
    assert batch["prompt_mask"].dtype == torch.bool
    for row in range(3):
        index = batch["prompt_index"][row].item()
        text = batch["prompts"][row]
        assert text == f"{index}="
        assert batch["meta"][row] == {"answer": index}
        assert batch["prompt_ids"][row, -len(text) :].tolist() == TOKENIZER.encode(text)
        assert batch["prompt_mask"][row].tolist() == [False] * (5 - len(text)) + [True] * len(text)
    assert module(12, 3).width == 3


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**31), st.integers(1, 4))
def test_every_prompt_comes_once_a_pass(count, batch_size, seed, passes):
    if batch_size > count:
        return
    stream = module(count, batch_size, seed=seed).train_dataloader()
    batches = -(-passes * count // batch_size)
    items = [i for b in range(batches) for i in stream.batch_indices(b)]
    for start in range(0, passes * count, count):
        assert sorted(items[start : start + count]) == list(range(count))


def test_the_order_follows_seed_and_pass():
    first, again, other = (module(50, 25, seed=s).train_dataloader() for s in (3, 3, 4))
    orders = [[s.batch_indices(b) for b in range(4)] for s in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] + orders[0][1] != orders[0][2] + orders[0][3]


def indices(batches):
    return [batch["prompt_index"].tolist() for batch in batches]


def test_resume_at_every_position():
    undisturbed = module().train_dataloader()
    expected = [undisturbed.batch_indices(b) for b in range(12)]
    for position in range(8):
        before = module().train_dataloader()
        seen, iterator = [], iter(before)
        while len(seen) < position:
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(before)
            else:
                seen.append(batch["prompt_index"].tolist())
        after = module().train_dataloader()
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert seen + indices(after) == expected[: position + len(after)]


@pytest.mark.parametrize("field", ["batch_size", "seed", "prompts"])
def test_a_position_in_other_data_is_refused(field):
    stream = module().train_dataloader()
    state = stream.state_dict()
    with pytest.raises(ConfigurationError, match=field):
        stream.load_state_dict({**state, field: 99})


def test_validation_is_held_out_and_the_same_each_time():
    data = module(20, 2, validation=6)
    batches = indices(data.val_dataloader())
    assert batches == indices(data.val_dataloader())
    assert len(data.val_dataloader()) == len(batches) == 3
    held_out = {i for b in batches for i in b}
    assert len(held_out) == 6
    trained = {i for b in indices(data.train_dataloader()) for i in b}
    assert trained == set(range(20)) - held_out
    assert len(module(20, 2, validation=0.25).val_dataloader()) == 2
    assert module(20, 2).val_dataloader() == []


def test_bad_input_names_the_field(tmp_path):
    def refuse(match, prompts, **options):
        with pytest.raises(ConfigurationError, match=match):
            PromptDataModule(prompts, TOKENIZER, **{"batch_size": 2, **options})

    refuse("empty", [])
    refuse(r"prompt 1 has 4 tokens", [{"prompt": "1="}, {"prompt": "123="}], max_prompt_length=3)
    refuse("prompt 1 has no text", [{"prompt": "1="}, {"question": "1="}])
    refuse("batch_size", rows(1))
    refuse("batch_size", rows(5), validation=4)
    refuse("batch_size", rows(5), batch_size=0)
    refuse("validation", rows(9), validation=3)
    refuse("validation", rows(9), validation=-2)
    refuse("cannot be read", tmp_path / "none.jsonl")
    path = tmp_path / "prompts.jsonl"
    path.write_text("")
    refuse("empty", path)
    path.write_text('{"prompt": "1="}\n\n{"prompt": \n')
    refuse("line 3", path)
    path.write_text('{"prompt": "1="}\n["2="]\n')
    refuse("line 2", path)
    path.write_bytes(b"\xff\xfe")
    refuse("cannot be read", path)


class Interrupted(Exception):
    pass


class Recorder(LightningModule):
    """Keeps the prompts of every step that it finished."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.automatic_optimization = False
        self.finished, self.fail_at = [], fail_at

    def training_step(self, batch, _):
        if self.fail_at is not None and len(self.finished) == self.fail_at:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/mid.ckpt")
            raise Interrupted
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(torch.ones(1, 1)).sum())
        optimizer.step()
        self.finished.append(batch["prompt_index"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(root, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=root, **{"max_epochs": -1, **quiet, **options})


def expected_batches(count):
    stream = module().train_dataloader()
    return [stream.batch_indices(b) for b in range(count)]


@pytest.mark.parametrize("limit", [1.0, 3])
def test_lightning_goes_along_the_stream(tmp_path, limit):
    recorder = Recorder()
    make_trainer(tmp_path, max_steps=11, limit_train_batches=limit, enable_checkpointing=False).fit(recorder, module())
    assert recorder.finished == expected_batches(11)


@pytest.mark.parametrize("ends", [{"max_steps": 10}, {"max_steps": -1, "max_epochs": 3}])
@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
def test_lightning_resumes_after_any_step(tmp_path, ends, step):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    make_trainer(tmp_path, callbacks=[saver], **ends).fit(Recorder(), module())
    recorder = Recorder()
    trainer = make_trainer(tmp_path, enable_checkpointing=False, **ends)
    trainer.fit(recorder, module(), ckpt_path=tmp_path / f"step={step}.ckpt")
    total = 10 if ends["max_steps"] > 0 else 12
    assert recorder.finished == expected_batches(total)[step:]


def test_lightning_resumes_from_an_epochs_end(tmp_path):
    ends = {"max_epochs": 2, "max_steps": -1}
    saver = ModelCheckpoint(tmp_path, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1, filename="{epoch}")
    make_trainer(tmp_path, callbacks=[saver], **ends).fit(Recorder(), module())
    recorder = Recorder()
    trainer = make_trainer(tmp_path, enable_checkpointing=False, **{**ends, "max_epochs": 3})
    trainer.fit(recorder, module(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert recorder.finished == expected_batches(12)[4:]


@pytest.mark.parametrize("step", [0, 2, 4, 6])
def test_a_step_that_was_cut_off_is_done_again(tmp_path, step):
    with pytest.raises(Interrupted):
        make_trainer(tmp_path, max_steps=9, enable_checkpointing=False).fit(Recorder(fail_at=step), module())
    recorder = Recorder()
    trainer = make_trainer(tmp_path, max_steps=9, enable_checkpointing=False)
    trainer.fit(recorder, module(), ckpt_path=tmp_path / "mid.ckpt")
    assert recorder.finished == expected_batches(9)[step:]


def test_fit_twice(tmp_path):
    data, recorder = module(), Recorder()
    trainer = make_trainer(tmp_path, max_steps=3, enable_checkpointing=False)
    trainer.fit(recorder, data)
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(recorder, data)
    assert recorder.finished == expected_batches(7)
    fresh = Recorder()
    make_trainer(tmp_path, max_steps=3, enable_checkpointing=False).fit(fresh, data)
    assert fresh.finished == expected_batches(3)
