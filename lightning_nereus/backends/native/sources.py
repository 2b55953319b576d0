"""ModelSource: where a role's model comes from (a directory, a configuration, a model in memory)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_nereus.backends.native.shard_map import LM_HEAD, SCORE_HEAD, shard_map_of_model
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Head, ModelShape
from lightning_nereus.transition.shards import ShardMap, Slice

Read = Callable[[Slice], Tensor]


class ModelSource:
    """A decoder-only language model of ``transformers``, read slice by slice.

    Args:
        model: a name or directory that ``from_pretrained`` takes, a configuration (random weights
            from ``seed``) or a model.
        head: LM, or SCORE for critics and reward models; a score head that the files lack is drawn
            from ``seed``.
        seed: of random weights.

    Raises:
        ConfigurationError: if the model cannot be cut, or drops activations at random (a plan must not
            change the result).
    """

    def __init__(self, model: str | Path | PretrainedConfig | PreTrainedModel, head: Head, seed: int = 0) -> None:
        self.model = model
        self.head = head
        self.seed = seed
        dropping = [k for k, v in self.config.to_dict().items() if k.endswith(("dropout", "pdrop")) and v]
        if dropping:
            raise ConfigurationError(f"model.{dropping[0]}", "is not 0", "Set it to 0; RL training uses no dropout")

    @cached_property
    def config(self) -> PretrainedConfig:
        if isinstance(self.model, PretrainedConfig):
            return self.model
        if isinstance(self.model, PreTrainedModel):
            return self.model.config
        try:
            return AutoConfig.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            where = "is no such directory" if Path(self.model).is_absolute() else f"cannot be read ({error})"
            raise ConfigurationError(f"model {self.model}", where, "Give a name on the hub or a directory") from error

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config.to_dict(), self.head)

    @cached_property
    def _shard_map(self) -> ShardMap:
        return shard_map_of_model(self.config, self.head)

    def shard_map(self) -> ShardMap:
        return self._shard_map

    def load(self, slices: Mapping[str, Slice], dtype: torch.dtype) -> dict[str, Tensor]:
        """Read slices of the initial weights, each as a tensor of its own."""
        read = self._reader
        return {name: read(box).to(dtype).clone().contiguous() for name, box in slices.items()}

    @cached_property
    def _reader(self) -> Read:
        files = self._safetensors()
        return self._from_files(files) if files else self._from_memory()

    def _safetensors(self) -> dict[str, Path]:
        """File of each tensor of a local directory of safetensors; empty for anything else."""
        if not isinstance(self.model, str | Path) or not Path(self.model).is_dir():
            return {}
        directory = Path(self.model)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            return {k: directory / v for k, v in json.loads(index.read_text())["weight_map"].items()}
        single = directory / "model.safetensors"
        if not single.exists():
            return {}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)

    def _from_files(self, files: Mapping[str, Path]) -> Read:
        def read(box: Slice) -> Tensor:
            if box.name not in files:
                return _cut(self._missing(box.name), box)
            with safe_open(files[box.name], framework="pt") as file:
                return file.get_slice(box.name)[tuple(slice(a, b) for a, b in box.ranges)]

        return read

    def _from_memory(self) -> Read:
        weights: dict[str, Any] = {k: v.detach() for k, v in self._whole().state_dict().items()}

        def read(box: Slice) -> Tensor:
            return _cut(weights[box.name] if box.name in weights else self._missing(box.name), box)

        return read

    def _whole(self) -> PreTrainedModel:
        if isinstance(self.model, PreTrainedModel):
            return self.model
        if isinstance(self.model, PretrainedConfig):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        return AutoModelForCausalLM.from_pretrained(self.model, dtype="auto")

    def _missing(self, name: str) -> Tensor:
        """A score head on top of a language model starts at random, small enough that values start near 0."""
        if name != SCORE_HEAD:
            mend = f"Set tie_word_embeddings, or give files with {LM_HEAD}" if name == LM_HEAD else "Give whole files"
            raise ConfigurationError(f"model {self.model}", f"lacks {name}", mend)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(1, self.shape.hidden, generator=generator) * 0.1 / self.shape.hidden**0.5


def _cut(tensor: Tensor, box: Slice) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in box.ranges)]
