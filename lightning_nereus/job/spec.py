"""JobSpec: which models a job trains and asks, in which order their stages depend on one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job.roles import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
    Role,
    Stage,
)
from lightning_nereus.job.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The models of a job and their bytes.

    ``parameter_bytes`` are of one parameter (and of its gradient) in the training dtype;
    ``optimizer_bytes`` of the optimizer tensors of one trained parameter (Adam: twice the dtype).
    """

    shapes: tuple[tuple[Role, ModelShape], ...]
    model_stages: tuple[ModelStage, ...]
    parameter_bytes: int = 4
    optimizer_bytes: int = 8

    def __post_init__(self) -> None:
        roles = {role for role, _ in self.shapes}
        for model_stage in self.model_stages:
            if model_stage.role not in roles:
                raise ConfigurationError(
                    f"job.{model_stage}", "has no model", f"Give a model for role {model_stage.role}"
                )
        object.__setattr__(self, "model_stages", tuple(sorted(self.model_stages)))

    @classmethod
    def of(cls, shapes: Mapping[Role, ModelShape], *, parameter_bytes: int = 4, optimizer_bytes: int = 8) -> JobSpec:
        """The model-stages that follow from the roles present (PPO's five, GRPO's two to four)."""
        by_role = {
            Role.ACTOR: (ACTOR_GENERATION, ACTOR_TRAINING),
            Role.REFERENCE: (REFERENCE_INFERENCE,),
            Role.REWARD: (REWARD_INFERENCE,),
            Role.CRITIC: (CRITIC_TRAINING,),
        }
        stages = tuple(m for role in shapes for m in by_role[role])
        return cls(tuple(shapes.items()), stages, parameter_bytes, optimizer_bytes)

    def shape(self, model_stage: ModelStage) -> ModelShape:
        return dict(self.shapes)[model_stage.role]

    def in_stage(self, stage: Stage) -> tuple[ModelStage, ...]:
        return tuple(m for m in self.model_stages if m.stage is stage)

    @staticmethod
    def is_trained(model_stage: ModelStage) -> bool:
        """Whether its units carry gradients and optimizer tensors."""
        return model_stage.stage is Stage.TRAINING
