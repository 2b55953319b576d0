"""The four primitives over units (paper §5.2): the planning language of a transition.

Each is plain data that says which units go in and which come out; ``runtime/engine.py`` carries
them out. ``participants`` take part in an operation, ``acquires`` are the devices that the
model-stage newly occupies by it and ``releases`` those that it leaves.

Sub-unit ``(jp, jt)`` of a unit that is cut from ``(tp, pp)`` to ``(stp, spp)`` has at its position
``(p, t)`` the device at pipeline rank ``p * (pp / spp) + jp`` and tensor rank ``t * (tp / stp) + jt``
of the unit. The devices that share a position are the smallest enclosing group (paper §6.2): their
shards lie inside the sub-shard of that position, so Split gathers among them and Merge slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Layout, ModelStage, StagePlan


@dataclass(frozen=True, slots=True)
class UnitId:
    """Which Elastic Model Unit: one replica of a model-stage on its devices, pipeline-major (paper §5.1).

    The order of the devices belongs to the identity: it says which shard each of them holds.
    """

    model_stage: ModelStage
    layout: Layout
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.devices)) != self.layout.size or len(self.devices) != self.layout.size:
            raise ConfigurationError(
                f"unit of {self.model_stage}",
                f"devices {list(self.devices)} do not fill {self.layout}",
                f"Give {self.layout.size} different devices",
            )

    def __str__(self) -> str:
        return f"{self.model_stage} {self.layout} {list(self.devices)}"


def units_of(model_stage: ModelStage, stage_plan: StagePlan) -> tuple[UnitId, ...]:
    """A stage plan's units in DP order."""
    return tuple(UnitId(model_stage, stage_plan.layout, devices) for devices in stage_plan.units)


def sub_units(unit: UnitId, layout: Layout) -> tuple[UnitId, ...]:
    """The units of ``layout`` into which one unit splits, or of which it is merged: ``(jp, jt)``, jp-major.

    A unit that has the layout already is its only sub-unit.

    Raises:
        ConfigurationError: if a degree of ``layout`` does not divide the unit's.
    """
    if unit.layout == layout:
        return (unit,)
    if unit.layout.common(layout) != layout:
        raise ConfigurationError("layout", f"{layout} does not divide {unit.layout}", "Use a common divisor")
    pieces = zip(*_enclosing(unit.layout, layout), strict=True)
    return tuple(UnitId(unit.model_stage, layout, tuple(unit.devices[i] for i in piece)) for piece in pieces)


def joined(pieces: Sequence[tuple[int, ...]], sub: Layout, layout: Layout) -> tuple[int, ...]:
    """The devices of the unit of ``layout`` whose sub-units of layout ``sub`` are on ``pieces``, jp-major."""
    device = {
        position: piece[sub_position]
        for sub_position, group in enumerate(_enclosing(layout, sub))
        for position, piece in zip(group, pieces, strict=True)
    }
    return tuple(device[position] for position in range(layout.size))


def _enclosing(layout: Layout, sub: Layout) -> Iterator[tuple[int, ...]]:
    """For each position of ``sub`` the positions of ``layout`` in its enclosing group, by (jp, jt)."""
    factor_pp, factor_tp = layout.pp // sub.pp, layout.tp // sub.tp
    for p in range(sub.pp):
        for t in range(sub.tp):
            yield tuple(
                layout.position(p * factor_pp + jp, t * factor_tp + jt)
                for jp in range(factor_pp)
                for jt in range(factor_tp)
            )


def _check_cut(name: str, unit: UnitId, subs: tuple[UnitId, ...]) -> None:
    if len(subs) < 2 or subs != sub_units(unit, subs[0].layout):
        raise ConfigurationError(
            name, f"{[str(s) for s in subs]} are not the sub-units of {unit}", "Take them from sub_units"
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Cut one unit into independent replicas of a smaller layout on the same devices."""

    unit: UnitId
    subs: tuple[UnitId, ...]

    def __post_init__(self) -> None:
        _check_cut("split", self.unit, self.subs)

    @property
    def model_stage(self) -> ModelStage:
        return self.unit.model_stage

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(self.unit.devices)

    @property
    def acquires(self) -> frozenset[int]:
        return frozenset()

    @property
    def releases(self) -> frozenset[int]:
        return frozenset()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The enclosing group of each sub-unit position: the devices that gather among themselves."""
        return tuple(zip(*(sub.devices for sub in self.subs), strict=True))

    def __str__(self) -> str:
        return f"Split {self.unit} into {self.subs[0].layout}"


@dataclass(frozen=True, slots=True)
class Merge:
    """Join replicas into one unit of a larger layout on the same devices, each device slicing what it holds."""

    subs: tuple[UnitId, ...]
    unit: UnitId

    def __post_init__(self) -> None:
        _check_cut("merge", self.unit, self.subs)

    @property
    def model_stage(self) -> ModelStage:
        return self.unit.model_stage

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(self.unit.devices)

    @property
    def acquires(self) -> frozenset[int]:
        return frozenset()

    @property
    def releases(self) -> frozenset[int]:
        return frozenset()

    def __str__(self) -> str:
        return f"Merge {self.subs[0].layout} into {self.unit}"


@dataclass(frozen=True, slots=True)
class Extend:
    """Copy a unit to further devices, position by position.

    A device may be in both units, at any positions: the source lives on until it is destroyed.
    """

    source: UnitId
    target: UnitId

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        if (source.model_stage, source.layout) != (target.model_stage, target.layout) or source == target:
            raise ConfigurationError(
                "extend", f"{target} is no further replica of {source}", "Keep model-stage and layout"
            )

    @property
    def model_stage(self) -> ModelStage:
        return self.target.model_stage

    @property
    def participants(self) -> frozenset[int]:
        return frozenset((*self.source.devices, *self.target.devices))

    @property
    def acquires(self) -> frozenset[int]:
        return frozenset(self.target.devices)

    @property
    def releases(self) -> frozenset[int]:
        return frozenset()

    def __str__(self) -> str:
        return f"Extend {self.source} to {list(self.target.devices)}"


@dataclass(frozen=True, slots=True)
class Destroy:
    """End a unit of which another replica exists, and release its devices."""

    unit: UnitId

    @property
    def model_stage(self) -> ModelStage:
        return self.unit.model_stage

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(self.unit.devices)

    @property
    def acquires(self) -> frozenset[int]:
        return frozenset()

    @property
    def releases(self) -> frozenset[int]:
        return frozenset(self.unit.devices)

    def __str__(self) -> str:
        return f"Destroy {self.unit}"


Primitive = Split | Merge | Extend | Destroy
