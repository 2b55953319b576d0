"""What users of Lightning take for granted: loggers, sync_dist, validation, monitors, schedules, interrupts."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_nereus import NereusStrategy, PromptDataModule
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.countdown import countdown_prompts
from lightning_nereus.rl.ppo import PPOModule
from tests.test_strategy import TOKENIZER, config, module


def trainer(directory: Path, *callbacks: Callback, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "strategy": "nereus",
        "accelerator": "cpu",
        "devices": 4,
        "max_steps": 4,
        "logger": CSVLogger(directory, name="", version=""),
        "callbacks": list(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options})


def prompts(validation: int = 0) -> PromptDataModule:
    return PromptDataModule(countdown_prompts()[:40], TOKENIZER, 8, validation=validation)


def logged(directory: Path, name: str) -> dict[int, float]:
    """A metric by global step, from the CSV logger's file."""
    with (directory / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


class LogRanks(Callback):
    """Logs this rank's number in every way that Lightning reduces over ranks."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        mine = float(trainer.global_rank)
        pl_module.log("rank_mean", mine, sync_dist=True)
        pl_module.log("rank_sum", mine, sync_dist=True, reduce_fx="sum", on_step=True)
        pl_module.log("rank_max", torch.tensor(mine), sync_dist=True, reduce_fx="max", on_step=True)


def test_sync_dist_reduces_over_all_ranks(tmp_path: Path):
    made = trainer(tmp_path, LogRanks(), max_steps=1)
    made.fit(module("grpo"), prompts())
    found = {name: float(made.callback_metrics[name]) for name in ("rank_mean", "rank_sum", "rank_max")}
    assert found == {"rank_mean": 1.5, "rank_sum": 6.0, "rank_max": 3.0}


def test_steps_of_logs_checkpoints_and_trainer_agree(tmp_path: Path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    made = trainer(tmp_path, checkpoint)
    made.fit(module("grpo"), prompts())
    assert made.global_step == 4
    assert sorted(logged(tmp_path, "reward")) == [0, 1, 2, 3], "Lightning counts logged steps from 0"
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"}


def test_a_learning_rate_monitor_sees_the_schedule_of_each_optimizer(tmp_path: Path):
    made = trainer(tmp_path, LearningRateMonitor(logging_interval="step"))
    made.fit(PPOModule(config(), config(), max_new_tokens=8, lr=3e-3, critic_lr=6e-3, warmup=3), prompts())
    assert list(logged(tmp_path, "lr-AdamW").values()) == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3])
    assert list(logged(tmp_path, "lr-AdamW-1").values()) == pytest.approx([2e-3, 4e-3, 6e-3, 6e-3])


def test_validation_every_so_many_steps(tmp_path: Path):
    made = trainer(tmp_path, val_check_interval=2, check_val_every_n_epoch=None, limit_val_batches=1)
    made.fit(module("grpo"), prompts(validation=16))
    assert sorted(logged(tmp_path, "val_reward")) == [1, 3]


def test_checkpoints_by_a_metric_and_early_stopping(tmp_path: Path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val_reward", mode="max")
    stop = EarlyStopping("val_response_length", mode="max", patience=0, stopping_threshold=0.0)
    made = trainer(tmp_path, best, stop, val_check_interval=1, max_steps=12)
    made.fit(module("grpo"), prompts(validation=8))
    assert made.global_step == 4, "Lightning finishes its first epoch in any case"
    assert Path(best.best_model_path).is_dir()


def test_limits_and_epochs(tmp_path: Path):
    made = trainer(tmp_path, max_steps=-1, max_epochs=2, limit_train_batches=3)
    made.fit(module("grpo"), prompts())
    assert (made.current_epoch, made.global_step) == (2, 6)


def test_fast_dev_run_and_validate(tmp_path: Path):
    trainer(tmp_path, fast_dev_run=True, logger=False).fit(module("grpo"), prompts(validation=8))
    found = trainer(tmp_path).validate(module("grpo"), prompts(validation=8), verbose=False)
    assert 0 <= found[0]["val_reward"] <= 1


def test_tensorboard_gets_every_step(tmp_path: Path):
    made = trainer(tmp_path, logger=TensorBoardLogger(tmp_path, name="", version=""), devices=2, max_steps=2)
    made.fit(module("grpo"), prompts())
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "nereus.jsonl").exists(), "the record is where the logger writes"


def test_one_module_does_not_inherit_what_another_learned(tmp_path: Path):
    made, data = trainer(tmp_path, devices=2, max_steps=2, logger=False), prompts(validation=8)
    made.fit(module("grpo", lr=0.1), data)
    own = trainer(tmp_path, devices=2, logger=False).validate(module("grpo", seed=1), data, verbose=False)
    assert made.validate(module("grpo", seed=1), data, verbose=False) == own


def test_validation_batches_divide_among_the_replicas_of_every_plan(tmp_path: Path):
    """One prompt a batch: sampled once each in validation, twice in training."""
    data = PromptDataModule(countdown_prompts()[:8], TOKENIZER, 1, validation=2)
    trainer(tmp_path, max_steps=2, val_check_interval=1).fit(module("grpo", minibatches=1), data)
    plan = {name: {"dp": 2} for name in ("actor.generation", "reference.inference", "actor.training")}
    with pytest.raises(ConfigurationError, match=r"actor\.generation dp: 2 replicas .* do not divide 1 rows"):
        trainer(tmp_path, strategy=NereusStrategy(plan)).fit(module("grpo", minibatches=1), data)


class Unpicklable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"a function": lambda: None}


def test_a_result_that_cannot_travel_says_so(tmp_path: Path):
    with pytest.raises(Exception, match=r"(?i)pickle|lambda"):
        trainer(tmp_path, Unpicklable(), devices=2, max_steps=1, enable_checkpointing=False).fit(
            module("grpo"), prompts()
        )


class Raises(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 2:
            raise LookupError("a callback of rank 2 is at fault")


def test_an_exception_in_one_ranks_callback_surfaces(tmp_path: Path):
    with pytest.raises(LookupError, match="a callback of rank 2 is at fault"):
        trainer(tmp_path, Raises()).fit(module("grpo"), prompts())


def test_an_interrupt_ends_the_run_and_leaves_no_process(tmp_path: Path):
    command = [str(Path(sys.executable).with_name("nereus")), "train", "cluster.devices=4", "hydra.run.dir=out"]
    process = subprocess.Popen(
        [*command, "trainer.max_steps=100000"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    record = tmp_path / "out" / "nereus.jsonl"
    end = time.monotonic() + 120
    while not (record.exists() and '"step"' in record.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 4
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "nereus: interrupted; what ran is in" in errors
    assert "Traceback" not in errors
    assert not any(rank.is_running() for rank in ranks)
