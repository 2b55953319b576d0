"""A run as one picture: length and reward, devices, the plan of each model-stage, seconds predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_nereus.control.decisions import Outcome
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import StagePlan
from lightning_nereus.report.record import Run, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinct for colour-blind readers (Okabe and Ito).
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"
OUTCOME_COLOURS = {
    Outcome.URGENT: RED,
    Outcome.OPPORTUNISTIC: GREEN,
    Outcome.REJECTED: ORANGE,
    Outcome.KEPT: GREY,
    Outcome.INFEASIBLE: "black",
}
_LAYOUT_COLOURS = ("#56B4E9", "#F0E442", "#009E73", "#CC79A7", "#E69F00", "#0072B2", "#D55E00", "#999999")


def draw(run: Run, path: str | Path) -> Path:
    """Write a run's picture (the format follows the name's ending) and return where it is.

    Raises:
        ConfigurationError: if the run has no step.
    """
    # Drawing is all that needs matplotlib, which takes a second to import.
    from matplotlib.figure import Figure

    if not run.steps:
        raise ConfigurationError("run", "has no step to draw", "Give the record of a run that trained")
    rows = len(run.steps[0].plan)
    figure = Figure(figsize=(11, 6.5 + 0.45 * rows), layout="constrained")
    ratios = [2.0, 1.2, 0.5 * rows + 0.3, 1.6]
    learning, devices, plans, seconds = figure.subplots(4, 1, sharex=True, height_ratios=ratios)
    steps = [record.step for record in run.steps]
    _draw_learning(learning, steps, run.steps)
    _draw_devices(devices, steps, run.steps)
    _draw_plans(plans, run.steps)
    _draw_seconds(seconds, steps, run.steps)
    for axes in (learning, devices, plans, seconds):
        for record in run.decisions:
            axes.axvline(record.decision.trigger.step + 0.5, color=OUTCOME_COLOURS[record.decision.outcome], lw=1.2)
    seconds.set_xlabel("RL step")
    seconds.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    outcomes = {record.decision.outcome for record in run.decisions}
    handles = [_line(OUTCOME_COLOURS[outcome], f"{outcome} decision") for outcome in Outcome if outcome in outcomes]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    path = Path(path)
    figure.savefig(path, dpi=110)
    return path


def _line(colour: str, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label)


def _draw_learning(axes: Axes, steps: Sequence[int], records: Sequence[StepRecord]) -> None:
    axes.plot(steps, [record.response_length for record in records], color=BLUE)
    axes.set_ylabel("response length\n(tokens)", color=BLUE)
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot(steps, [record.reward for record in records], color=RED)
    right.set_ylabel("reward", color=RED)
    if all(record.reward >= 0 for record in records):
        right.set_ylim(bottom=0)


def _draw_devices(axes: Axes, steps: Sequence[int], records: Sequence[StepRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.step(steps, [len(record.pool) for record in records], where="mid", color=GREY, lw=5, label="in the pool")
    axes.step(steps, [len(record.plan.devices) for record in records], where="mid", color="black", label="in use")
    axes.set_ylim(0, max(len(record.pool) for record in records) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("devices")
    axes.legend(loc="lower right", ncols=2, frameon=False)


def _draw_plans(axes: Axes, records: Sequence[StepRecord]) -> None:
    model_stages = list(records[0].plan)
    colours: dict[str, str] = {}
    for row, model_stage in enumerate(model_stages):
        spans = _spans(records, [record.plan[model_stage] for record in records])
        for first, last, stage_plan in spans:
            label = str(stage_plan)
            colour = colours.setdefault(label, _LAYOUT_COLOURS[len(colours) % len(_LAYOUT_COLOURS)])
            width = last - first + 1
            axes.barh(row, width, left=first - 0.5, height=0.8, color=colour, alpha=0.6, edgecolor="white")
            # A letter takes about a hundredth of the axes' width.
            if width * 95 / len(records) >= len(label):
                axes.text(first - 0.5 + width / 2, row, label, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(model_stages)), [str(m) for m in model_stages])
    axes.invert_yaxis()


def _spans(records: Sequence[StepRecord], plans: Sequence[StagePlan]) -> Iterator[tuple[int, int, StagePlan]]:
    """(first step, last step, stage plan) of every stretch under one layout and DP degree."""
    pairs = list(zip(records, plans, strict=True))
    for _, group in groupby(pairs, key=lambda pair: str(pair[1])):
        stretch = list(group)
        yield stretch[0][0].step, stretch[-1][0].step, stretch[0][1]


def _draw_seconds(axes: Axes, steps: Sequence[int], records: Sequence[StepRecord]) -> None:
    axes.plot(steps, [record.seconds for record in records], color="black", label="measured")
    axes.plot(steps, [record.predicted_seconds for record in records], color=BLUE, ls="--", label="predicted before")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", ncols=2, frameon=False)
