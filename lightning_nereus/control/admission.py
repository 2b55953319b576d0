"""Admission: whether an opportunistic transition pays (paper §4.3, Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a transition is admitted, and the figures that decided."""

    admitted: bool
    reason: str


def admit(saving_seconds: float, transition_seconds: float, horizon: float, gamma: float) -> Verdict:
    """``saving > 0 and L_tran / saving <= gamma * H``.

    Args:
        saving_seconds: predicted, of each RL step.
        transition_seconds: predicted, once.
        horizon: H, steps until the signal is expected to cross its threshold again.
        gamma: share of the horizon within which the transition has to pay back.
    """
    if not saving_seconds > 0:
        return Verdict(False, f"saves {saving_seconds:.4g} s a step, which is nothing")
    payback, allowed = transition_seconds / saving_seconds, gamma * horizon
    figures = (
        f"saves {saving_seconds:.4g} s a step and costs {transition_seconds:.4g} s: pays back in {payback:.3g} steps, "
        f"of {allowed:.3g} allowed (gamma {gamma:g} x horizon {horizon:.3g})"
    )
    return Verdict(payback <= allowed, figures)
