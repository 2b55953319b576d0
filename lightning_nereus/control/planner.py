"""Planner: the plan with the lowest predicted step latency that fits pool and memory (paper §4.2, Eq. 1).

Each model-stage's frontier of options, one choice of options for each stage, and a search over the
three stages that keeps the best so far and leaves out whatever cannot reach it. Stages add up, apart
from two couplings: actor and critic score rows beside reference and reward, and all
model-stages of a device share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_nereus.control.options import Option, OptionSpace
from lightning_nereus.control.search import TIE, Found, StageChoices, best
from lightning_nereus.cost import CostModel, PlanEstimate
from lightning_nereus.errors import InfeasiblePlanError
from lightning_nereus.job import Layout, ModelStage, Plan, Stage, StagePlan, Workload


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it is predicted to take."""

    plan: Plan
    estimate: PlanEstimate


class Planner:
    """Searches the plan space of one job on its cluster."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model

    def plan(
        self,
        workload: Workload,
        pool: Sequence[int],
        current: Plan | None,
        k: int = 5,
        transition_seconds: Callable[[Plan], float] | None = None,
        layouts: Mapping[ModelStage, Layout] | None = None,
    ) -> list[Candidate]:
        """The ``k`` best plans besides the one in force (and it, where it is among them), by predicted step seconds.

        After the best come first those that leave the model-stages of one or two stages as they are, which is what
        makes a transition cheap, then the next best. Among equals, the one that is cheaper to reach.

        Args:
            current: the plan in force, if any.
            transition_seconds: cost of a transition to a plan; without it, elements that move.
            layouts: the only layout of each model-stage to consider.

        Raises:
            InfeasiblePlanError: if no plan fits.
        """
        space = OptionSpace(self.cost_model, workload, pool, current, layouts)
        options = {m: space.options(m) for m in self.cost_model.job.model_stages}
        found = self._search(space, options, k, by_memory=False)
        if not found or not self._fit(found[0][2]):
            # The fastest plan of all does not fit: slower options that take less memory matter.
            found = self._search(space, options, k, by_memory=True)
        else:
            found = [entry for entry in found if self._fit(entry[2])]
        if not found:
            raise InfeasiblePlanError(self._why(space, options, workload))
        return self._ranked(found, workload, k, current, transition_seconds)

    def _search(
        self, space: OptionSpace, options: Mapping[ModelStage, Sequence[Option]], k: int, *, by_memory: bool
    ) -> list[Found]:
        """The best of all, then the best that keep stages of the current plan, then the next best of all."""
        frontier = {m: space.frontier(each, by_memory=by_memory) for m, each in options.items()}
        stages = [stage for stage in Stage if self.cost_model.job.in_stage(stage)]
        choices = {stage: self._choices(stage, frontier, space.pool) for stage in Stage}
        limit = self.cost_model.memory_limit if by_memory else None
        fastest = best(choices, k + 1, limit, self.cost_model, space.pool)
        kept: list[Found] = []
        current = space.current
        if current is not None:
            as_now = {m: [o for o in each if o.stage_plan == current[m]] for m, each in frontier.items()}
            same = {stage: self._choices(stage, as_now, space.pool) for stage in stages}
            for count in range(1, len(stages)):
                for keep in combinations(stages, count):
                    restricted = {s: same[s] if s in keep else choices[s] for s in Stage}
                    kept += best(restricted, 1, limit, self.cost_model, space.pool)
        ranked = (*fastest[:1], *sorted(kept, key=lambda entry: entry[:2]), *fastest[1:])
        distinct: dict[tuple[StagePlan, ...], Found] = {}
        for entry in ranked:
            distinct.setdefault(tuple(option.stage_plan for option in entry[2]), entry)
        return list(distinct.values())

    def _choices(
        self, stage: Stage, options: Mapping[ModelStage, Sequence[Option]], pool: Sequence[int]
    ) -> StageChoices:
        return StageChoices([options[m] for m in self.cost_model.job.in_stage(stage)], self.cost_model, pool)

    def _fit(self, options: Sequence[Option]) -> bool:
        return _fits(options, self.cost_model.memory_limit)

    def _ranked(
        self,
        found: Sequence[Found],
        workload: Workload,
        k: int,
        current: Plan | None,
        transition_seconds: Callable[[Plan], float] | None,
    ) -> list[Candidate]:
        candidates = []
        for _, moved, options in found:
            plan = Plan(tuple((o.model_stage, o.stage_plan) for o in options))
            if plan != current:
                k -= 1  # the plan in force takes no place of the others
            candidates.append((Candidate(plan, self.cost_model.estimate(plan, workload)), moved))
            if k <= 0:
                break
        candidates.sort(key=lambda entry: entry[0].estimate.step_seconds)
        ranked: list[Candidate] = []
        while candidates:
            first = candidates[0][0].estimate.step_seconds
            tied = [entry for entry in candidates if entry[0].estimate.step_seconds <= first * (1 + TIE)]
            candidates = candidates[len(tied) :]
            if transition_seconds is not None and len(tied) > 1:
                tied = [(candidate, transition_seconds(candidate.plan)) for candidate, _ in tied]
            ranked += [candidate for candidate, _ in sorted(tied, key=lambda entry: entry[1])]
        return ranked

    def _why(self, space: OptionSpace, options: Mapping[ModelStage, Sequence[Option]], workload: Workload) -> str:
        """Why nothing fits: the model-stage without an option, or the smallest plan's overflow."""
        devices = len(space.pool)
        for model_stage, each in options.items():
            if each:
                continue
            plans = space.stage_plans(model_stage)
            if not plans:
                return f"no plan on {devices} devices: no layout of {model_stage} fits; add devices or change the rows"
            smallest = min(
                (Plan(((model_stage, p),)) for p in plans), key=lambda p: _fullest(self.cost_model, p, workload)
            )
            reason = self.cost_model.memory_violation(smallest, workload)
            return f"no plan on {devices} devices: {model_stage} does not fit even as {smallest}: {reason}"
        smallest = Plan.of({m: min(each, key=lambda o: o.memory.total).stage_plan for m, each in options.items()})
        reason = self.cost_model.memory_violation(smallest, workload)
        return f"no plan on {devices} devices fits in memory; the leanest of each model-stage together: {reason}"


def _fullest(model: CostModel, plan: Plan, workload: Workload) -> float:
    return max(memory.total for memory in model.memory(plan, workload).values())


def _fits(options: Sequence[Option], limit: float) -> bool:
    resident: dict[int, float] = {}
    transient: dict[int, float] = {}
    for option in options:
        memory = option.memory
        for device in option.devices:
            resident[device] = resident.get(device, 0.0) + memory.resident
            transient[device] = max(transient.get(device, 0.0), memory.transient)
    return all(resident[d] + transient[d] <= limit for d in resident)
