"""What a plan costs: operations, latency, memory, and their calibration (paper §4.2). Imports without torch."""

from lightning_nereus.cost.calibration import Calibration
from lightning_nereus.cost.memory import MemoryEstimate
from lightning_nereus.cost.model import CostModel, PlanEstimate
from lightning_nereus.cost.operations import LinkType, Operation, OperationClass

__all__ = [
    "Calibration",
    "CostModel",
    "LinkType",
    "MemoryEstimate",
    "Operation",
    "OperationClass",
    "PlanEstimate",
]
