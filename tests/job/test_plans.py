import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Layout, ModelStage, Plan, StagePlan

degrees = st.sampled_from([1, 2, 4, 8])


@given(degrees, degrees, st.integers(1, 6))
def test_units_partition_the_devices(tp, pp, dp):
    stage_plan = StagePlan(Layout(tp, pp), dp, tuple(range(dp * tp * pp)))
    assert [d for unit in stage_plan.units for d in unit] == list(stage_plan.devices)
    for device in stage_plan.devices:
        unit, position = stage_plan.locate(device)
        assert stage_plan.units[unit][position] == device
    assert stage_plan.locate(10_000) is None
    assert StagePlan.from_dict(stage_plan.to_dict()) == stage_plan


@given(degrees, degrees, degrees, degrees)
def test_common_layout_divides_both(a, b, c, d):
    common = Layout(a, b).common(Layout(c, d))
    assert a % common.tp == c % common.tp == b % common.pp == d % common.pp == 0


def test_positions_are_pipeline_major():
    layout = Layout(tp=2, pp=4)
    assert [layout.position(p, t) for p in range(4) for t in range(2)] == list(range(8))
    assert layout.ranks(5) == (2, 1)


def test_plan_iterates_in_stage_order_and_survives_a_round_trip():
    plan = Plan(((ACTOR_TRAINING, StagePlan(Layout(2), 1, (2, 3))), (ACTOR_GENERATION, StagePlan(Layout(), 2, (0, 1)))))
    assert list(plan) == [ACTOR_GENERATION, ACTOR_TRAINING]
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.devices == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Layout(0, 1), "layout.tp"),
        (lambda: StagePlan(Layout(2), 2, (0, 1, 2)), "devices"),
        (lambda: StagePlan(Layout(2), 1, (1, 1)), "devices"),
        (lambda: StagePlan(Layout(), 0, ()), "dp"),
        (lambda: StagePlan.from_dict({"tp": 1, "ep": 2}), "ep"),
        (lambda: ModelStage.parse("judge.training"), "judge"),
        (lambda: ModelStage.parse("actor.dreaming"), "dreaming"),
        (lambda: Plan(()), "plan"),
    ],
)
def test_bad_plans_name_the_field(make, field):
    with pytest.raises(ConfigurationError, match=field):
        make()
