import itertools

from lightning_nereus.job import ACTOR_TRAINING, Layout, Plan, StagePlan
from lightning_nereus.transition import Extend, Merge, keep_resident, plan_transition
from lightning_nereus.transition.primitives import sub_units, units_of
from tests.transition.test_graph import PLANS, reaches, shuffled


def test_all_that_can_stay_stays():
    for seed, (a, b) in enumerate(itertools.product(PLANS, PLANS)):
        current, asked = shuffled(a, seed), shuffled(b, -seed - 1)
        target = keep_resident(ACTOR_TRAINING, current, asked)
        assert (target.layout, target.dp, sorted(target.devices)) == (asked.layout, asked.dp, sorted(asked.devices))
        graph = reaches(Plan.of({ACTOR_TRAINING: current}), Plan.of({ACTOR_TRAINING: target}))
        sub = current.layout.common(target.layout)
        present = {piece for unit in units_of(ACTOR_TRAINING, current) for piece in sub_units(unit, sub)}
        able = sum(set(piece.devices) <= set(target.devices) for piece in present)
        extends = sum(isinstance(operation, Extend) for operation in graph.primitives)
        assert extends == target.dp * target.layout.size // sub.size - able


def test_a_merge_on_its_own_devices_copies_nothing():
    current, target = StagePlan(Layout(2), 2, (0, 1, 2, 3)), StagePlan(Layout(4), 1, (0, 1, 2, 3))
    target = keep_resident(ACTOR_TRAINING, current, target)
    assert target.devices == (0, 2, 1, 3)
    graph = plan_transition(Plan.of({ACTOR_TRAINING: current}), Plan.of({ACTOR_TRAINING: target}))
    assert [type(operation) for operation in graph.order] == [Merge]
