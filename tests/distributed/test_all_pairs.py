"""Every ordered pair of stage plans on up to 8 ranks: all state after the transition, bit for bit (design §10.2)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, ModelStage, Plan, StagePlan
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.runtime.engine import TransitionEngine
from lightning_nereus.runtime.unit import UnitState
from lightning_nereus.transition import ShardMap, UnitId, keep_resident, plan_transition
from lightning_nereus.transition.shards import Slice
from tests.distributed.ranks import RankPool
from tests.transition.world import SHARD_MAP, plan_space

PLANS = list(plan_space(8))
State = dict[str, dict[str, Tensor]]
KINDS = {"parameters": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float64}


def whole(shard_map: ShardMap) -> State:
    """A model's reference state: every element of every tensor is different."""
    state: State = {}
    start = 0
    for kind, dtype in KINDS.items():
        state[kind] = {}
        for name, spec in shard_map.items():
            count = spec.elements
            state[kind][name] = torch.arange(start, start + count, dtype=dtype).reshape(spec.shape) / 7
            start += count
    return state


def cut_out(reference: State, shard: dict[str, Slice]) -> State:
    return {
        kind: {n: group[n][tuple(slice(a, b) for a, b in box.ranges)].clone() for n, box in shard.items()}
        for kind, group in reference.items()
    }


def held_by(rank: int, plan: Plan, references: dict[ModelStage, State]) -> dict[UnitId, UnitState]:
    states = {}
    for model_stage, stage_plan in plan.items():
        where = stage_plan.locate(rank)
        if where is None:
            continue
        dp_rank, position = where
        unit = UnitId(model_stage, stage_plan.layout, stage_plan.units[dp_rank])
        tensors = cut_out(references[model_stage], SHARD_MAP.shard(unit.layout, position))
        states[unit] = UnitState(unit, position, tensors, {"step": 7.0}, updates=7, version=3)
    return states


def relay(rank: int, communicators: Communicators, pairs: list[tuple[Plan, Plan]]) -> list[str]:
    """Carry out each pair's transition; returns what differs from the reference, as text."""
    stages = sorted({m for current, _ in pairs for m in current})
    references = {m: whole(SHARD_MAP) for m in stages}
    engine = TransitionEngine(rank, dict.fromkeys(stages, SHARD_MAP), communicators)
    wrong = []
    for current, target in pairs:
        states = engine.execute(plan_transition(current, target), held_by(rank, current, references))
        expected = held_by(rank, target, references)
        if set(states) != set(expected):
            wrong.append(f"rank {rank}, {current} -> {target}: units {set(states)} instead of {set(expected)}")
            continue
        for unit, state in states.items():
            other = expected[unit]
            if (state.position, state.scalars, state.updates, state.version) != (other.position, {"step": 7.0}, 7, 3):
                wrong.append(f"rank {rank}, {current} -> {target}: counters of {unit}")
            for kind, group in other.tensors.items():
                if set(state.tensors[kind]) != set(group):
                    wrong.append(f"rank {rank}, {current} -> {target}: names of {kind}")
                wrong.extend(
                    f"rank {rank}, {current} -> {target}: {kind} {name}"
                    for name, tensor in group.items()
                    if not torch.equal(state.tensors[kind][name], tensor)
                )
    return wrong


def differences(ranks: RankPool, pairs: list[tuple[Plan, Plan]]) -> list[str]:
    return [text for wrong in ranks.run(relay, pairs) for text in wrong]


def shuffled(plan: StagePlan, generator: random.Random) -> StagePlan:
    """The same degrees on other devices, in another order."""
    devices = tuple(generator.sample(range(8), len(plan.devices)))
    return StagePlan(plan.layout, plan.dp, devices)


def test_there_are_twenty_six_plans():
    assert len(PLANS) == 26


@pytest.mark.parametrize("first", range(0, 26, 13))
def test_every_pair(ranks: RankPool, first: int):
    pairs = [
        (Plan.of({ACTOR_TRAINING: a}), Plan.of({ACTOR_TRAINING: b})) for a in PLANS[first : first + 13] for b in PLANS
    ]
    assert differences(ranks, pairs) == []


def test_every_pair_on_other_devices(ranks: RankPool):
    generator = random.Random(20)
    pairs = [
        (Plan.of({ACTOR_TRAINING: shuffled(a, generator)}), Plan.of({ACTOR_TRAINING: shuffled(b, generator)}))
        for a in PLANS
        for b in PLANS
    ]
    assert differences(ranks, pairs) == []


def test_pairs_that_keep_what_is_resident(ranks: RankPool):
    pairs = [
        (Plan.of({ACTOR_TRAINING: a}), Plan.of({ACTOR_TRAINING: keep_resident(ACTOR_TRAINING, a, b)}))
        for a in PLANS
        for b in PLANS
    ]
    assert differences(ranks, pairs) == []


def test_two_model_stages_at_once(ranks: RankPool):
    generator = random.Random(5)
    pairs = []
    for _ in range(60):
        a, b, c, d = (shuffled(generator.choice(PLANS), generator) for _ in range(4))
        pairs.append(
            (Plan.of({ACTOR_GENERATION: a, ACTOR_TRAINING: b}), Plan.of({ACTOR_GENERATION: c, ACTOR_TRAINING: d}))
        )
    assert differences(ranks, pairs) == []
