"""The local graph: one model-stage's change as primitives and their dependencies (paper §6.1).

Default order Split -> Destroy -> Extend -> Merge, through the largest layout into which both the
current and the target units can be split. A unit without another replica is destroyed only after
Extend has copied it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_nereus.job import ModelStage, StagePlan
from lightning_nereus.transition.primitives import Destroy, Extend, Merge, Primitive, Split, UnitId, sub_units, units_of


class EdgeKind(StrEnum):
    """Why one primitive waits for another: it needs its state, or the devices that it releases."""

    STATE = "state"
    RESOURCE = "resource"


@dataclass(frozen=True, slots=True)
class Edge:
    """``after`` starts when ``before`` has ended; both are indices into a graph's operations."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """One model-stage's primitives in the default order, and the edges between them."""

    operations: tuple[Primitive, ...]
    edges: tuple[Edge, ...]


def decompose(
    model_stage: ModelStage, current: StagePlan, target: StagePlan, *, contested: frozenset[int] = frozenset()
) -> LocalGraph:
    """The primitives that turn ``current``'s units into ``target``'s, in the default order.

    ``contested`` are devices for which other model-stages wait; where nothing is retained, the
    replica that has to live until it is copied is chosen off them if possible.
    """
    now, then = units_of(model_stage, current), units_of(model_stage, target)
    if set(now) == set(then):
        return LocalGraph((), ())
    sub = current.layout.common(target.layout)
    present = [piece for unit in now for piece in sub_units(unit, sub)]
    wanted = [piece for unit in then for piece in sub_units(unit, sub)]
    wanted_set, present_set = frozenset(wanted), frozenset(present)
    retained = [piece for piece in present if piece in wanted_set]
    missing = [piece for piece in wanted if piece not in present_set]
    redundant = [piece for piece in present if piece not in wanted_set]
    last = None if retained else _last(redundant, missing, contested)

    splits = [Split(unit, sub_units(unit, sub)) for unit in now if unit.layout != sub]
    destroys = [Destroy(piece) for piece in redundant if piece != last]
    extends = _extends(missing, retained if last is None else [last])
    merges = [Merge(sub_units(unit, sub), unit) for unit in then if unit.layout != sub]
    ends = [] if last is None else [Destroy(last)]
    operations = (*splits, *destroys, *extends, *merges, *ends)
    return LocalGraph(operations, _edges(operations))


def _last(redundant: Sequence[UnitId], missing: Sequence[UnitId], contested: frozenset[int]) -> UnitId:
    """The one replica to copy from: few contested devices first, then most shards that need not move."""

    def moved(piece: UnitId) -> int:
        return sum(a != b for other in missing for a, b in zip(piece.devices, other.devices, strict=True))

    return min(redundant, key=lambda piece: (len(contested.intersection(piece.devices)), moved(piece)))


def _extends(missing: Sequence[UnitId], sources: Sequence[UnitId]) -> list[Extend]:
    """One Extend for each missing replica, the sources taking turns, a near one first.

    Devices are numbered node by node, so that the distance of numbers stands for that of devices.
    """
    extends = []
    turn: list[UnitId] = []
    for target in missing:
        turn = turn or list(sources)
        source = min(turn, key=lambda piece: abs(piece.devices[0] - target.devices[0]))
        turn.remove(source)
        extends.append(Extend(source, target))
    return extends


def _edges(operations: Sequence[Primitive]) -> tuple[Edge, ...]:
    """State dependencies by unit, and a model-stage's own releases before its acquisitions."""
    maker: dict[UnitId, int] = {}
    readers: dict[UnitId, list[int]] = {}
    holder: dict[int, int] = {}
    edges: list[Edge] = []

    def reads(index: int, unit: UnitId) -> None:
        if unit in maker:
            edges.append(Edge(maker[unit], index, EdgeKind.STATE))

    def consumes(index: int, unit: UnitId) -> None:
        copies = readers.get(unit, [])
        edges.extend(Edge(copy, index, EdgeKind.STATE) for copy in copies)
        if not copies:
            reads(index, unit)

    for index, operation in enumerate(operations):
        match operation:
            case Split(_, subs):
                maker.update(dict.fromkeys(subs, index))
            case Destroy(unit):
                consumes(index, unit)
                holder.update(dict.fromkeys(unit.devices, index))
            case Extend(source, target):
                reads(index, source)
                readers.setdefault(source, []).append(index)
                maker[target] = index
                releases = sorted({holder[d] for d in target.devices if d in holder})
                edges.extend(Edge(release, index, EdgeKind.RESOURCE) for release in releases)
            case Merge(subs, _):
                for piece in subs:
                    consumes(index, piece)
    return tuple(dict.fromkeys(edges))
