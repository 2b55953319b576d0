"""Planner: the plan with the lowest predicted step latency that fits pool and memory (paper §4.2, Eq. 1).

Each model-stage's frontier of options, one choice of options for each stage, and a search over the
three stages that keeps the best so far and leaves out whatever cannot reach it. Stages add up, apart
from two couplings: actor and critic score rows beside reference and reward, and all
model-stages of a device share its memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from lightning_nereus.control.options import Option, OptionSpace
from lightning_nereus.cost import CostModel, LinkType, PlanEstimate
from lightning_nereus.cost.model import Task, makespan
from lightning_nereus.errors import InfeasiblePlanError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Layout, ModelStage, Plan, Stage, StagePlan, Workload

# Predictions that differ by less are the same: sums in another order differ by 1e-16.
TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it is predicted to take."""

    plan: Plan
    estimate: PlanEstimate


@dataclass(frozen=True, slots=True)
class _Choice:
    """One option for each model-stage of one stage."""

    options: tuple[Option, ...]
    scoring: tuple[Task, ...]
    main: tuple[Task, ...]
    seconds: float
    scoring_seconds: float
    moved: float


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
        """The best plan and up to ``k - 1`` others, by predicted step seconds.

        The others are first those that leave the model-stages of one or two stages as they are, which is what
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
        return self._ranked(found, workload, k, transition_seconds)

    def _search(
        self, space: OptionSpace, options: Mapping[ModelStage, Sequence[Option]], k: int, *, by_memory: bool
    ) -> list[_Found]:
        """The best of all, then the best that keep stages of the current plan, then the next best of all."""
        frontier = {m: space.frontier(each, by_memory=by_memory) for m, each in options.items()}
        stages = [stage for stage in Stage if self.cost_model.job.in_stage(stage)]
        choices = {stage: list(self._choices(stage, frontier)) for stage in Stage}
        limit = self.cost_model.memory_limit if by_memory else None
        best = _best(choices, k, limit, self.cost_model)
        kept: list[_Found] = []
        current = space.current
        if current is not None:
            same = {
                stage: [c for c in choices[stage] if all(o.stage_plan == current[o.model_stage] for o in c.options)]
                for stage in stages
            }
            for count in range(1, len(stages)):
                for keep in combinations(stages, count):
                    restricted = {s: same[s] if s in keep else choices[s] for s in Stage}
                    kept += _best(restricted, 1, limit, self.cost_model)
        ranked = (*best[:1], *sorted(kept, key=lambda entry: entry[:2]), *best[1:])
        distinct: dict[tuple[StagePlan, ...], _Found] = {}
        for entry in ranked:
            distinct.setdefault(tuple(option.stage_plan for option in entry[2]), entry)
        return list(distinct.values())

    def _choices(self, stage: Stage, frontier: Mapping[ModelStage, Sequence[Option]]) -> Iterator[_Choice]:
        model, members = self.cost_model, self.cost_model.job.in_stage(stage)
        for options in product(*(frontier[m] for m in members)):
            scoring: list[Task] = []
            main: list[Task] = []
            for option in options:
                beside = [o.devices for o in options if o.devices.isdisjoint(option.devices)]
                slowdown = model.slowdown(option.nodes, len(option.devices.union(*beside)))
                scoring.append((option.devices, option.work.scoring.total(slowdown)))
                main.append((option.devices, option.work.main.total(slowdown)))
            moved = sum(o.moved for o in options)
            yield _Choice(options, tuple(scoring), tuple(main), makespan(main), makespan(scoring), moved)

    def _fit(self, options: Sequence[Option]) -> bool:
        return _fits(options, self.cost_model.memory_limit)

    def _ranked(
        self,
        found: Sequence[_Found],
        workload: Workload,
        k: int,
        transition_seconds: Callable[[Plan], float] | None,
    ) -> list[Candidate]:
        candidates = []
        for _, moved, options in found[: max(k, 1)]:
            plan = Plan(tuple((o.model_stage, o.stage_plan) for o in options))
            candidates.append((Candidate(plan, self.cost_model.estimate(plan, workload)), moved))
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


# (step seconds, rounded so that ties are equal; elements moved; the options of all model-stages)
_Found = tuple[float, float, tuple[Option, ...]]


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


def _best(choices: Mapping[Stage, Sequence[_Choice]], k: int, limit: float | None, model: CostModel) -> list[_Found]:
    """The ``k`` best combinations of choices, exactly: a combination is left out only where a lower bound of its
    seconds is above the k-th best; partial ones also where they overfill a device already."""
    generations = sorted(choices[Stage.GENERATION], key=lambda c: c.seconds + _synchronisation(c, LinkType.INTRA))
    inferences = sorted(choices[Stage.INFERENCE], key=lambda c: (c.seconds, c.moved))
    if not (generations and inferences and choices[Stage.TRAINING]):
        return []
    least_generation = generations[0].seconds + _synchronisation(generations[0], LinkType.INTRA)
    least_inference = inferences[0].seconds
    trainings = sorted(choices[Stage.TRAINING], key=lambda c: c.seconds + max(c.scoring_seconds, least_inference))
    found: list[_Found] = []

    def beyond(seconds: float) -> bool:
        return len(found) == k and seconds > found[-1][0] * (1 + TIE)

    for training in trainings:
        if beyond(training.seconds + max(training.scoring_seconds, least_inference) + least_generation):
            break
        if limit is not None and not _fits(training.options, limit):
            continue
        for inference in inferences:
            if beyond(training.seconds + max(training.scoring_seconds, inference.seconds) + least_generation):
                break
            scored = training.seconds + makespan((*inference.main, *training.scoring))
            if beyond(scored + least_generation):
                continue
            both = (*inference.options, *training.options)
            if limit is not None and not _fits(both, limit):
                continue
            for generation in generations:
                if beyond(scored + generation.seconds + _synchronisation(generation, LinkType.INTRA)):
                    break
                options = (*generation.options, *both)
                seconds = scored + generation.seconds + _synchronisation(generation, _link(options, model))
                if beyond(seconds) or (limit is not None and not _fits(options, limit)):
                    continue
                moved = generation.moved + inference.moved + training.moved
                bisect.insort(found, (float(f"{seconds:.10g}"), moved, options), key=lambda entry: entry[:2])
                del found[k:]
    return found


def _synchronisation(generation: _Choice, link: LinkType) -> float:
    return sum(o.synchronisation.get(link, 0.0) for o in generation.options)


def _link(options: Sequence[Option], model: CostModel) -> LinkType:
    """The link between the actor's training and generation devices."""
    actor = [o.devices for o in options if o.model_stage in (ACTOR_GENERATION, ACTOR_TRAINING)]
    return LinkType.INTER if model.cluster.spans_nodes(tuple(frozenset().union(*actor))) else LinkType.INTRA
