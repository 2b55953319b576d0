"""Monitor: reads each step's telemetry and says when to replan (paper §4.1), and keeps H (§4.3).

Two kinds of triggers. A changed pool and a predicted memory violation trigger at once. Response length,
achieved compute and achieved communication efficiency trigger when they leave their reference, their
value at the last replan, by more than a relative threshold.

Efficiency is measured seconds over what peak rates say (an uncalibrated prediction, so that
calibration does not hide the drift that it learns). Compute efficiency is read from model-stages whose
plan has neither tensor nor pipeline parallelism; communication efficiency from those that have either,
less what compute drifted by at the same time: a device that throttles slows both, a link only one. A job in which
every model-stage communicates cannot tell the two apart from stage times, and reports communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ModelStage, Plan

# Signals are medians over this many steps, so that one noisy step triggers nothing; references of
# efficiencies are taken when as many steps have run since the last replan.
SMOOTHING_STEPS = 3
# Weight of the newest interval in the moving average of intervals between crossings.
INTERVAL_WEIGHT = 0.5


class Signal(StrEnum):
    """What can trigger a replan."""

    POOL = "pool"
    MEMORY = "memory"
    LENGTH = "length"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class StepTelemetry:
    """What one RL step showed.

    ``pool`` are the devices of the next step; ``lengths`` the response lengths in tokens, one a row;
    ``stage_seconds`` of each model-stage on its slowest rank, waiting for the ranks of its own unit included; empty
    where nothing was measured.
    """

    step: int
    pool: tuple[int, ...]
    lengths: tuple[float, ...]
    prompt_length: float
    stage_seconds: dict[ModelStage, float]
    step_seconds: float

    def __post_init__(self) -> None:
        if not self.pool:
            raise ConfigurationError("telemetry.pool", "is empty", "Give the devices of the next step")
        if not self.lengths:
            raise ConfigurationError("telemetry.lengths", "is empty", "Give the length of at least one response")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Relative drifts that trigger a replan (paper §4.1: 30% for length)."""

    length: float = 0.3
    compute: float = 0.25
    communication: float = 0.25

    def __post_init__(self) -> None:
        for name in ("length", "compute", "communication"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"thresholds.{name}", f"{getattr(self, name)} is not positive", "Use a share above 0, such as 0.3"
                )


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why to replan after ``step``. Urgent: the current plan cannot run on."""

    step: int
    signals: tuple[Signal, ...]
    reason: str
    urgent: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "signals": [str(s) for s in self.signals],
            "reason": self.reason,
            "urgent": self.urgent,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trigger:
        return cls(data["step"], tuple(Signal(s) for s in data["signals"]), data["reason"], data["urgent"])


@dataclass(slots=True)
class _Drift:
    """One smoothed signal and its reference."""

    recent: list[float] = field(default_factory=list)
    reference: float | None = None

    def add(self, value: float) -> None:
        self.recent = [*self.recent, value][-SMOOTHING_STEPS:]

    @property
    def value(self) -> float | None:
        return median(self.recent) if self.recent else None

    @property
    def change(self) -> float:
        """Relative change against the reference; 0 where one of them is missing."""
        if not self.reference or self.value is None:
            return 0.0
        return self.value / self.reference - 1

    def to_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "reference": self.reference}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> _Drift:
        return cls([float(x) for x in data["recent"]], data["reference"])


class Monitor:
    """Keeps references, short moving medians and the intervals between crossings. Mutable."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._pool: tuple[int, ...] | None = None
        self._memory_reported = False
        self._length = _Drift()
        self._compute = _Drift()
        self._communication = _Drift()
        self._last_crossing: dict[Signal, int] = {}
        self._interval: dict[Signal, float] = {}

    def observe(
        self,
        telemetry: StepTelemetry,
        plan: Plan,
        memory_violation: str | None,
        predicted_seconds: Mapping[ModelStage, float],
    ) -> Trigger | None:
        """Take one step in, and say whether to replan after it.

        Args:
            plan: the plan that the step ran under.
            memory_violation: why the plan will not fit the next step's memory, if so.
            predicted_seconds: of each model-stage, by an uncalibrated cost model.
        """
        self._take(telemetry, plan, predicted_seconds)
        reasons: dict[Signal, str] = {}
        lost = sorted(plan.devices - set(telemetry.pool))
        if self._pool is not None and set(telemetry.pool) != set(self._pool):
            reasons[Signal.POOL] = f"the pool went from {len(self._pool)} to {len(telemetry.pool)} devices"
        elif lost:
            reasons[Signal.POOL] = "the pool lacks devices of the plan"
        if lost:
            reasons[Signal.POOL] += f"; the plan uses {lost}, which are not in it"
        self._pool = telemetry.pool
        if memory_violation is not None and not self._memory_reported:
            reasons[Signal.MEMORY] = f"the next step does not fit in memory: {memory_violation}"
        self._memory_reported = memory_violation is not None
        reasons.update(self._drifts())
        if not reasons:
            return None
        for signal in reasons:
            self._cross(signal, telemetry.step)
        urgent = bool(lost) or memory_violation is not None
        return Trigger(telemetry.step, tuple(reasons), "; ".join(reasons.values()), urgent)

    def reset(self) -> None:
        """Make the signals as they are now their references: after every replan, admitted or not (paper §4.1)."""
        self._length.reference = self._length.value
        for drift in (self._compute, self._communication):
            if drift.reference is not None:
                drift.reference = drift.value

    def forget_efficiencies(self) -> None:
        """After a change of plan: efficiencies belong to one, and are taken anew from the steps to come."""
        self._compute, self._communication = _Drift(), _Drift()

    def horizon(self, signals: Iterable[Signal]) -> float:
        """H in steps: the moving average of the intervals between a signal's crossings, 1 before the first
        interval; of several signals the smallest (paper §4.3)."""
        return min((self._interval.get(signal, 1.0) for signal in signals), default=1.0)

    def start(self, pool: tuple[int, ...]) -> None:
        """The pool before the first step, so that a change during it is seen."""
        self._pool = tuple(pool)

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe state."""
        return {
            "pool": None if self._pool is None else list(self._pool),
            "memory_reported": self._memory_reported,
            "length": self._length.to_dict(),
            "compute": self._compute.to_dict(),
            "communication": self._communication.to_dict(),
            "last_crossing": {str(k): v for k, v in self._last_crossing.items()},
            "interval": {str(k): v for k, v in self._interval.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pool = None if state["pool"] is None else tuple(state["pool"])
        self._memory_reported = bool(state["memory_reported"])
        self._length = _Drift.from_dict(state["length"])
        self._compute = _Drift.from_dict(state["compute"])
        self._communication = _Drift.from_dict(state["communication"])
        self._last_crossing = {Signal(k): int(v) for k, v in state["last_crossing"].items()}
        self._interval = {Signal(k): float(v) for k, v in state["interval"].items()}

    def _take(self, telemetry: StepTelemetry, plan: Plan, predicted: Mapping[ModelStage, float]) -> None:
        self._length.add(fmean(telemetry.lengths))
        if self._length.reference is None:
            self._length.reference = self._length.value
        ratios = {
            m: seconds / predicted[m]
            for m, seconds in telemetry.stage_seconds.items()
            if m in plan and seconds > 0 and predicted.get(m, 0.0) > 0
        }
        alone = {m for m in ratios if plan[m].layout.size == 1}
        for drift, stages in ((self._compute, alone), (self._communication, ratios.keys() - alone)):
            if not stages:
                continue
            # Geometric mean: each model-stage's own error of prediction cancels against the reference.
            drift.add(math.exp(fmean(math.log(ratios[m]) for m in sorted(stages))))
            if drift.reference is None and len(drift.recent) == SMOOTHING_STEPS:
                drift.reference = drift.value

    def _drifts(self) -> dict[Signal, str]:
        found: dict[Signal, str] = {}
        limits = self.thresholds
        if abs(self._length.change) > limits.length:
            found[Signal.LENGTH] = f"responses are {self._length.change:+.0%} long against the last replan"
        compute = self._compute.change
        if abs(compute) > limits.compute:
            found[Signal.COMPUTE] = f"computation takes {compute:+.0%} against the last replan"
        communication = (1 + self._communication.change) / (1 + compute) - 1
        if self._communication.reference is not None and abs(communication) > limits.communication:
            found[Signal.COMMUNICATION] = f"stages that communicate take {communication:+.0%} against the last replan"
        return found

    def _cross(self, signal: Signal, step: int) -> None:
        last = self._last_crossing.get(signal)
        self._last_crossing[signal] = step
        if last is None or last >= step:  # the latter of another run
            return
        old = self._interval.get(signal)
        new = float(step - last)
        self._interval[signal] = new if old is None else (1 - INTERVAL_WEIGHT) * old + INTERVAL_WEIGHT * new
