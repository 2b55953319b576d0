"""Layout-free checkpoints through torch.distributed.checkpoint (design §9).

Each rank writes the boxes of the global tensors that it owns (every element of the logical state
once), each rank reads the boxes that its unit needs: a run may resume under another plan or pool.
Tensors are named ``model_stage/kind/parameter``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION
from lightning_nereus.runtime.job import JobRuntime
from lightning_nereus.runtime.unit import PARAMETERS, UnitCollection
from lightning_nereus.transition.primitives import UnitId
from lightning_nereus.transition.shards import ShardMap, Slice

LIGHTNING_FILE = "lightning.ckpt"


class GlobalTensorBox(Tensor):
    """A local tensor that stands for one box of a global tensor, in the terms of torch's DCP."""

    _local: Tensor
    _box: Slice

    @staticmethod
    def __new__(cls, local: Tensor, box: Slice, global_shape: tuple[int, ...]) -> GlobalTensorBox:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(global_shape), dtype=local.dtype, device=local.device)
        made._local, made._box = local, box
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on a checkpoint box; it only carries bytes to and from storage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GlobalTensorBox({self._box}, of {tuple(self.shape)})"

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size(start for start, _ in self._box.ranges)
        return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(self._box.shape))

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        chunk = self._chunk()
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self._local), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._local


def owned_slices(shard_map: ShardMap, unit: UnitId, position: int) -> dict[str, Slice]:
    """The boxes of a position that no earlier position of the unit holds: each element once."""
    owned = {}
    for name, box in shard_map.shard(unit.layout, position).items():
        cut = shard_map[name].cut
        earlier = [shard_map.slice(name, unit.layout, p) for p in range(position)]
        held = [other for other in earlier if other is not None]
        if cut is None:
            if not held:
                owned[name] = box
            continue
        start, stop = box.ranges[cut.dim]
        overlapping = [other.ranges[cut.dim] for other in held]
        if any((a, b) == (start, stop) for a, b in overlapping):
            continue
        # Ranges of later tensor ranks start and stop later, so what is left is one range.
        start = max([start, *(b for a, b in overlapping if a <= start < b)])
        if start < stop:
            owned[name] = Slice(name, (*box.ranges[: cut.dim], (start, stop), *box.ranges[cut.dim + 1 :]))
    return owned


def _named_tensors(collection: UnitCollection) -> Iterable[tuple[str, str, Tensor]]:
    parameters = collection.executor.parameters
    for name, parameter in parameters.items():
        yield PARAMETERS, name, parameter.detach()
    if collection.binding:
        for kind, name, tensor in collection.binding.named_tensors(parameters):
            yield kind, name, tensor


def save(directory: Path, runtime: JobRuntime) -> dict[str, Any]:
    """Write every model-stage's logical state and return what a reader must know besides the tensors.

    Collective over the job's world. Generation units are copies of the trained actor and are left out.
    """
    boxes: dict[str, Tensor] = {}
    for collection in _kept(runtime):
        if collection.unit is None or collection.dp_rank != 0:
            continue
        held = collection.shard_map.shard(collection.unit.layout, collection.position)
        owned = owned_slices(collection.shard_map, collection.unit, collection.position)
        for kind, name, tensor in _named_tensors(collection):
            if name in owned:
                part = tensor[owned[name].within(held[name])].contiguous()
                key = f"{collection.model_stage}/{kind}/{name}"
                boxes[key] = GlobalTensorBox(part, owned[name], collection.shard_map[name].shape)
    state_dict_saver.save(boxes, checkpoint_id=str(directory), no_dist=not dist.is_initialized())
    described: dict[str, Any] = {}
    for part in runtime.gather({str(c.model_stage): _describe(c) for c in _kept(runtime) if c.unit is not None}):
        described = {**part, **described}
    return {"model_stages": described, "plan": runtime.plan.to_dict()}


