"""A wheel carries all that a job needs, away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from lightning_nereus.report.record import read_run

REPOSITORY = Path(__file__).parents[1]
TRAIN = "import sys; from lightning_nereus.cli import main; sys.argv[0] = 'nereus'; main()"


def test_an_installed_wheel_finds_its_configurations_prompts_and_traces(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(tmp_path / "site")
    command = [sys.executable, "-c", TRAIN, "train", "trace=p3_us_east", "cluster.devices=1", "trainer.max_steps=1"]
    done = subprocess.run(
        [*command, "hydra.run.dir=out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_run(tmp_path / "out").steps) == 1
    sources = (tmp_path / "out" / ".hydra" / "hydra.yaml").read_text()
    assert str(tmp_path / "site" / "lightning_nereus" / "conf") in sources
