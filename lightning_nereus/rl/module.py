"""RLModule: what every RL algorithm has in common as a LightningModule (design §9).

One RL step is one ``training_step``: sample, score, learn, hand the new weights to generation.
Models live in units that the strategy owns; the module asks for them through handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_nereus.backends.native.sources import ModelSource
from lightning_nereus.backends.sampling import Sampling
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, LengthStats, Plan, Role, Stage, Workload
from lightning_nereus.rl.handles import ActorHandle, CriticHandle, ModelHandle, ScoringHandle, make_handle
from lightning_nereus.rl.rewards import RewardFunction, call_reward
from lightning_nereus.rl.rollout import Rollout
from lightning_nereus.rl.tokenizer import Tokenizer
from lightning_nereus.runtime.job import JobRuntime

ModelInput = Any
"""A name or directory for ``from_pretrained``, a configuration (random weights) or a model."""


def reward_function(reward: Any) -> RewardFunction | None:
    """The reward if it is a function; None for a model, whose classes are callable too."""
    return None if isinstance(reward, torch.nn.Module | type) or not callable(reward) else cast(RewardFunction, reward)


class ScheduleUnit(StrEnum):
    """What a learning-rate schedule counts."""

    RL_STEP = "rl_step"
    OPTIMIZER_STEP = "optimizer_step"


class RLModule(LightningModule):
    """Base of the algorithms. Subclasses say which models they need and write ``training_step``.

    Args:
        sources: the model of each role.
        tokenizer: of the actor; the datamodule's (``trainer.datamodule.tokenizer``) when None.
        samples: responses to each prompt.
        max_new_tokens: response limit.
        temperature: at which responses are drawn and their log-probs taken.
        minibatches: optimizer steps in one pass over a step's rows; ``epochs`` the number of passes.
        learning_rates: of each trained role.
        warmup: length of a linear warm-up, in units of ``schedule_unit``; 0 for a constant rate.
        max_grad_norm: clips the whole model's gradient norm; 0 leaves it.
        seed: of sampling and of the order of rows in minibatches.

    Raises:
        ConfigurationError: naming the field.
    """

    def __init__(
        self,
        sources: Mapping[Role, ModelSource],
        *,
        tokenizer: Tokenizer | None,
        samples: int,
        max_new_tokens: int,
        temperature: float,
        minibatches: int,
        epochs: int,
        learning_rates: Mapping[Role, float],
        warmup: int,
        schedule_unit: ScheduleUnit | str,
        max_grad_norm: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sources = dict(sources)
        for field, value in (("samples", samples), ("max_new_tokens", max_new_tokens), ("epochs", epochs)):
            if value < 1:
                raise ConfigurationError(field, f"{value} is too few", "Use at least 1")
        for role, rate in learning_rates.items():
            if not 0 <= rate < float("inf"):
                raise ConfigurationError(f"learning rate of {role}", f"{rate} is none", "Use a finite rate from 0")
        if not temperature > 0:
            raise ConfigurationError("temperature", f"{temperature} gives no gradient", "Use a temperature above 0")
        self._tokenizer = tokenizer
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.minibatches = minibatches
        self.epochs = epochs
        self.learning_rates = dict(learning_rates)
        self.warmup = warmup
        self.schedule_unit = ScheduleUnit(schedule_unit)
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.lengths: list[int] = []
        """Response lengths of the last RL step, in tokens."""
        self._handles: dict[Role, ModelHandle] = {}
        self._runtime: JobRuntime | None = None

    # What the strategy asks before anything starts

    def check(self, trainer: Trainer) -> None:
        """Refuse a job that cannot run.

        Raises:
            ConfigurationError: batch, lengths or tokenizer that the models cannot take.
        """
        data = self._datamodule(trainer)
        vocabulary = self.sources[Role.ACTOR].shape.vocab
        if self.tokenizer_of(trainer).vocab_size > vocabulary:
            raise ConfigurationError(
                "tokenizer", f"has more tokens than the actor's vocabulary of {vocabulary}", "Use the model's own"
            )
        for role, source in self.sources.items():
            source.shard_map()
            limit = source.shape.max_position
            if data.width + self.max_new_tokens > limit:
                raise ConfigurationError(
                    "max_new_tokens",
                    f"{data.width} prompt tokens and {self.max_new_tokens} new ones pass {role}'s context of {limit}",
                    "Shorten prompts or responses",
                )
        self.workload(trainer)

    def workload(self, trainer: Trainer) -> Workload:
        """The work of one RL step before any response was seen."""
        data = self._datamodule(trainer)
        # Evenly spread up to the limit: an untrained model may answer as long as it may, and a first plan must hold.
        lengths = LengthStats.of(range(1, self.max_new_tokens + 1))
        rows = data.batch_size * self.samples
        validation = data.batch_size if len(data.val_dataloader()) else 0
        return Workload(rows, data.width, lengths, self.max_new_tokens, self.minibatches, self.epochs, validation)

    def check_plan(self, plan: Plan, workload: Workload) -> None:
        """Refuse a plan whose DP degrees or micro-batches do not divide the rows.

        Raises:
            ConfigurationError: naming the model-stage and the degree.
        """
        for model_stage, stage_plan in plan.items():
            micro_batches = stage_plan.micro_batches if model_stage.stage is Stage.TRAINING else 1
            parts = stage_plan.dp * micro_batches
            for total in workload.batches(model_stage.stage):
                if total % parts:
                    raise ConfigurationError(
                        f"plan {model_stage} dp",
                        f"{stage_plan.dp} replicas x {micro_batches} micro-batches do not divide {total} rows",
                        "Use divisors of the batch",
                    )

    def _datamodule(self, trainer: Trainer) -> Any:
        data = getattr(trainer, "datamodule", None)
        if data is None or not hasattr(data, "width") or not hasattr(data, "batch_size"):
            raise ConfigurationError(
                "datamodule", "gives no prompts", "Pass a PromptDataModule: trainer.fit(module, datamodule)"
            )
        return data

    def tokenizer_of(self, trainer: Trainer) -> Tokenizer:
        """The tokenizer of the job.

        Raises:
            ConfigurationError: if neither module nor datamodule has one with an end token.
        """
        tokenizer = self._tokenizer or getattr(self._datamodule(trainer), "tokenizer", None)
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigurationError("tokenizer", "is missing or has no end token", "Give one with eos_token_id")
        return tokenizer

    # The units, while they stand

    def bind(self, runtime: JobRuntime) -> None:
        """Called by the strategy when the units stand."""
        self._runtime = runtime
        self._handles = {role: make_handle(runtime, role) for role in self.sources}

    def unbind(self) -> None:
        self._runtime, self._handles = None, {}

    def _handle(self, role: Role) -> Any:
        if role not in self._handles:
            raise RuntimeError(f"{role} stands between the Trainer's set-up and its teardown only, or the job has none")
        return self._handles[role]

    @property
    def actor(self) -> ActorHandle:
        return self._handle(Role.ACTOR)

    @property
    def critic(self) -> CriticHandle:
        return self._handle(Role.CRITIC)

    @property
    def reference(self) -> ScoringHandle:
        return self._handle(Role.REFERENCE)

    @property
    def reward(self) -> ScoringHandle:
        return self._handle(Role.REWARD)

    # Parts of a step

    def sample(self, batch: Mapping[str, Any], samples: int, temperature: float) -> Rollout:
        """Responses to a batch of prompts from the generation units."""
        tokenizer = self.tokenizer_of(self.trainer)
        end = tokenizer.eos_token_id
        assert end is not None
        pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        sampling = Sampling(self.max_new_tokens, end, pad, temperature)
        return self.actor.generate(
            batch, samples=samples, sampling=sampling, step=self.global_step, seed=self.seed
        ).result()

    def score_by(self, reward: RewardFunction | None, rollout: Rollout) -> Tensor:
        """Rewards [n], float64, of a function (run once a row, where the row was sampled) or of the reward model."""
        if reward is None:
            return self.reward.scores(rollout).result()["scores"].double()
        assert self._runtime is not None
        collection, total = self._runtime.collections[ACTOR_GENERATION], len(rollout)
        mine, local = collection.rows(total), None
        if collection.unit is not None and collection.position == 0:
            part = rollout.select(torch.arange(mine.start, mine.stop))
            tokenizer = self.tokenizer_of(self.trainer)
            local = {"rewards": call_reward(reward, part.prompts, part.text(tokenizer), part.meta)}
        return self._runtime.share_rows(ACTOR_GENERATION, total, local)["rewards"]

    def minibatch_rows(self, rows: int) -> Iterator[Tensor]:
        """Row indices of every optimizer step, from (seed, RL step, pass) alone."""
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.global_step) * 1009 + epoch)
            order = torch.randperm(rows, generator=generator) if self.minibatches > 1 else torch.arange(rows)
            yield from order.chunk(self.minibatches)

    def step_schedules(self, unit: ScheduleUnit) -> None:
        """Advance the learning-rate schedules if ``unit`` is what they count."""
        if unit is self.schedule_unit:
            schedulers = self.lr_schedulers()
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                if scheduler is not None:
                    scheduler.step()  # type: ignore[call-arg]

    def finish_step(self, rollout: Rollout, rewards: Tensor, figures: Mapping[str, float]) -> None:
        """Hand the new weights to generation, count and log the step."""
        assert self._runtime is not None
        self.step_schedules(ScheduleUnit.RL_STEP)
        self._runtime.synchronise_weights()
        self.lengths = rollout.lengths.tolist()
        self.log("reward", rewards.mean(), prog_bar=True)
        self.log("response_length", rollout.lengths.double().mean(), prog_bar=True)
        self.log_dict(dict(figures))

    def validate(self, batch: Mapping[str, Any], reward: RewardFunction | None) -> None:
        """Greedy responses to held-out prompts and their mean reward."""
        rollout = self.sample(batch, 1, 0.0)
        rewards = self.score_by(reward, rollout)
        self.log("val_reward", rewards.mean(), on_epoch=True, batch_size=len(rollout), prog_bar=True)
        self.log("val_response_length", rollout.lengths.double().mean(), on_epoch=True, batch_size=len(rollout))

    def configure_optimizers(self) -> Any:
        """AdamW for each trained role. Override it to return one optimizer over each role's ``parameters()``."""
        optimizers = [
            AdamW(self._handle(r).parameters(), lr=lr, weight_decay=0.0) for r, lr in self.learning_rates.items()
        ]
        if not self.warmup:
            return optimizers
        schedule: Callable[[int], float] = lambda done: min(1.0, (done + 1) / self.warmup)  # noqa: E731
        return optimizers, [LambdaLR(optimizer, schedule) for optimizer in optimizers]


class Figures:
    """Statistics of a step's optimizer steps, averaged."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def add(self, prefix: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            key = f"{prefix}/{name}"
            self._sums[key] = self._sums.get(key, 0.0) + float(value)
            self._count[key] = self._count.get(key, 0) + 1

    def means(self) -> dict[str, float]:
        return {key: total / self._count[key] for key, total in self._sums.items()}
