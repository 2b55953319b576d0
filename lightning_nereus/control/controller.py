"""Controller: monitor -> planner -> transition -> admission -> Decision (paper §4, Fig. 4).

A pure function of the telemetry that it is given, apart from three states: references and intervals
(Monitor), efficiencies (Calibration) and the lengths of the last steps. It runs the same in a trainer,
in a simulator and in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lightning_nereus.control.admission import admit
from lightning_nereus.control.decisions import Decision, Outcome, Proposal
from lightning_nereus.control.monitor import SMOOTHING_STEPS, Monitor, Signal, StepTelemetry, Thresholds, Trigger
from lightning_nereus.control.planner import Candidate, Planner
from lightning_nereus.cost import Calibration, CostModel, PlanEstimate
from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import Cluster, JobSpec, Layout, LengthStats, ModelStage, Plan, Workload
from lightning_nereus.transition import (
    MemoryBound,
    ShardMap,
    TransitionEstimate,
    TransitionGraph,
    estimate,
    plan_transition,
    shard_bytes,
)

# Keys under which a calibration keeps measured over predicted seconds of transitions, apart: what every one takes
# (closing and opening groups, building the units anew) and what its primitives take.
OVERHEAD_KEY = "transition.overhead"
PRIMITIVES_KEY = "transition.primitives"
# A transition that moves nothing takes 10 to 30 ms on CPU ranks.
OVERHEAD_SECONDS = 0.01


class Policy(StrEnum):
    """When to look for a plan, and what it takes to adopt one."""

    NEREUS = "nereus"  # on triggers, if it pays back within its horizon
    ALWAYS = "always"  # on triggers, whatever is faster
    EVERY_K = "every_k"  # every so many steps, whatever is faster
    STATIC = "static"  # never


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How to decide.

    ``gamma`` is the share of the horizon within which a transition pays back (paper Eq. 2), ``every`` the
    steps between replans of ``every_k``, ``fallbacks`` the number of targets besides the best that are considered,
    ``headroom`` the share of a device's memory that plans and transitions may fill.
    """

    policy: Policy | str = Policy.NEREUS
    gamma: float = 0.5
    thresholds: Thresholds = field(default_factory=Thresholds)
    every: int = 10
    fallbacks: int = 3
    headroom: float = 0.9

    def __post_init__(self) -> None:
        if self.policy not in list(Policy):
            raise ConfigurationError("policy", f"{self.policy!r} is unknown", f"Use one of {', '.join(Policy)}")
        object.__setattr__(self, "policy", Policy(self.policy))
        if not 0 <= self.gamma <= 1:
            raise ConfigurationError("gamma", f"{self.gamma} is no share", "Use 0 (urgent transitions only) to 1")
        if self.every < 1:
            raise ConfigurationError("every", f"{self.every} is too few", "Use at least 1")
        if self.fallbacks < 0:
            raise ConfigurationError("fallbacks", f"{self.fallbacks} is negative", "Use 0 or more")
        if not 0 < self.headroom <= 1:
            raise ConfigurationError("headroom", f"{self.headroom} is no share", "Use a share above 0, at most 1")


