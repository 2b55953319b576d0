"""NereusStrategy under a real Trainer on forked ranks: every plan, transition and habit gives one result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import Qwen3Config

from lightning_nereus import GRPOModule, NereusStrategy, Plan, PPOModule, PromptDataModule
from lightning_nereus.errors import ConfigurationError, PeerLostError, RewardError
from lightning_nereus.rl.countdown import ALPHABET, countdown_progress, countdown_prompts
from lightning_nereus.rl.tokenizer import CharTokenizer
from lightning_nereus.runtime.checkpoint import read_tensors

TOKENIZER = CharTokenizer(ALPHABET)
GRPO = ("actor.generation", "reference.inference", "actor.training")
PPO = ("actor.generation", "reference.inference", "reward.inference", "critic.training", "actor.training")
ONE = {"tp": 1, "pp": 1, "dp": 1}


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.3,
    )


def module(algorithm: str, **options: Any) -> Any:
    options = {"max_new_tokens": 8, "lr": 1e-2, "minibatches": 2, "epochs": 2, "warmup": 3, **options}
    if algorithm == "grpo":
        return GRPOModule(config(), options.pop("reward", countdown_progress), samples=2, kl_coef=0.02, **options)
    return PPOModule(config(), config(), critic_lr=1e-2, **options)


def uniform(stages: tuple[str, ...], **stage_plan: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(stage_plan) for name in stages}


class Relay(Callback):
    """Changes the plan at the end of given steps."""

    def __init__(self, plans: dict[int, dict[str, Any]]) -> None:
        self.plans = plans

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step in self.plans:
            trainer.strategy.relay(Plan.from_dict(self.plans[trainer.global_step]))  # type: ignore[attr-defined]


def fit(
    directory: Path,
    algorithm: str,
    plan: dict[str, Any] | None,
    *,
    steps: int = 3,
    devices: int = 8,
    relays: dict[int, dict[str, Any]] | None = None,
    ckpt_path: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    precision: str = "64-true",
    **options: Any,
) -> Trainer:
    trainer = Trainer(
        strategy=NereusStrategy(plan=plan),
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        callbacks=[Relay(relays or {}), ModelCheckpoint(directory, save_last=True, every_n_train_steps=1), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=directory,
    )
    data = PromptDataModule(countdown_prompts()[:40], TOKENIZER, 8)
    trainer.fit(module(algorithm, **options), data, ckpt_path=ckpt_path)
    return trainer


def result(directory: Path) -> dict[str, Tensor]:
    return read_tensors(directory / "last.ckpt")


def assert_equal(directory: Path, reference: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    tensors = result(directory)
    assert set(tensors) == set(reference)
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, reference[name], atol=tolerance, rtol=tolerance), name


def learned(metrics: Mapping[str, Any]) -> dict[str, float]:
    """All but what says how long it took and on what."""
    return {name: float(value) for name, value in metrics.items() if not name.startswith("nereus/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three steps of each algorithm on one device, without a process group."""
    runs = {}
    for algorithm in ("grpo", "ppo"):
        directory = tmp_path_factory.mktemp(algorithm)
        trainer = fit(directory, algorithm, None, devices=1)
        runs[algorithm] = (result(directory), dict(trainer.callback_metrics))
    return runs


