"""The transition engine: carries a TransitionGraph out over real process groups (paper §6.2).

Every rank walks the graph in the same order and takes its own part; ranks outside an operation
pass on at once, so that operations on disjoint devices run at the same time. The order is the
same everywhere, therefore no two ranks ever wait for one another in a circle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nereus.errors import TransitionError
from lightning_nereus.job import ModelStage
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.runtime.unit import UnitState, cut
from lightning_nereus.transition.graph import TransitionGraph
from lightning_nereus.transition.primitives import Destroy, Extend, Merge, Split, UnitId
from lightning_nereus.transition.shards import ShardMap, Slice
from lightning_nereus.transition.transfers import intersect

# Large enough to amortise a message, small enough that a bucket never dominates memory.
BUCKET_BYTES = 32 * 2**20


class TransitionEngine:
    """Executes primitives on this rank's states.

    Args:
        rank: this device.
        shard_maps: the shard map of each model-stage.
        communicators: where groups come from; None where the job has one process.
    """

    def __init__(
        self, rank: int, shard_maps: Mapping[ModelStage, ShardMap], communicators: Communicators | None
    ) -> None:
        self.rank = rank
        self.shard_maps = shard_maps
        self.communicators = communicators
        self.moved_bytes = 0

    def execute(self, graph: TransitionGraph, states: dict[UnitId, UnitState]) -> dict[UnitId, UnitState]:
        """Carry out all primitives; ``states`` is consumed and the re-laid states are returned.

        ``moved_bytes`` afterwards counts what this rank received from others.

        Raises:
            TransitionError: if a state that a primitive needs is missing here.
        """
        self.moved_bytes = 0
        for operation in graph.order:
            if self.rank not in operation.participants:
                continue
            match operation:
                case Split(unit, subs):
                    self._split(unit, subs, states)
                case Merge(subs, unit):
                    self._merge(subs, unit, states)
                case Extend(source, target):
                    self._extend(source, target, states)
                case Destroy(unit):
                    self._take(unit, states)
        return states

    def _peek(self, unit: UnitId, states: dict[UnitId, UnitState]) -> UnitState:
        if unit not in states:
            raise TransitionError(f"rank {self.rank} holds no state of {unit}; the plan in force was not this one")
        return states[unit]

    def _take(self, unit: UnitId, states: dict[UnitId, UnitState]) -> UnitState:
        self._peek(unit, states)
        return states.pop(unit)

    def _slices(self, unit: UnitId, position: int) -> dict[str, Slice]:
        return self.shard_maps[unit.model_stage].shard(unit.layout, position)

    def _split(self, unit: UnitId, subs: tuple[UnitId, ...], states: dict[UnitId, UnitState]) -> None:
        """Position-wise all-gather inside the enclosing group. The source lives until it is read."""
        state = self._peek(unit, states)
        sub, position = _own(subs, self.rank)
        # Every device of the enclosing group ends with the same sub-shard, at the same position.
        members = sorted((s.devices[position] for s in subs), key=unit.devices.index)
        wanted = self._slices(sub, position)
        gathered = {
            kind: {name: torch.empty(box.shape, dtype=_dtype(group)) for name, box in wanted.items()}
            for kind, group in state.tensors.items()
        }
        group = self._group(tuple(members))
        for member in members:
            held = self._slices(unit, unit.devices.index(member))
            for kind, tensors in gathered.items():
                boxes = {n: box for n, w in wanted.items() if n in held and (box := intersect(held[n], w)) is not None}
                for bucket in _buckets(boxes, _dtype(state.tensors[kind]).itemsize):
                    flat = self._pack(state.tensors[kind], held, bucket, _dtype(state.tensors[kind]), member)
                    dist.broadcast(flat, src=member, group=group)
                    self.moved_bytes += 0 if member == self.rank else flat.numel() * flat.element_size()
                    _unpack(flat, tensors, wanted, bucket)
        states[sub] = state.like(sub, position, gathered)
        self._take(unit, states)

    def _pack(
        self,
        tensors: Mapping[str, Tensor],
        held: Mapping[str, Slice],
        boxes: list[Slice],
        dtype: torch.dtype,
        owner: int,
    ) -> Tensor:
        if owner != self.rank:
            return torch.empty(sum(b.elements for b in boxes), dtype=dtype)
        return torch.cat([tensors[b.name][b.within(held[b.name])].reshape(-1) for b in boxes])

    def _merge(self, subs: tuple[UnitId, ...], unit: UnitId, states: dict[UnitId, UnitState]) -> None:
        """Each device already holds the sub-shard that encloses its target shard: slice, no traffic."""
        sub, sub_position = _own(subs, self.rank)
        state = self._take(sub, states)
        position = unit.devices.index(self.rank)
        held, wanted = self._slices(sub, sub_position), self._slices(unit, position)
        tensors = {
            kind: {name: cut(group[name], held[name], box) for name, box in wanted.items()}
            for kind, group in state.tensors.items()
        }
        states[unit] = state.like(unit, position, tensors)

    def _extend(self, source: UnitId, target: UnitId, states: dict[UnitId, UnitState]) -> None:
        """Rank-aligned copy of every shard, each sent once. Sends come first: a rank may do both."""
        pending: list[tuple[dist.Work | None, Tensor]] = []
        pairs = list(zip(source.devices, target.devices, strict=True))
        for position, (giver, taker) in enumerate(pairs):
            if giver == self.rank and giver != taker:
                pending.extend(self._send(self._peek(source, states), position, taker))
        for position, (giver, taker) in enumerate(pairs):
            if taker != self.rank:
                continue
            if giver == taker:
                own = self._peek(source, states)
                copies = {k: {n: t.clone() for n, t in group.items()} for k, group in own.tensors.items()}
                states[target] = own.like(target, position, copies)
            else:
                states[target] = self._receive(target, position, giver)
        for work, _buffer in pending:
            if work is not None:
                work.wait()

    def _send(self, state: UnitState, position: int, taker: int) -> list[tuple[dist.Work | None, Tensor]]:
        header = torch.tensor(list(json.dumps(state.header()).encode()), dtype=torch.uint8)
        messages = [torch.tensor([header.numel()]), header]
        held = self._slices(state.unit, position)
        for group in state.tensors.values():
            for bucket in _buckets(held, _dtype(group).itemsize):
                messages.append(self._pack(group, held, bucket, _dtype(group), self.rank))
        return [(dist.isend(message, dst=taker), message) for message in messages]

    def _receive(self, unit: UnitId, position: int, giver: int) -> UnitState:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, src=giver)
        raw = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(raw, src=giver)
        header = json.loads(bytes(raw.tolist()))
        wanted = self._slices(unit, position)
        tensors: dict[str, dict[str, Tensor]] = {}
        for kind, dtype_name in header["kinds"].items():
            dtype = getattr(torch, dtype_name)
            tensors[kind] = {name: torch.empty(box.shape, dtype=dtype) for name, box in wanted.items()}
            for bucket in _buckets(wanted, dtype.itemsize):
                flat = torch.empty(sum(b.elements for b in bucket), dtype=dtype)
                dist.recv(flat, src=giver)
                self.moved_bytes += flat.numel() * flat.element_size()
                _unpack(flat, tensors[kind], wanted, bucket)
        return UnitState(unit, position, tensors, header["scalars"], header["updates"], header["version"])

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if self.communicators is None:
            raise TransitionError(f"devices {ranks} cannot exchange state: the job runs in one process")
        return self.communicators.group(ranks)


def _own(units: Iterable[UnitId], rank: int) -> tuple[UnitId, int]:
    for unit in units:
        if rank in unit.devices:
            return unit, unit.devices.index(rank)
    raise TransitionError(f"rank {rank} is in none of the units of this operation")


def _dtype(group: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(group.values())).dtype


def _buckets(boxes: Mapping[str, Slice], itemsize: int) -> Iterator[list[Slice]]:
    """Boxes in order, packed up to BUCKET_BYTES (a larger box goes alone)."""
    bucket: list[Slice] = []
    size = 0
    for box in boxes.values():
        nbytes = box.elements * itemsize
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(box)
        size += nbytes
    if bucket:
        yield bucket


def _unpack(flat: Tensor, tensors: Mapping[str, Tensor], held: Mapping[str, Slice], boxes: list[Slice]) -> None:
    for box, part in zip(boxes, flat.split([b.elements for b in boxes]), strict=True):
        tensors[box.name][box.within(held[box.name])].copy_(part.view(box.shape))
