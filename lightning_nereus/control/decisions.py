"""Decisions: what the controller found after a step and why, as records that are logged, shown and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightning_nereus.control.monitor import Trigger
from lightning_nereus.job import Plan


class Outcome(StrEnum):
    """What became of a replan."""

    URGENT = "urgent"  # admitted, because the plan in force cannot run on
    OPPORTUNISTIC = "opportunistic"  # admitted, because it pays back
    REJECTED = "rejected"  # a faster plan exists and does not pay back, or cannot be reached
    KEPT = "kept"  # no plan is faster
    INFEASIBLE = "infeasible"  # the plan in force cannot run on, and nothing can take its place


@dataclass(frozen=True, slots=True)
class Proposal:
    """A target plan with its predicted figures and what was said of it.

    ``step_seconds`` of an RL step under it, ``transition_seconds`` and ``transition_bytes`` of reaching it.
    """

    plan: Plan
    step_seconds: float
    transition_seconds: float
    transition_bytes: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "step_seconds": self.step_seconds,
            "transition_seconds": self.transition_seconds,
            "transition_bytes": self.transition_bytes,
            "verdict": self.verdict,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Proposal:
        return cls(**{**data, "plan": Plan.from_dict(data["plan"])})


@dataclass(frozen=True, slots=True)
class Decision:
    """One replan: why, from which plan, to which target, and what was turned down on the way.

    ``target`` is the admitted proposal; None where the plan in force stays. ``current_seconds`` is None where
    the plan in force cannot run. ``horizon`` is H in steps; ``note`` says why there is no target to speak of;
    ``stranded`` that the plan in force uses devices that leave.
    """

    trigger: Trigger
    outcome: Outcome
    current: Plan
    current_seconds: float | None
    horizon: float
    target: Proposal | None = None
    rejected: tuple[Proposal, ...] = ()
    note: str = "no plan is predicted to be faster"
    stranded: bool = False

    @property
    def admitted(self) -> bool:
        return self.target is not None

    @property
    def reason(self) -> str:
        """Why it went as it did, for people."""
        if self.target is not None:
            return self.target.verdict
        return self.rejected[0].verdict if self.rejected else self.note

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "trigger": self.trigger.to_dict(),
            "outcome": str(self.outcome),
            "current": self.current.to_dict(),
            "current_seconds": self.current_seconds,
            "horizon": self.horizon,
            "target": self.target.to_dict() if self.target else None,
            "rejected": [proposal.to_dict() for proposal in self.rejected],
            "note": self.note,
            "stranded": self.stranded,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """Inverse of :meth:`to_dict`."""
        return cls(
            Trigger.from_dict(data["trigger"]),
            Outcome(data["outcome"]),
            Plan.from_dict(data["current"]),
            data["current_seconds"],
            data["horizon"],
            Proposal.from_dict(data["target"]) if data["target"] else None,
            tuple(Proposal.from_dict(proposal) for proposal in data["rejected"]),
            data["note"],
            data["stranded"],
        )
