import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.cost import Calibration, LinkType, OperationClass
from lightning_nereus.errors import ConfigurationError


def test_defaults_are_conservative():
    calibration = Calibration()
    assert all(0 < calibration.efficiency(kind) < 0.7 for kind in OperationClass)
    assert calibration.factor("actor.training") == 1.0


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_one_key_converges(truth, predicted):
    calibration = Calibration()
    for _ in range(12):
        calibration.observe("gemm", predicted * calibration.factor("gemm"), predicted * truth)
    assert calibration.factor("gemm") == pytest.approx(truth, rel=1e-2)
    assert calibration.efficiency(OperationClass.GEMM) == pytest.approx(0.45 / truth, rel=1e-2)


def test_an_outlier_moves_nothing_once_three_were_seen():
    calibration = Calibration()
    for _ in range(6):
        calibration.observe("gemm", calibration.factor("gemm"), 2.0)
    before = calibration.factor("gemm")
    calibration.observe("gemm", before, 200.0)
    assert calibration.factor("gemm") == pytest.approx(before, rel=1e-2)


def test_a_slow_first_step_is_forgotten_at_the_second():
    calibration = Calibration()
    calibration.observe("gemm", 1.0, 50.0)
    for _ in range(8):
        calibration.observe("gemm", calibration.factor("gemm"), 2.0)
    assert calibration.factor("gemm") == pytest.approx(2.0, rel=0.05)


def test_a_lasting_change_is_followed():
    calibration = Calibration()
    for truth in (2.0, 6.0):
        for _ in range(8):
            calibration.observe("p2p.intra", calibration.factor("p2p.intra"), truth)
    assert calibration.factor("p2p.intra") == pytest.approx(6.0, rel=0.05)


def test_parts_are_told_apart_by_plans_with_different_shares():
    calibration = Calibration()
    true = {"actor.training": 3.0, "all_reduce.intra": 8.0}
    plans = [{"actor.training": 10.0}, {"actor.training": 5.0, "all_reduce.intra": 4.0}]
    for _ in range(4):
        for nominal in plans:
            for _ in range(6):
                predicted = {k: v * calibration.factor(k) for k, v in nominal.items()}
                calibration.observe_parts(predicted, sum(v * true[k] for k, v in nominal.items()))
    assert calibration.factor("actor.training") == pytest.approx(3.0, rel=0.05)
    assert calibration.factor("all_reduce.intra") == pytest.approx(8.0, rel=0.1)


def test_unseen_model_stages_take_after_their_stage_then_after_all():
    calibration = Calibration()
    calibration.observe("reference.inference", 1.0, 4.0)
    calibration.observe("actor.training", calibration.factor("actor.training"), 9.0)
    assert calibration.factor("reward.inference") == pytest.approx(4.0, rel=0.01)
    assert calibration.factor("actor.generation") == pytest.approx(6.0, rel=0.01)
    assert calibration.factor("gemm") == 1.0


def test_round_trip_through_json():
    calibration = Calibration()
    calibration.observe_parts({"actor.training": 1.0, "all_reduce.intra": 0.5}, 3.0)
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again.to_dict() == calibration.to_dict()
    assert again.efficiency(OperationClass.ALL_REDUCE, LinkType.INTRA) == calibration.efficiency(
        OperationClass.ALL_REDUCE, LinkType.INTRA
    )
    with pytest.raises(ConfigurationError, match="calibration"):
        Calibration.from_dict({"factors": {"gemm": {}}, "windows": {}})


def test_bad_times_are_refused():
    with pytest.raises(ConfigurationError, match="measured"):
        Calibration().observe("gemm", 1.0, math.nan)
    with pytest.raises(ConfigurationError, match="gemm"):
        Calibration().observe("gemm", -1.0, 1.0)
