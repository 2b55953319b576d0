"""CostModel: predicted seconds and bytes of a plan, calibrated by what was measured (paper §4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_nereus.cost.calibration import Calibration
from lightning_nereus.cost.latency import Links, Rates, StageSeconds, links_of, stage_seconds
from lightning_nereus.cost.memory import MemoryEstimate, shard_elements, stage_memory
from lightning_nereus.cost.operations import LinkType, OperationClass, collective
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    Cluster,
    JobSpec,
    ModelStage,
    Plan,
    Stage,
    StagePlan,
    Workload,
)


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Predicted seconds of one RL step, and of each model-stage's own work in it.

    ``synchronisation_seconds`` is what the actor's new weights take to reach generation; it is in ``step_seconds``.
    """

    step_seconds: float
    stage_seconds: dict[ModelStage, float]
    synchronisation_seconds: float = 0.0


Task = tuple[frozenset[int], float]


def makespan(tasks: Sequence[Task]) -> float:
    """End of the last task, where each starts, in order, when all its devices are free: tasks that share
    devices take turns, others run at the same time."""
    free: dict[int, float] = {}
    end = 0.0
    for devices, seconds in tasks:
        stop = max((free.get(d, 0.0) for d in devices), default=0.0) + seconds
        free.update(dict.fromkeys(devices, stop))
        end = max(end, stop)
    return end


