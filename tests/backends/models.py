"""Tiny models with random weights whose sizes are awkward on purpose: grouped queries, tied ends, odd vocabularies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mistral_one_kv_head": MistralConfig(**{**SIZES, "num_key_value_heads": 1}, sliding_window=None),
    "gemma2_tied": Gemma2Config(**SIZES, query_pre_attn_scalar=8, sliding_window=7),
    "qwen2_bias": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True),
    "starcoder2": Starcoder2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        sliding_window=None,
        embedding_dropout=0.0,
        residual_dropout=0.0,
    ),
}


def whole_model(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """The model as transformers makes it; norm weights are moved off 1, so that a lost one is seen."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.dim() == 2:
            parameter.data.mul_(4)
    return model.to(dtype).eval()


def batch(rows: int, prompt: int = 5, responses: int = 6, vocab: int = 97) -> dict[str, Any]:
    """Left-padded prompts, right-padded responses."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, vocab, (rows, prompt + responses), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for row in range(rows):
        mask[row, : row % 3] = False
        mask[row, prompt + responses - row % 4 :] = row % 4 == 0
    return {"input_ids": ids, "attention_mask": mask, "prompt_width": prompt}


def reference_log_probs(model: Any, rows: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """Log-probs of the response tokens [n, R] by transformers' own forward in double precision."""
    ids, mask = rows["input_ids"], rows["attention_mask"]
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=places).logits.double() / temperature
    log_probs = torch.log_softmax(logits, -1)[:, rows["prompt_width"] - 1 : -1]
    return log_probs.gather(-1, ids[:, rows["prompt_width"] :].unsqueeze(-1)).squeeze(-1)
