"""The ``nereus`` command.

``nereus train`` is a Hydra application: all that follows are its overrides (``experiment=demo policy.gamma=0.3``,
``-m policy=nereus,static``). The ranks of a job are forked, so that the command line is parsed once.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from lightning_nereus.configuration import build, config_directory
from lightning_nereus.errors import ConfigurationError, NereusError
from lightning_nereus.report.picture import draw
from lightning_nereus.report.record import FILE_NAME, RunRecorder, read_run
from lightning_nereus.report.terminal import LiveTable, summary

# What shells say of a command that Ctrl-C ended.
INTERRUPTED = 130


@hydra.main(version_base="1.3", config_path=config_directory(), config_name="config")
def train(config: DictConfig) -> None:
    """One job, in Hydra's output directory."""
    about = HydraConfig.get()
    quiet()
    try:
        run_job(config, Path(about.runtime.output_dir))
    except Exception as error:
        if about.mode is RunMode.MULTIRUN:
            # The sweep goes on with the other jobs and ends with this one's error.
            which = ", ".join(about.overrides.task) or "no overrides"
            print(f"nereus: job {about.job.num} ({which}) failed: {error}", file=sys.stderr)
            raise
        if isinstance(error, NereusError):
            sys.exit(f"nereus: {error}")
        raise


def run_job(config: DictConfig, directory: Path) -> None:
    """Train, then show what happened and draw it."""
    job = build(config, directory, (RunRecorder(), LiveTable()))
    try:
        job.fit()
    except SystemExit:
        if job.trainer.interrupted:
            print(f"nereus: interrupted; what ran is in {directory}", file=sys.stderr)
            sys.exit(INTERRUPTED)
        raise
    finally:
        if sys.stdout.isatty():
            Console().show_cursor()  # a rank that was killed while it drew has left it hidden
    if (directory / FILE_NAME).exists():
        show(directory)


def show(directory: Path) -> None:
    """A run's summary on the terminal, and its picture beside its record."""
    run = read_run(directory)
    console = Console(highlight=False)
    console.print(summary(run), soft_wrap=True)
    if run.steps:
        console.print(f"Picture: {draw(run, directory / 'nereus.png')}", soft_wrap=True)


def quiet() -> None:
    """Leave the terminal to the run: no advertisements and no warnings about what is so by design."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lightning|torch)\b")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="nereus", description="RL post-training that changes its own parallel plan.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "train",
        add_help=False,
        help="run a job; takes Hydra overrides, e.g. experiment=demo policy.gamma=0.3; --help shows the configuration",
    )
    report = commands.add_parser("report", help="sum up a run and draw it")
    report.add_argument("run", type=Path, help="the run's directory")
    arguments, rest = parser.parse_known_args()
    if arguments.command == "train":
        sys.argv = ["nereus train", *rest]
        train()
        return
    if rest:
        parser.error(f"unknown argument {rest[0]}")
    try:
        show(arguments.run)
    except ConfigurationError as error:
        sys.exit(f"nereus: {error}")
