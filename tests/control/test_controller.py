"""The corridor from telemetry to decision, on plain data: what triggers, what is admitted, what falls back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_nereus.control.controller import Controller, ControllerOptions, Policy
from lightning_nereus.control.decisions import Decision, Outcome, Proposal
from lightning_nereus.control.monitor import Signal, StepTelemetry, Trigger
from lightning_nereus.cost import Calibration, CostModel
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import JobSpec, Layout, LengthStats, Plan, StagePlan
from lightning_nereus.transition import shard_map_of
from tests.cost.jobs import GRPO, PPO, cluster, workload

ALL = tuple(range(8))


def controller(job: JobSpec = GRPO, *, memory_gib: float = 80.0, **options: Any) -> Controller:
    shard_maps = {m: shard_map_of(job.shape(m)) for m in job.model_stages}
    made = Controller(job, cluster(memory_gib=memory_gib), shard_maps, workload(), ControllerOptions(**options))
    return made


class World:
    """A cluster that takes exactly what an uncalibrated model says, times a factor."""

    def __init__(self, made: Controller, factor: float = 1.0) -> None:
        self.model = CostModel(made.cost_model.job, made.cost_model.cluster, Calibration())
        self.factor = factor

    def telemetry(self, step: int, plan: Plan, length: float, pool: tuple[int, ...] = ALL) -> StepTelemetry:
        found = self.model.estimate(plan, workload(length))
        seconds = {m: s * self.factor for m, s in found.stage_seconds.items()}
        return StepTelemetry(step, pool, (length,) * 64, 64.0, seconds, found.step_seconds * self.factor)


def run(made: Controller, lengths: list[float], pools: dict[int, tuple[int, ...]] | None = None, factor: float = 1.0):
    """Decisions over a run whose responses have these lengths."""
    world, plan, pool = World(made, factor), made.initial_plan(ALL), ALL
    assert made.start(pool, plan) is None
    decisions: list[Decision] = []
    for step, length in enumerate(lengths, start=1):
        pool = (pools or {}).get(step, pool)
        decision = made.step(world.telemetry(step, plan, length, pool), plan)
        if decision is not None:
            decisions.append(decision)
            if decision.target is not None:
                plan = decision.target.plan
    return decisions, plan, made


def test_a_steady_run_is_left_alone():
    assert run(controller(), [256.0] * 15)[:2] == ([], controller().initial_plan(ALL))


def test_growing_responses_are_looked_at_and_decisions_survive_json():
    decisions, _, _ = run(controller(), [256.0 * 1.15**step for step in range(25)])
    assert decisions
    assert all(Signal.LENGTH in decision.trigger.signals for decision in decisions)
    for decision in decisions:
        assert Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) == decision
        assert decision.reason


def test_an_admitted_target_is_faster_and_pays_back_within_its_share_of_the_horizon():
    made = controller(PPO)
    slow = Plan.uniform(PPO.model_stages, StagePlan(Layout(8, 1), 1, ALL, 4))
    world = World(made)
    for step in range(1, 4):
        assert made.step(world.telemetry(step, slow, 256.0), slow) is None
    decision = None
    for step in range(4, 12):
        decision = decision or made.step(world.telemetry(step, slow, 2048.0), slow)
    assert decision is not None
    assert decision.outcome is Outcome.OPPORTUNISTIC
    saving = decision.current_seconds - decision.target.step_seconds
    assert 0 < decision.target.transition_seconds <= 0.5 * decision.horizon * saving


def test_a_target_that_does_not_pay_back_falls_back_or_is_rejected_with_figures():
    made = controller(PPO, gamma=1e-9)
    slow = Plan.uniform(PPO.model_stages, StagePlan(Layout(8, 1), 1, ALL, 4))
    world = World(made)
    decision = None
    for step in range(1, 12):
        found = made.step(world.telemetry(step, slow, 256.0 if step < 4 else 2048.0), slow)
        decision = decision or found
    assert decision is not None
    assert decision.outcome is Outcome.REJECTED
    assert not decision.admitted
    assert len(decision.rejected) > 1, "slightly slower candidates are considered"
    assert "pays back in" in decision.reason
    seconds = [proposal.step_seconds for proposal in decision.rejected]
    assert seconds == sorted(seconds)


def test_lost_devices_are_left_at_once():
    decisions, plan, _ = run(controller(PPO), [256.0] * 6, {4: (0, 1, 3, 4, 6, 7)})
    assert [d.outcome for d in decisions] == [Outcome.URGENT]
    assert decisions[0].trigger.step == 4
    assert decisions[0].current_seconds is None
    assert plan.devices <= {0, 1, 3, 4, 6, 7}


def test_a_run_that_starts_outside_its_pool_leaves_at_once():
    made = controller(PPO)
    plan = Plan.uniform(PPO.model_stages, StagePlan(Layout(2, 1), 4, ALL, 4))
    decision = made.start((0, 1, 2, 3), plan, 7)
    assert decision is not None
    assert decision.outcome is Outcome.URGENT
    assert decision.trigger.step == 7
    assert decision.target is not None
    assert decision.target.plan.devices <= {0, 1, 2, 3}
    stranded = controller(PPO, policy="static").start((0, 1), plan)
    assert stranded is not None
    assert (stranded.outcome, stranded.stranded) == (Outcome.INFEASIBLE, True)


def test_a_run_that_resumes_looks_at_its_plan_with_what_it_had_learned():
    made = controller(GRPO, memory_gib=3.0)
    made.load_state_dict(run(controller(GRPO, memory_gib=3.0), [4096.0] * 4)[2].state_dict())
    plan = Plan.uniform(GRPO.model_stages, StagePlan(Layout(), 2, (0, 1)))
    decision = made.start(ALL, plan, 4)
    assert decision is not None
    assert decision.outcome is Outcome.URGENT
    assert "does not fit in memory" in decision.trigger.reason
    fitting = decision.target.plan  # type: ignore[union-attr]
    again = made.start(ALL, fitting, 4)
    assert again is not None
    assert (again.trigger.reason, again.trigger.urgent) == ("the run resumes", False)
    assert made.start(ALL, fitting, 0) is None


def test_lost_devices_are_left_under_the_layouts_in_force_where_no_other_can_be_reached():
    """Every faster target needs a Split for which there is no memory; destroying replicas needs none."""
    made = controller(PPO, memory_gib=1.4)
    plan = Plan.uniform(PPO.model_stages, StagePlan(Layout(1, 2), 4, ALL, 8))
    assert made.cost_model.fits(plan, made.workload)
    decision = made.start((0, 1, 2, 3), plan)
    assert decision is not None
    assert decision.outcome is Outcome.URGENT
    assert decision.target is not None
    assert decision.target.plan.devices <= {0, 1, 2, 3}


def test_a_slower_cluster_is_seen_while_responses_grow():
    made = controller(PPO)
    plan = made.initial_plan(ALL)
    made.start(ALL, plan)
    seen: set[Signal] = set()
    for step in range(1, 31):
        world = World(made, factor=1.0 if step < 8 else 4.0)
        decision = made.step(world.telemetry(step, plan, 128.0 * 1.14**step), plan)
        if decision is not None:
            seen |= set(decision.trigger.signals)
            # The plan in force stays, whatever was decided.
    assert seen & {Signal.COMPUTE, Signal.COMMUNICATION}


def test_a_long_tail_now_and_then_is_no_drift_of_efficiency():
    made = controller(PPO)
    plan = Plan.uniform(PPO.model_stages, StagePlan(Layout(2, 1), 4, ALL, 4))
    made.start(ALL, plan)
    for step in range(1, 40):
        lengths = (256.0,) * 63 + (512.0 if step % 2 else 1536.0,)
        work = replace(workload(), response_length=LengthStats.of(lengths))
        found = CostModel(PPO, cluster(), Calibration()).estimate(plan, work)
        telemetry = StepTelemetry(step, ALL, lengths, 64.0, found.stage_seconds, found.step_seconds)
        decision = made.step(telemetry, plan)
        if decision is not None:
            assert not {Signal.COMPUTE, Signal.COMMUNICATION} & set(decision.trigger.signals)


def test_a_static_run_leaves_no_intervals_behind():
    made = run(controller(PPO, policy="static"), [256.0 * 1.2**step for step in range(12)])[2]
    assert made.monitor.horizon([Signal.LENGTH]) > 1.0


def test_devices_that_come_are_used_if_that_pays():
    decisions, plan, _ = run(controller(PPO, gamma=1.0), [1024.0] * 12, {2: (0, 1, 2, 3), 8: ALL}, factor=60.0)
    assert [d.trigger.signals for d in decisions if d.admitted][-1] == (Signal.POOL,)
    assert plan.devices > {0, 1, 2, 3}


def test_a_predicted_memory_violation_is_urgent_and_mended():
    made = controller(GRPO, memory_gib=3.0)
    lengths = [256.0] * 4 + [4096.0] * 2
    decisions, plan, _ = run(made, lengths)
    urgent = [d for d in decisions if Signal.MEMORY in d.trigger.signals]
    assert urgent
    assert urgent[0].outcome is Outcome.URGENT
    assert "does not fit in memory" in urgent[0].trigger.reason
    assert made.cost_model.fits(plan, workload(4096.0))


def test_what_fits_nowhere_stays_and_says_why():
    made = controller(GRPO, memory_gib=1.2)
    decisions, _, _ = run(made, [256.0, 8000.0, 8000.0])
    assert decisions
    assert {d.outcome for d in decisions} == {Outcome.INFEASIBLE}
    assert not any(d.stranded for d in decisions)
    assert "fit" in decisions[0].reason


def test_a_transition_that_moves_nothing_teaches_nothing_about_those_that_do():
    made = controller(PPO)
    a = Plan.uniform(PPO.model_stages, StagePlan(Layout(2, 1), 4, ALL))
    b = Plan.uniform(PPO.model_stages, StagePlan(Layout(1, 2), 4, ALL))
    none = Plan.uniform(PPO.model_stages, StagePlan(Layout(2, 1), 4, ALL, 4))
    before = made.transition(a, b)[1].seconds
    trigger = Trigger(1, (Signal.MEMORY,), "grown", True)
    for _ in range(3):
        proposal = Proposal(none, 1.0, made.transition(a, none)[1].seconds, 0.0, "")
        made.observe_transition(Decision(trigger, Outcome.URGENT, a, None, 1.0, proposal), 0.03)
    assert made.transition(a, none)[1].seconds == pytest.approx(0.03, rel=0.1)
    assert made.transition(a, b)[1].seconds == pytest.approx(before + 0.02, rel=0.1)


def test_policies():
    lengths = [256.0] * 4 + [2048.0] * 12
    assert run(controller(PPO, policy="static"), lengths)[0] == []
    stranded = run(controller(PPO, policy="static"), lengths[:3], {3: (0, 1)})[0]
    assert [(d.outcome, d.stranded) for d in stranded] == [(Outcome.INFEASIBLE, True)]
    always, _, _ = run(controller(PPO, policy=Policy.ALWAYS, gamma=0.0), lengths)
    every, _, _ = run(controller(PPO, policy="every_k", every=5), lengths)
    assert all(d.outcome in (Outcome.OPPORTUNISTIC, Outcome.KEPT) for d in (*always, *every))
    assert [d.trigger.step for d in every] == [5, 10, 15]


def test_transition_times_are_learned():
    made = controller(PPO)
    a = Plan.uniform(PPO.model_stages, StagePlan(Layout(2, 1), 4, ALL))
    b = Plan.uniform(PPO.model_stages, StagePlan(Layout(1, 2), 4, ALL))
    before = made.transition(a, b)[1].seconds
    trigger = Trigger(1, (Signal.LENGTH,), "longer", False)
    for _ in range(6):
        proposal = Proposal(b, 1.0, made.transition(a, b)[1].seconds, 0.0, "")
        made.observe_transition(Decision(trigger, Outcome.OPPORTUNISTIC, a, 2.0, 1.0, proposal), 3 * before)
    assert made.transition(a, b)[1].seconds == pytest.approx(3 * before, rel=0.15)


def test_state_is_json_and_goes_on_where_it_was():
    lengths = [256.0 * 1.1**step for step in range(16)]
    whole = controller(PPO)
    first, second = controller(PPO), controller(PPO)
    world, plan = World(whole), whole.initial_plan(ALL)
    for step, length in enumerate(lengths, start=1):
        telemetry = world.telemetry(step, plan, length)
        if step == 9:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            # The step after a resume is not learned from.
            whole.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        one = whole.step(telemetry, plan)
        other = (first if step < 9 else second).step(telemetry, plan)
        assert one == other
    assert whole.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "greedy"}, "policy: 'greedy' is unknown"),
        ({"gamma": -0.1}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"every": 0}, "every"),
        ({"fallbacks": -1}, "fallbacks"),
        ({"headroom": 1.5}, "headroom"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        ControllerOptions(**options)
