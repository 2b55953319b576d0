"""Plain data that describe a job. Imports without torch."""

from lightning_nereus.job.cluster import Cluster, DeviceSpec, LinkSpec
from lightning_nereus.job.plans import Layout, Plan, Recompute, StagePlan
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
from lightning_nereus.job.shapes import Head, ModelShape
from lightning_nereus.job.spec import JobSpec
from lightning_nereus.job.workload import LengthStats, Workload

__all__ = [
    "ACTOR_GENERATION",
    "ACTOR_TRAINING",
    "CRITIC_TRAINING",
    "REFERENCE_INFERENCE",
    "REWARD_INFERENCE",
    "Cluster",
    "DeviceSpec",
    "Head",
    "JobSpec",
    "Layout",
    "LengthStats",
    "LinkSpec",
    "ModelShape",
    "ModelStage",
    "Plan",
    "Recompute",
    "Role",
    "Stage",
    "StagePlan",
    "Workload",
]
