"""GRPO with a reward of your own, on the configurations of conf/.

python examples/grpo.py cluster=cpu8 trainer.max_steps=20
python examples/grpo.py -m policy=nereus,static
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_nereus.cli import quiet, run_job
from lightning_nereus.configuration import config_directory


def digits(prompts: Sequence[str], responses: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[float]:
    """The share of a response of 40 characters that is digits: long responses of nothing else earn 1."""
    return [sum(character.isdigit() for character in response[:40]) / 40 for response in responses]


@hydra.main(version_base="1.3", config_path=config_directory(), config_name="config")
def main(config: DictConfig) -> None:
    quiet()
    config.data.reward = "__main__:digits"
    run_job(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
