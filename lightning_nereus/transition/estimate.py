"""L_tran: what a transition moves and how long it takes, before it is admitted (paper §4.2, §6).

Counts the primitive path exactly as the engine carries it out: Split gathers every member's shard in
its enclosing group, Extend sends each shard once unless source and target are the same device, Merge
and same-device copies stay in the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Cluster, ModelStage
from lightning_nereus.transition.feasibility import BytesOf, shard_bytes
from lightning_nereus.transition.graph import TransitionGraph
from lightning_nereus.transition.primitives import Extend, Merge, Primitive, Split
from lightning_nereus.transition.shards import ShardMap

# Making one communicator takes 3 to 20 ms over gloo; the middle of the range.
SETUP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class TransitionEstimate:
    """``moved_bytes`` is the sum over devices of bytes received from others; ``seconds`` the critical path."""

    moved_bytes: float
    seconds: float


def estimate(
    graph: TransitionGraph,
    shard_maps: Mapping[ModelStage, ShardMap],
    cluster: Cluster,
    *,
    bytes_per_element: Mapping[ModelStage, float],
    efficiency: float = 1.0,
    setup_seconds: float = SETUP_SECONDS,
) -> TransitionEstimate:
    """Bytes and seconds of a transition.

    Args:
        shard_maps: of every model-stage in the graph.
        bytes_per_element: bytes that move with one parameter element, optimizer tensors included.
        efficiency: share of the links' bandwidth that transfers reach.
        setup_seconds: for the communicators of one operation that moves bytes between devices.

    Raises:
        ConfigurationError: if ``efficiency`` is no share.
    """
    if not 0 < efficiency <= 1:
        raise ConfigurationError("efficiency", f"{efficiency} is no share", "Use a share above 0, at most 1")
    bytes_of = shard_bytes(shard_maps, bytes_per_element)
    before: dict[Primitive, list[Primitive]] = {}
    for edge in graph.edges:
        before.setdefault(graph.primitives[edge.after], []).append(graph.primitives[edge.before])
    moved = 0.0
    ended: dict[Primitive, float] = {}
    free: dict[int, float] = {}
    # Operations start when their predecessors and their devices are done: the order is the devices' order.
    for operation in graph.order:
        participants = operation.participants
        start = max(
            (*(ended[other] for other in before.get(operation, ())), *(free.get(d, 0.0) for d in participants)),
            default=0.0,
        )
        received, seconds = _transfer(operation, bytes_of, cluster, efficiency)
        moved += received
        end = start + seconds + (setup_seconds if received else 0.0)
        ended[operation] = end
        free.update(dict.fromkeys(participants, end))
    return TransitionEstimate(moved, max(ended.values(), default=0.0))


def _transfer(operation: Primitive, bytes_of: BytesOf, cluster: Cluster, efficiency: float) -> tuple[float, float]:
    """(bytes received from other devices, seconds) of one operation, set-up apart."""
    match operation:
        case Split():
            return _gather(operation, bytes_of, cluster, efficiency)
        case Extend(source, target):
            received, longest = 0.0, 0.0
            for position, (giver, taker) in enumerate(zip(source.devices, target.devices, strict=True)):
                nbytes = bytes_of(target, position)
                if giver == taker:
                    longest = max(longest, _copy_seconds(nbytes, cluster))
                else:
                    received += nbytes
                    link = cluster.link(giver, taker)
                    longest = max(longest, nbytes / (link.bandwidth * efficiency) + link.latency)
            return received, longest
        case Merge(_, unit):
            return 0.0, max(_copy_seconds(bytes_of(unit, position), cluster) for position in range(unit.layout.size))
        case _:
            return 0.0, 0.0


def _gather(split: Split, bytes_of: BytesOf, cluster: Cluster, efficiency: float) -> tuple[float, float]:
    """The enclosing groups gather at the same time, each as a ring over its slowest link."""
    received, longest = 0.0, 0.0
    for members in split.groups:
        shares = {d: bytes_of(split.unit, split.unit.devices.index(d)) for d in members}
        total = sum(shares.values())
        link = cluster.inter_link if cluster.spans_nodes(members) else cluster.intra_link
        most = total - min(shares.values())
        received += total * (len(members) - 1)
        longest = max(longest, most / (link.bandwidth * efficiency) + link.latency * (len(members) - 1))
    return received, longest


def _copy_seconds(nbytes: float, cluster: Cluster) -> float:
    """A copy inside a device reads and writes."""
    return 2 * nbytes / cluster.device.memory_bandwidth
