"""Workload: the batch of one RL step and how long its rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job.roles import Stage


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Response lengths of one RL step, in tokens. ``quantiles`` are evenly spaced from the
    shortest to the longest, so that the tail is kept and not only the mean (design: the tail sets
    the end of generation)."""

    mean: float
    quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.quantiles or not self.mean >= 0:
            raise ConfigurationError("lengths", "is empty or negative", "Give at least one response length")

    @classmethod
    def of(cls, lengths: Sequence[float], points: int = 21) -> LengthStats:
        """Summarise measured lengths."""
        if not lengths:
            raise ConfigurationError("lengths", "is empty", "Give at least one response length")
        ordered = sorted(float(x) for x in lengths)
        last = len(ordered) - 1
        quantiles = tuple(ordered[round(i * last / (points - 1))] for i in range(points))
        return cls(sum(ordered) / len(ordered), quantiles)

    @classmethod
    def constant(cls, length: float) -> LengthStats:
        return cls(float(length), (float(length),))

    @property
    def longest(self) -> float:
        return self.quantiles[-1]

    def quantile(self, share: float) -> float:
        """The length that a share (0 to 1) of the rows does not exceed."""
        return self.quantiles[round(share * (len(self.quantiles) - 1))]

    def scaled(self, factor: float) -> LengthStats:
        return LengthStats(self.mean * factor, tuple(q * factor for q in self.quantiles))


@dataclass(frozen=True, slots=True)
class Workload:
    """One RL step's work. Rows are sampled responses: prompts times samples a prompt.

    ``minibatches`` is the number of optimizer steps that one pass over the rows is cut into and
    ``epochs`` the number of passes; both are part of the update rule and never change with the plan.
    ``validation_rows`` are those of one validation batch, 0 where the job validates nothing: they are sampled and
    scored under the same plan.
    """

    rows: int
    prompt_length: float
    response_length: LengthStats
    max_response_length: int
    minibatches: int = 1
    epochs: int = 1
    validation_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "max_response_length", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"workload.{name}", f"{getattr(self, name)} is too small", "Use at least 1")
        if self.rows % self.minibatches:
            raise ConfigurationError(
                "workload.minibatches",
                f"{self.minibatches} does not divide the {self.rows} rows of a step",
                "Use a divisor",
            )

    def batches(self, stage: Stage) -> tuple[int, ...]:
        """Numbers of rows that a model-stage of ``stage`` is given at a time: what its DP degrees must divide."""
        if stage is Stage.TRAINING:
            return self.rows, self.minibatch_rows
        return (self.rows, self.validation_rows) if self.validation_rows else (self.rows,)

    @property
    def minibatch_rows(self) -> int:
        """Rows of one optimizer step, over all replicas."""
        return self.rows // self.minibatches
