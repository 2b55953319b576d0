"""Roles, stages and model-stages: what a job is made of (paper §1, §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightning_nereus.errors import ConfigurationError


class Role(StrEnum):
    """A model of the job."""

    ACTOR = "actor"
    CRITIC = "critic"
    REWARD = "reward"
    REFERENCE = "reference"


class Stage(StrEnum):
    """A phase of one RL step, declared in the order in which the phases run."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"

    @property
    def order(self) -> int:
        return list(Stage).index(self)


@dataclass(frozen=True, slots=True)
class ModelStage:
    """One role in one stage: the paper's M."""

    role: Role
    stage: Stage

    def __str__(self) -> str:
        return f"{self.role}.{self.stage}"

    def __lt__(self, other: ModelStage) -> bool:
        return self.sort_key < other.sort_key

    @property
    def sort_key(self) -> tuple[int, int]:
        """Generation before inference before training, then the order of the roles."""
        return self.stage.order, list(Role).index(self.role)

    @classmethod
    def parse(cls, text: str) -> ModelStage:
        """Read ``"actor.generation"``.

        Raises:
            ConfigurationError: if the role or the stage is unknown.
        """
        role, _, stage = str(text).partition(".")
        if role not in list(Role):
            raise ConfigurationError(f"model-stage {text!r}", f"unknown role {role!r}", f"Use one of {', '.join(Role)}")
        if stage not in list(Stage):
            raise ConfigurationError(
                f"model-stage {text!r}", f"unknown stage {stage!r}", f"Write ROLE.STAGE with one of {', '.join(Stage)}"
            )
        return cls(Role(role), Stage(stage))


ACTOR_GENERATION = ModelStage(Role.ACTOR, Stage.GENERATION)
REFERENCE_INFERENCE = ModelStage(Role.REFERENCE, Stage.INFERENCE)
REWARD_INFERENCE = ModelStage(Role.REWARD, Stage.INFERENCE)
CRITIC_TRAINING = ModelStage(Role.CRITIC, Stage.TRAINING)
ACTOR_TRAINING = ModelStage(Role.ACTOR, Stage.TRAINING)
