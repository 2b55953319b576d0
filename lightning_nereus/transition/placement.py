"""Which device takes which rank of a target: in place of what it holds already (design §6)."""

from __future__ import annotations

from dataclasses import replace

from lightning_nereus.job import ModelStage, StagePlan
from lightning_nereus.transition.primitives import joined, sub_units, units_of


def keep_resident(model_stage: ModelStage, current: StagePlan, target: StagePlan) -> StagePlan:
    """``target`` on the same devices, ordered so that every sub-unit that can stay where it is does.

    With devices in natural order even a Merge of neighbours would have to copy: units ``[0, 1]`` and
    ``[2, 3]`` of tp 2 are the sub-units of tp 4 on ``[0, 2, 1, 3]``, not on ``[0, 1, 2, 3]``. Sub-units
    that were neighbours stay neighbours; whether a tensor group then spans nodes is for the caller to see.
    """
    sub = current.layout.common(target.layout)
    pool = frozenset(target.devices)
    kept = [
        piece.devices
        for unit in units_of(model_stage, current)
        for piece in sub_units(unit, sub)
        if pool.issuperset(piece.devices)
    ]
    taken = {device for piece in kept for device in piece}
    rest = [device for device in target.devices if device not in taken]
    fresh = [tuple(rest[i : i + sub.size]) for i in range(0, len(rest), sub.size)]
    pieces, each = [*kept, *fresh], target.layout.size // sub.size
    devices = (
        device
        for first in range(0, len(pieces), each)
        for device in joined(pieces[first : first + each], sub, target.layout)
    )
    return replace(target, devices=tuple(devices))
