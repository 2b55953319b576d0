"""What the planner returns fits, is distinct, in order, and is no worse than any uniform plan."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from lightning_nereus.control.planner import Planner
from lightning_nereus.cost import CostModel
from lightning_nereus.errors import InfeasiblePlanError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    JobSpec,
    Layout,
    ModelStage,
    Plan,
    Recompute,
    Role,
    StagePlan,
)
from tests.cost.jobs import ACTOR, GRPO, PPO, cluster, workload


@pytest.mark.parametrize("job", [GRPO, PPO])
@pytest.mark.parametrize("pool", [(0,), (2, 5), (0, 1, 2, 3), tuple(range(8))])
def test_plans_fit_and_come_in_order(job, pool):
    model, work = CostModel(job, cluster()), workload()
    found = Planner(model).plan(work, pool, None, k=4)
    assert len({candidate.plan for candidate in found}) == len(found) > 0
    seconds = [candidate.estimate.step_seconds for candidate in found]
    assert seconds == sorted(seconds)
    for candidate in found:
        assert candidate.plan.devices <= set(pool)
        assert set(candidate.plan) == set(job.model_stages)
        assert model.fits(candidate.plan, work)
        assert candidate.estimate.step_seconds == pytest.approx(model.estimate(candidate.plan, work).step_seconds)


@pytest.mark.parametrize("job", [GRPO, PPO])
def test_no_uniform_plan_is_faster(job):
    model, work = CostModel(job, cluster()), workload()
    best = Planner(model).plan(work, tuple(range(8)), None, k=1)[0]
    for tp, pp in [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4)]:
        dp = 8 // (tp * pp)
        for micro_batches in (1, 2, 4):
            plan = Plan.uniform(job.model_stages, StagePlan(Layout(tp, pp), dp, tuple(range(8)), micro_batches))
            if model.fits(plan, work):
                assert best.estimate.step_seconds <= model.estimate(plan, work).step_seconds * (1 + 1e-9)


def every_stage_plan(model: CostModel, model_stage: ModelStage, rows: int, pool: tuple[int, ...]) -> list[StagePlan]:
    """All layouts, degrees, device subsets, micro-batches and recompute policies of a small pool."""
    found = []
    powers = (1, 2, 4, 8)
    for tp, pp, dp in product(powers, powers, range(1, 5)):
        if tp * pp * dp > len(pool) or rows % dp or pp > model.job.shape(model_stage).layers:
            continue
        training = model_stage in (ACTOR_TRAINING, CRITIC_TRAINING)
        micro_batches = [m for m in powers if rows // dp % m == 0] if model_stage != ACTOR_GENERATION else [1]
        for devices in combinations(pool, tp * pp * dp):
            for micro, recompute in product(micro_batches, Recompute if training else [Recompute.NONE]):
                found.append(StagePlan(Layout(tp, pp), dp, devices, micro, recompute))
    return found


@pytest.mark.parametrize(("memory_gib", "length"), [(80.0, 256.0), (0.5, 256.0), (0.35, 64.0)])
def test_no_plan_of_all_is_faster(memory_gib: float, length: float):
    """Brute force over every subset of three devices, where memory is plenty, and where it is tight."""
    job, pool = JobSpec.of({Role.ACTOR: ACTOR}), (0, 1, 2)
    model = CostModel(job, cluster(memory_gib=memory_gib))
    work = workload(length, rows=8, minibatches=1)
    options = [every_stage_plan(model, m, 8, pool) for m in job.model_stages]
    plans = (Plan(tuple(zip(job.model_stages, each, strict=True))) for each in product(*options))
    fitting = [model.estimate(plan, work).step_seconds for plan in plans if model.fits(plan, work)]
    if not fitting:
        with pytest.raises(InfeasiblePlanError):
            Planner(model).plan(work, pool, None)
        return
    best = Planner(model).plan(work, pool, None, k=1)[0]
    assert best.estimate.step_seconds == pytest.approx(min(fitting), rel=1e-9)


@pytest.mark.parametrize("job", [GRPO, PPO])
def test_plans_stay_distinct_beside_a_current_one(job):
    planner, work = Planner(CostModel(job, cluster())), workload()
    first = planner.plan(work, tuple(range(8)), None, k=1)[0].plan
    found = planner.plan(workload(2048.0), tuple(range(8)), first, k=5)
    assert len({candidate.plan for candidate in found}) == len(found) > 0
    again = planner.plan(work, tuple(range(8)), first, k=1)[0].plan
    assert again == first, "a plan that is the best already is kept"


def test_nothing_fits():
    with pytest.raises(InfeasiblePlanError):
        Planner(CostModel(PPO, cluster(memory_gib=0.01))).plan(workload(), tuple(range(8)), None)