@pytest.mark.parametrize(
    ("algorithm", "plan"),
    [
        ("grpo", None),
        ("grpo", uniform(GRPO, tp=2, pp=2, dp=2, micro_batches=2)),
        ("grpo", uniform(GRPO, tp=4, pp=2, dp=1, micro_batches=4, recompute="layer")),
        ("ppo", uniform(PPO, tp=2, pp=1, dp=2, micro_batches=1)),
        (
            "ppo",
            {
                "actor.generation": {"tp": 2, "dp": 4},
                "reference.inference": {"pp": 2, "devices": [3, 1]},
                "reward.inference": {"tp": 2, "devices": [6, 7]},
                "critic.training": {"pp": 2, "dp": 1, "devices": [4, 5], "micro_batches": 2},
                "actor.training": {"tp": 2, "pp": 2, "devices": [0, 1, 2, 3], "micro_batches": 2},
            },
        ),
    ],
)
def test_every_plan_gives_one_result(tmp_path: Path, alone: Any, algorithm: str, plan: Any):
    trainer = fit(tmp_path, algorithm, plan)
    reference, metrics = alone[algorithm]
    assert_equal(tmp_path, reference)
    assert trainer.global_step == 3
    assert learned(trainer.callback_metrics) == pytest.approx(learned(metrics), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_transitions_do_not_change_the_result(tmp_path: Path, alone: Any, algorithm: str):
    stages = GRPO if algorithm == "grpo" else PPO
    relays = {
        1: uniform(stages, tp=2, pp=2, dp=2, devices=[5, 1, 7, 0, 2, 3, 6, 4], micro_batches=2),
        2: uniform(stages, tp=1, pp=1, dp=4, devices=[3, 2, 1, 0]),
    }
    fit(tmp_path, algorithm, uniform(stages, tp=4, dp=2), relays=relays)
    assert_equal(tmp_path, alone[algorithm][0])


@st.composite
def stage_plans(draw: st.DrawFn, stage: str) -> dict[str, Any]:
    """Any layout, degree, devices, micro-batches and recompute policy that a job of 8 rows and 8 ranks allows."""
    training = stage.endswith("training")  # in minibatches of half of the rows
    tp, pp, dp = draw(
        st.sampled_from(
            [
                (t, p, d)
                for t in (1, 2, 4)
                for p in (1, 2)
                for d in (1, 2, 4, 8)
                if t * p * d <= 8 and (d < 8 or not training)
            ]
        )
    )
    plan: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
    plan["devices"] = draw(st.permutations(range(8)))[: tp * pp * dp]
    if training:
        plan["micro_batches"] = draw(st.sampled_from([m for m in (1, 2, 4) if 4 // dp % m == 0]))
        plan["recompute"] = draw(st.sampled_from(["none", "layer"]))
    return plan


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_random_transitions_at_random_boundaries(tmp_path_factory: Any, alone: Any, algorithm: str):
    stages = GRPO if algorithm == "grpo" else PPO
    plans = st.fixed_dictionaries({stage: stage_plans(stage) for stage in stages})

    # Not shrunk: an example takes some seconds.
    @settings(max_examples=4, deadline=None, phases=(Phase.reuse, Phase.generate), print_blob=True)
    @given(first=plans, relays=st.dictionaries(st.sampled_from((1, 2)), plans, min_size=1))
    def equal(first: dict[str, Any], relays: dict[int, dict[str, Any]]) -> None:
        directory = tmp_path_factory.mktemp("random")
        fit(directory, algorithm, first, relays=relays)
        assert_equal(directory, alone[algorithm][0])

    equal()


def test_transitions_on_one_device_change_no_bit(tmp_path: Path):
    one = uniform(GRPO, **ONE, micro_batches=2)
    other = uniform(GRPO, **ONE, micro_batches=2, recompute="layer")
    fit(tmp_path / "plain", "grpo", one, devices=1)
    fit(tmp_path / "changed", "grpo", one, devices=1, relays={1: other, 2: one})
    plain, changed = result(tmp_path / "plain"), result(tmp_path / "changed")
    assert all(torch.equal(changed[name], tensor) for name, tensor in plain.items())


def test_single_precision_agrees_to_rounding(tmp_path: Path):
    plan = uniform(GRPO, tp=2, pp=2, dp=2, micro_batches=2)
    fit(tmp_path / "one", "grpo", None, devices=1, steps=1, precision="32-true")
    fit(tmp_path / "eight", "grpo", plan, steps=1, precision="32-true")
    # The first step of Adam divides a gradient by its size, which blows the rounding of the smallest up.
    one, eight = result(tmp_path / "one"), result(tmp_path / "eight")
    moments = [name for name in one if "exp_avg" in name]
    assert moments
    for name in moments:
        assert torch.allclose(one[name], eight[name], atol=1e-5, rtol=1e-5), name


def test_resume_under_another_plan(tmp_path: Path, alone: Any):
    fit(tmp_path / "first", "grpo", uniform(GRPO, tp=2, dp=4), steps=2)
    trainer = fit(
        tmp_path / "second",
        "grpo",
        uniform(GRPO, pp=2, dp=2, micro_batches=2),
        steps=3,
        ckpt_path=tmp_path / "first" / "last.ckpt",
    )
    assert trainer.global_step == 3
    assert_equal(tmp_path / "second", alone["grpo"][0])


def test_a_checkpoint_has_lightnings_name_and_counters(tmp_path: Path):
    fit(tmp_path, "grpo", None, steps=2, devices=2)
    assert {p.name for p in tmp_path.glob("*.ckpt")} == {"epoch=0-step=2.ckpt", "last.ckpt"}


def test_fit_twice_goes_on(tmp_path: Path):
    made = module("grpo")
    data = PromptDataModule(countdown_prompts()[:40], TOKENIZER, 8)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy="nereus",
        accelerator="cpu",
        devices=2,
        max_steps=1,
        precision="64-true",
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(made, data)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(made, data)
    assert trainer.global_step == 2


def test_an_exception_in_a_reward_surfaces_once(tmp_path: Path):
    def reward(prompts: Any, responses: Any, meta: Any) -> Any:
        raise ZeroDivisionError("the grader divides by zero")

    before = _children()
    with pytest.raises(ZeroDivisionError, match="the grader divides by zero"):
        fit(tmp_path, "grpo", None, devices=4, reward=reward)
    assert _children() == before


def test_a_reward_of_nan_is_refused(tmp_path: Path):
    with pytest.raises(RewardError, match="nan for row"):
        fit(tmp_path, "grpo", None, devices=2, reward=lambda p, r, m: [float("nan")] * len(r))


class KillRank(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), 9)


def test_a_killed_rank_ends_the_run_with_one_error(tmp_path: Path):
    before = _children()
    with pytest.raises(PeerLostError, match=r"rank 1 .* was killed by SIGKILL"):
        fit(tmp_path, "grpo", None, devices=4, callbacks=(KillRank(),))
    assert _children() == before


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (uniform(GRPO, tp=3, dp=1), "tp: 3 does not divide 4 attention heads"),
        (uniform(GRPO, pp=4, dp=1), "pp: 4 stages for 3 layers"),
        (uniform(GRPO, dp=3), "do not divide"),
        (uniform(GRPO, dp=16), "not among the 8 devices"),
        (uniform(GRPO[:2], dp=2), "lacks actor.training"),
        (uniform(("cook.training",), dp=2), "unknown role 'cook'"),
        (uniform(("actor.dancing",), dp=2), "unknown stage 'dancing'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_any_process_starts(tmp_path: Path, plan: Any, words: str):
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, "grpo", plan)


def test_what_the_trainer_cannot_have_is_refused():
    data = PromptDataModule(countdown_prompts()[:40], TOKENIZER, 8)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    with pytest.raises(ConfigurationError, match="pass actor's context of 64"):
        Trainer(strategy="nereus", **options).fit(module("grpo", max_new_tokens=60), data)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches"):
        Trainer(strategy="nereus", accumulate_grad_batches=2, **options).fit(module("grpo"), data)
    with pytest.raises(ConfigurationError, match="gradient_clip_val"):
        Trainer(strategy="nereus", gradient_clip_val=1.0, **options).fit(module("grpo"), data)
    with pytest.raises(ConfigurationError, match="num_nodes"):
        Trainer(strategy="nereus", num_nodes=2, **options).fit(module("grpo"), data)
    with pytest.raises(ConfigurationError, match="datamodule"):
        Trainer(strategy="nereus", **options).fit(module("grpo"))


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]
