"""Options: every way in which one model-stage may be laid over a pool, and which of them can matter.

The candidates of paper §4.2: power-of-two tensor-parallel degrees inside a node, power-of-two pipeline
degrees, every data-parallel degree that divides the rows, micro-batches and recompute policies, on
the first devices of the pool, on its last, or on those that the model-stage holds already. First and last
let the model-stages of one stage sit side by side or share. Those that another beats in latency, devices
and memory at the same time are dropped: what stays is the latency-resource frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_nereus.cost import CostModel, LinkType
from lightning_nereus.cost.latency import Links, StageSeconds, links_of
from lightning_nereus.cost.memory import MemoryEstimate, shard_elements, stage_memory
from lightning_nereus.job import (
    ACTOR_GENERATION,
    Layout,
    ModelStage,
    Plan,
    Recompute,
    Stage,
    StagePlan,
    Workload,
)
from lightning_nereus.transition import keep_resident


@dataclass(frozen=True, slots=True)
class Option:
    """One stage plan of one model-stage with all that the search asks of it.

    ``moved`` are the parameter elements that devices would have to receive from where they are now.
    """

    model_stage: ModelStage
    stage_plan: StagePlan
    devices: frozenset[int]
    nodes: int
    work: StageSeconds
    memory: MemoryEstimate
    moved: float
    synchronisation: Mapping[LinkType, float]

    @property
    def figures(self) -> tuple[float, ...]:
        """What an option must not exceed to be as good: seconds of each kind."""
        scoring, main = self.work.scoring, self.work.main
        return (
            scoring.compute,
            sum(scoring.communication.values()),
            main.compute,
            sum(main.communication.values()),
            *self.synchronisation.values(),
        )


class OptionSpace:
    """The options of one replan. Latencies and memory are worked out once for each layout and link."""

    def __init__(
        self,
        cost_model: CostModel,
        workload: Workload,
        pool: Sequence[int],
        current: Plan | None,
        layouts: Mapping[ModelStage, Layout] | None,
    ) -> None:
        self.cost_model = cost_model
        self.workload = workload
        self.pool = tuple(sorted(pool))
        self.current = current
        self.layouts = layouts
        self._work: dict[tuple[ModelStage, StagePlan, Links], StageSeconds] = {}
        self._memory: dict[tuple[ModelStage, StagePlan], MemoryEstimate] = {}

    def stage_plans(self, model_stage: ModelStage) -> list[StagePlan]:
        """Every stage plan of a model-stage, each once; the one in force first where it still can be."""
        found: dict[StagePlan, None] = {}
        now = self.current[model_stage] if self.current is not None else None
        if now is not None and self._possible(model_stage, now):
            found[now] = None
        for layout, dp in self._degrees(model_stage):
            for devices in self._device_sets(model_stage, layout, dp):
                placed = StagePlan(layout, dp, devices)
                if now is not None:
                    placed = self._resident(model_stage, now, placed)
                for micro_batches in self._micro_batches(model_stage, dp):
                    for recompute in self._recomputes(model_stage):
                        found[replace(placed, micro_batches=micro_batches, recompute=recompute)] = None
        return list(found)

    def options(self, model_stage: ModelStage) -> list[Option]:
        """Every option that fits in a device's memory by itself."""
        options = (self._option(model_stage, stage_plan) for stage_plan in self.stage_plans(model_stage))
        return [option for option in options if option.memory.total <= self.cost_model.memory_limit]

    def frontier(self, options: Sequence[Option], *, by_memory: bool) -> list[Option]:
        """The options that no other beats; those that move nothing stay in any case.

        Args:
            by_memory: whether to keep slower ones that take less memory.
        """
        # Where devices share compute slots, fewer devices may mean more of them at work at the same time, so that
        # only options on the same devices compare.
        shared = bool(self.cost_model.cluster.compute_slots)
        kept: list[Option] = []
        for option in sorted(options, key=lambda o: (sum(o.figures), len(o.devices), o.memory.total, o.moved)):
            if option.moved == 0 and self.current is not None:
                kept.append(option)
                continue
            if not any(_beats(other, option, by_memory=by_memory, same_devices=shared) for other in kept):
                kept.append(option)
        return kept

    def _rows(self, model_stage: ModelStage) -> int:
        return self.workload.minibatch_rows if model_stage.stage is Stage.TRAINING else self.workload.rows

    def _degrees(self, model_stage: ModelStage) -> Iterator[tuple[Layout, int]]:
        shape, batches = self.cost_model.job.shape(model_stage), self.workload.batches(model_stage.stage)
        tensor = [t for t in _powers(self.cost_model.cluster.devices_per_node) if shape.heads % t == 0]
        for tp in tensor:
            for pp in _powers(shape.layers):
                layout = Layout(tp, pp)
                if self.layouts is not None and layout != self.layouts[model_stage]:
                    continue
                for dp in range(1, len(self.pool) // layout.size + 1):
                    if all(rows % dp == 0 for rows in batches):
                        yield layout, dp

    def _possible(self, model_stage: ModelStage, stage_plan: StagePlan) -> bool:
        if not set(self.pool).issuperset(stage_plan.devices):
            return False
        return self.layouts is None or self.layouts[model_stage] == stage_plan.layout

    def _micro_batches(self, model_stage: ModelStage, dp: int) -> Iterator[int]:
        """Powers of two that divide a replica's rows; generation takes all rows at once."""
        if model_stage.stage is Stage.GENERATION:
            return iter((1,))
        rows = self._rows(model_stage) // dp
        return (m for m in _powers(rows) if rows % m == 0)

    @staticmethod
    def _recomputes(model_stage: ModelStage) -> tuple[Recompute, ...]:
        return tuple(Recompute) if model_stage.stage is Stage.TRAINING else (Recompute.NONE,)

    def _device_sets(self, model_stage: ModelStage, layout: Layout, dp: int) -> list[tuple[int, ...]]:
        """The first devices, the last, and those held now; in pieces of ``tp`` devices of one node each."""
        cluster, tp = self.cost_model.cluster, layout.tp
        nodes: dict[int, list[int]] = {}
        for device in self.pool:
            nodes.setdefault(cluster.node(device), []).append(device)
        pieces = [tuple(own[i : i + tp]) for own in nodes.values() for i in range(0, len(own) - tp + 1, tp)]
        count = dp * layout.pp
        if count > len(pieces):
            return []
        sets = [pieces[:count], pieces[-count:]]
        if self.current is not None:
            held = set(self.current[model_stage].devices)
            nearest = sorted(range(len(pieces)), key=lambda i: -len(held.intersection(pieces[i])))[:count]
            sets.append([pieces[i] for i in sorted(nearest)])
        return list(dict.fromkeys(tuple(d for piece in pieces for d in piece) for pieces in sets))

    def _resident(self, model_stage: ModelStage, now: StagePlan, placed: StagePlan) -> StagePlan:
        """``placed`` with its devices in the order that moves least, unless a tensor group would leave its node."""
        ordered = keep_resident(model_stage, now, placed)
        return ordered if links_of(ordered, self.cost_model.cluster).tp is LinkType.INTRA else placed

    def _option(self, model_stage: ModelStage, stage_plan: StagePlan) -> Option:
        model = self.cost_model
        # Devices count through their links only, so that placements of one layout share their latency.
        plain = replace(stage_plan, devices=tuple(range(len(stage_plan.devices))))
        links = links_of(stage_plan, model.cluster)
        work = self._work.get((model_stage, plain, links))
        if work is None:
            work = model.work_over(model_stage, stage_plan, self.workload, links)
            self._work[model_stage, plain, links] = work
        memory = self._memory.get((model_stage, plain))
        if memory is None:
            memory = stage_memory(model.job, model_stage, stage_plan, self.workload)
            self._memory[model_stage, plain] = memory
        synchronisation = {}
        if model_stage == ACTOR_GENERATION:
            synchronisation = {link: model.synchronisation_over(stage_plan, link) for link in LinkType}
        devices = frozenset(stage_plan.devices)
        nodes = len({model.cluster.node(d) for d in devices})
        moved = self._moved(model_stage, stage_plan)
        return Option(model_stage, stage_plan, devices, nodes, work, memory, moved, synchronisation)

    def _moved(self, model_stage: ModelStage, stage_plan: StagePlan) -> float:
        if self.current is None:
            return 0.0
        now = self.current[model_stage]
        if now.layout == stage_plan.layout:
            held = {(d, i % now.layout.size) for i, d in enumerate(now.devices)}
            missing = sum((d, i % now.layout.size) not in held for i, d in enumerate(stage_plan.devices))
            # Giving devices up moves nothing, but it is a change.
            if missing == 0 and set(now.units) != set(stage_plan.units):
                return 1.0
        else:
            missing = len(stage_plan.devices)
        return float(missing * shard_elements(self.cost_model.job.shape(model_stage), stage_plan.layout))


def _powers(limit: int) -> Iterator[int]:
    power = 1
    while power <= limit:
        yield power
        power *= 2


def _beats(a: Option, b: Option, *, by_memory: bool, same_devices: bool) -> bool:
    """Whether ``a`` is as good as ``b`` in every respect, so that ``b`` is never needed."""
    if a.devices != b.devices and (same_devices or not a.devices < b.devices):
        return False
    if by_memory and (a.memory.resident > b.memory.resident or a.memory.transient > b.memory.transient):
        return False
    if same_devices:
        return all(x <= y for x, y in zip(a.figures, b.figures, strict=True))
    return (
        a.work.scoring.total(1.0) <= b.work.scoring.total(1.0)
        and a.work.main.total(1.0) <= b.work.main.total(1.0)
        and all(a.synchronisation[link] <= b.synchronisation[link] for link in a.synchronisation)
    )
