"""JobRuntime: the unit collections of one rank, the plan in force, and how both change together."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, JobSpec, ModelStage, Plan
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.runtime.engine import TransitionEngine
from lightning_nereus.runtime.unit import UnitCollection, UnitState
from lightning_nereus.runtime.weights import synchronise
from lightning_nereus.transition.graph import TransitionGraph, plan_transition
from lightning_nereus.transition.primitives import UnitId
from lightning_nereus.transition.shards import ShardMap


@dataclass(frozen=True, slots=True)
class TransitionReport:
    """What one transition did, alike on every rank. Bytes are those that crossed devices."""

    seconds: float
    moved_bytes: int
    primitives: dict[str, int]


def check_plan(plan: Plan, shard_maps: Mapping[ModelStage, ShardMap], world_size: int) -> None:
    """Refuse a plan that the models or the world cannot take, before anything changes.

    Raises:
        ConfigurationError: naming the model-stage and the degree or device.
    """
    missing = [str(m) for m in shard_maps if m not in plan]
    extra = [str(m) for m in plan if m not in shard_maps]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}, which the job has not"
        raise ConfigurationError("plan", problem, "Plan each model-stage of the job")
    for model_stage, stage_plan in plan.items():
        shard_maps[model_stage].check(stage_plan.layout)
        absent = [d for d in stage_plan.devices if not 0 <= d < world_size]
        if absent:
            raise ConfigurationError(
                f"plan {model_stage} devices",
                f"{absent} are not among the {world_size} devices of the job",
                "Use devices from 0 on, or raise the Trainer's devices",
            )


class StageClock:
    """Seconds that this rank spent in each model-stage since the last :meth:`drain`."""

    def __init__(self) -> None:
        self._seconds: defaultdict[ModelStage, float] = defaultdict(float)

    @contextmanager
    def measure(self, model_stage: ModelStage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[model_stage] += time.perf_counter() - start

    def drain(self) -> dict[ModelStage, float]:
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class JobRuntime:
    """Everything of the job that lives on this rank.

    Args:
        job: the models and model-stages.
        plan: the first plan.
        collections: one per model-stage, not yet materialised.
        rank: this device; ``world_size`` the number of devices of the job.
        communicators: where groups come from; None for a job of one process.
    """

    def __init__(
        self,
        job: JobSpec,
        plan: Plan,
        collections: Mapping[ModelStage, UnitCollection],
        rank: int,
        world_size: int,
        communicators: Communicators | None,
    ) -> None:
        self.job = job
        self.plan = plan
        self.collections = dict(collections)
        self.rank = rank
        self.world_size = world_size
        self.communicators = communicators
        self.clock = StageClock()
        shard_maps = {m: c.shard_map for m, c in self.collections.items()}
        self.engine = TransitionEngine(rank, shard_maps, communicators)
        check_plan(plan, shard_maps, world_size)

    def materialise(self) -> None:
        """Build every unit of this rank from its model's source."""
        for model_stage, collection in self.collections.items():
            collection.materialise(self.plan[model_stage])

    def transition(self, target: Plan, graph: TransitionGraph | None = None) -> TransitionReport:
        """Re-lay every unit from the plan in force to ``target``. All ranks call it at a safe boundary."""
        check_plan(target, {m: c.shard_map for m, c in self.collections.items()}, self.world_size)
        graph = graph or plan_transition(self.plan, target)
        start = time.perf_counter()
        states: dict[UnitId, UnitState] = {}
        for model_stage, collection in self.collections.items():
            if self.plan[model_stage] != target[model_stage]:
                states.update(collection.detach())
        states = self.engine.execute(graph, states)
        for model_stage, collection in self.collections.items():
            if self.plan[model_stage] != target[model_stage]:
                collection.attach(target[model_stage], states)
        self.plan = target
        totals = torch.tensor([self.engine.moved_bytes, 0.0], dtype=torch.float64)
        self.all_reduce(totals, "sum")
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        self.all_reduce(elapsed, "max")
        kinds = Counter(type(operation).__name__ for operation in graph.order)
        return TransitionReport(float(elapsed), int(totals[0]), dict(kinds))

    def synchronise_weights(self) -> None:
        """Hand the trained actor's parameters to its generation units."""
        if ACTOR_TRAINING in self.collections and ACTOR_GENERATION in self.collections:
            synchronise(self.collections[ACTOR_TRAINING], self.collections[ACTOR_GENERATION])

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce over the job's world in place ("sum" or "max")."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
        return tensor

    def share_rows(self, model_stage: ModelStage, total: int, local: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Give every rank all rows of a result of which each unit holds its share.

        ``local`` holds this rank's rows (leading dimension ``total / dp``), None outside the
        model-stage. Units hand out their rows through their first device.
        """
        collection = self.collections[model_stage]
        if self.world_size == 1:
            assert local is not None
            return dict(local)
        about = self._share_description(collection, local)
        shared = {}
        for name, (shape, dtype_name) in about.items():
            dtype = getattr(torch, dtype_name)
            parts = []
            for dp_rank, leader in enumerate(collection.leaders):
                if local is not None and collection.dp_rank == dp_rank and leader == self.rank:
                    part = local[name].contiguous()
                else:
                    part = torch.empty([total // len(collection.leaders), *shape], dtype=dtype)
                dist.broadcast(part, src=leader)
                parts.append(part)
            shared[name] = torch.cat(parts)
        return shared

    def _share_description(self, collection: UnitCollection, local: Mapping[str, Tensor] | None) -> dict[str, Any]:
        described = [
            {k: (list(v.shape[1:]), str(v.dtype).removeprefix("torch.")) for k, v in local.items()} if local else None
        ]
        dist.broadcast_object_list(described, src=collection.leaders[0])
        assert described[0] is not None
        return described[0]

    def share_values(self, model_stage: ModelStage, values: Mapping[str, float] | None) -> dict[str, float]:
        """Give every rank the scalars that the first unit's leader holds."""
        if self.world_size == 1:
            assert values is not None
            return dict(values)
        box = [dict(values) if values is not None else None]
        dist.broadcast_object_list(box, src=self.collections[model_stage].leaders[0])
        assert box[0] is not None
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values
