"""Transitions: from one plan to another by primitives over units (paper §5.2, §6). Imports without torch."""

from lightning_nereus.transition.estimate import TransitionEstimate, estimate
from lightning_nereus.transition.feasibility import MemoryBound, peak_memory, shard_bytes
from lightning_nereus.transition.graph import TransitionGraph, plan_transition
from lightning_nereus.transition.placement import keep_resident
from lightning_nereus.transition.primitives import Destroy, Extend, Merge, Primitive, Split, UnitId
from lightning_nereus.transition.shape_map import shard_map_of
from lightning_nereus.transition.shards import ShardMap

__all__ = [
    "Destroy",
    "Extend",
    "MemoryBound",
    "Merge",
    "Primitive",
    "ShardMap",
    "Split",
    "TransitionEstimate",
    "TransitionGraph",
    "UnitId",
    "estimate",
    "keep_resident",
    "peak_memory",
    "plan_transition",
    "shard_bytes",
    "shard_map_of",
]
