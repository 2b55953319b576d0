"""The nereus command as a user types it: a job, a sweep over multi-process jobs, a report; failures are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_nereus.report.record import read_run

NEREUS = str(Path(sys.executable).with_name("nereus"))
EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("trainer.max_steps=2", "model.config.num_hidden_layers=2", "algorithm.arguments.max_new_tokens=8")


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)


def test_train_then_report(tmp_path: Path):
    done = run(tmp_path, NEREUS, "train", *SMALL, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert "step   2" in done.stdout
    assert len(read_run(tmp_path / "out").steps) == 2
    assert {"nereus.jsonl", "nereus.png", "metrics.csv", ".hydra"} <= {p.name for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "nereus.png").unlink()
    shown = run(tmp_path, NEREUS, "report", "out")
    assert shown.returncode == 0
    assert (tmp_path / "out" / "nereus.png").exists()


def test_a_sweep_runs_every_job_in_a_directory_of_its_own_and_names_the_one_that_fails(tmp_path: Path):
    """Eight processes a job; the second has a batch that its plan does not divide."""
    sweep = (
        "cluster.devices=8",
        "+stages.plan={actor:{generation:{dp:8},training:{dp:8}}}",
        "algorithm.arguments.kl_coef=0",
    )
    done = run(
        tmp_path, NEREUS, "train", "-m", *SMALL, *sweep, "data.batch_size=8,3,4", "algorithm.arguments.samples=4",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert done.returncode != 0
    assert [len(read_run(tmp_path / "sweep" / job).steps) for job in ("0", "2")] == [2, 2]
    assert {p.name for p in (tmp_path / "sweep").iterdir()} == {"0", "1", "2", "multirun.yaml"}
    failed = [line for line in done.stderr.splitlines() if line.startswith("nereus: job")]
    assert len(failed) == 1
    assert "nereus: job 1 (" in failed[0]
    assert "data.batch_size=3" in failed[0]
    assert "do not divide 12 rows" in failed[0]
    # Ranks do not parse the command line again: what Hydra says of a job is said once.
    assert done.stdout.count("#0 :") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "policy.gamma=2"), "nereus: gamma: 2.0 is no share"),
        (("train", "polcy=static"), "Could not override 'polcy'"),
        (("report", "nowhere"), "nereus: run: nowhere cannot be read"),
        (("dance",), "invalid choice: 'dance'"),
    ],
)
def test_a_mistake_gives_one_error_and_no_traceback(tmp_path: Path, arguments: tuple[str, ...], words: str):
    done = run(tmp_path, NEREUS, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("grpo.py", *SMALL),
        ("ppo.py", "experiment=ppo_five", "cluster.devices=4", *SMALL),
    ],
)
def test_examples_run(tmp_path: Path, command: tuple[str, ...]):
    done = run(tmp_path, sys.executable, str(EXAMPLES / command[0]), *command[1:], "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert len(read_run(tmp_path / "out").steps) == 2
