"""What the planner returns fits, is distinct, in order, and is no worse than any uniform plan."""

from __future__ import annotations

import pytest

from lightning_nereus.control.planner import Planner
from lightning_nereus.cost import CostModel
from lightning_nereus.errors import InfeasiblePlanError
from lightning_nereus.job import Layout, Plan, StagePlan
from tests.cost.jobs import GRPO, PPO, cluster, workload


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
