"""Every transition of the plan space, executed by symbols: inputs exist, the target is all that is left."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nereus.errors import InfeasiblePlanError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Plan,
    StagePlan,
)
from lightning_nereus.transition import plan_transition
from tests.transition.world import World, plan_space

PLANS = list(plan_space(8))
FIVE = (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, CRITIC_TRAINING, ACTOR_TRAINING)


def topological(graph):
    at = {operation: i for i, operation in enumerate(graph.order)}
    assert len(at) == len(graph.order) == len(graph.primitives)
    assert set(at) == set(graph.primitives)
    for edge in graph.edges:
        assert at[graph.primitives[edge.before]] < at[graph.primitives[edge.after]]


def reaches(current, target):
    graph = plan_transition(current, target)
    topological(graph)
    world = World(current)
    world.run(graph.order)
    world.assert_is(target)
    return graph


def shuffled(plan, seed, pool=8):
    """The same layout and dp on devices drawn from the pool in any order."""
    devices = random.Random(seed).sample(range(pool), len(plan.devices))
    return StagePlan(plan.layout, plan.dp, tuple(devices))


def test_every_pair_in_natural_order():
    assert len({(p.layout, p.dp) for p in PLANS}) == len(PLANS) == 26
    for a, b in itertools.product(PLANS, PLANS):
        graph = reaches(Plan(((ACTOR_TRAINING, a),)), Plan(((ACTOR_TRAINING, b),)))
        assert bool(graph) == (a != b)


def test_every_pair_with_devices_reassigned():
    for seed, (a, b) in enumerate(itertools.product(PLANS, PLANS)):
        reaches(Plan(((ACTOR_TRAINING, shuffled(a, seed)),)), Plan(((ACTOR_TRAINING, shuffled(b, -seed - 1)),)))


stage_plans = st.builds(shuffled, st.sampled_from(PLANS), st.integers(0, 10**6))
plans = st.builds(lambda chosen: Plan(tuple(zip(FIVE, chosen, strict=True))), st.tuples(*[stage_plans] * 5))


@settings(max_examples=60, deadline=None)
@given(plans, plans)
def test_five_model_stages_at_once(current, target):
    try:
        graph = reaches(current, target)
    except InfeasiblePlanError:
        # Only concurrently placed model-stages of one stage can block one another for good.
        assert any(
            a.stage is b.stage and all(set(p[a].devices).isdisjoint(p[b].devices) for p in (current, target))
            for a, b in itertools.combinations(FIVE, 2)
        )
    else:
        assert graph == plan_transition(current, target)
