from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.cost import Calibration, CostModel
from lightning_nereus.cost.model import makespan
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    LengthStats,
    Plan,
    Recompute,
    StagePlan,
)
from tests.cost.jobs import ACTOR, GRPO, PPO, cluster, workload


def on(devices, tp=1, pp=1, **more):
    return StagePlan(Layout(tp, pp), len(devices) // (tp * pp), tuple(devices), **more)


def test_scoring_a_compute_bound_batch_takes_its_flops():
    """Closed form: with huge bandwidth and no launches to speak of, time is FLOPs over the reached rates."""
    spec = cluster()
    spec = replace(spec, device=replace(spec.device, memory_bandwidth=1e30, peak_flops=1e9))
    load = workload(448.0, rows=8)
    tokens = 8 * 512
    weights = ACTOR.layers * (ACTOR.layer_parameters - 2 * ACTOR.hidden)
    gemm = 2 * tokens * weights / (1e9 * 0.45)
    attention = ACTOR.layers * 4 * tokens * 512 * 256 / (1e9 * 0.3)
    logits = 2 * tokens * ACTOR.hidden * ACTOR.vocab / (1e9 * 0.4)
    seconds = CostModel(GRPO, spec).stage_latency(REFERENCE_INFERENCE, on([0]), load, 1)
    assert seconds == pytest.approx(gemm + attention + logits, rel=1e-3)


def test_training_is_scoring_and_three_passes_and_recompute_one_more():
    spec = cluster()
    spec = replace(spec, device=replace(spec.device, memory_bandwidth=1e30, peak_flops=1e9))
    load = workload(256.0, rows=8, minibatches=1)
    model = CostModel(PPO, spec)
    forward = model.stage_latency(REWARD_INFERENCE, on([0]), load, 1)
    kept = model.stage_latency(CRITIC_TRAINING, on([0]), load, 1)
    again = model.stage_latency(CRITIC_TRAINING, on([0], recompute=Recompute.LAYER), load, 1)
    optimizer = 12 * PPO.shape(CRITIC_TRAINING).parameters / (1e9 * 0.5)
    assert kept == pytest.approx(4 * forward + optimizer, rel=1e-3)
    assert again == pytest.approx(5 * forward + optimizer, rel=1e-3)


def test_epochs_repeat_training_and_not_scoring():
    model, load = CostModel(GRPO, cluster()), workload()
    work = model.work(ACTOR_TRAINING, on([0]), load)
    twice = model.work(ACTOR_TRAINING, on([0]), replace(load, epochs=2))
    assert twice.scoring == work.scoring
    assert twice.main.compute == pytest.approx(2 * work.main.compute)


def test_micro_batches_fill_the_pipeline():
    """With large enough micro-batches the bubble is (pp - 1) / m of the work."""
    spec = cluster()
    spec = replace(spec, device=replace(spec.device, memory_bandwidth=1e30, peak_flops=1e9))
    model, load = CostModel(PPO, spec), workload(256.0, rows=16, minibatches=1)
    few, many = (model.work(CRITIC_TRAINING, on(range(4), pp=4, micro_batches=m), load).scoring.compute for m in (1, 8))
    assert few / many == pytest.approx(4 / (11 / 8), rel=1e-2)


def test_the_tail_of_the_lengths_costs_time():
    model = CostModel(GRPO, cluster())
    even = replace(workload(), response_length=LengthStats.of([100.0] * 21))
    tail = replace(workload(), response_length=LengthStats.of([90.0] * 20 + [300.0]))
    assert tail.response_length.mean == even.response_length.mean
    assert model.stage_latency(ACTOR_GENERATION, on([0]), tail, 1) > 1.5 * model.stage_latency(
        ACTOR_GENERATION, on([0]), even, 1
    )


@given(st.floats(10, 4000), st.floats(1, 3), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
def test_longer_responses_never_take_less(length, growth, degrees):
    model = CostModel(PPO, cluster())
    plan = on(range(4), *degrees)
    for model_stage in PPO.model_stages:
        short, long = (model.stage_latency(model_stage, plan, workload(x), 4) for x in (length, length * growth))
        assert short <= long * (1 + 1e-12)


def test_collectives_across_nodes_are_slower():
    model = CostModel(GRPO, cluster(devices_per_node=2, nodes=2))
    inside, across = on([0, 1], tp=2), on([0, 2], tp=2)
    assert model.stage_latency(REFERENCE_INFERENCE, inside, workload(), 2) < model.stage_latency(
        REFERENCE_INFERENCE, across, workload(), 2
    )


def test_shared_slots_slow_computation_down():
    free, shared = CostModel(GRPO, cluster()), CostModel(GRPO, cluster(slots=2))
    alone = free.stage_latency(REFERENCE_INFERENCE, on([0]), workload(), 1)
    assert shared.stage_latency(REFERENCE_INFERENCE, on([0]), workload(), 2) == alone
    assert shared.stage_latency(REFERENCE_INFERENCE, on([0]), workload(), 8) == pytest.approx(4 * alone)
    assert free.stage_latency(REFERENCE_INFERENCE, on([0]), workload(), 8) == alone


def test_makespan_of_conflict_groups():
    a, b, both = frozenset({0}), frozenset({1}), frozenset({0, 1})
    assert makespan([]) == 0
    assert makespan([(a, 3.0), (b, 2.0)]) == 3.0
    assert makespan([(a, 3.0), (a, 2.0)]) == 5.0
    assert makespan([(a, 3.0), (b, 2.0), (both, 1.0), (b, 4.0)]) == 8.0


def test_a_step_is_the_critical_path_of_its_phases():
    model, load = CostModel(PPO, cluster()), workload()
    left, right = on(range(4)), on(range(4, 8))
    apart = Plan.of(
        {
            ACTOR_GENERATION: on(range(8)),
            REFERENCE_INFERENCE: left,
            REWARD_INFERENCE: right,
            ACTOR_TRAINING: left,
            CRITIC_TRAINING: right,
        }
    )
    estimate = model.estimate(apart, load)
    work = {m: model.work(m, p, load) for m, p in apart.items()}
    scoring = {m: w.scoring.total(1) for m, w in work.items()}
    main = {m: w.main.total(1) for m, w in work.items()}
    scored = max(main[REFERENCE_INFERENCE] + scoring[ACTOR_TRAINING], main[REWARD_INFERENCE] + scoring[CRITIC_TRAINING])
    expected = main[ACTOR_GENERATION] + scored + max(main[ACTOR_TRAINING], main[CRITIC_TRAINING])
    assert estimate.step_seconds == pytest.approx(expected + estimate.synchronisation_seconds)
    assert estimate.synchronisation_seconds == pytest.approx(ACTOR.parameters * 4 / (100e9 * 0.6) + 5e-6)
    assert estimate.stage_seconds[ACTOR_TRAINING] == pytest.approx(main[ACTOR_TRAINING] + scoring[ACTOR_TRAINING])
    serial = model.estimate(Plan.of({**apart, REWARD_INFERENCE: left}), load)
    assert serial.step_seconds > estimate.step_seconds
    assert model.active_devices(apart, ACTOR_TRAINING) == 8
    assert model.active_devices(apart.replace(CRITIC_TRAINING, left), ACTOR_TRAINING) == 4


def test_predictions_converge_to_measurements_and_other_plans_follow():
    model, load = CostModel(GRPO, cluster()), workload()
    dp, tp = on(range(2)), on(range(2), tp=2)
    before = model.stage_latency(ACTOR_TRAINING, tp, load, 2)
    measured = 7 * model.stage_latency(ACTOR_TRAINING, dp, load, 2)
    for _ in range(10):
        model.observe_stage(ACTOR_TRAINING, dp, load, 2, measured)
    assert model.stage_latency(ACTOR_TRAINING, dp, load, 2) == pytest.approx(measured, rel=1e-2)
    assert model.stage_latency(ACTOR_TRAINING, tp, load, 2) > 2 * before
    # An outlier in the middle of a run changes next to nothing.
    model.observe_stage(ACTOR_TRAINING, dp, load, 2, 50 * measured)
    assert model.stage_latency(ACTOR_TRAINING, dp, load, 2) == pytest.approx(measured, rel=5e-2)
    assert model.with_calibration(Calibration()).stage_latency(ACTOR_TRAINING, tp, load, 2) == before


def test_a_slow_link_is_learned_from_stage_times_alone():
    spec = cluster()
    slow = replace(spec, intra_link=replace(spec.intra_link, bandwidth=1e9))
    truth, model, load = CostModel(GRPO, slow), CostModel(GRPO, spec), workload()
    for _ in range(4):
        for plan in (on([0]), on(range(4), tp=4)):
            for _ in range(8):
                measured = truth.stage_latency(REFERENCE_INFERENCE, plan, load, 4)
                model.observe_stage(REFERENCE_INFERENCE, plan, load, 4, measured)
    unseen = on(range(2), tp=2)
    assert model.stage_latency(REFERENCE_INFERENCE, unseen, load, 2) == pytest.approx(
        truth.stage_latency(REFERENCE_INFERENCE, unseen, load, 2), rel=0.2
    )


def test_headroom_is_a_share():
    with pytest.raises(ConfigurationError, match="headroom"):
        CostModel(GRPO, cluster(), headroom=1.5)
