"""The global transition graph: all model-stages' changes in one safe order (paper §6.1).

1. Decompose each model-stage's change into a local graph.
2. Where an Extend acquires devices that a concurrently placed model-stage still holds, add an edge
   from an executable Destroy that releases them. A Destroy that depends on the blocked acquisition
   is never chosen, so the graph stays acyclic.
3. Order: release before acquire; generation, inference, training break ties.

Two model-stages whose devices are disjoint before and after are placed concurrently: each counts on
devices of its own. Within one stage both run at the same time, so an acquisition that no executable
Destroy unblocks makes the target infeasible, unless a memory bound shows that both fit on the device
for the moment. Model-stages of different stages take turns on a device, and so may overlap on it
while memory allows. Model-stages that share devices in one of the plans wait only for memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import ModelStage, Plan
from lightning_nereus.transition.feasibility import MemoryBound, Residency
from lightning_nereus.transition.local import Edge, EdgeKind, decompose
from lightning_nereus.transition.primitives import Destroy, Extend, Merge, Primitive, Split

# Release-before-acquire: Destroy frees devices, Merge frees memory, Split leads to both.
_PRIORITY = {Destroy: 0, Merge: 1, Split: 2, Extend: 3}
_Key = tuple[int, tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class TransitionGraph:
    """What turns one plan into another, the same on every rank.

    ``primitives`` are sorted by model-stage, each in its default order; ``edges`` index them;
    ``order`` is a topological order of them, to be walked by every device.
    """

    primitives: tuple[Primitive, ...]
    edges: tuple[Edge, ...]
    order: tuple[Primitive, ...]

    @property
    def resource_edges(self) -> tuple[tuple[Primitive, Primitive], ...]:
        """(before, after) of the edges that wait for devices."""
        return tuple(
            (self.primitives[e.before], self.primitives[e.after]) for e in self.edges if e.kind is EdgeKind.RESOURCE
        )

    def __bool__(self) -> bool:
        return bool(self.primitives)


def plan_transition(current: Plan, target: Plan, *, memory: MemoryBound | None = None) -> TransitionGraph:
    """The transition from ``current`` to ``target``; with ``memory``, one that stays below its limit.

    Raises:
        ConfigurationError: if the plans are not of the same model-stages.
        InfeasiblePlanError: if an acquisition stays blocked (the message names the chain of
            primitives that wait for one another) or nothing that could go on fits in memory (the
            message gives the figures).
    """
    if set(current) != set(target):
        different = sorted(set(current) ^ set(target))
        raise ConfigurationError(
            "target plan", f"and current plan differ in {', '.join(map(str, different))}", "Plan the same model-stages"
        )
    builder = _Builder()
    for model_stage in current:
        contested = frozenset().union(
            *(
                frozenset(target[other].devices) - frozenset(current[other].devices)
                for other in current
                if _concurrent(model_stage, other, current, target)
            )
        )
        local = decompose(model_stage, current[model_stage], target[model_stage], contested=contested)
        builder.add(local.operations, local.edges)
    builder.unblock(current, target, memory)
    order = _schedule(builder, Residency(current, memory) if memory else None)
    primitives = tuple(builder.primitives)
    return TransitionGraph(primitives, tuple(builder.edges), tuple(primitives[i] for i in order))


def _concurrent(a: ModelStage, b: ModelStage, current: Plan, target: Plan) -> bool:
    """Whether two model-stages are on devices of their own, before and after."""
    return a != b and all(set(plan[a].devices).isdisjoint(plan[b].devices) for plan in (current, target))


class _Builder:
    """The graph while edges are added: primitives by index, and who waits for whom."""

    def __init__(self) -> None:
        self.primitives: list[Primitive] = []
        self.edges: list[Edge] = []
        self.predecessors: list[list[int]] = []
        self.waived: dict[int, str] = {}

    def add(self, operations: Sequence[Primitive], edges: Sequence[Edge]) -> None:
        offset = len(self.primitives)
        self.primitives.extend(operations)
        self.predecessors.extend([] for _ in operations)
        for edge in edges:
            self._link(offset + edge.before, offset + edge.after, edge.kind)

    def _link(self, before: int, after: int, kind: EdgeKind) -> None:
        self.edges.append(Edge(before, after, kind))
        self.predecessors[after].append(before)

    def unblock(self, current: Plan, target: Plan, memory: MemoryBound | None) -> None:
        """Give each blocked acquisition an edge from the executable Destroy that releases its devices.

        A device is held until the one Destroy that releases it, so that there is one candidate for
        each holder; which replica is destroyed last was chosen by ``decompose``.
        """
        releases: dict[ModelStage, dict[int, int]] = {}
        for index, operation in enumerate(self.primitives):
            for device in operation.releases:
                releases.setdefault(operation.model_stage, {})[device] = index
        for after, operation in enumerate(self.primitives):
            if not isinstance(operation, Extend):
                continue
            for holder, by_device in releases.items():
                needed = {by_device[d] for d in operation.acquires if d in by_device}
                if not needed or not _concurrent(operation.model_stage, holder, current, target):
                    continue
                for before in sorted(needed):
                    self._wait(before, after, memory)

    def _wait(self, before: int, after: int, memory: MemoryBound | None) -> None:
        release, acquisition = self.primitives[before], self.primitives[after]
        if self._path(before, after) is not None:
            return
        circle = self._path(after, before)
        if circle is None:
            self._link(before, after, EdgeKind.RESOURCE)
        elif release.model_stage.stage is acquisition.model_stage.stage:
            chain = self._chain(circle)
            if memory is None:
                raise InfeasiblePlanError(f"no order of primitives reaches the target plan: {chain}")
            self.waived[after] = chain

    def _path(self, start: int, end: int) -> list[int] | None:
        """Primitives from ``start`` to ``end``, each waiting for the one before; None if ``end`` does not wait."""
        successor = {end: end}
        stack = [end]
        while stack:
            node = stack.pop()
            if node == start:
                path = [node]
                while path[-1] != end:
                    path.append(successor[path[-1]])
                return path
            for before in self.predecessors[node]:
                if before not in successor:
                    successor[before] = node
                    stack.append(before)
        return None

    def _chain(self, circle: Sequence[int]) -> str:
        acquisition, release = self.primitives[circle[0]], self.primitives[circle[-1]]
        devices = sorted(acquisition.acquires & release.releases)
        waits = ", which waits for ".join(f"[{self.primitives[i]}]" for i in reversed(circle))
        return f"[{acquisition}] needs devices {devices} of {waits}"


def _schedule(builder: _Builder, residency: Residency | None) -> list[int]:
    """A deterministic topological order; each time the first ready primitive that fits in memory."""
    primitives = builder.primitives
    waiting = [len(before) for before in builder.predecessors]
    successors: list[list[int]] = [[] for _ in primitives]
    for edge in builder.edges:
        successors[edge.before].append(edge.after)

    def key(index: int) -> _Key:
        operation = primitives[index]
        return _PRIORITY[type(operation)], operation.model_stage.sort_key, index

    ready = [key(index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = _take(ready, builder, residency)
        order.append(index)
        for after in successors[index]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, key(after))
    return order


def _take(ready: list[_Key], builder: _Builder, residency: Residency | None) -> int:
    """Pop the first ready primitive that fits; larger ones wait until others have freed memory."""
    if residency is None:
        return heapq.heappop(ready)[-1]
    too_large = []
    while ready:
        entry = heapq.heappop(ready)
        operation = builder.primitives[entry[-1]]
        if residency.overflow(operation) is None:
            residency.apply(operation)
            for other in too_large:
                heapq.heappush(ready, other)
            return entry[-1]
        too_large.append(entry)
    raise InfeasiblePlanError(_no_room(too_large, builder.primitives, builder.waived, residency))


def _no_room(
    too_large: Sequence[_Key],
    primitives: Sequence[Primitive],
    waived: Mapping[int, str],
    residency: Residency,
) -> str:
    index = too_large[0][-1]
    over = residency.overflow(primitives[index])
    assert over is not None
    message = f"the transition does not fit: {residency.refusal(primitives[index], *over)}"
    chains = [waived[entry[-1]] for entry in too_large if entry[-1] in waived]
    return "; ".join([message, *chains])
