"""Layouts and plans: how each model-stage is laid over the devices (paper §4.2, §5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job.roles import ModelStage


class Recompute(StrEnum):
    """Which activations of a training step are computed again in the backward pass."""

    NONE = "none"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Tensor- and pipeline-parallel degrees inside one unit."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or degree < 1:
                raise ConfigurationError(f"layout.{axis}", f"{degree!r} is no degree", "Use a whole number from 1")

    @property
    def size(self) -> int:
        """Devices of one unit."""
        return self.tp * self.pp

    def position(self, pipeline_rank: int, tensor_rank: int) -> int:
        """Index in a unit's device order, which is pipeline-major."""
        return pipeline_rank * self.tp + tensor_rank

    def ranks(self, position: int) -> tuple[int, int]:
        """(pipeline rank, tensor rank) of a position."""
        return divmod(position, self.tp)

    def common(self, other: Layout) -> Layout:
        """The largest layout into which both can be split (``layout_sub``, paper §6.1)."""
        return Layout(math.gcd(self.tp, other.tp), math.gcd(self.pp, other.pp))

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One model-stage's layout, data-parallel degree and devices: the paper's π.

    ``devices`` lists the units one after the other, each pipeline-major: unit ``u`` is
    ``devices[u * layout.size : (u + 1) * layout.size]``. ``micro_batches`` is the number of
    gradient-accumulation steps of one minibatch on each replica (paper §6.2: the paper's ``a``);
    under pipeline parallelism they are what fills the pipeline.
    """

    layout: Layout
    dp: int
    devices: tuple[int, ...]
    micro_batches: int = 1
    recompute: Recompute = Recompute.NONE

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ConfigurationError("dp", f"{self.dp} is no degree", "Use a whole number from 1")
        if self.micro_batches < 1:
            raise ConfigurationError("micro_batches", f"{self.micro_batches} is too few", "Use at least 1")
        object.__setattr__(self, "devices", tuple(self.devices))
        needed = self.dp * self.layout.size
        if len(self.devices) != needed:
            raise ConfigurationError(
                "devices",
                f"{len(self.devices)} devices for dp {self.dp} x tp {self.layout.tp} x pp {self.layout.pp} = {needed}",
                "Give one device for each position",
            )
        if len(set(self.devices)) != len(self.devices):
            raise ConfigurationError("devices", f"{list(self.devices)} names a device twice", "Name each once")

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each unit, in DP order."""
        size = self.layout.size
        return tuple(self.devices[u * size : (u + 1) * size] for u in range(self.dp))

    def locate(self, device: int) -> tuple[int, int] | None:
        """(DP rank, position in the unit) of a device, or None when it takes no part."""
        try:
            return divmod(self.devices.index(device), self.layout.size)
        except ValueError:
            return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "dp": self.dp,
            "devices": list(self.devices),
            "micro_batches": self.micro_batches,
            "recompute": str(self.recompute),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """Inverse of :meth:`to_dict`; ``tp``, ``pp``, ``dp`` default to 1, ``devices`` to the first ones.

        Raises:
            ConfigurationError: on an unknown key or a value that is no degree.
        """
        unknown = set(data) - {"tp", "pp", "dp", "devices", "micro_batches", "recompute"}
        if unknown:
            raise ConfigurationError(
                f"stage plan key {sorted(unknown)[0]!r}",
                "is unknown",
                "Use tp, pp, dp, devices, micro_batches, recompute",
            )
        layout = Layout(int(data.get("tp", 1)), int(data.get("pp", 1)))
        dp = int(data.get("dp", 1))
        devices = data.get("devices")
        if devices is None:
            devices = range(dp * layout.size)
        recompute = str(data.get("recompute", Recompute.NONE))
        if recompute not in list(Recompute):
            raise ConfigurationError("recompute", f"{recompute!r} is unknown", f"Use one of {', '.join(Recompute)}")
        return cls(layout, dp, tuple(int(d) for d in devices), int(data.get("micro_batches", 1)), Recompute(recompute))

    def __str__(self) -> str:
        return f"dp{self.dp} {self.layout}"


@dataclass(frozen=True, slots=True)
class Plan(Mapping[ModelStage, StagePlan]):
    """A StagePlan for each ModelStage: the paper's S. Iterates in stage order."""

    stages: tuple[tuple[ModelStage, StagePlan], ...]
    _index: dict[ModelStage, StagePlan] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(dict(self.stages).items(), key=lambda item: item[0].sort_key))
        if not ordered:
            raise ConfigurationError("plan", "has no model-stage", "Give a stage plan for each model-stage")
        object.__setattr__(self, "stages", ordered)
        object.__setattr__(self, "_index", dict(ordered))

    @classmethod
    def of(cls, stages: Mapping[ModelStage, StagePlan]) -> Plan:
        return cls(tuple(stages.items()))

    @classmethod
    def uniform(cls, model_stages: Iterator[ModelStage] | tuple[ModelStage, ...], stage_plan: StagePlan) -> Plan:
        """The same stage plan for every model-stage (all share the devices)."""
        return cls(tuple((m, stage_plan) for m in model_stages))

    def __getitem__(self, key: ModelStage) -> StagePlan:
        return self._index[key]

    def __iter__(self) -> Iterator[ModelStage]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __hash__(self) -> int:
        return hash(self.stages)

    @property
    def devices(self) -> frozenset[int]:
        """Every device that any model-stage uses."""
        return frozenset(d for stage_plan in self.values() for d in stage_plan.devices)

    def replace(self, model_stage: ModelStage, stage_plan: StagePlan) -> Plan:
        return Plan.of({**self._index, model_stage: stage_plan})

    def to_dict(self) -> dict[str, Any]:
        return {str(m): p.to_dict() for m, p in self.stages}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> Plan:
        """Inverse of :meth:`to_dict`: ``{"actor.training": {"tp": 2, "dp": 4}, ...}``.

        Raises:
            ConfigurationError: naming the model-stage.
        """
        stages = []
        for name, stage_plan in data.items():
            model_stage = ModelStage.parse(name)
            try:
                stages.append((model_stage, StagePlan.from_dict(stage_plan)))
            except ConfigurationError as error:
                raise ConfigurationError(f"plan {name} {error.field}", error.problem, error.mend) from error
            except (TypeError, ValueError, AttributeError) as error:
                mend = 'Write {"tp": 2, "pp": 1, "dp": 2, "devices": [0, 1, 2, 3]}'
                raise ConfigurationError(f"plan {name}", f"is {stage_plan!r}", mend) from error
        return cls(tuple(stages))

    def __str__(self) -> str:
        return ", ".join(f"{m} {p}" for m, p in self.stages)
