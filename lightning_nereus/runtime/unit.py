"""Elastic Model Units at run time: what this device holds of each model-stage (paper §5).

A :class:`UnitState` is the logical state Λ of one position of a unit as plain tensors. It is what
the transition engine re-lays; the executor of a backend is built around it and thrown away with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ModelStage, StagePlan
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.transition.primitives import UnitId
from lightning_nereus.transition.shards import ShardMap, Slice

PARAMETERS = "parameters"


@dataclass(slots=True)
class UnitState:
    """One position's share of a unit.

    ``tensors[kind][name]`` has the shape of the position's slice of ``name``; kinds are the
    parameters and each optimizer tensor that is shaped like its parameter. ``scalars[kind]`` are
    optimizer values that all parameters share (Adam's step count). ``updates`` counts optimizer
    steps, ``version`` the policy version that the parameters stand for.
    """

    unit: UnitId
    position: int
    tensors: dict[str, dict[str, Tensor]]
    scalars: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    version: int = 0

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for group in self.tensors.values() for t in group.values())

    def header(self) -> dict[str, object]:
        """What a receiver must know besides the shard map, as JSON values."""
        return {
            "kinds": {kind: str(_dtype_of(group)).removeprefix("torch.") for kind, group in self.tensors.items()},
            "scalars": self.scalars,
            "updates": self.updates,
            "version": self.version,
        }

    def like(self, unit: UnitId, position: int, tensors: dict[str, dict[str, Tensor]]) -> UnitState:
        """The same logical state in another place."""
        return UnitState(unit, position, tensors, dict(self.scalars), self.updates, self.version)


def _dtype_of(group: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(group.values())).dtype


def cut(tensor: Tensor, held: Slice, wanted: Slice) -> Tensor:
    """A copy of the part ``wanted`` of a tensor that stands for ``held``."""
    return tensor[wanted.within(held)].contiguous().clone()


class Executor(Protocol):
    """What a backend builds around one position's shards, as far as the runtime needs it."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def reduce_gradients(self, dp_group: dist.ProcessGroup | None) -> None: ...

    def gradient_norm(self) -> Tensor: ...

    def clip_(self, max_norm: float) -> Tensor: ...


class OptimizerBinding:
    """Keeps one torch optimizer in step with parameters that come and go.

    The optimizer object lives as long as the run, so that Lightning's wrappers, learning-rate
    schedulers and monitors keep working; only the parameters and tensors inside it change.
    On a rank outside the model-stage it holds one empty placeholder.
    ``group_of`` says which parameter group takes a name; names that a rank has not held before are
    looked up in it, so it must cover the whole model.
    """

    def __init__(self, optimizer: Optimizer, group_of: Mapping[str, int], placeholder: nn.Parameter) -> None:
        self.optimizer = optimizer
        self.group_of = group_of
        self.placeholder = placeholder

    def extract(self, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
        """(tensors shaped like their parameter, scalars shared by all), and forget them."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for kind, name, tensor in self.named_tensors(parameters):
            tensors.setdefault(kind, {})[name] = tensor
        scalars = self.scalars(parameters)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        return tensors, scalars

    def named_tensors(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, parameter name, tensor) of every optimizer tensor that is shaped like its parameter."""
        for name, parameter in parameters.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield kind, name, value

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """Values that are no tensors of their parameter's shape (Adam's ``step``), the same for all."""
        return {
            kind: float(value)
            for parameter in parameters.values()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if not (isinstance(value, Tensor) and value.dim() > 0)
        }

    def bind(
        self,
        parameters: Mapping[str, nn.Parameter],
        tensors: Mapping[str, Mapping[str, Tensor]],
        scalars: Mapping[str, float],
    ) -> None:
        """Point the optimizer at the parameters that this rank holds now."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        for name, parameter in parameters.items():
            self.optimizer.param_groups[self.group_of[name]]["params"].append(parameter)
            state: dict[str, Tensor] = {kind: group[name] for kind, group in tensors.items()}
            state.update({kind: torch.tensor(value, dtype=torch.float32) for kind, value in scalars.items()})
            if state:
                self.optimizer.state[parameter] = state
        if not parameters:
            self.optimizer.param_groups[0]["params"].append(self.placeholder)


class UnitCollection:
    """The units of one model-stage, seen from this rank: at most one position of one unit.

    Args:
        model_stage: which model-stage.
        shard_map: its parameters.
        rank: this device.
        communicators: where groups come from; None where the job has one process.
        load: reads the initial slices (``ModelSource.load``).
        build: makes an executor of ``(unit, position, parameters, groups)``.
    """

    def __init__(
        self,
        model_stage: ModelStage,
        shard_map: ShardMap,
        rank: int,
        communicators: Communicators | None,
        load: Callable[[Mapping[str, Slice]], dict[str, Tensor]],
        build: Callable[[UnitId, int, dict[str, Tensor], UnitRanks], Executor],
    ) -> None:
        self.model_stage = model_stage
        self.shard_map = shard_map
        self.rank = rank
        self.communicators = communicators
        self._load = load
        self._build = build
        self.plan: StagePlan | None = None
        self.executor: Any = None
        self.unit: UnitId | None = None
        self.position = -1
        self.dp_rank = -1
        self.dp_group: dist.ProcessGroup | None = None
        self.updates = 0
        self.version = 0
        self.binding: OptimizerBinding | None = None
        # Stands in an optimizer for a rank that holds none of the model's parameters.
        self.placeholder = nn.Parameter(torch.empty(0))

    def materialise(self, plan: StagePlan) -> None:
        """Build this rank's unit from the model's source."""
        unit, position, _ = self._place(plan)
        states = {}
        if unit is not None:
            tensors = self._load(self.shard_map.shard(unit.layout, position))
            states[unit] = UnitState(unit, position, {PARAMETERS: tensors})
        self.attach(plan, states)

    def detach(self) -> dict[UnitId, UnitState]:
        """Take the logical state out and drop the executor. Gradients hold no state at a safe boundary."""
        if self.unit is None:
            return {}
        parameters = dict(self.executor.parameters)
        tensors, scalars = self.binding.extract(parameters) if self.binding else ({}, {})
        held = {name: p.detach() for name, p in parameters.items()}
        state = UnitState(self.unit, self.position, {PARAMETERS: held, **tensors}, scalars, self.updates, self.version)
        unit = self.unit
        self.executor = self.unit = self.dp_group = None
        return {unit: state}

    def attach(self, plan: StagePlan, states: Mapping[UnitId, UnitState]) -> None:
        """Build the executor around this rank's state under ``plan``."""
        unit, position, dp_rank = self._place(plan)
        self.plan, self.unit, self.position, self.dp_rank = plan, unit, position, dp_rank
        if unit is None:
            if self.binding:
                self.binding.bind({}, {}, {})
            return
        state = states[unit]
        self.updates, self.version = state.updates, state.version
        self.executor = self._build(unit, position, state.tensors[PARAMETERS], UnitRanks.of(unit, position))
        if self.communicators is not None:
            peers = tuple(devices[position] for devices in plan.units)
            self.dp_group = self.communicators.group(peers)
        if self.binding:
            optimizer_tensors = {k: v for k, v in state.tensors.items() if k != PARAMETERS}
            self.binding.bind(self.executor.parameters, optimizer_tensors, state.scalars)

    def _place(self, plan: StagePlan) -> tuple[UnitId | None, int, int]:
        where = plan.locate(self.rank)
        if where is None:
            return None, -1, -1
        dp_rank, position = where
        return UnitId(self.model_stage, plan.layout, plan.units[dp_rank]), position, dp_rank

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first device of each unit, in DP order."""
        assert self.plan is not None
        return tuple(unit[0] for unit in self.plan.units)

    def rows(self, total: int) -> range:
        """The rows of a batch of ``total`` that this rank's unit takes (empty outside the stage).

        Raises:
            ConfigurationError: if the DP degree does not divide the batch.
        """
        assert self.plan is not None
        if total % self.plan.dp:
            raise ConfigurationError(
                f"{self.model_stage} dp", f"{self.plan.dp} does not divide {total} rows", "Use a divisor of the batch"
            )
        if self.unit is None:
            return range(0)
        share = total // self.plan.dp
        return range(self.dp_rank * share, (self.dp_rank + 1) * share)


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """The devices with which one position of a unit computes, each tuple in group order."""

    unit: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    tied: tuple[int, ...]

    @classmethod
    def of(cls, unit: UnitId, position: int) -> UnitRanks:
        layout = unit.layout
        pipeline, tensor = layout.ranks(position)
        at = unit.devices.__getitem__
        tp = tuple(at(layout.position(pipeline, t)) for t in range(layout.tp))
        pp = tuple(at(layout.position(p, tensor)) for p in range(layout.pp))
        ends = pipeline in (0, layout.pp - 1) and layout.pp > 1
        return cls(unit.devices, tp, pp, (pp[0], pp[-1]) if ends else (unit.devices[position],))
