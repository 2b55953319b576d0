"""What a run did, step by step, as data: written to ``nereus.jsonl``, shown in a terminal, drawn afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol

from lightning_nereus.control.decisions import Decision, Outcome
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Plan

FILE_NAME = "nereus.jsonl"


@dataclass(frozen=True, slots=True)
class RunHead:
    """What a run starts with. ``memory_bytes`` of one device; ``step`` is above 0 where it resumes."""

    policy: str
    devices: int
    memory_bytes: float
    plan: Plan
    step: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One RL step. ``pool`` are the devices that could be used in it; ``predicted_seconds`` was predicted before it.

    ``tokens_per_second`` counts response tokens; ``response_length`` is their mean a row.
    """

    step: int
    seconds: float
    predicted_seconds: float
    reward: float
    response_length: float
    tokens_per_second: float
    pool: tuple[int, ...]
    plan: Plan
    stage_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """What an admitted decision's transition took."""

    seconds: float
    moved_bytes: int
    primitives: dict[str, int]


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision, and the transition where one was admitted."""

    decision: Decision
    transition: TransitionRecord | None = None


class RunObserver(Protocol):
    """Is told what a run does, on rank 0."""

    def started(self, head: RunHead, directory: Path) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def decided(self, record: DecisionRecord) -> None: ...

    def ended(self) -> None: ...


def _fields(record: RunHead | StepRecord | TransitionRecord) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


class RunRecorder:
    """Appends every record to ``nereus.jsonl`` in the run's directory, a line each."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def started(self, head: RunHead, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")  # of a run that was killed while it wrote
        self._write("run", {**_fields(head), "plan": head.plan.to_dict()})

    def stepped(self, record: StepRecord) -> None:
        self._write("step", {**_fields(record), "plan": record.plan.to_dict()})

    def decided(self, record: DecisionRecord) -> None:
        transition = _fields(record.transition) if record.transition else None
        self._write("decision", {"decision": record.decision.to_dict(), "transition": transition})

    def ended(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, data: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"kind": kind, **data}) + "\n")
        self._file.flush()  # a run that is killed keeps its record


@dataclass(slots=True)
class Run:
    """A whole run, as read back."""

    head: RunHead
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Forget what came after ``step``, from which the run goes on."""
        self.steps = [record for record in self.steps if record.step <= step]
        self.decisions = [record for record in self.decisions if record.decision.trigger.step <= step]

    @property
    def transitions(self) -> list[DecisionRecord]:
        """The decisions that changed the plan."""
        return [record for record in self.decisions if record.transition is not None]

    @property
    def rejections(self) -> list[DecisionRecord]:
        """The decisions that left a faster plan alone."""
        return [record for record in self.decisions if record.decision.outcome is Outcome.REJECTED]


def read_run(path: str | Path) -> Run:
    """Read a run's directory or its ``nereus.jsonl``: the last run there, with the parts before it was resumed.

    A line that a kill cut off is left out.

    Raises:
        ConfigurationError: naming the line that is no record.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    run: Run | None = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError("run", f"{path} cannot be read ({error})", "Give a run's directory") from error
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        try:
            kind = data.pop("kind")
            if kind == "run":
                head = RunHead(**{**data, "plan": Plan.from_dict(data["plan"])})
                if run is None or head.step == 0:
                    run = Run(head)
                run.cut(head.step)
                continue
            assert run is not None
            if kind == "step":
                plan, pool = Plan.from_dict(data["plan"]), tuple(data["pool"])
                run.steps.append(StepRecord(**{**data, "plan": plan, "pool": pool}))
            else:
                transition = TransitionRecord(**data["transition"]) if data["transition"] else None
                run.decisions.append(DecisionRecord(Decision.from_dict(data["decision"]), transition))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ConfigurationError(
                "run", f"line {number} of {path} is no record ({error!r})", "Give a file that a run wrote"
            ) from error
    if run is None:
        raise ConfigurationError("run", f"{path} has no run", "Give a run's directory")
    return run
