"""The job of `make demo`: a run that changes its own parallel plan, then the same run without, and their difference.

On the screen and in the folder that it names: every step, every decision with its reason, a picture.
"""

from __future__ import annotations

import time
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console
from torch import Tensor

from lightning_nereus.cli import quiet, show
from lightning_nereus.configuration import build, config_directory
from lightning_nereus.report.record import RunRecorder, read_run
from lightning_nereus.report.terminal import LiveTable
from lightning_nereus.runtime.checkpoint import read_tensors

EMULATED = """\
Real: the models, 8 processes, their arithmetic, collectives, timings, calibration, transfers and learning.
Emulated, as this machine is small: each rank may use no more than {memory:g} MiB (conf/cluster/cpu8.yaml), so that
memory binds as it does on a GPU, and two devices leave and come back as two nodes of a spot trace did
(conf/trace/p3_us_east.yaml). The first plan is what one might have written by hand (conf/stages/by_hand.yaml)."""


def run(overrides: list[str], directory: Path) -> tuple[dict[str, Tensor], float]:
    """Train; the tensors at the end and the seconds that it took."""
    config = compose("config", ["experiment=demo", *overrides])
    if not overrides:
        console.print(EMULATED.format(memory=config.cluster.memory_mib), style="dim", soft_wrap=True)
    job = build(config, directory, (RunRecorder(), LiveTable(console)))
    start = time.perf_counter()
    job.fit()
    seconds = time.perf_counter() - start
    checkpoint = job.trainer.checkpoint_callback
    return read_tensors(Path(checkpoint.best_model_path)), seconds  # type: ignore[union-attr]


if __name__ == "__main__":
    quiet()
    console = Console(highlight=False, soft_wrap=True)
    folder = Path("outputs", "demo", time.strftime("%Y-%m-%d_%H-%M-%S"))
    with initialize_config_dir(config_directory(), version_base="1.3"):
        console.rule("A run that adapts")
        adapted, adapted_seconds = run([], folder / "adapted")
        console.rule("The same run under its first plan, on all 8 devices")
        static, static_seconds = run(["policy=static", "trace=none"], folder / "static")
    console.rule("What the first run did")
    show(folder / "adapted")
    difference = max(float((adapted[name] - tensor).abs().max()) for name, tensor in static.items())
    steps = len(read_run(folder / "adapted").steps)
    text = f"Largest difference of any parameter or Adam tensor after {steps} RL steps"
    console.print(f"{text}: [bold]{difference:.1e}[/] (float64)")
    console.print(f"Adapted: {adapted_seconds:.0f} s. Never adapted: {static_seconds:.0f} s.")
