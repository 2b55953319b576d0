"""Rewards that a Python function gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_nereus.errors import RewardError

RewardFunction = Callable[[list[str], list[str], list[Mapping[str, Any]]], Sequence[float]]
"""``reward(prompts, responses, meta)`` gives one finite number a row."""


def call_reward(
    function: RewardFunction, prompts: Sequence[str], responses: Sequence[str], meta: Sequence[Mapping[str, Any]]
) -> Tensor:
    """Rewards, float64 [n].

    What the function raises goes through untouched, so that it is seen once, with its own type and text.

    Raises:
        RewardError: the answer is no sequence of n finite numbers; names the row.
    """
    answer = function(list(prompts), list(responses), list(meta))
    name = getattr(function, "__name__", type(function).__name__)
    if (
        not hasattr(answer, "__len__")
        or not hasattr(answer, "__getitem__")
        or isinstance(answer, (str, bytes, Mapping))
    ):
        raise RewardError(f"{name} gave a {type(answer).__name__}, no sequence. Return one number for each response")
    if isinstance(answer, Tensor):
        answer = answer.detach().cpu()
        if answer.dim() == 0:
            raise RewardError(f"{name} gave a single number. Return one number for each response")
    if len(answer) != len(responses):
        raise RewardError(
            f"{name} gave {len(answer)} rewards for {len(responses)} responses. Return one number for each response"
        )
    rows = zip(answer, responses, strict=True)
    return torch.tensor([_number(name, r, v, text) for r, (v, text) in enumerate(rows)], dtype=torch.float64)


def _number(name: str, row: int, value: Any, response: str) -> float:
    number = value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of torch or numpy
        number = value.item()
    if not isinstance(number, Real):
        problem = f"{value!r:.60} ({type(value).__name__}), which is no number"
    elif not math.isfinite(number):
        problem = f"{number}"
    else:
        return float(number)
    raise RewardError(f"{name} gave {problem} for row {row} ({response!r:.60}). Return a finite number for every row")