class Controller:
    """Decides after every step whether the job's plan changes.

    Args:
        shard_maps: of every model-stage, for what a transition moves.
        workload: of a step before any response was seen.
    """

    def __init__(
        self,
        job: JobSpec,
        cluster: Cluster,
        shard_maps: Mapping[ModelStage, ShardMap],
        workload: Workload,
        options: ControllerOptions | None = None,
    ) -> None:
        self.options = options or ControllerOptions()
        self.cost_model = CostModel(job, cluster, headroom=self.options.headroom)
        self.planner = Planner(self.cost_model)
        self.monitor = Monitor(self.options.thresholds)
        # What peak rates say, so that learning does not hide the drift that it learns.
        self._peaks = self.cost_model.with_calibration(Calibration())
        self._shard_maps = dict(shard_maps)
        self._moved_bytes = {
            m: float(job.parameter_bytes + (job.optimizer_bytes if job.is_trained(m) else 0)) for m in job.model_stages
        }
        bytes_of = shard_bytes(self._shard_maps, self._moved_bytes)
        self._memory = MemoryBound(cluster.device.memory_bytes, bytes_of, self.options.headroom)
        self._first_workload = workload
        self._lengths: list[tuple[float, ...]] = []
        self._prompt_length = workload.prompt_length
        # The first step under a plan makes its communicators and fills its caches: nothing is learned from it.
        self._unsettled = True

    @property
    def calibration(self) -> Calibration:
        return self.cost_model.calibration

    @property
    def workload(self) -> Workload:
        """The work expected of the next step: lengths as in the last few."""
        if not self._lengths:
            return self._first_workload
        return self._workload([length for step in self._lengths for length in step])

    def start(self, pool: Sequence[int], plan: Plan, step: int = 0) -> Decision | None:
        """Before the first step, of a run or of its resumption: the decision if ``plan`` cannot run, or if the run
        resumes, under a plan that was chosen without what it had learned."""
        self.monitor.start(tuple(pool))
        reasons: dict[Signal, str] = {}
        if lost := sorted(plan.devices - set(pool)):
            reasons[Signal.POOL] = f"the plan uses {lost}, which are not in the pool"
        if violation := self.cost_model.memory_violation(plan, self.workload):
            reasons[Signal.MEMORY] = f"the plan does not fit in memory: {violation}"
        if not reasons and step == 0:
            return None
        text = "; ".join(reasons.values()) or "the run resumes"
        return self._decide(Trigger(step, tuple(reasons), text, bool(reasons)), plan, pool)

    def initial_plan(self, pool: Sequence[int]) -> Plan:
        """The plan to start with.

        Raises:
            InfeasiblePlanError: if no plan fits the pool and its memory.
        """
        return self.planner.plan(self.workload, pool, None, k=1)[0].plan

    def predict(self, plan: Plan) -> PlanEstimate:
        """A step under a plan, at the lengths of the last few steps."""
        return self.cost_model.estimate(plan, self.workload)

    def transition(self, current: Plan, target: Plan) -> tuple[TransitionGraph, TransitionEstimate]:
        """The graph within the memory bound, and what it takes. Every rank gets the same.

        Raises:
            InfeasiblePlanError: if no order of primitives reaches the target within the devices' memory.
        """
        graph = plan_transition(current, target, memory=self._memory)
        found = estimate(graph, self._shard_maps, self.cost_model.cluster, bytes_per_element=self._moved_bytes)
        return graph, replace(found, seconds=sum(self._parts(found).values()))

    def _parts(self, found: TransitionEstimate) -> dict[str, float]:
        factor = self.calibration.factor
        return {
            OVERHEAD_KEY: OVERHEAD_SECONDS * factor(OVERHEAD_KEY),
            PRIMITIVES_KEY: found.seconds * factor(PRIMITIVES_KEY),
        }

    def step(self, telemetry: StepTelemetry, plan: Plan) -> Decision | None:
        """Take one RL step in; the decision if there was reason to replan, else None."""
        self._learn(telemetry, plan)
        violation = self.cost_model.memory_violation(plan, self.workload)
        peaks = self._peaks.estimate(plan, self._workload(telemetry.lengths)).stage_seconds
        seen = replace(telemetry, stage_seconds={}) if self._unsettled else telemetry
        self._unsettled = False
        trigger = self.monitor.observe(seen, plan, violation, peaks)
        if trigger is not None and not self._heeds(trigger, telemetry.pool, plan):
            self.monitor.reset()  # else the same drift would count as another crossing at every step
            trigger = None
        if self.options.policy is Policy.EVERY_K and trigger is None and telemetry.step % self.options.every == 0:
            trigger = Trigger(telemetry.step, (), f"{self.options.every} steps have passed", False)
        return None if trigger is None else self._decide(trigger, plan, telemetry.pool)

    def observe_transition(self, decision: Decision, measured_seconds: float) -> None:
        """Learn from an admitted transition how long transitions take here."""
        assert decision.target is not None
        graph = plan_transition(decision.current, decision.target.plan, memory=self._memory)
        found = estimate(graph, self._shard_maps, self.cost_model.cluster, bytes_per_element=self._moved_bytes)
        self.calibration.observe_parts(self._parts(found), measured_seconds)

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "monitor": self.monitor.state_dict(),
            "calibration": self.calibration.to_dict(),
            "lengths": [list(step) for step in self._lengths],
            "prompt_length": self._prompt_length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.load_state_dict(state["monitor"])
        self.cost_model = self.cost_model.with_calibration(Calibration.from_dict(state["calibration"]))
        self.planner = Planner(self.cost_model)
        self._lengths = [tuple(float(x) for x in step) for step in state["lengths"]]
        self._prompt_length = float(state["prompt_length"])
        self._unsettled = True

    # Parts of a step

    def _workload(self, lengths: Sequence[float]) -> Workload:
        return replace(self._first_workload, prompt_length=self._prompt_length, response_length=LengthStats.of(lengths))

    def _learn(self, telemetry: StepTelemetry, plan: Plan) -> None:
        self._prompt_length = telemetry.prompt_length
        self._lengths = [*self._lengths, telemetry.lengths][-SMOOTHING_STEPS:]
        if self._unsettled:
            return
        workload = self._workload(telemetry.lengths)
        for model_stage, seconds in telemetry.stage_seconds.items():
            active = self.cost_model.active_devices(plan, model_stage)
            self.cost_model.observe_stage(model_stage, plan[model_stage], workload, active, seconds)

    def _heeds(self, trigger: Trigger, pool: Sequence[int], plan: Plan) -> bool:
        match self.options.policy:
            case Policy.STATIC:
                return not plan.devices <= set(pool)
            case Policy.EVERY_K:
                return trigger.urgent
            case _:
                return True

    def _decide(self, trigger: Trigger, plan: Plan, pool: Sequence[int]) -> Decision | None:
        stranded = not plan.devices <= set(pool)
        if self.options.policy is Policy.STATIC:
            if not stranded:
                return None
            note = "policy static changes no plan"
            return Decision(trigger, Outcome.INFEASIBLE, plan, None, 1.0, note=note, stranded=True)
        decision = replace(self._replan(trigger, plan, pool), stranded=stranded)
        self.monitor.reset()
        if decision.admitted:
            self.monitor.forget_efficiencies()
        self._unsettled = decision.admitted
        return decision

    def _replan(self, trigger: Trigger, plan: Plan, pool: Sequence[int]) -> Decision:
        runs = plan.devices <= set(pool) and self.cost_model.fits(plan, self.workload)
        now = self.predict(plan).step_seconds if runs else None
        horizon = self.monitor.horizon(trigger.signals)
        decision = Decision(trigger, Outcome.KEPT, plan, now, horizon)

        def seconds_to(target: Plan) -> float:
            try:
                return self.transition(plan, target)[1].seconds
            except InfeasiblePlanError:
                return math.inf

        rejected: list[Proposal] = []
        note = ""
        for layouts in self._layouts(decision):
            try:
                found = self.planner.plan(self.workload, pool, plan, 1 + self.options.fallbacks, seconds_to, layouts)
            except InfeasiblePlanError as error:
                note = note or str(error)
                continue
            for candidate in found:
                if candidate.plan == plan:
                    continue
                outcome, proposal = self._judge(candidate, decision)
                if outcome is Outcome.KEPT:
                    break  # this one and all that follow are slower than the plan in force
                if outcome is Outcome.REJECTED:
                    rejected.append(proposal)
                    continue
                return replace(decision, outcome=outcome, target=proposal, rejected=tuple(rejected))
        if now is None:
            outcome, note = Outcome.INFEASIBLE, note or "no target can be reached"
        else:
            outcome = Outcome.REJECTED if rejected else Outcome.KEPT
        return replace(decision, outcome=outcome, rejected=tuple(rejected), note=note or decision.note)

    @staticmethod
    def _layouts(decision: Decision) -> Iterator[dict[ModelStage, Layout] | None]:
        """All layouts; then, for a plan that cannot run on, those in force, which need no Split to reach."""
        yield None
        if decision.current_seconds is None:
            yield {model_stage: stage_plan.layout for model_stage, stage_plan in decision.current.items()}

    def _judge(self, candidate: Candidate, decision: Decision) -> tuple[Outcome, Proposal]:
        step_seconds = candidate.estimate.step_seconds
        saving = None if decision.current_seconds is None else decision.current_seconds - step_seconds
        proposal = Proposal(candidate.plan, step_seconds, 0.0, 0.0, "")
        if saving is not None and not saving > 0:
            return Outcome.KEPT, proposal
        try:
            _, cost = self.transition(decision.current, candidate.plan)
        except InfeasiblePlanError as error:
            return Outcome.REJECTED, replace(proposal, verdict=str(error))
        proposal = replace(proposal, transition_seconds=cost.seconds, transition_bytes=cost.moved_bytes)
        if saving is None:
            return Outcome.URGENT, replace(proposal, verdict="the plan in force cannot run on")
        if self.options.policy is not Policy.NEREUS:
            text = f"saves {saving:.4g} s a step; policy {self.options.policy} asks for no more"
            return Outcome.OPPORTUNISTIC, replace(proposal, verdict=text)
        verdict = admit(saving, cost.seconds, decision.horizon, self.options.gamma)
        outcome = Outcome.OPPORTUNISTIC if verdict.admitted else Outcome.REJECTED
        return outcome, replace(proposal, verdict=verdict.reason)
