"""The errors that a user can meet, each raised in one kind of situation."""

from __future__ import annotations


class NereusError(Exception):
    """Base of every error that lightning-nereus raises on purpose."""


class ConfigurationError(NereusError, ValueError):
    """Input that cannot work. Names the field and the mend; raised before anything changes."""

    def __init__(self, field: str, problem: str, mend: str) -> None:
        super().__init__(field, problem, mend)
        self.field = field
        self.problem = problem
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}. {self.mend}"


class InfeasiblePlanError(NereusError):
    """No plan, or no order of primitives, fits the devices and their memory."""


class TransitionError(NereusError):
    """A transition stopped partway, or its check found state that differs from its source."""


class RewardError(NereusError):
    """A reward function raised, or returned something that is no reward."""


class PeerLostError(NereusError):
    """A process of the job died or stopped answering."""
