"""AdaptationCallback under a real Trainer on forked ranks: it decides, re-lays, records, resumes; the result stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nereus import AdaptationCallback, NereusStrategy, PromptDataModule
from lightning_nereus.control.decisions import Outcome
from lightning_nereus.control.monitor import Signal
from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.hardware.cpu import describe_cpu
from lightning_nereus.report.record import Run, RunRecorder, read_run
from lightning_nereus.rl.countdown import countdown_prompts
from lightning_nereus.runtime.checkpoint import read_tensors
from lightning_nereus.simulate.traces import PoolTrace
from tests.test_strategy import GRPO, TOKENIZER, module, uniform

SHRINKS = PoolTrace(((0, (0, 1, 2, 3)), (2, (0, 3)), (4, (0, 1, 2, 3))))


class Prompts(PromptDataModule):
    """Remembers which prompts each step used."""

    def __init__(self, path: Path) -> None:
        super().__init__(countdown_prompts()[:40], TOKENIZER, 8)
        self.path = path

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is not None and self.trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(batch["prompts"]) + "\n")
        return batch


def train(
    directory: Path,
    *callbacks: Any,
    steps: int = 6,
    plan: Any = None,
    memory: float | None = None,
    ckpt_path: Path | None = None,
    algorithm: str = "grpo",
) -> Trainer:
    directory.mkdir(exist_ok=True, parents=True)
    trainer = Trainer(
        strategy=NereusStrategy(plan, None if memory is None else describe_cpu(4, memory_bytes=memory)),
        accelerator="cpu",
        devices=4,
        max_steps=steps,
        precision="64-true",
        logger=False,
        callbacks=[*callbacks, ModelCheckpoint(directory, save_last=True, every_n_train_steps=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module(algorithm), Prompts(directory / "prompts.jsonl"), ckpt_path=ckpt_path)
    return trainer


def adaptation(policy: str = "nereus", inventory: Any = SHRINKS, **options: Any) -> AdaptationCallback:
    return AdaptationCallback(policy, inventory=inventory, observers=(RunRecorder(),), **options)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("static")
    train(directory, adaptation("static", None), plan=uniform(GRPO, tp=2, dp=2))
    return directory


def assert_same_result(directory: Path, other: Path) -> None:
    ours, theirs = read_tensors(directory / "last.ckpt"), read_tensors(other / "last.ckpt")
    assert set(ours) == set(theirs)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-12


def prompts(directory: Path) -> list[str]:
    return (directory / "prompts.jsonl").read_text().splitlines()


def assert_whole(run: Run, steps: int) -> None:
    assert [record.step for record in run.steps] == list(range(1, steps + 1))
    plan = run.head.plan
    targets = {r.decision.trigger.step: r.decision.target.plan for r in run.transitions if r.decision.target}
    for record in run.steps:
        assert record.plan == plan
        assert record.plan.devices <= set(record.pool), "no step runs on a device that has left"
        plan = targets.get(record.step, plan)


def test_a_pool_that_shrinks_and_recovers_changes_the_plan_and_not_the_result(tmp_path: Path, static: Path):
    train(tmp_path, adaptation(), plan=uniform(GRPO, tp=2, dp=2))
    run = read_run(tmp_path)
    assert_whole(run, 6)
    lost = next(r for r in run.decisions if r.decision.trigger.step == 2)
    assert lost.decision.outcome is Outcome.URGENT
    assert Signal.POOL in lost.decision.trigger.signals
    assert lost.transition is not None
    assert lost.transition.seconds > 0
    assert any(r.decision.trigger.step == 4 for r in run.decisions)
    assert_same_result(tmp_path, static)
    assert prompts(tmp_path) == prompts(static)


def test_an_interrupted_run_that_adapts_resumes_to_the_same_end(tmp_path: Path, static: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    trainer = train(first, adaptation(), steps=3, plan=uniform(GRPO, tp=2, dp=2))
    assert trainer.callbacks[0].state_dict()["monitor"]["pool"] == [0, 3]  # type: ignore[attr-defined]
    # Its first plan uses devices that left before the step at which it resumes.
    train(second, adaptation(), plan=uniform(GRPO, tp=2, dp=2), ckpt_path=first / "last.ckpt")
    run = read_run(second)
    assert [record.step for record in run.steps] == [4, 5, 6]
    assert run.decisions[0].decision.trigger.step == 3
    assert run.steps[0].plan.devices <= {0, 3}
    assert_same_result(second, static)
    assert [*prompts(first), *prompts(second)] == prompts(static)


def test_memory_that_will_not_do_is_mended_before_the_step_that_would_fail(tmp_path: Path, static: Path):
    # Each rank may use 350 KiB: all of a step's rows at once, replicated, are too much.
    plan = uniform(GRPO, dp=4)
    train(tmp_path, adaptation(inventory=None), steps=3, plan=plan, memory=350 * 2**10)
    first = read_run(tmp_path).decisions[0]
    assert first.decision.trigger.step == 0, "an untrained model may answer as long as it may"
    assert Signal.MEMORY in first.decision.trigger.signals
    assert first.decision.outcome is Outcome.URGENT


@pytest.mark.parametrize("policy", ["always", "every_k"])
def test_other_policies_run_and_keep_the_result(tmp_path: Path, static: Path, policy: str):
    train(tmp_path, adaptation(policy, every=2), plan=uniform(GRPO, pp=2, dp=2))
    run = read_run(tmp_path)
    assert_whole(run, 6)
    assert run.transitions
    assert_same_result(tmp_path, static)


def test_static_does_not_leave_devices_that_go(tmp_path: Path):
    with pytest.raises(InfeasiblePlanError, match=r"the plan uses \[1, 2\], .* policy static"):
        train(tmp_path, adaptation("static"), plan=uniform(GRPO, tp=2, dp=2))
    assert len(read_run(tmp_path).steps) == 2, "what ran before is on record"


def test_a_callback_is_supplied_and_the_planner_chooses_the_first_plan(tmp_path: Path):
    trainer = train(tmp_path, steps=1)
    assert sum(isinstance(c, AdaptationCallback) for c in trainer.callbacks) == 1  # type: ignore[attr-defined]
    assert read_run(tmp_path).head.policy == "nereus"
    assert {"nereus/seconds", "nereus/tokens_per_second", "nereus/devices"} <= set(trainer.callback_metrics)


def test_what_makes_no_sense_is_refused_before_any_process_starts(tmp_path: Path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AdaptationCallback`"):
        train(tmp_path, adaptation(), adaptation())
    with pytest.raises(ConfigurationError, match="inventory: gives"):
        train(tmp_path, adaptation(inventory=PoolTrace.constant((0, 9))))
    with pytest.raises(ConfigurationError, match=r"inventory: gives \(5,\) for step 3"):
        train(tmp_path, adaptation(inventory=PoolTrace(((0, (0, 1)), (3, (5,))))))
    with pytest.raises(ConfigurationError, match=r"has no devices_at\(step\)"):
        adaptation(inventory=lambda step: (0, 1))
    with pytest.raises(InfeasiblePlanError, match="no plan on 4 devices"):
        train(tmp_path, memory=1000.0)
    with pytest.raises(ConfigurationError, match="cluster: has 2 devices, the Trainer has 4"):
        Trainer(
            strategy=NereusStrategy(cluster=describe_cpu(2)),
            accelerator="cpu",
            devices=4,
            logger=False,
            enable_checkpointing=False,
        ).fit(module("grpo"), Prompts(tmp_path / "p"))
    assert not list(tmp_path.glob("nereus.jsonl"))
