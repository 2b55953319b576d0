"""Prompts, in one global order that every rank shares.

The order is a stream: pass 0 over all prompts in an order drawn from (seed, 0), then pass 1, and so
on. Batch ``b`` is the stream's items ``b * batch_size`` to ``(b + 1) * batch_size``, whatever the
plan, the rank or the restart; a batch at the end of a pass goes on into the next one, so no prompt
is left out and none comes twice in a pass. The only state is the number of finished batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loops.progress import _ProcessedTracker
from torch import Tensor

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.rl.tokenizer import Tokenizer

Batch = dict[str, Any]


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, each an object with a string under "prompt".

    Raises:
        ConfigurationError: the file or a line cannot be read; names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("prompts", f"{path} cannot be read ({error})", "Give a JSON Lines file") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                "prompts", f"line {number} of {path} is no JSON ({error})", 'Write one {"prompt": ...} a line'
            ) from error
        _check_row(row, f"line {number} of {path}")
        rows.append(row)
    return rows


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise ConfigurationError("prompts", f"{where} has no text under 'prompt'", 'Give {"prompt": "...", ...}')


class PromptSet:
    """Tokenised prompts.

    Args:
        rows: each with "prompt" and whatever the reward needs; all but the prompt becomes ``meta``.
        tokenizer: gives the ids and the padding.
        max_prompt_length: the width P of every batch, in tokens; None for the longest prompt's.

    Raises:
        ConfigurationError: no rows, a row without a prompt, or one that is too long or gives no token.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_prompt_length: int | None = None
    ) -> None:
        if not rows:
            raise ConfigurationError("prompts", "the set is empty", "Give at least one batch of prompts")
        for i, row in enumerate(rows):
            _check_row(row, f"prompt {i}")
        self.texts = [row["prompt"] for row in rows]
        self.meta = [{k: v for k, v in row.items() if k != "prompt"} for row in rows]
        self._ids = [tokenizer.encode(text, add_special_tokens=False) for text in self.texts]
        self.width = max(map(len, self._ids)) if max_prompt_length is None else max_prompt_length
        for i, ids in enumerate(self._ids):
            if not 0 < len(ids) <= self.width:
                raise ConfigurationError(
                    "max_prompt_length",
                    f"prompt {i} has {len(ids)} tokens, {self.width} are allowed and one is needed",
                    "Allow more, or leave the prompt out",
                )
        # The mask says what is padding, so the end token may stand in.
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if pad is None:
            raise ConfigurationError("tokenizer", "it has neither pad nor end token", "Set pad_token_id")
        self._pad = pad

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: Sequence[int]) -> Batch:
        """``prompt_ids`` [b, P] int64 padded on the left, ``prompt_mask`` [b, P] bool, ``prompt_index`` [b], ``meta``
        and ``prompts`` (lists)."""
        ids = torch.full((len(indices), self.width), self._pad, dtype=torch.int64)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, index in enumerate(indices):
            tokens = self._ids[index]
            ids[row, self.width - len(tokens) :] = torch.tensor(tokens)
            mask[row, self.width - len(tokens) :] = True
        return {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "prompt_index": torch.tensor(indices, dtype=torch.int64),
            "meta": [self.meta[i] for i in indices],
            "prompts": [self.texts[i] for i in indices],
        }


