"""Proximal Policy Optimization with a learned critic (Schulman et al. 2017; Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lightning_nereus.backends.native.sources import ModelSource
from lightning_nereus.job import Head, Role
from lightning_nereus.rl.advantages import gae, token_rewards, whiten
from lightning_nereus.rl.kl import KLEstimator, estimate_kl
from lightning_nereus.rl.losses import Aggregation, aggregation_weights, policy_loss, value_loss
from lightning_nereus.rl.module import Figures, ModelInput, RLModule, ScheduleUnit, reward_function
from lightning_nereus.rl.rewards import RewardFunction
from lightning_nereus.rl.tokenizer import Tokenizer


class PPOModule(RLModule):
    """PPO over five model-stages: generation, reference, reward, critic and actor training.

    Args:
        actor: the policy.
        critic: the value model; a score head on the actor's body when None.
        reward: a function ``reward(prompts, responses, meta) -> numbers``, or a reward model.
        reference: what the KL penalty in the rewards holds the policy to; the initial actor when None.
        kl_coef: weight of the penalty (0: no reference model); ``kl_estimator`` its estimate.
        gamma, lam: discount and GAE's lambda over tokens.
        value_clip: how far a value may move from its old one in one step; None does not clip.

    The other arguments are those of :class:`RLModule` and :class:`GRPOModule`.
    """

    def __init__(
        self,
        actor: ModelInput,
        reward: RewardFunction | ModelInput,
        *,
        critic: ModelInput = None,
        reference: ModelInput = None,
        tokenizer: Tokenizer | None = None,
        samples: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        minibatches: int = 1,
        epochs: int = 1,
        lr: float = 1e-6,
        critic_lr: float = 1e-5,
        warmup: int = 0,
        schedule_unit: ScheduleUnit | str = ScheduleUnit.RL_STEP,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        value_clip: float | None = 0.2,
        kl_coef: float = 0.05,
        kl_estimator: KLEstimator | str = KLEstimator.K1,
        gamma: float = 1.0,
        lam: float = 0.95,
        max_grad_norm: float = 1.0,
        seed: int = 0,
    ) -> None:
        sources = {Role.ACTOR: ModelSource(actor, Head.LM, seed)}
        sources[Role.CRITIC] = ModelSource(actor if critic is None else critic, Head.SCORE, seed + 1)
        function = reward_function(reward)
        if function is None:
            sources[Role.REWARD] = ModelSource(cast(Any, reward), Head.SCORE, seed + 2)
        if kl_coef:
            sources[Role.REFERENCE] = ModelSource(actor if reference is None else reference, Head.LM, seed)
        super().__init__(
            sources,
            tokenizer=tokenizer,
            samples=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            minibatches=minibatches,
            epochs=epochs,
            learning_rates={Role.ACTOR: lr, Role.CRITIC: critic_lr},
            warmup=warmup,
            schedule_unit=schedule_unit,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        self.reward_function = function
        self.clip_low, self.clip_high, self.value_clip = clip_low, clip_high, value_clip
        self.kl_coef, self.kl_estimator = kl_coef, KLEstimator(kl_estimator)
        self.gamma, self.lam = gamma, lam

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        rollout = self.sample(batch, self.samples, self.temperature)
        mask = rollout.response_mask
        reference = self.reference.log_probs(rollout, self.temperature) if self.kl_coef else None
        values = self.critic.values(rollout)
        old = self.actor.log_probs(rollout, self.temperature)
        rewards = self.score_by(self.reward_function, rollout)
        old_log_probs, old_values = old.result()["log_probs"], values.result()["values"]
        kl = None
        if reference is not None:
            kl = estimate_kl(old_log_probs, reference.result()["log_probs"], self.kl_estimator)
        advantages, returns = gae(
            token_rewards(rewards, kl, mask, self.kl_coef), old_values.double(), mask, self.gamma, self.lam
        )
        data = {
            **rollout.model_rows(),
            "old_log_probs": old_log_probs,
            "old_values": old_values,
            "advantages": whiten(advantages, mask),
            "returns": returns,
            "mask": mask,
        }
        figures = Figures()
        for rows in self.minibatch_rows(len(rollout)):
            part = {k: v[rows] if isinstance(v, Tensor) else v for k, v in data.items()}
            part["weights"] = aggregation_weights(part["mask"], Aggregation.TOKEN_MEAN)
            critic = self.critic.update(part, self._value_objective, max_grad_norm=self.max_grad_norm)
            actor = self.actor.update(
                part, self._policy_objective, max_grad_norm=self.max_grad_norm, temperature=self.temperature
            )
            figures.add("critic", critic.result())
            figures.add("actor", actor.result())
            self.step_schedules(ScheduleUnit.OPTIMIZER_STEP)
        if kl is not None:
            figures.add("actor", {"reference_kl": float(kl[mask].mean())})
        self.finish_step(rollout, rewards, figures.means())

    def _policy_objective(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, statistics = policy_loss(
            outputs["log_probs"],
            rows["old_log_probs"],
            rows["advantages"],
            rows["mask"],
            rows["weights"],
            self.clip_low,
            self.clip_high,
        )
        entropy = torch.where(rows["mask"], outputs["entropy"].detach(), 0.0)
        return loss, {**statistics, "entropy": (entropy * rows["weights"]).sum()}

    def _value_objective(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(
            outputs["values"], rows["old_values"], rows["returns"], rows["mask"], rows["weights"], self.value_clip
        )

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self.validate(batch, self.reward_function)
