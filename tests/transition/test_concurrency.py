"""Model-stages that wait for one another's devices (paper §6.1, Fig. 1b, Fig. 6)."""

import re

import pytest

from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelShape,
    ModelStage,
    Plan,
    Role,
    Stage,
    StagePlan,
)
from lightning_nereus.transition import (
    Destroy,
    Extend,
    MemoryBound,
    Merge,
    Split,
    peak_memory,
    plan_transition,
    shard_bytes,
    shard_map_of,
)
from lightning_nereus.transition.primitives import joined
from tests.transition.world import SHARD_MAP, World


def blocks(first, count, size):
    return [tuple(range(first + i * size, first + (i + 1) * size)) for i in range(count)]


def stage(tp, pp, sub, groups):
    """A stage plan whose units are joined from runs of sub-units."""
    layout = Layout(tp, pp)
    each = layout.size // sub.size
    unit_groups = [groups[i : i + each] for i in range(0, len(groups), each)]
    devices = tuple(d for members in unit_groups for d in joined(members, sub, layout))
    return StagePlan(layout, len(unit_groups), devices)


def figure_6():
    """Fig. 6: 96 GPUs, numbered from 1; reward gives GPUs 49-64 to actor generation and critic training."""
    actor, reward, critic = Layout(2, 2), Layout(4, 2), Layout(1, 2)
    current = {
        ACTOR_GENERATION: stage(2, 4, actor, blocks(1, 8, 4)),
        REWARD_INFERENCE: stage(4, 8, reward, blocks(33, 4, 8)),
        CRITIC_TRAINING: stage(1, 4, critic, blocks(65, 16, 2)),
    }
    target = {
        ACTOR_GENERATION: stage(4, 2, actor, blocks(1, 8, 4) + blocks(49, 4, 4)),
        REWARD_INFERENCE: stage(8, 2, reward, blocks(33, 2, 8)),
        CRITIC_TRAINING: stage(1, 2, critic, blocks(49, 24, 2)),
    }
    return Plan.of(current), Plan.of(target)


def test_figure_6():
    current, target = figure_6()
    assert [current[m].dp for m in current] == [4, 1, 8]
    assert [target[m].dp for m in target] == [6, 1, 24]
    graph = plan_transition(current, target)

    def count(model_stage):
        mine = [type(o) for o in graph.primitives if o.model_stage == model_stage]
        return [mine.count(kind) for kind in (Split, Destroy, Extend, Merge)]

    assert count(ACTOR_GENERATION) == [4, 0, 4, 6]
    assert count(REWARD_INFERENCE) == [1, 2, 0, 1]
    assert count(CRITIC_TRAINING) == [8, 0, 8, 0]
    # Each Extend waits for the one reward Destroy that releases its devices, and for nothing else.
    waits = graph.resource_edges
    assert len(waits) == 12
    for release, acquisition in waits:
        assert isinstance(release, Destroy)
        assert release.model_stage == REWARD_INFERENCE
        assert isinstance(acquisition, Extend)
        assert acquisition.acquires <= release.releases
    at = {operation: i for i, operation in enumerate(graph.order)}
    assert all(at[before] < at[after] for before, after in waits)
    # Release before acquire, then stage order.
    extends = [o for o in graph.order if isinstance(o, Extend)]
    assert [o.model_stage for o in extends] == [ACTOR_GENERATION] * 4 + [CRITIC_TRAINING] * 8
    assert max(at[o] for o in graph.order if isinstance(o, Destroy)) < min(at[o] for o in extends)
    shape = ModelShape(layers=16, hidden=16, intermediate=32, heads=16, kv_heads=4, head_dim=2, vocab=64)
    world = World(current, shard_map_of(shape))
    world.run(graph.order)
    world.assert_is(target)


def test_figure_1b_critic_waits_for_the_actor_replica_to_go():
    two = Layout(2)
    current = Plan.of(
        {CRITIC_TRAINING: StagePlan(two, 1, (0, 1)), ACTOR_TRAINING: StagePlan(two, 3, tuple(range(2, 8)))}
    )
    target = Plan.of(
        {CRITIC_TRAINING: StagePlan(two, 2, (0, 1, 6, 7)), ACTOR_TRAINING: StagePlan(two, 2, tuple(range(2, 6)))}
    )
    graph = plan_transition(current, target)
    ((release, acquisition),) = graph.resource_edges
    assert str(release) == "Destroy actor.training tp2 pp1 [6, 7]"
    assert str(acquisition) == "Extend critic.training tp2 pp1 [0, 1] to [6, 7]"
    assert graph.order == (release, acquisition)


