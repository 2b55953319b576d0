"""Pool traces: which devices a job has at each RL step, read from spot traces of real clusters.

A trace is a CSV of ``milliseconds,add|remove,node``, one device a node. A node that comes takes the
lowest free device; where none is free it waits, and takes the place of the next that leaves.
"""

from __future__ import annotations

import bisect
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_nereus.errors import ConfigurationError

_FIELD = "trace"
_Event = tuple[float, str, str]


@dataclass(frozen=True, slots=True)
class PoolTrace:
    """The pool from given steps on; ``changes`` are (first step, devices), in order, from step 0."""

    changes: tuple[tuple[int, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if not self.changes or self.changes[0][0] != 0:
            raise ConfigurationError(_FIELD, "says nothing about step 0", "Start with the pool before the first step")
        steps = [step for step, _ in self.changes]
        if steps != sorted(set(steps)):
            raise ConfigurationError(_FIELD, f"steps {steps} are not in order", "Give each change once, in order")
        for step, devices in self.changes:
            if not devices:
                raise ConfigurationError(_FIELD, f"has a pool of zero devices at step {step}", "Leave at least one")
            if len(set(devices)) != len(devices) or min(devices) < 0:
                raise ConfigurationError(
                    _FIELD, f"has the pool {list(devices)} at step {step}", "Name each device once, from 0 on"
                )

    @classmethod
    def constant(cls, devices: Sequence[int]) -> PoolTrace:
        """A pool that never changes."""
        return cls(((0, tuple(devices)),))

    @classmethod
    def read(cls, path: str | Path, devices: int, seconds_per_step: float, start_seconds: float = 0.0) -> PoolTrace:
        """Read a trace.

        Args:
            devices: most that the job has; more nodes than that wait.
            seconds_per_step: of the trace, that pass in one RL step.
            start_seconds: where in the trace step 0 lies.

        Raises:
            ConfigurationError: naming the line that cannot be read, or the step at which no device is left.
        """
        if devices < 1:
            raise ConfigurationError(f"{_FIELD}.devices", f"{devices} is too few", "Use at least 1")
        if not seconds_per_step > 0:
            raise ConfigurationError(
                f"{_FIELD}.seconds_per_step", f"{seconds_per_step} is no time", "Use seconds above 0"
            )
        held: dict[str, int] = {}
        waiting: list[str] = []
        pools: dict[int, tuple[int, ...]] = {}
        events = list(_events(Path(path)))
        if not events or events[0][0] > start_seconds:
            raise ConfigurationError(
                _FIELD, f"{path} has no device at second {start_seconds:g}", "Start at or after its first line"
            )
        for seconds, action, node in events:
            if action == "add":
                waiting.append(node)
            elif node in waiting:
                waiting.remove(node)
            else:
                del held[node]
            free = sorted(set(range(devices)) - set(held.values()))
            for device in free[: len(waiting)]:
                held[waiting.pop(0)] = device
            # A change during a step is seen at the boundary that ends it.
            step = max(0, -int(-(seconds - start_seconds) // seconds_per_step))
            pools[step] = tuple(sorted(held.values()))
        changes: list[tuple[int, tuple[int, ...]]] = []
        for step, pool in sorted(pools.items()):
            if not changes or changes[-1][1] != pool:
                changes.append((step, pool))
        return cls(tuple(changes))

    def devices_at(self, step: int) -> tuple[int, ...]:
        """The pool of an RL step."""
        index = bisect.bisect_right([first for first, _ in self.changes], step) - 1
        return self.changes[max(index, 0)][1]


def _events(path: Path) -> Iterator[_Event]:
    """(seconds, action, node) of each line; names the first line that makes no sense."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            _FIELD, f"{path} cannot be read ({error})", "Give a CSV of milliseconds,add|remove,node"
        ) from error
    present: set[str] = set()
    last = 0.0
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row:
            continue
        where = f"line {number} of {path}"
        try:
            milliseconds, action, node = (cell.strip() for cell in row)
            seconds = float(milliseconds) / 1000
        except ValueError:
            raise ConfigurationError(
                _FIELD, f"{where} is {','.join(row)!r}", "Write milliseconds,add|remove,node"
            ) from None
        if action not in ("add", "remove"):
            raise ConfigurationError(_FIELD, f"{where} has the action {action!r}", "Use add or remove")
        if not seconds >= last:
            raise ConfigurationError(_FIELD, f"{where} goes back in time", "Sort the lines")
        if (action == "add") == (node in present):
            state = "is there already" if node in present else "is not there"
            raise ConfigurationError(_FIELD, f"{where}: {node} {state}", "Add each node once before it is removed")
        (present.add if action == "add" else present.remove)(node)
        last = seconds
        yield seconds, action, node