class PromptStream:
    """The training loader: the stream from where it stopped, ``len`` batches an iteration.

    No torch ``DataLoader``, so Lightning leaves it as it is; with ``state_dict``, so Lightning
    resumes it inside an epoch.

    Args:
        prompts: where the indices point.
        indices: the prompts that belong to the stream.
        batch_size: prompts a batch.
        seed: of every pass's order.
        in_flight: how many delivered batches are not finished yet (a batch is finished when its step
            is); they are delivered again after a restart.
    """

    def __init__(
        self,
        prompts: PromptSet,
        indices: Sequence[int],
        batch_size: int,
        seed: int,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        self.prompts = prompts
        self.indices = torch.tensor(indices, dtype=torch.int64)
        self.batch_size = batch_size
        self.seed = seed
        self._in_flight = in_flight
        self._delivered = 0

    def __len__(self) -> int:
        """Batches an epoch: enough that the first epoch shows every prompt."""
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            batch = self.prompts.batch(self.batch_indices(self._delivered))
            self._delivered += 1
            yield batch

    def batch_indices(self, number: int) -> list[int]:
        """The prompts of the batch of that number, counted from the start of training."""
        total = len(self.indices)
        items = range(number * self.batch_size, (number + 1) * self.batch_size)
        orders = {p: self._order(p) for p in {item // total for item in items}}
        return [int(orders[item // total][item % total]) for item in items]

    def _order(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(_mix(self.seed, number))
        return self.indices[torch.randperm(len(self.indices), generator=generator)]

    def state_dict(self) -> dict[str, Any]:
        """Finished batches, and what the order depends on."""
        return {
            "finished_batches": max(self._delivered - self._in_flight(), 0),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "prompts": len(self.indices),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the finished batches.

        Raises:
            ConfigurationError: another batch size, seed or number of prompts, under which the
                position would mean other prompts.
        """
        for field, here in (("batch_size", self.batch_size), ("seed", self.seed), ("prompts", len(self.indices))):
            if state[field] != here:
                raise ConfigurationError(
                    field, f"the checkpoint has {state[field]}, this run {here}", "Resume with the same data"
                )
        self._delivered = state["finished_batches"]


class ValidationBatches:
    """The validation loader: the same batches in the same order each time."""

    def __init__(self, prompts: PromptSet, indices: Sequence[int], batch_size: int) -> None:
        self.prompts = prompts
        self.indices = list(indices)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.indices) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.prompts.batch(self.indices[start : start + self.batch_size])


class PromptDataModule(LightningDataModule):
    """Prompts for an RL job.

    Args:
        prompts: a JSON Lines file or rows, each with "prompt" (text); the rest goes to the reward as ``meta``.
        tokenizer: the actor's.
        batch_size: prompts an RL step, over all replicas.
        max_prompt_length: the fixed width of prompts in tokens; None for the longest prompt's.
        seed: of the order and of the validation split.
        validation: prompts held out: a whole number of batches, or a share in (0, 1), which is
            rounded to whole batches (at least one), as every batch must divide among replicas.

    Raises:
        ConfigurationError: an unreadable file or line, no prompts, a prompt that is too long, a batch
            larger than the training set, a validation set that is no whole number of batches.
    """

    def __init__(
        self,
        prompts: str | Path | Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        batch_size: int,
        max_prompt_length: int | None = None,
        seed: int = 0,
        validation: int | float = 0,
    ) -> None:
        super().__init__()
        rows = read_prompts(prompts) if isinstance(prompts, (str, Path)) else prompts
        self.prompts = PromptSet(rows, tokenizer, max_prompt_length)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.seed = seed
        if batch_size < 1:
            raise ConfigurationError("batch_size", f"{batch_size} is too few", "Use at least 1")
        held_out = self._held_out(validation)
        if batch_size > len(self.prompts) - held_out:
            raise ConfigurationError(
                "batch_size",
                f"{batch_size} prompts a batch, {len(self.prompts) - held_out} to train with",
                "Use a smaller batch or validation set, or more prompts",
            )
        generator = torch.Generator().manual_seed(_mix(seed, -1))
        order = torch.randperm(len(self.prompts), generator=generator).tolist()
        self._validation = sorted(order[:held_out])
        self._training = sorted(order[held_out:])
        self._stream: PromptStream | None = None
        self._stream_trainer: Any = None
        self._restored: Mapping[str, Any] | None = None

    def _held_out(self, validation: int | float) -> int:
        if isinstance(validation, float) and 0 < validation < 1:
            return max(round(validation * len(self.prompts) / self.batch_size), 1) * self.batch_size
        if validation != int(validation) or validation < 0 or int(validation) % self.batch_size:
            raise ConfigurationError(
                "validation",
                f"{validation} is neither a share in (0, 1) nor a whole number of batches of {self.batch_size}",
                "Round it to whole batches",
            )
        return int(validation)

    @property
    def width(self) -> int:
        """Tokens of a padded prompt."""
        return self.prompts.width

    def train_dataloader(self) -> PromptStream:
        """The stream: from its start for a new trainer, further on for one that trained already or resumes."""
        state = self._restored
        if state is None and self._stream is not None and self._stream_trainer is self.trainer:
            state = self._stream.state_dict()
        stream = PromptStream(self.prompts, self._training, self.batch_size, self.seed, self._in_flight)
        if state is not None:
            stream.load_state_dict(state)
        self._stream, self._stream_trainer, self._restored = stream, self.trainer, None
        return stream

    def val_dataloader(self) -> ValidationBatches | list[Any]:
        """Held-out prompts; an empty list, which Lightning takes for "none", if there are none."""
        if not self._validation:
            return []
        return ValidationBatches(self.prompts, self._validation, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The stream's state. Lightning restores this one at an epoch's end too, where it skips the loader's own."""
        return {} if self._stream is None else self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None

    def _in_flight(self) -> int:
        """Batches that Lightning fetched and whose step has not ended (0 or 1)."""
        if self.trainer is None:
            return 0
        progress = cast(_ProcessedTracker, self.trainer.fit_loop.epoch_loop.batch_progress.current)
        return min(max(progress.ready - progress.processed, 0), 1)


def _mix(seed: int, number: int) -> int:
    """One generator seed for (seed, pass); neighbours of either must not share it."""
    return (seed * 0x9E3779B97F4A7C15 + number + 1) % (1 << 63)
