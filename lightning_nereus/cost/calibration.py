"""Calibration: how far measured times are from peak rates, learned while the job runs (paper §4.2).

A key names what shares a factor (measured / predicted seconds at the default efficiency):

- an operation class, ``gemm`` or ``all_reduce.intra``: from timings of kernels and collectives;
- a model-stage, ``actor.training``: what its computation is slower than its classes say, from stage timings;
- anything else whose predictions are off by a factor, ``transition``.

A stage's time is a sum of parts under several keys. :meth:`Calibration.observe_parts` moves each
factor by its share of the sum and by how little is known of it (a Kalman filter on logarithms, without
covariances): under one plan the sum converges to the measurement; plans with different shares of
communication tell the parts apart, and what one plan has shown is not unlearned under the next.
Outliers are held off by a median over the latest measurements of the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low
from typing import Any

from lightning_nereus.cost.operations import LinkType, OperationClass
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ModelStage, Stage

# What a class reaches until it was measured: below what good kernels reach, so that plans are not oversold.
DEFAULT_EFFICIENCY: Mapping[OperationClass, float] = {
    OperationClass.GEMM: 0.45,
    OperationClass.ATTENTION_PREFILL: 0.3,
    OperationClass.ATTENTION_DECODE: 0.5,
    OperationClass.LOGITS: 0.4,
    OperationClass.ELEMENTWISE: 0.5,
    OperationClass.OPTIMIZER: 0.5,
    OperationClass.ALL_REDUCE: 0.6,
    OperationClass.ALL_GATHER: 0.6,
    OperationClass.REDUCE_SCATTER: 0.6,
    OperationClass.BROADCAST: 0.6,
    OperationClass.P2P: 0.6,
}

# Variance of a logarithm's default (a factor of e either way is ordinary), of a measured step time
# (5%), and of what changes from one measurement to the next. The last two being equal, a known factor goes
# 62% of the way at each measurement: noise is averaged over a few, a change is followed within five.
UNSEEN_VARIANCE = 1.0
MEASUREMENT_VARIANCE = 0.05**2
DRIFT_VARIANCE = MEASUREMENT_VARIANCE
# One outlier among three measurements never is the median; of two, the lower is taken: stalls only add time.
WINDOW = 3
# No factor leaves this range: a unit mistaken in a peak is within it, a broken clock is not.
LARGEST_FACTOR = 1e5


class Calibration:
    """Learned factors by key. Mutable: it is one of the three places where state lives."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._variances: dict[str, float] = {}
        self._windows: dict[str, list[float]] = {}

    def factor(self, key: str) -> float:
        """Measured over predicted seconds of a key; of an unseen model-stage what its nearest relatives show.

        Relatives are the model-stages seen in the same stage, else all seen (their geometric mean).
        Anything else unseen is 1.
        """
        log = self._logs.get(key)
        if log is None:
            log = self._of_relatives(key)
        return math.exp(log)

    def efficiency(self, kind: OperationClass, link: LinkType | None = None) -> float:
        """Share of the peak that a class reaches."""
        key = str(kind) if link is None else f"{kind}.{link}"
        return DEFAULT_EFFICIENCY[kind] / self.factor(key)

    def observe(self, key: str, predicted_seconds: float, measured_seconds: float) -> None:
        """Learn from one measurement; ``predicted_seconds`` at the factor as it is now."""
        self.observe_parts({key: predicted_seconds}, measured_seconds)

    def observe_parts(self, predicted_seconds: Mapping[str, float], measured_seconds: float) -> None:
        """Learn from the measured sum of several parts; each predicted at its factor as it is now.

        Raises:
            ConfigurationError: if a time is negative or not finite.
        """
        for name, seconds in (*predicted_seconds.items(), ("measured", measured_seconds)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigurationError(f"seconds of {name}", f"{seconds} is no time", "Give finite seconds from 0")
        parts = {key: seconds for key, seconds in predicted_seconds.items() if seconds > 0}
        total = sum(parts.values())
        if total <= 0 or measured_seconds <= 0:
            return
        # The window compares measurements with what no learning touches, so that it outlives the learning.
        source = "+".join(sorted(parts))
        base = sum(seconds / self.factor(key) for key, seconds in parts.items())
        window = [*self._windows.get(source, []), math.log(measured_seconds / base)][-WINDOW:]
        self._windows[source] = window
        error = math.log(base / total) + median_low(window)
        shares = {key: seconds / total for key, seconds in parts.items()}
        variances = {key: self._variances.get(key, UNSEEN_VARIANCE) + DRIFT_VARIANCE for key in shares}
        norm = MEASUREMENT_VARIANCE + sum(variances[key] * share * share for key, share in shares.items())
        before = {key: math.log(self.factor(key)) for key in shares}
        bound = math.log(LARGEST_FACTOR)
        for key, share in shares.items():
            gain = variances[key] * share / norm
            self._logs[key] = min(max(before[key] + gain * error, -bound), bound)
            self._variances[key] = variances[key] * (1 - gain * share)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe state."""
        return {
            "factors": {key: {"log": log, "variance": self._variances[key]} for key, log in self._logs.items()},
            "windows": {source: list(window) for source, window in self._windows.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigurationError: if ``data`` is no such state.
        """
        calibration = cls()
        try:
            for key, entry in data["factors"].items():
                calibration._logs[key] = float(entry["log"])
                calibration._variances[key] = float(entry["variance"])
            calibration._windows = {s: [float(x) for x in w] for s, w in data["windows"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                "calibration", f"is not readable ({error!r})", "Give what to_dict wrote"
            ) from error
        return calibration

    def copy(self) -> Calibration:
        return Calibration.from_dict(self.to_dict())

    def _of_relatives(self, key: str) -> float:
        stage = _stage_of(key)
        if stage is None:
            return 0.0
        relatives = {other: log for other, log in self._logs.items() if _stage_of(other) is not None}
        near = [log for other, log in relatives.items() if _stage_of(other) is stage] or list(relatives.values())
        return sum(near) / len(near) if near else 0.0


def _stage_of(key: str) -> Stage | None:
    """The stage of a model-stage's key; None for other keys."""
    try:
        return ModelStage.parse(key).stage
    except ConfigurationError:
        return None
