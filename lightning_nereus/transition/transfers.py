"""Point-to-point slice copies: who sends which box of which tensor to whom.

Compiled alike on every rank from plain data. Weight synchronisation (training to generation and
inference, any two layouts) is one such list; each target device receives exactly the boxes that
it needs and does not hold (design §6).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_nereus.errors import TransitionError
from lightning_nereus.job import StagePlan
from lightning_nereus.transition.shards import ShardMap, Slice


@dataclass(frozen=True, slots=True)
class Copy:
    """One box that ``source`` sends to ``target`` (a local copy where they are the same device)."""

    source: int
    target: int
    box: Slice


def intersect(a: Slice, b: Slice) -> Slice | None:
    """The box that both hold, or None."""
    ranges = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a.ranges, b.ranges, strict=True))
    return Slice(a.name, ranges) if all(start < stop for start, stop in ranges) else None


def cover(need: Slice, holders: Iterable[tuple[int, Slice]]) -> list[tuple[int, Slice]]:
    """Cut a needed box into disjoint boxes, each with a device that holds it; earlier holders win.

    Boxes of one parameter differ along at most one dimension (its tensor cut), so a sweep along
    that dimension is enough.

    Raises:
        TransitionError: if some part has no holder.
    """
    pieces: list[tuple[int, Slice]] = []
    missing = [need]
    for device, held in holders:
        rest: list[Slice] = []
        for box in missing:
            common = intersect(box, held)
            if common is None:
                rest.append(box)
                continue
            pieces.append((device, common))
            rest.extend(_remainder(box, common))
        missing = rest
        if not missing:
            return pieces
    raise TransitionError(f"no device holds {missing[0]}; the unit that should is incomplete")


def _remainder(box: Slice, taken: Slice) -> list[Slice]:
    """What is left of ``box`` before and after ``taken`` along the one dimension in which they differ."""
    for dim, ((start, stop), (low, high)) in enumerate(zip(box.ranges, taken.ranges, strict=True)):
        if (start, stop) != (low, high):
            parts = [(start, low), (high, stop)]
            left = [part for part in parts if part[0] < part[1]]
            return [Slice(box.name, (*box.ranges[:dim], part, *box.ranges[dim + 1 :])) for part in left]
    return []


def synchronisation_copies(shard_map: ShardMap, source: StagePlan, target: StagePlan) -> list[Copy]:
    """Copies that bring every unit of ``target`` to the parameters of ``source``'s units.

    Both are model-stages of one role. Target unit ``u`` prefers what its own device holds, then
    source unit ``u % dp``, so that the load spreads over the replicas.
    """
    copies = []
    held = [
        [(device, shard_map.shard(source.layout, position)) for position, device in enumerate(unit)]
        for unit in source.units
    ]
    local = {device: shard for unit in held for device, shard in unit}
    for index, unit in enumerate(target.units):
        replica = held[index % source.dp]
        for position, device in enumerate(unit):
            for name, need in shard_map.shard(target.layout, position).items():
                own = [(device, local[device][name])] if name in local.get(device, {}) else []
                others = [(d, shard[name]) for d, shard in replica if name in shard]
                copies.extend(Copy(d, device, box) for d, box in cover(need, [*own, *others]))
    return copies
