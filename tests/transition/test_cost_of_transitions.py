"""Memory and time of a transition against counts that know nothing of the code under test."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    Cluster,
    DeviceSpec,
    Layout,
    LinkSpec,
    Plan,
    StagePlan,
)
from lightning_nereus.transition import MemoryBound, estimate, peak_memory, plan_transition, shard_bytes
from tests.transition.test_graph import PLANS, shuffled
from tests.transition.world import SHARD_MAP, World

THREE = (ACTOR_GENERATION, CRITIC_TRAINING, ACTOR_TRAINING)
MAPS = dict.fromkeys(THREE, SHARD_MAP)
ONES = dict.fromkeys(THREE, 1.0)
SLOW, FAST = LinkSpec("slow", 10.0, 1.0), LinkSpec("fast", 1000.0, 0.0)
DEVICE = DeviceSpec("d", 1.0, 1.0, 1e30)


def cluster(nodes=1, per_node=8, intra=FAST, inter=SLOW):
    return Cluster("c", nodes, per_node, DEVICE, intra, inter)


def bound(capacity, headroom=1.0, workspace=0.0):
    return MemoryBound(capacity, shard_bytes(MAPS, ONES), headroom, workspace)


stage_plans = st.builds(shuffled, st.sampled_from(PLANS), st.integers(0, 10**6))
plans = st.builds(lambda chosen: Plan(tuple(zip(THREE, chosen, strict=True))), st.tuples(*[stage_plans] * 3))


def test_moved_bytes_of_every_pair_equal_a_count():
    for seed, (a, b) in enumerate(itertools.product(PLANS, PLANS)):
        current = Plan.of({ACTOR_TRAINING: a})
        target = Plan.of({ACTOR_TRAINING: shuffled(b, seed) if seed % 2 else b})
        graph = plan_transition(current, target)
        world = World(current)
        world.run(graph.order)
        figures = estimate(graph, MAPS, cluster(), bytes_per_element={ACTOR_TRAINING: 12.0})
        assert figures.moved_bytes == 12 * world.received
        assert figures.seconds > 0 or not world.received


@settings(max_examples=60, deadline=None)
@given(plans, plans, st.floats(1.0, 6.0))
def test_an_admitted_order_stays_below_the_bound(current, target, factor):
    """The capacity lies between what the plans themselves need and several times as much."""
    rest = World(current).peaks, World(target).peaks
    capacity = factor * max(max(peaks.values()) for peaks in rest)
    try:
        graph = plan_transition(current, target, memory=bound(capacity))
    except InfeasiblePlanError:
        return
    world = World(current)
    world.run(graph.order)
    world.assert_is(target)
    assert max(world.peaks.values()) <= capacity
    assert peak_memory(graph.order, current, bound(capacity)) == world.peaks


def test_the_bound_refuses_with_figures_and_at_the_byte():
    current = Plan.of({ACTOR_TRAINING: StagePlan(Layout(8), 1, tuple(range(8)))})
    target = Plan.of({ACTOR_TRAINING: StagePlan(Layout(1, 8), 1, tuple(range(8)))})
    graph = plan_transition(current, target)
    world = World(current)
    world.run(graph.order)
    peak = max(world.peaks.values())
    assert plan_transition(current, target, memory=bound(peak)) == graph
    with pytest.raises(
        InfeasiblePlanError, match=r"Merge tp1 pp1 into actor\.training tp1 pp8 .* on device \d, .* 100% of"
    ):
        plan_transition(current, target, memory=bound(peak - 1))
    with pytest.raises(InfeasiblePlanError, match="does not fit"):
        peak_memory(graph.order, current, bound(peak - 1))
    with pytest.raises(InfeasiblePlanError, match="90% of"):
        plan_transition(current, target, memory=bound(peak, headroom=0.9))
    with pytest.raises(InfeasiblePlanError):
        plan_transition(current, target, memory=bound(peak, workspace=1.0))


def test_idle_model_stages_count():
    idle = StagePlan(Layout(), 1, (1,))
    current = Plan.of({ACTOR_TRAINING: StagePlan(Layout(), 1, (0,)), ACTOR_GENERATION: idle})
    target = Plan.of({ACTOR_TRAINING: StagePlan(Layout(), 2, (0, 1)), ACTOR_GENERATION: idle})
    whole = SHARD_MAP.elements(Layout(), 0)
    assert plan_transition(current, target, memory=bound(2 * whole))
    with pytest.raises(InfeasiblePlanError, match="on device 1"):
        plan_transition(current, target, memory=bound(2 * whole - 1))


def test_what_does_not_fit_yet_waits_until_memory_is_free():
    # Both leave a device and take the other's; generation shares it with training in the target plan.
    one, other = StagePlan(Layout(), 2, (0, 1)), StagePlan(Layout(), 1, (2,))
    current = Plan.of({ACTOR_GENERATION: other, ACTOR_TRAINING: one})
    target = Plan.of({ACTOR_GENERATION: StagePlan(Layout(), 2, (2, 0)), ACTOR_TRAINING: StagePlan(Layout(), 1, (1,))})
    whole = SHARD_MAP.elements(Layout(), 0)
    graph = plan_transition(current, target, memory=bound(whole))
    assert peak_memory(graph.order, current, bound(whole)) == {0: whole, 1: whole, 2: whole}


def test_seconds_by_hand():
    whole = SHARD_MAP.elements(Layout(), 0)

    def seconds(current, target, where, **options):
        graph = plan_transition(Plan.of({ACTOR_TRAINING: current}), Plan.of({ACTOR_TRAINING: target}))
        return estimate(graph, MAPS, where, bytes_per_element=ONES, setup_seconds=0.0, **options).seconds

    one, two, four = (StagePlan(Layout(), n, tuple(range(n))) for n in (1, 2, 4))
    assert seconds(one, two, cluster()) == pytest.approx(whole / 1000)
    assert seconds(one, two, cluster(nodes=2, per_node=1)) == pytest.approx(whole / 10 + 1)
    assert seconds(one, two, cluster(), efficiency=0.5) == pytest.approx(whole / 500)
    # Three copies from one source follow one another; from two sources two run at the same time.
    assert seconds(one, four, cluster()) == pytest.approx(3 * whole / 1000)
    assert seconds(two, four, cluster()) == pytest.approx(whole / 1000)
    # Each of two tensor ranks receives the other's shard.
    shards = [SHARD_MAP.elements(Layout(2), position) for position in range(2)]
    assert seconds(StagePlan(Layout(2), 1, (0, 1)), two, cluster()) == pytest.approx(max(shards) / 1000)
    graph = plan_transition(Plan.of({ACTOR_TRAINING: one}), Plan.of({ACTOR_TRAINING: two}))
    slower = estimate(graph, MAPS, cluster(), bytes_per_element=ONES, setup_seconds=2.0)
    assert slower.seconds == pytest.approx(2 + whole / 1000)
    with pytest.raises(ConfigurationError, match="efficiency"):
        estimate(graph, MAPS, cluster(), bytes_per_element=ONES, efficiency=0.0)


def test_bounds_check_themselves():
    for broken in ({"capacity_bytes": 0}, {"headroom": 1.5}, {"workspace_bytes": -1}):
        fields = {"capacity_bytes": 1.0, "bytes_of": shard_bytes(MAPS, ONES)} | broken
        with pytest.raises(ConfigurationError, match=next(iter(broken))):
            MemoryBound(**fields)
