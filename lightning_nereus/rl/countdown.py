"""Countdown: reach a target from given numbers, each used once, by + - * / and brackets.

A response is one attempt or several, separated by ``;``. The last one is the answer. Attempts are
what makes responses worth being long: a model may try, and try again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.resources import files
from typing import Any

from lightning_nereus.rl.data import read_prompts

ALPHABET = "0123456789+-*/()=:; "
"""Every character of the shipped prompts and of a possible response."""
SEPARATOR = ";"
ATTEMPTS = 4
"""Attempts that earn partial credit."""
PARTIAL = 0.9
"""The most that anything but the exact answer can earn."""

_MAX_DEPTH = 50
_MAX_DIGITS = 6


def countdown_prompts() -> list[dict[str, Any]]:
    """The shipped puzzles: ``prompt`` ("71 33 12=116:"), ``numbers`` and ``target``."""
    return read_prompts(str(files("lightning_nereus.rl").joinpath("prompts/countdown.jsonl")))


class _Malformed(Exception):
    pass


class _Parser:
    """Recursive descent over one expression; keeps the numbers that it read, and the exact value.

    ``read`` stays what was read before the fault, which is what partial credit looks at.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.read: list[int] = []

    def value(self) -> Fraction:
        result = self._sum()
        if self.position != len(self.text):
            raise _Malformed
        return result

    def _peek(self) -> str:
        while self.text[self.position : self.position + 1] == " ":
            self.position += 1
        return self.text[self.position : self.position + 1]

    def _sum(self) -> Fraction:
        total = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self.position += 1
            term = self._product()
            total = total + term if sign == "+" else total - term
        return total

    def _product(self) -> Fraction:
        product = self._operand()
        while (sign := self._peek()) in ("*", "/"):
            self.position += 1
            factor = self._operand()
            if sign == "/" and not factor:
                raise _Malformed
            product = product * factor if sign == "*" else product / factor
        return product

    def _operand(self) -> Fraction:
        if self._peek() == "(":
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise _Malformed
            self.position += 1
            inside = self._sum()
            if self._peek() != ")":
                raise _Malformed
            self.position += 1
            self.depth -= 1
            return inside
        start = self.position
        while self.text[self.position : self.position + 1] in tuple("0123456789"):
            self.position += 1
        digits = self.text[start : self.position]
        if not digits or len(digits) > _MAX_DIGITS or (len(digits) > 1 and digits[0] == "0"):
            raise _Malformed
        self.read.append(int(digits))
        return Fraction(int(digits))


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it; None if it is none (or divides by 0)."""
    parser = _Parser(expression.strip())
    try:
        return parser.value(), parser.read
    except _Malformed:
        return None


def _exact(attempt: str, numbers: Sequence[int], target: int) -> bool:
    result = evaluate(attempt)
    return result is not None and result[0] == target and sorted(result[1]) == sorted(numbers)


def countdown_reward(
    prompts: Sequence[str], responses: Sequence[str], meta: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1.0 where the response's last attempt uses every number once and equals the target, else 0.0."""
    return [
        float(_exact(response.split(SEPARATOR)[-1], row["numbers"], row["target"]))
        for response, row in zip(responses, meta, strict=True)
    ]


def countdown_progress(
    prompts: Sequence[str], responses: Sequence[str], meta: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Verifiable partial credit in [0, 1] on the way to an answer, for models that start from nothing.

    1.0 is the exact answer, as in ``countdown_reward``. Anything else earns at most ``PARTIAL``: the
    mean, over ``ATTEMPTS`` places, of what each distinct attempt up to the first malformed one earns:
    half for having as many numbers joined by operators as the puzzle (an attempt that breaks off
    counts the numbers read up to there), half for each of the puzzle's numbers used once. A place
    without an attempt earns nothing, nor does a repeated attempt.
    """
    return [_progress(response, row) for response, row in zip(responses, meta, strict=True)]


def _progress(response: str, row: Mapping[str, Any]) -> float:
    numbers = row["numbers"]
    attempts = response.split(SEPARATOR)
    if _exact(attempts[-1], numbers, row["target"]):
        return 1.0
    credit = 0.0
    seen: set[str] = set()
    for attempt in attempts[:ATTEMPTS]:
        parser = _Parser(attempt.strip())
        try:
            parser.value()
            whole = True
        except _Malformed:
            whole = False
        if attempt.strip() not in seen:
            credit += _attempt_credit(parser.read, numbers)
        seen.add(attempt.strip())
        if not whole:
            break
    return PARTIAL * credit / ATTEMPTS


def _attempt_credit(read: Sequence[int], numbers: Sequence[int]) -> float:
    """In [0, 1]; more numbers than the puzzle has cost as much as they earned."""
    length = max(1 - abs(len(read) - len(numbers)) / len(numbers), 0.0)
    used = sum((Counter(read) & Counter(numbers)).values()) / len(numbers)
    return (length + used) / 2
