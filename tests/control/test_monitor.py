"""Triggers: the pool and memory at once, drifts beyond their threshold, references anew after a replan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_nereus.control.monitor import Monitor, Signal, StepTelemetry
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Layout, Plan, StagePlan

PLAN = Plan.uniform((ACTOR_GENERATION, ACTOR_TRAINING), StagePlan(Layout(), 4, (0, 1, 2, 3)))
SECONDS = {ACTOR_GENERATION: 1.0, ACTOR_TRAINING: 1.0}


def observe(
    monitor: Monitor, step: int, length: float = 100.0, pool: tuple[int, ...] = (0, 1, 2, 3), memory=None
) -> Any:
    telemetry = StepTelemetry(step, pool, (length,), 10.0, SECONDS, 2.0)
    return monitor.observe(telemetry, PLAN, memory, SECONDS)


def test_steady_steps_trigger_nothing():
    monitor = Monitor()
    assert [observe(monitor, step) for step in range(12)] == [None] * 12


def test_length_drift_triggers_once_and_not_again_after_a_reset():
    monitor = Monitor()
    for step in range(4):
        assert observe(monitor, step) is None
    triggers = []
    for step in range(4, 14):
        trigger = observe(monitor, step, length=150.0)
        if trigger is not None:
            triggers.append(trigger)
            monitor.reset()
    assert len(triggers) >= 1
    assert triggers[0].signals == (Signal.LENGTH,)
    assert not triggers[0].urgent
    assert observe(monitor, 14, length=150.0) is None


def test_a_lost_device_is_urgent_and_a_new_one_is_not():
    monitor = Monitor()
    monitor.start((0, 1, 2, 3))
    gone = observe(monitor, 0, pool=(0, 1, 2))
    assert gone.signals == (Signal.POOL,)
    assert gone.urgent
    monitor = Monitor()
    monitor.start((0, 1, 2, 3))
    grown = observe(monitor, 0, pool=(0, 1, 2, 3, 4))
    assert grown.signals == (Signal.POOL,)
    assert not grown.urgent


def test_a_memory_violation_is_urgent():
    trigger = observe(Monitor(), 0, memory="device 3 needs 2 GiB of 1 GiB")
    assert trigger.signals == (Signal.MEMORY,)
    assert trigger.urgent
    assert "device 3" in trigger.reason


def test_the_horizon_is_1_before_the_first_interval_and_then_the_smallest():
    monitor = Monitor()
    assert monitor.horizon((Signal.POOL, Signal.LENGTH)) == 1.0
    monitor.start((0, 1, 2, 3))
    for step, pool in ((0, (0, 1, 2, 3, 4)), (8, (0, 1, 2, 3)), (16, (0, 1, 2, 3, 4))):
        observe(monitor, step, pool=pool)
    assert monitor.horizon((Signal.POOL,)) == pytest.approx(8.0)


def test_state_survives_json():
    monitor = Monitor()
    for step in range(5):
        observe(monitor, step)
    again = Monitor()
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.state_dict() == monitor.state_dict()


def test_an_empty_pool_is_refused():
    with pytest.raises(ConfigurationError, match="pool"):
        StepTelemetry(0, (), (1.0,), 1.0, {}, 1.0)
