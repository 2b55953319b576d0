"""Feasibility: what every device holds at every operation of a transition (paper §4.3, §6.2).

Retained state, intermediate units, message buffers and idle co-resident model-stages must fit
together. A device's memory changes only through operations in which it takes part, and it takes
part in them in the graph's order, so that a walk over the order gives each device's true peak
however the operations of different devices interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import ModelStage, Plan
from lightning_nereus.transition.primitives import Destroy, Extend, Merge, Primitive, Split, UnitId, units_of
from lightning_nereus.transition.shards import ShardMap

BytesOf = Callable[[UnitId, int], float]


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """How much memory a transition may use on one device, in bytes.

    ``bytes_of(unit, position)`` is the state at one position of a unit (see :func:`shard_bytes`);
    ``headroom`` the share of the capacity that may be used; ``workspace_bytes`` what one operation
    takes for message buffers on each of its participants.
    """

    capacity_bytes: float
    bytes_of: BytesOf
    headroom: float = 0.9
    workspace_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.capacity_bytes > 0:
            raise ConfigurationError("capacity_bytes", f"{self.capacity_bytes} is not positive", "Use bytes above 0")
        if not 0 < self.headroom <= 1:
            raise ConfigurationError("headroom", f"{self.headroom} is no share", "Use a share above 0, at most 1")
        if not self.workspace_bytes >= 0:
            raise ConfigurationError("workspace_bytes", "is negative", "Use 0 or more")

    @property
    def limit(self) -> float:
        return self.capacity_bytes * self.headroom


def shard_bytes(shard_maps: Mapping[ModelStage, ShardMap], bytes_per_element: Mapping[ModelStage, float]) -> BytesOf:
    """Bytes of the state at a position of a unit: its shard's elements, each at the model-stage's bytes.

    ``bytes_per_element`` counts everything that moves with an element: 4 for fp32 parameters, 12 with
    Adam's two tensors.
    """

    def bytes_of(unit: UnitId, position: int) -> float:
        model_stage = unit.model_stage
        return shard_maps[model_stage].elements(unit.layout, position) * bytes_per_element[model_stage]

    return bytes_of


class Residency:
    """Bytes that each device holds while operations are taken one after the other."""

    def __init__(self, plan: Plan, memory: MemoryBound) -> None:
        self.memory = memory
        self.held: dict[int, float] = {}
        for model_stage, stage_plan in plan.items():
            for unit in units_of(model_stage, stage_plan):
                self._add(unit, 1)
        self.peaks = dict(self.held)

    def _add(self, unit: UnitId, sign: int) -> None:
        for position, device in enumerate(unit.devices):
            self.held[device] = self.held.get(device, 0.0) + sign * self.memory.bytes_of(unit, position)

    def growth(self, operation: Primitive) -> dict[int, float]:
        """Bytes that an operation adds on each device before it frees anything.

        Split keeps its source until all have read it, Merge until it has sliced it.
        """
        match operation:
            case Split(_, subs):
                made = subs
            case Merge(_, unit):
                made = (unit,)
            case Extend(_, target):
                made = (target,)
            case Destroy():
                return {}
        bytes_of, workspace = self.memory.bytes_of, self.memory.workspace_bytes
        grown = dict.fromkeys(operation.participants, workspace)
        for unit in made:
            for position, device in enumerate(unit.devices):
                grown[device] += bytes_of(unit, position)
        return grown

    def overflow(self, operation: Primitive) -> tuple[int, float] | None:
        """(device, bytes in use) where the operation would pass the limit by most, or None if it fits."""
        used = {d: self.held.get(d, 0.0) + grown for d, grown in self.growth(operation).items()}
        worst = max(used, key=lambda d: (used[d], -d), default=None)
        return (worst, used[worst]) if worst is not None and used[worst] > self.memory.limit else None

    def apply(self, operation: Primitive) -> None:
        """Take an operation: record the peak that it causes, then what it leaves."""
        for device, grown in self.growth(operation).items():
            self.peaks[device] = max(self.peaks.get(device, 0.0), self.held.get(device, 0.0) + grown)
        match operation:
            case Split(unit, subs):
                made, gone = subs, (unit,)
            case Merge(subs, unit):
                made, gone = (unit,), subs
            case Extend(_, target):
                made, gone = (target,), ()
            case Destroy(unit):
                made, gone = (), (unit,)
        for unit in made:
            self._add(unit, 1)
        for unit in gone:
            self._add(unit, -1)

    def refusal(self, operation: Primitive, device: int, used: float) -> str:
        memory = self.memory
        return (
            f"{operation} needs {_size(used)} on device {device}, which holds {_size(self.held.get(device, 0.0))}; "
            f"{memory.headroom:.0%} of {_size(memory.capacity_bytes)} is {_size(memory.limit)}"
        )


def peak_memory(order: Iterable[Primitive], current: Plan, memory: MemoryBound) -> dict[int, float]:
    """Each device's peak in bytes over an order of primitives that starts from ``current``.

    Raises:
        InfeasiblePlanError: naming the first operation that passes the limit, its device and the figures.
    """
    residency = Residency(current, memory)
    for operation in order:
        over = residency.overflow(operation)
        if over is not None:
            raise InfeasiblePlanError(f"the transition does not fit: {residency.refusal(operation, *over)}")
        residency.apply(operation)
    return residency.peaks


def _size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
