"""Weight synchronisation: training units hand their parameters to generation and inference units."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nereus.runtime.unit import UnitCollection
from lightning_nereus.transition.transfers import Copy, synchronisation_copies


def synchronise(source: UnitCollection, target: UnitCollection) -> int:
    """Bring ``target``'s units to ``source``'s parameters and policy version. All ranks call it.

    Each device receives exactly what it needs and does not hold. Returns the bytes received here.
    """
    assert source.plan is not None
    assert target.plan is not None
    rank = source.rank
    copies = synchronisation_copies(source.shard_map, source.plan, target.plan)
    sending = _by_peer([c for c in copies if c.source == rank != c.target], lambda c: c.target)
    receiving = _by_peer([c for c in copies if c.target == rank != c.source], lambda c: c.source)
    operations, landed = [], []
    for peer, boxes in sending.items():
        flat = torch.cat([_view(source, c).reshape(-1) for c in boxes])
        operations.append(dist.P2POp(dist.isend, flat, peer))
    for peer, boxes in receiving.items():
        dtype = next(iter(target.executor.parameters.values())).dtype
        flat = torch.empty(sum(c.box.elements for c in boxes), dtype=dtype)
        operations.append(dist.P2POp(dist.irecv, flat, peer))
        landed.append((boxes, flat))
    works = dist.batch_isend_irecv(operations) if operations else []
    for copy in copies:
        if copy.source == copy.target == rank:
            _view(target, copy).copy_(_view(source, copy))
    for work in works:
        work.wait()
    for boxes, flat in landed:
        for copy, part in zip(boxes, flat.split([c.box.elements for c in boxes]), strict=True):
            _view(target, copy).copy_(part.view(copy.box.shape))
    target.version = target.version + 1
    return sum(flat.numel() * flat.element_size() for _, flat in landed)


def _by_peer(copies: list[Copy], peer_of) -> dict[int, list[Copy]]:
    grouped: dict[int, list[Copy]] = {}
    for copy in copies:
        grouped.setdefault(peer_of(copy), []).append(copy)
    return dict(sorted(grouped.items()))


def _view(collection: UnitCollection, copy: Copy) -> Tensor:
    assert collection.unit is not None
    held = collection.shard_map.slice(copy.box.name, collection.unit.layout, collection.position)
    assert held is not None
    return collection.executor.parameters[copy.box.name].detach()[copy.box.within(held)]
