"""Joins a model source, the native executor and the runtime's unit collection."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nereus.backends.native.executor import NativeExecutor, UnitGroups
from lightning_nereus.backends.native.sources import ModelSource
from lightning_nereus.backends.native.stage_module import StageModule
from lightning_nereus.job import ModelStage
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.runtime.unit import UnitCollection, UnitRanks
from lightning_nereus.transition.primitives import UnitId


def unit_collection(
    model_stage: ModelStage, source: ModelSource, rank: int, communicators: Communicators | None, dtype: torch.dtype
) -> UnitCollection:
    """The units of a model-stage whose model comes from ``source``, computed by the native backend."""
    shard_map = source.shard_map()

    def build(unit: UnitId, position: int, tensors: dict[str, Tensor], ranks: UnitRanks) -> NativeExecutor:
        groups = UnitGroups()
        if communicators is not None:
            groups = UnitGroups(*(communicators.group(r) for r in (ranks.unit, ranks.tp, ranks.pp, ranks.tied)))
        module = StageModule(source.config, source.head, shard_map, unit.layout, position, tensors, groups.tp)
        return NativeExecutor(module, shard_map, unit.layout, position, groups)

    return UnitCollection(model_stage, shard_map, rank, communicators, lambda slices: source.load(slices, dtype), build)
