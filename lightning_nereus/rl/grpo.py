"""Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lightning_nereus.backends.native.sources import ModelSource
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Head, Role
from lightning_nereus.rl.advantages import Scale, group_relative
from lightning_nereus.rl.kl import KLEstimator, check_loss_estimator, kl_loss
from lightning_nereus.rl.losses import Aggregation, aggregation_weights, policy_loss
from lightning_nereus.rl.module import Figures, ModelInput, RLModule, ScheduleUnit, reward_function
from lightning_nereus.rl.rewards import RewardFunction
from lightning_nereus.rl.tokenizer import Tokenizer


class GRPOModule(RLModule):
    """GRPO: a response's advantage is its reward against those of the same prompt.

    Args:
        actor: the policy.
        reward: a function ``reward(prompts, responses, meta) -> numbers``, or a reward model.
        reference: what the KL term holds the policy to; the initial actor when None. Not used with ``kl_coef=0``.
        kl_coef: weight of the KL term in the loss; ``kl_estimator`` k2 or k3.
        clip_low, clip_high: the ratio is kept in ``[1 - clip_low, 1 + clip_high]``.
        aggregation: how token losses become one number; ``scale`` what centred rewards are divided by.

    The other arguments are those of :class:`RLModule`.
    """

    def __init__(
        self,
        actor: ModelInput,
        reward: RewardFunction | ModelInput,
        *,
        reference: ModelInput = None,
        tokenizer: Tokenizer | None = None,
        samples: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        minibatches: int = 1,
        epochs: int = 1,
        lr: float = 1e-6,
        warmup: int = 0,
        schedule_unit: ScheduleUnit | str = ScheduleUnit.RL_STEP,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator | str = KLEstimator.K3,
        aggregation: Aggregation | str = Aggregation.TOKEN_MEAN,
        scale: Scale | str = Scale.GROUP,
        max_grad_norm: float = 1.0,
        seed: int = 0,
    ) -> None:
        sources = {Role.ACTOR: ModelSource(actor, Head.LM, seed)}
        function = reward_function(reward)
        if kl_coef:
            sources[Role.REFERENCE] = ModelSource(actor if reference is None else reference, Head.LM, seed)
        if function is None:
            sources[Role.REWARD] = ModelSource(cast(Any, reward), Head.SCORE, seed + 1)
        super().__init__(
            sources,
            tokenizer=tokenizer,
            samples=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            minibatches=minibatches,
            epochs=epochs,
            learning_rates={Role.ACTOR: lr},
            warmup=warmup,
            schedule_unit=schedule_unit,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        if samples < 2:
            raise ConfigurationError("samples", f"a group of {samples} has nothing to compare with", "Use at least 2")
        self.reward_function = function
        self.clip_low, self.clip_high = clip_low, clip_high
        self.kl_coef, self.kl_estimator = kl_coef, KLEstimator(kl_estimator)
        if kl_coef:
            check_loss_estimator(self.kl_estimator)
        self.aggregation, self.scale = Aggregation(aggregation), Scale(scale)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        rollout = self.sample(batch, self.samples, self.temperature)
        old = self.actor.log_probs(rollout, self.temperature)
        reference = self.reference.log_probs(rollout, self.temperature) if self.kl_coef else None
        rewards = self.score_by(self.reward_function, rollout)
        data = {
            **rollout.model_rows(),
            "old_log_probs": old.result()["log_probs"],
            "advantages": group_relative(rewards, self.samples, self.scale),
            "mask": rollout.response_mask,
        }
        if reference is not None:
            data["reference_log_probs"] = reference.result()["log_probs"]
        figures = Figures()
        for rows in self.minibatch_rows(len(rollout)):
            part = {k: v[rows] if isinstance(v, Tensor) else v for k, v in data.items()}
            part["weights"] = aggregation_weights(part["mask"], self.aggregation, self.max_new_tokens)
            part["means"] = aggregation_weights(part["mask"], Aggregation.TOKEN_MEAN)
            update = self.actor.update(
                part, self._objective, max_grad_norm=self.max_grad_norm, temperature=self.temperature
            )
            figures.add("actor", update.result())
            self.step_schedules(ScheduleUnit.OPTIMIZER_STEP)
        self.finish_step(rollout, rewards, figures.means())

    def _objective(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, mask, weights, means = outputs["log_probs"], rows["mask"], rows["weights"], rows["means"]
        loss, statistics = policy_loss(
            log_probs, rows["old_log_probs"], rows["advantages"], mask, weights, self.clip_low, self.clip_high, means
        )
        if self.kl_coef:
            term, kl = kl_loss(log_probs, rows["reference_log_probs"], mask, weights, self.kl_estimator, means)
            loss, statistics = loss + self.kl_coef * term, {**statistics, **kl}
        entropy = torch.where(mask, outputs["entropy"].detach(), 0.0)
        return loss, {**statistics, "entropy": (entropy * means).sum()}

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self.validate(batch, self.reward_function)
