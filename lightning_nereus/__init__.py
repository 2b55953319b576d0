"""lightning-nereus: a Lightning strategy that changes a job's parallel plan while it runs.

Names are imported when they are first asked for, so that the rooms of plain data (job, transition...)
import without torch. Asking for any of them registers ``strategy="nereus"``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_nereus.adaptation import AdaptationCallback
    from lightning_nereus.job import Layout, ModelStage, Plan, Role, Stage, StagePlan
    from lightning_nereus.rl.data import PromptDataModule
    from lightning_nereus.rl.grpo import GRPOModule
    from lightning_nereus.rl.ppo import PPOModule
    from lightning_nereus.strategy import NereusStrategy

_HOMES = {
    "AdaptationCallback": "adaptation",
    "GRPOModule": "rl.grpo",
    "NereusStrategy": "strategy",
    "PPOModule": "rl.ppo",
    "PromptDataModule": "rl.data",
    **dict.fromkeys(("Layout", "ModelStage", "Plan", "Role", "Stage", "StagePlan"), "job"),
}

__all__ = [
    "AdaptationCallback",
    "GRPOModule",
    "Layout",
    "ModelStage",
    "NereusStrategy",
    "PPOModule",
    "Plan",
    "PromptDataModule",
    "Role",
    "Stage",
    "StagePlan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home != "job":
        import_module("lightning_nereus.strategy")
    return getattr(import_module(f"lightning_nereus.{home}"), name)