def _kept(runtime: JobRuntime) -> list[UnitCollection]:
    return [c for m, c in runtime.collections.items() if m != ACTOR_GENERATION]


def _describe(collection: UnitCollection) -> dict[str, Any]:
    kinds = {kind: str(tensor.dtype).removeprefix("torch.") for kind, _, tensor in _named_tensors(collection)}
    scalars = collection.binding.scalars(collection.executor.parameters) if collection.binding else {}
    return {"kinds": kinds, "scalars": scalars, "updates": collection.updates, "version": collection.version}


def load(directory: Path, runtime: JobRuntime, about: Mapping[str, Any]) -> None:
    """Read parameters and optimizer tensors into the units that this rank holds, under the plan in force.

    Collective over the job's world. ``about`` is what :func:`save` returned.

    Raises:
        ConfigurationError: if the checkpoint lacks a model-stage of the job.
    """
    described = about["model_stages"]
    boxes: dict[str, Tensor] = {}
    read: list[tuple[UnitCollection, dict[str, dict[str, Tensor]]]] = []
    for collection in _kept(runtime):
        if str(collection.model_stage) not in described:
            raise ConfigurationError("ckpt_path", f"lacks {collection.model_stage}", "Resume the job that wrote it")
        if collection.unit is None:
            continue
        held = collection.shard_map.shard(collection.unit.layout, collection.position)
        tensors: dict[str, dict[str, Tensor]] = {}
        for kind, dtype in described[str(collection.model_stage)]["kinds"].items():
            if kind != PARAMETERS and collection.binding is None:
                continue  # validation and test keep no optimizer
            for name, box in held.items():
                if kind == PARAMETERS:
                    local = collection.executor.parameters[name].detach()
                else:
                    local = torch.empty(box.shape, dtype=getattr(torch, dtype))
                    tensors.setdefault(kind, {})[name] = local
                boxes[f"{collection.model_stage}/{kind}/{name}"] = GlobalTensorBox(
                    local, box, collection.shard_map[name].shape
                )
        read.append((collection, tensors))
    state_dict_loader.load(boxes, checkpoint_id=str(directory), no_dist=not dist.is_initialized())
    for collection, tensors in read:
        entry = described[str(collection.model_stage)]
        collection.updates, collection.version = entry["updates"], entry["version"]
        if collection.binding:
            collection.binding.bind(collection.executor.parameters, tensors, entry["scalars"])
    runtime.synchronise_weights()


def load_parameters(directory: Path, runtime: JobRuntime) -> None:
    """Read parameters only, if :func:`save` has written there. Collective over the job's world."""
    if not (directory / ".metadata").exists():
        return
    boxes: dict[str, Tensor] = {}
    for collection in _kept(runtime):
        if collection.unit is None:
            continue
        for name, box in collection.shard_map.shard(collection.unit.layout, collection.position).items():
            local = collection.executor.parameters[name].detach()
            key = f"{collection.model_stage}/{PARAMETERS}/{name}"
            boxes[key] = GlobalTensorBox(local, box, collection.shard_map[name].shape)
    state_dict_loader.load(boxes, checkpoint_id=str(directory), no_dist=not dist.is_initialized())
    runtime.synchronise_weights()


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint, ``model_stage/kind/parameter``, in this process."""
    metadata = FileSystemReader(str(directory)).read_metadata()
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state_dict_loader.load(tensors, checkpoint_id=str(directory), no_dist=True)
    return tensors


def lightning_file(path: str | Path) -> Path:
    """Lightning's own part of a checkpoint.

    Raises:
        ConfigurationError: if the path is no checkpoint of this strategy.
    """
    file = Path(path) / LIGHTNING_FILE
    if not file.is_file():
        raise ConfigurationError(
            "ckpt_path", f"{path} is no checkpoint of this strategy", f"Give a directory that holds {LIGHTNING_FILE}"
        )
    return file


def discard(path: Path) -> None:
    """Remove a checkpoint if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