class CostModel:
    """Predicts; learns through its :class:`Calibration` only.

    Args:
        headroom: share of a device's memory that a plan may fill.
    """

    def __init__(
        self, job: JobSpec, cluster: Cluster, calibration: Calibration | None = None, headroom: float = 0.9
    ) -> None:
        if not 0 < headroom <= 1:
            raise ConfigurationError("headroom", f"{headroom} is no share", "Use a share above 0, at most 1")
        self.job = job
        self.cluster = cluster
        self.calibration = calibration if calibration is not None else Calibration()
        self.headroom = headroom

    def with_calibration(self, calibration: Calibration) -> CostModel:
        """The same model of the same job under other efficiencies."""
        return CostModel(self.job, self.cluster, calibration, self.headroom)

    # Time

    def slowdown(self, nodes: int, active_devices: int) -> float:
        """How many times longer a device computes, where ``active_devices`` share their nodes' compute slots.

        They are on ``nodes`` nodes, or on as many as they need if that is more.
        """
        return float(self.slowdowns(np.array(float(nodes)), np.array(float(active_devices))))

    def slowdowns(self, nodes: NDArray[np.float64], active_devices: NDArray[np.float64]) -> NDArray[np.float64]:
        """:meth:`slowdown` of many at a time."""
        slots = self.cluster.compute_slots
        if not slots:
            return np.ones(np.broadcast_shapes(nodes.shape, active_devices.shape))
        nodes = np.maximum(nodes, np.ceil(active_devices / self.cluster.devices_per_node))
        return np.maximum(1.0, active_devices / (slots * nodes))

    def work(self, model_stage: ModelStage, stage_plan: StagePlan, workload: Workload) -> StageSeconds:
        """Both turns of a model-stage, computation at full rate and with the model-stage's learned factor."""
        return self.work_over(model_stage, stage_plan, workload, links_of(stage_plan, self.cluster))

    def work_over(
        self, model_stage: ModelStage, stage_plan: StagePlan, workload: Workload, links: Links
    ) -> StageSeconds:
        """:meth:`work` where the links are known: devices matter through nothing else."""
        rates = Rates(self.cluster, self.calibration)
        seconds = stage_seconds(self.job, model_stage, stage_plan, workload, links, rates)
        factor = self.calibration.factor(str(model_stage))
        return seconds.slower(factor)

    def stage_latency(
        self, model_stage: ModelStage, stage_plan: StagePlan, workload: Workload, active_devices: int
    ) -> float:
        """Seconds of one model-stage in one RL step, scoring included, with ``active_devices`` at work."""
        work = self.work(model_stage, stage_plan, workload)
        slowdown = self.slowdown(self._nodes(stage_plan.devices), active_devices)
        return work.scoring.total(slowdown) + work.main.total(slowdown)

    def active_devices(self, plan: Plan, model_stage: ModelStage) -> int:
        """Devices at work together with a model-stage: its own, and those of its stage's model-stages beside it."""
        own = set(plan[model_stage].devices)
        beside = [set(p.devices) for m, p in plan.items() if m.stage is model_stage.stage and own.isdisjoint(p.devices)]
        return len(own.union(*beside))

    def estimate(self, plan: Plan, workload: Workload) -> PlanEstimate:
        """The critical path of one RL step.

        Generation; then reference, reward, actor and critic score the rows; then actor and critic train.
        Each of the three waits for the rows of the one before. Within each, model-stages that share a
        device take turns, and others run at the same time. Last, the actor's weights go to generation.
        """
        scoring: dict[ModelStage, float] = {}
        main: dict[ModelStage, float] = {}
        for model_stage, stage_plan in plan.items():
            work = self.work(model_stage, stage_plan, workload)
            slowdown = self.slowdown(self._nodes(stage_plan.devices), self.active_devices(plan, model_stage))
            scoring[model_stage] = work.scoring.total(slowdown)
            main[model_stage] = work.main.total(slowdown)
        devices = {m: frozenset(p.devices) for m, p in plan.items()}
        step = 0.0
        for phase in self.phases(plan, scoring, main):
            step += makespan([(devices[m], seconds) for m, seconds in phase])
        synchronisation = self.synchronisation(plan)
        return PlanEstimate(step + synchronisation, {m: scoring[m] + main[m] for m in plan}, synchronisation)

    @staticmethod
    def phases(
        plan: Plan, scoring: Mapping[ModelStage, float], main: Mapping[ModelStage, float]
    ) -> tuple[list[tuple[ModelStage, float]], ...]:
        """What runs between one exchange of rows and the next, in order."""
        by_stage = {stage: [m for m in plan if m.stage is stage] for stage in Stage}
        return (
            [(m, main[m]) for m in by_stage[Stage.GENERATION]],
            [(m, main[m]) for m in by_stage[Stage.INFERENCE]] + [(m, scoring[m]) for m in by_stage[Stage.TRAINING]],
            [(m, main[m]) for m in by_stage[Stage.TRAINING]],
        )

    def synchronisation(self, plan: Plan) -> float:
        """Seconds that the actor's new weights take: each generation device receives its shard."""
        if ACTOR_GENERATION not in plan or ACTOR_TRAINING not in plan:
            return 0.0
        source, target = plan[ACTOR_TRAINING], plan[ACTOR_GENERATION]
        spans = self.cluster.spans_nodes((*source.devices, *target.devices))
        return self.synchronisation_over(target, LinkType.INTER if spans else LinkType.INTRA)

    def synchronisation_over(self, generation: StagePlan, link: LinkType) -> float:
        """:meth:`synchronisation` where the link between training and generation is known."""
        size = shard_elements(self.job.shape(ACTOR_GENERATION), generation.layout) * self.job.parameter_bytes
        return Rates(self.cluster, self.calibration).seconds(collective(OperationClass.P2P, link, 2, size))

    def _nodes(self, devices: Sequence[int]) -> int:
        return len({self.cluster.node(d) for d in devices})

    # Memory

    @property
    def memory_limit(self) -> float:
        """Bytes that a plan may take of each device."""
        return self.cluster.device.memory_bytes * self.headroom

    def memory(self, plan: Plan, workload: Workload) -> dict[int, MemoryEstimate]:
        """Bytes on each device: every resident model-stage, and the largest transient of them."""
        resident: dict[int, float] = {}
        transient: dict[int, float] = {}
        for model_stage, stage_plan in plan.items():
            share = stage_memory(self.job, model_stage, stage_plan, workload)
            for device in stage_plan.devices:
                resident[device] = resident.get(device, 0.0) + share.resident
                transient[device] = max(transient.get(device, 0.0), share.transient)
        return {device: MemoryEstimate(resident[device], transient[device]) for device in sorted(resident)}

    def fits(self, plan: Plan, workload: Workload) -> bool:
        return self.memory_violation(plan, workload) is None

    def memory_violation(self, plan: Plan, workload: Workload) -> str | None:
        """Which device a plan would overfill most and by how much; None where it fits."""
        memory = self.memory(plan, workload)
        device = max(memory, key=lambda d: (memory[d].total, -d))
        needed, limit = memory[device], self.memory_limit
        if needed.total <= limit:
            return None
        return (
            f"device {device} needs {size_text(needed.total)} ({size_text(needed.resident)} resident, "
            f"{size_text(needed.transient)} at work); {self.headroom:.0%} of "
            f"{size_text(self.cluster.device.memory_bytes)} is {size_text(limit)}"
        )

    # Learning

    def observe_stage(
        self,
        model_stage: ModelStage,
        stage_plan: StagePlan,
        workload: Workload,
        active_devices: int,
        measured_seconds: float,
    ) -> None:
        """Learn from a model-stage's measured seconds in one RL step.

        Its computation moves the model-stage's own factor, its communication those of the collectives'
        classes, each by its share of the predicted time.
        """
        work = self.work(model_stage, stage_plan, workload)
        both = work.scoring + work.main
        slowdown = self.slowdown(self._nodes(stage_plan.devices), active_devices)
        parts = {str(model_stage): both.compute * slowdown, **both.communication}
        self.calibration.observe_parts(parts, measured_seconds)


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 2**20:.3f} MiB"