def test_stages_that_share_devices_wait_only_for_memory():
    current = Plan.uniform((ACTOR_GENERATION, ACTOR_TRAINING), StagePlan(Layout(), 1, (0,)))
    target = Plan.uniform((ACTOR_GENERATION, ACTOR_TRAINING), StagePlan(Layout(), 1, (1,)))
    assert not plan_transition(current, target).resource_edges


def test_two_stages_swap_devices_because_they_take_turns():
    one, other = StagePlan(Layout(), 1, (0,)), StagePlan(Layout(), 1, (1,))
    current = Plan.of({ACTOR_GENERATION: one, ACTOR_TRAINING: other})
    target = Plan.of({ACTOR_GENERATION: other, ACTOR_TRAINING: one})
    graph = plan_transition(current, target)
    assert len(graph.resource_edges) == 1
    world = World(current)
    world.run(graph.order)
    world.assert_is(target)


ROTATING = (REFERENCE_INFERENCE, REWARD_INFERENCE, ModelStage(Role.CRITIC, Stage.INFERENCE))


def rotation():
    """Three model-stages of one stage, one device each, all move on by one."""
    current = Plan.of({m: StagePlan(Layout(), 1, (i,)) for i, m in enumerate(ROTATING)})
    target = Plan.of({m: StagePlan(Layout(), 1, ((i + 1) % 3,)) for i, m in enumerate(ROTATING)})
    return current, target


def bound(capacity, model_stages=ROTATING):
    ones = dict.fromkeys(model_stages, 1.0)
    return MemoryBound(capacity, shard_bytes(dict.fromkeys(model_stages, SHARD_MAP), ones), headroom=1.0)


def test_rotation_names_the_chain():
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_transition(*rotation())
    message = str(caught.value)
    assert "needs devices" in message
    for model_stage in ROTATING:
        assert f"Destroy {model_stage}" in message
        assert f"Extend {model_stage}" in message
    assert len(re.findall("which waits for", message)) == 5


def test_rotation_is_solved_where_two_models_fit_on_one_device():
    whole = SHARD_MAP.elements(Layout(), 0)
    current, target = rotation()
    graph = plan_transition(current, target, memory=bound(2 * whole))
    assert max(peak_memory(graph.order, current, bound(2 * whole)).values()) == 2 * whole
    world = World(current)
    world.run(graph.order)
    world.assert_is(target)
    with pytest.raises(InfeasiblePlanError, match=r"on device \d.*which waits for"):
        plan_transition(current, target, memory=bound(2 * whole - 1))


def test_a_chain_of_moves_needs_no_second_model_on_a_device():
    # A free device at the end of the chain: the moves follow one another.
    current = Plan.of({m: StagePlan(Layout(), 1, (i,)) for i, m in enumerate(ROTATING)})
    target = Plan.of({m: StagePlan(Layout(), 1, (i + 1,)) for i, m in enumerate(ROTATING)})
    whole = SHARD_MAP.elements(Layout(), 0)
    graph = plan_transition(current, target, memory=bound(whole))
    assert [o.model_stage for o in graph.order if isinstance(o, Extend)] == list(ROTATING[::-1])
    assert max(peak_memory(graph.order, current, bound(whole)).values()) == whole


def test_the_replica_for_which_others_wait_is_given_up_first():
    # Critic on 0, 1 goes to 4; actor on 2 grows onto 0, and would wait for a copy were 0 critic's last replica.
    current = Plan.of({CRITIC_TRAINING: StagePlan(Layout(), 2, (0, 1)), ACTOR_TRAINING: StagePlan(Layout(), 1, (2,))})
    target = Plan.of({CRITIC_TRAINING: StagePlan(Layout(), 1, (4,)), ACTOR_TRAINING: StagePlan(Layout(), 2, (2, 0))})
    ((release, acquisition),) = plan_transition(current, target).resource_edges
    assert release.releases == acquisition.acquires == {0}
    assert {type(o) for o in plan_transition(current, target).order[:1]} == {Destroy}
    copied = [o.source.devices for o in plan_transition(current, target).order if isinstance(o, Extend)]
    assert sorted(copied) == [(1,), (2,)]


def test_plans_of_different_jobs_are_refused():
    one = StagePlan(Layout(), 1, (0,))
    with pytest.raises(ConfigurationError, match=r"critic\.training"):
        plan_transition(Plan.of({ACTOR_TRAINING: one}), Plan.of({ACTOR_TRAINING: one, CRITIC_TRAINING: one}))
