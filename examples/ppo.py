"""PPO with all five model-stages (actor, critic, reward and reference models), each laid over 8 ranks by the planner.

python examples/ppo.py experiment=ppo_five
python examples/ppo.py experiment=ppo_five model.config.num_hidden_layers=8 trainer.max_steps=30
"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import DictConfig

from lightning_nereus.cli import quiet, show
from lightning_nereus.configuration import build, config_directory
from lightning_nereus.report.record import RunRecorder
from lightning_nereus.report.terminal import LiveTable


@hydra.main(version_base="1.3", config_path=config_directory(), config_name="config")
def main(config: DictConfig) -> None:
    quiet()
    directory = Path(HydraConfig.get().runtime.output_dir)
    job = build(config, directory, (RunRecorder(), LiveTable()))
    # Everything is Lightning's as ever: more callbacks, other loggers, trainer.validate...
    job.trainer.callbacks.append(LearningRateMonitor())  # type: ignore[attr-defined]
    job.fit()
    show(directory)


if __name__ == "__main__":
    main()
