"""Rollout: prompts with sampled responses, the same rows on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rows of n = prompts x samples; row ``r`` is sample ``r % samples`` of prompt ``r // samples``.

    Token ids go from the sampler to the loss as they are; text is made from them, never the reverse.
    Which positions are response tokens is said by the mask alone, so pad and end may be one token.

    Args:
        prompt_ids: [n, P], padded on the left.
        prompt_mask: [n, P] bool.
        response_ids: [n, R], padded on the right.
        response_mask: [n, R] bool; the end token is a response token, nothing after it is.
        rollout_log_probs: [n, R] of the sampler at its temperature; 0 outside the mask.
        prompt_index: [n], each row's prompt in the data set.
        samples: responses to each prompt.
        meta: what the data set knows of each row's prompt.
        prompts: each row's prompt as text; empty where the batch brought none.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    prompt_index: Tensor
    samples: int
    meta: Sequence[Mapping[str, Any]]
    prompts: Sequence[str] = ()

    def __post_init__(self) -> None:
        n = len(self.prompt_ids)
        shapes = {
            "prompt_mask": (self.prompt_mask, self.prompt_ids.shape),
            "response_ids": (self.response_ids, (n, *self.response_ids.shape[1:])),
            "response_mask": (self.response_mask, self.response_ids.shape),
            "rollout_log_probs": (self.rollout_log_probs, self.response_ids.shape),
            "prompt_index": (self.prompt_index, (n,)),
        }
        for field, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != tuple(shape):
                raise ConfigurationError(field, f"shape {tuple(tensor.shape)}", f"Give {tuple(shape)}")
        for field, mask in (("prompt_mask", self.prompt_mask), ("response_mask", self.response_mask)):
            if mask.dtype is not torch.bool:
                raise ConfigurationError(field, f"dtype {mask.dtype}", "Give bool")
        if len(self.meta) != n or len(self.prompts) not in (0, n):
            raise ConfigurationError("meta", f"{len(self.meta)} entries for {n} rows", "Give one a row")

    @classmethod
    def of(
        cls, batch: Mapping[str, Any], prompts: Mapping[str, Tensor], shared: Mapping[str, Tensor], samples: int
    ) -> Rollout:
        """A rollout from the batch of prompts and what generation shared.

        Args:
            batch: as ``PromptDataModule`` gives it; ``meta``, ``prompts`` and ``prompt_index`` may be absent.
            prompts: ``prompt_ids`` and ``prompt_mask``, already repeated for each row.
            shared: ``response_ids``, ``response_mask`` (any integer or bool dtype), ``log_probs``.
            samples: responses to each prompt.
        """
        n = len(prompts["prompt_ids"])
        device = shared["response_ids"].device
        owners = [row // samples for row in range(n)]
        meta: Sequence[Mapping[str, Any]] = batch.get("meta") or [{}] * (n // samples)
        texts: list[str] = list(batch.get("prompts") or [])
        index = batch.get("prompt_index")
        index = torch.arange(n // samples, device=device) if index is None else index
        return cls(
            prompt_ids=prompts["prompt_ids"],
            prompt_mask=prompts["prompt_mask"].bool(),
            response_ids=shared["response_ids"],
            response_mask=shared["response_mask"].bool(),
            rollout_log_probs=shared["log_probs"],
            prompt_index=index.repeat_interleave(samples),
            samples=samples,
            meta=[meta[owner] for owner in owners],
            prompts=[texts[owner] for owner in owners] if texts else [],
        )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """Response tokens of each row, [n] int64, the end included."""
        return self.response_mask.sum(dim=1)

    def select(self, index: Tensor) -> Rollout:
        """The rows of ``index`` [m] (int64) in its order. Groups stay whole only where the index keeps them so."""
        index = index.to(self.prompt_ids.device)
        rows: list[int] = index.tolist()
        texts: Sequence[str] = [self.prompts[row] for row in rows] if self.prompts else ()
        return Rollout(
            prompt_ids=self.prompt_ids[index],
            prompt_mask=self.prompt_mask[index],
            response_ids=self.response_ids[index],
            response_mask=self.response_mask[index],
            rollout_log_probs=self.rollout_log_probs[index],
            prompt_index=self.prompt_index[index],
            samples=self.samples,
            meta=[self.meta[row] for row in rows],
            prompts=texts,
        )

    def model_rows(self) -> dict[str, Any]:
        """What a model reads: ``input_ids`` and ``attention_mask`` (bool), [n, P + R], and ``prompt_width`` P."""
        return {
            "input_ids": torch.cat([self.prompt_ids, self.response_ids], dim=1),
            "attention_mask": torch.cat([self.prompt_mask, self.response_mask], dim=1),
            "prompt_width": self.prompt_ids.shape[1],
        }

    def text(self, tokenizer: Tokenizer) -> list[str]:
        """The responses, without special tokens."""
        rows = zip(self.response_ids.tolist(), self.response_mask.tolist(), strict=True)
        return [
            tokenizer.decode([t for t, inside in zip(ids, mask, strict=True) if inside], skip_special_tokens=True)
            for ids, mask in rows
        ]
