"""ModelShape: the numbers of a dense causal LM that cost and planning need, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightning_nereus.errors import ConfigurationError


class Head(StrEnum):
    """What stands on top of the decoder: next-token logits, or one score a token."""

    LM = "lm"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and counts of one decoder-only model. ``max_position`` is in tokens."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    head: Head = Head.LM
    max_position: int = 4096
    qk_norm: bool = False
    attention_bias: bool = False
    norms_per_layer: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_position"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"model.{name}", f"{value!r} is no size", "Use a whole number from 1")
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                "model.kv_heads",
                f"{self.kv_heads} does not divide heads {self.heads}",
                "Use a divisor of the number of heads",
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head: Head = Head.LM) -> ModelShape:
        """Read a ``transformers`` configuration dictionary (``config.to_dict()``).

        Raises:
            ConfigurationError: if a size is missing or makes no sense.
        """
        missing = [
            k for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if not config.get(k)
        ]
        if missing:
            raise ConfigurationError(f"model.{missing[0]}", "is missing", "Give a decoder-only model's configuration")
        heads = config["num_attention_heads"]
        model_type = config.get("model_type", "")
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config.get("intermediate_size") or 4 * config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)) and head is Head.LM,
            head=head,
            max_position=config.get("max_position_embeddings") or 4096,
            qk_norm=model_type in ("qwen3", "gemma3_text"),
            attention_bias=bool(config.get("attention_bias", model_type == "qwen2")),
            norms_per_layer=4 if model_type in ("gemma2", "gemma3_text") else 2,
        )

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)
        biases = (q + 2 * kv) if self.attention_bias else 0
        norms = self.norms_per_layer * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + biases + 3 * self.hidden * self.intermediate + norms

    @property
    def parameters(self) -> int:
        """Elements of the whole model, a tied embedding counted once."""
        top = self.hidden if self.head is Head.SCORE else (0 if self.tied else self.vocab * self.hidden)
        return self.vocab * self.hidden + self.layers * self.layer_parameters + self.hidden + top
