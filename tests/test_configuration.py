"""conf/ and what it builds: every file composes, every mistake is named, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from lightning_nereus.configuration import build, config_directory
from lightning_nereus.control.controller import Policy
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_TRAINING, Layout
from lightning_nereus.rl.ppo import PPOModule

GROUPS = ("model", "stages", "cost", "algorithm", "cluster", "backend", "policy", "trace", "experiment")


def composed(*overrides: str) -> Any:
    with initialize_config_dir(config_directory(), version_base="1.3"):
        return compose("config", list(overrides))


def job(tmp_path: Path, *overrides: str) -> Any:
    return build(composed(*overrides), tmp_path, ())


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_every_group_composes(group: str):
    names = [path.stem for path in (Path(config_directory()) / group).glob("*.yaml")]
    assert names
    for name in names:
        composed(f"{group}={name}")


def test_the_demo_is_what_its_experiment_says(tmp_path: Path):
    made = job(tmp_path, "experiment=demo", "policy.gamma=0.3", "stages.plan.actor.training.dp=2")
    strategy = made.trainer.strategy
    assert made.trainer.max_steps == 40
    assert strategy.cluster.devices == 8
    assert strategy.cluster.device.memory_bytes == 12 * 2**20
    assert strategy.first_plan[ACTOR_TRAINING].layout == Layout(2, 1)
    assert strategy.first_plan[ACTOR_TRAINING].dp == 2
    options = made.trainer.callbacks[0].options
    assert (options.policy, options.gamma) == (Policy.NEREUS, 0.3)


def test_five_model_stages(tmp_path: Path):
    made = job(tmp_path, "experiment=ppo_five")
    assert isinstance(made.module, PPOModule)
    assert len(made.trainer.strategy.job_spec(made.module).model_stages) == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.name=greedy", "policy: 'greedy' is unknown"),
        ("policy.gamma=2", "gamma"),
        ("policy.thresholds.length=-1", r"thresholds\.length"),
        ("cluster.devices=0", r"cluster\.devices"),
        ("cost.headroom=2", "headroom"),
        ("backend.generation=sglang", r"backend\.generation: 'sglang'"),
        ("+algorithm.arguments.lrr=1", r"algorithm\.arguments\.lrr: is no argument of GRPOModule"),
        ("+algorithm.arguments.tokenizer=x", r"algorithm\.arguments\.tokenizer"),
        ("+algorithm.arguments.aggregation=foo", r"algorithm\.arguments: are refused"),
        ("algorithm.arguments.samples=abc", r"algorithm\.arguments: are refused"),
        ("algorithm.arguments.lr=-1", "learning rate of actor: -1"),
        ("algorithm.arguments.lr=nan", "learning rate of actor"),
        ("cluster.memory_mib=0", r"cluster\.memory_mib: 0"),
        ("trainer.max_steps=abc", "trainer: does not take"),
        ("+trainer.max_step=1", r"trainer\.max_step"),
        ("+trainer.devices=4", r"trainer\.devices"),
        ("trainer.precision=16-mixed", r"trainer\.precision: '16-mixed'"),
        ("data.prompts=/nowhere.jsonl", "prompts: /nowhere.jsonl cannot be read"),
        ("data.reward=nowhere:f", r"data\.reward: 'nowhere:f' is not found"),
        ("data.reward=null", r"data\.reward: and reward_model"),
        ("data.batch_size=100000", "batch_size"),
        ("model.tokenizer=null", r"model\.tokenizer"),
        ("data.reward=os:sep", r"data\.reward: 'os:sep' is no function"),
        ("model.tokenizer=/nowhere", r"model\.tokenizer: /nowhere cannot be read"),
        ("model.type=qwen99", r"model\.type: 'qwen99' is unknown"),
        ("model.config.hidden_size=abc", r"model\.config: is refused"),
        ("trace.path=/nowhere.csv", "trace: /nowhere.csv cannot be read"),
        ("+stages.plan.actor=3", r"stages\.plan\.actor"),
        ("+stages.plan.cook.training.tp=2", "unknown role 'cook'"),
        ("+stages.plan.actor.training.tq=2", r"plan actor\.training stage plan key 'tq'"),
        ("+stages.plan.actor.training.tp=two", r"plan actor\.training: is"),
        ("+stages.plan.actor.training.devices=3", r"plan actor\.training: is"),
        ("+stages.plan.actor.training={dp: 2, devices: [1]}", r"plan actor\.training devices: 1 devices for dp 2"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, override: str, words: str):
    with pytest.raises(ConfigurationError, match=words):
        job(tmp_path, override)


@pytest.mark.parametrize("override", ["cluster.devices=many", "polcy=nereus", "model=gpt9", "seed=x"])
def test_what_hydra_refuses(override: str):
    with pytest.raises(ConfigCompositionException):
        composed(override)
