"""A run's record: written and read back whole, summed up, drawn; what is no record is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lightning_nereus.control.decisions import Decision, Outcome, Proposal
from lightning_nereus.control.monitor import Signal, Trigger
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Layout, Plan, StagePlan
from lightning_nereus.report.picture import draw
from lightning_nereus.report.record import (
    DecisionRecord,
    RunHead,
    RunObserver,
    RunRecorder,
    StepRecord,
    TransitionRecord,
    read_run,
)
from lightning_nereus.report.terminal import LiveTable, summary

A = Plan.uniform((ACTOR_GENERATION, ACTOR_TRAINING), StagePlan(Layout(), 4, (0, 1, 2, 3)))
B = A.replace(ACTOR_TRAINING, StagePlan(Layout(2, 1), 2, (0, 1, 2, 3), 4))
HEAD = RunHead("nereus", 4, 2.0**30, A)
PAYS = Proposal(B, 1.5, 0.1, 2.0**20, "saves 0.5 s [a step]")
DECISIONS = (
    DecisionRecord(
        Decision(
            Trigger(2, (Signal.LENGTH,), "responses are +40% long", False), Outcome.REJECTED, A, 2.0, 1.0, None, (PAYS,)
        )
    ),
    DecisionRecord(
        Decision(Trigger(3, (Signal.POOL,), "the pool grew", False), Outcome.OPPORTUNISTIC, A, 2.0, 4.0, PAYS),
        TransitionRecord(0.2, 2**20, {"Split": 4, "Destroy": 2}),
    ),
    DecisionRecord(Decision(Trigger(4, (Signal.COMPUTE,), "slower", False), Outcome.KEPT, B, 1.5, 1.0)),
)


def steps() -> list[StepRecord]:
    seconds = {"actor.generation": 0.5, "actor.training": 1.0}
    return [
        StepRecord(n, 1.5, 1.4, 0.1 * n, 10.0 * n, 100.0, (0, 1, 2, 3), A if n <= 3 else B, seconds)
        for n in range(1, 6)
    ]


def play(observer: RunObserver, directory: Path) -> None:
    observer.started(HEAD, directory)
    for step in steps():
        observer.stepped(step)
        for record in DECISIONS:
            if record.decision.trigger.step == step.step:
                observer.decided(record)
    observer.ended()


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path):
    play(RunRecorder(), tmp_path)
    run = read_run(tmp_path)
    assert run.head == HEAD
    assert run.steps == steps()
    assert tuple(run.decisions) == DECISIONS
    assert run.transitions == [DECISIONS[1]]
    assert run.rejections == [DECISIONS[0]]


def test_the_picture_is_drawn(tmp_path: Path):
    play(RunRecorder(), tmp_path)
    for name in ("run.png", "run.svg"):
        path = draw(read_run(tmp_path), tmp_path / name)
        assert path.stat().st_size > 10_000
    assert b"dp2 tp2 pp1" in (tmp_path / "run.svg").read_bytes() or b"<svg" in (tmp_path / "run.svg").read_bytes()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_steps_and_decisions(tmp_path: Path, terminal: bool):
    console = Console(record=True, force_terminal=terminal, width=200)
    play(LiveTable(console), tmp_path)
    text = console.export_text()
    assert "saves 0.5 s [a step]" in text
    assert "actor.training dp4 tp1 pp1 -> dp2 tp2 pp1 x4" in text
    assert "2 Destroy, 4 Split; 1.00 MiB in 0.200 s" in text
    assert "no plan is predicted to be faster" in text


def test_the_summary_has_every_transition_and_rejection(tmp_path: Path):
    play(RunRecorder(), tmp_path)
    console = Console(record=True, width=200)
    console.print(summary(read_run(tmp_path)))
    text = console.export_text()
    assert "predicted 0.100 s, measured 0.200 s" in text
    assert "1 transitions, 1 rejections, 1 replans without a faster plan" in text
    assert "After step 2, rejected" in text


def test_a_record_outlives_a_kill_a_resumption_and_a_second_run(tmp_path: Path):
    play(RunRecorder(), tmp_path)
    with (tmp_path / "nereus.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    resumed = RunRecorder()
    resumed.started(replace(HEAD, step=3), tmp_path)
    resumed.stepped(steps()[3])
    resumed.ended()
    run = read_run(tmp_path)
    assert [record.step for record in run.steps] == [1, 2, 3, 4], "what is done again counts once"
    assert tuple(run.decisions) == DECISIONS[:2], "what was decided later was undone"
    play(RunRecorder(), tmp_path)
    assert read_run(tmp_path).steps == steps(), "a run from the start is another run"


@pytest.mark.parametrize("text", ["", "{", '{"kind": "step"}', '{"kind": "run", "policy": 3}'])
def test_what_is_no_record_is_named(tmp_path: Path, text: str):
    (tmp_path / "nereus.jsonl").write_text(text + ("\n" if text else ""))
    with pytest.raises(ConfigurationError, match=r"line 1|has no run"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_run(tmp_path / "nowhere")
