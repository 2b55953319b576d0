"""What a run does, in a terminal: a live table of steps and a line for each decision, and its summary at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lightning_nereus.control.decisions import Outcome
from lightning_nereus.cost.model import size_text
from lightning_nereus.job import ModelStage, Plan, Recompute, StagePlan
from lightning_nereus.report.record import DecisionRecord, Run, RunHead, StepRecord

VISIBLE_STEPS = 12
COLOURS = {
    Outcome.URGENT: "red",
    Outcome.OPPORTUNISTIC: "green",
    Outcome.REJECTED: "yellow",
    Outcome.KEPT: "dim",
    Outcome.INFEASIBLE: "bold red",
}


class LiveTable:
    """A run observer that draws on a console; line by line where that is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._rows: deque[StepRecord] = deque(maxlen=VISIBLE_STEPS)
        self._live: Live | None = None

    def started(self, head: RunHead, directory: Path) -> None:
        self._rows.clear()
        self.console.print(
            f"[bold]{head.devices} devices[/], {size_text(head.memory_bytes)} each, policy [bold]{head.policy}[/]; "
            f"record in {escape(str(directory))}"
        )
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()

    def stepped(self, record: StepRecord) -> None:
        if self._live is None:
            self.console.print(_line(record))
            return
        self._rows.append(record)
        self._live.update(steps_table(self._rows), refresh=True)

    def decided(self, record: DecisionRecord) -> None:
        self.console.print(decision_line(record))

    def ended(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def steps_table(steps: Iterable[StepRecord]) -> Table:
    """A row a step, a column a model-stage."""
    steps = list(steps)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("step", "reward", "length", "tokens/s", "seconds", "devices"):
        table.add_column(name, justify="right")
    for model_stage in steps[-1].plan:
        table.add_column(str(model_stage).replace(".", "\n"))
    for record in steps:
        used = f"{len(record.plan.devices)}/{len(record.pool)}"
        figures = (f"{record.step}", f"{record.reward:.3f}", f"{record.response_length:.1f}")
        speed = (f"{record.tokens_per_second:.0f}", f"{record.seconds:.2f}")
        table.add_row(*figures, *speed, used, *map(layout_text, record.plan.values()))
    return table


def layout_text(stage_plan: StagePlan) -> str:
    """``dp2 tp2 pp1``, micro-batches where there are several, ``r`` where layers are recomputed."""
    micro_batches = f" x{stage_plan.micro_batches}" if stage_plan.micro_batches > 1 else ""
    return f"{stage_plan}{micro_batches}{' r' if stage_plan.recompute is Recompute.LAYER else ''}"


def plan_text(plan: Plan) -> str:
    return ", ".join(f"{m} {layout_text(p)}" for m, p in plan.items())


def changes(current: Plan, target: Plan) -> Iterator[tuple[ModelStage, str]]:
    """What a transition changes of each model-stage, for people; the devices where nothing else does."""
    for model_stage, now in current.items():
        then = target[model_stage]
        if now == then:
            continue
        before, after = layout_text(now), layout_text(then)
        if before == after:
            before, after = f"devices {list(now.devices)}", str(list(then.devices))
        yield model_stage, f"{before} -> {after}"


def changes_text(current: Plan, target: Plan) -> str:
    return ", ".join(f"{model_stage} {text}" for model_stage, text in changes(current, target))


def decision_line(record: DecisionRecord) -> str:
    """One decision with its reason, in rich markup."""
    decision = record.decision
    colour = COLOURS[decision.outcome]
    head = f"[{colour}]after step {decision.trigger.step}: {decision.outcome}[/]: {escape(decision.trigger.reason)}"
    target = decision.target or (decision.rejected[0] if decision.rejected else None)
    if target is None:
        return f"{head}; {escape(decision.reason)}"
    text = f"{head}; {changes_text(decision.current, target.plan)}: {escape(target.verdict)}"
    if record.transition is not None:
        done = record.transition
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.primitives.items())) or "nothing to move"
        text += f" [{colour}]({kinds}; {size_text(done.moved_bytes)} in {done.seconds:.3f} s)[/]"
    return text


def summary(run: Run) -> str:
    """Every transition with its predicted and measured figures, and every target that was turned down; rich markup."""
    blocks = []
    for record in run.decisions:
        if record.transition is not None:
            blocks.append(_transition_text(record))
        elif record.decision.outcome is not Outcome.KEPT:
            blocks.append(_refusal_text(record))
    kept = sum(record.decision.outcome is Outcome.KEPT for record in run.decisions)
    stuck = sum(record.decision.outcome is Outcome.INFEASIBLE for record in run.decisions)
    counts = [
        f"{len(run.transitions)} transitions",
        f"{len(run.rejections)} rejections",
        f"{kept} replans without a faster plan",
        *([f"{stuck} without any plan"] if stuck else []),
    ]
    count = ", ".join(counts)
    return "\n".join([*blocks, f"[bold]{count}[/]"])


def _transition_text(record: DecisionRecord) -> str:
    decision, transition = record.decision, record.transition
    assert decision.target is not None
    assert transition is not None
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(transition.primitives.items())) or "no primitive"
    figures = (
        f"{kinds}; moved {size_text(transition.moved_bytes)}; "
        f"predicted {decision.target.transition_seconds:.3f} s, measured {transition.seconds:.3f} s"
    )
    return _block(record, decision.target.plan, decision.target.verdict, figures)


def _refusal_text(record: DecisionRecord) -> str:
    decision = record.decision
    if not decision.rejected:
        return _block(record, decision.current, decision.note)
    best, *others = decision.rejected
    lines = [f"and {len(others)} slower ones"] if others else []
    return _block(record, best.plan, best.verdict, *lines)


def _block(record: DecisionRecord, target: Plan, *lines: str) -> str:
    decision = record.decision
    head = (
        f"After step {decision.trigger.step}, [{COLOURS[decision.outcome]}]{decision.outcome}[/]: "
        f"{escape(decision.trigger.reason)}"
    )
    changed = [f"{m!s:<20} {text}" for m, text in changes(decision.current, target)]
    return "\n".join([head, *(f"    {escape(line)}" for line in (*changed, *lines))])


def _line(record: StepRecord) -> str:
    return (
        f"step {record.step:3d}  reward {record.reward:.3f}  length {record.response_length:5.1f}  "
        f"{record.tokens_per_second:5.0f} tokens/s  {record.seconds:.2f} s  "
        f"{len(record.plan.devices)} of {len(record.pool)} devices  {plan_text(record.plan)}"
    )
