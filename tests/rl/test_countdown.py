import ast
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.rl.countdown import (
    ALPHABET,
    PARTIAL,
    countdown_progress,
    countdown_prompts,
    countdown_reward,
    evaluate,
)
from lightning_nereus.rl.tokenizer import CharTokenizer

PUZZLE = {"numbers": [71, 33, 12], "target": 116}


def exact(response, puzzle=PUZZLE):
    return countdown_reward([""], [response], [puzzle])[0]


def progress(response, puzzle=PUZZLE):
    return countdown_progress([""], [response], [puzzle])[0]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12+71+33", 1),
        ("(12 + 71) + 33", 1),
        ("71;12+71+33", 1),
        ("12+71+33;71", 0),
        ("116", 0),
        ("12+71+33+0", 0),
        ("12+71+33=116", 0),
        ("12+71+", 0),
        ("", 0),
        ("71+33+12)", 0),
        ("71+33+012", 0),
    ],
)
def test_only_the_exact_answer_is_right(response, reward):
    assert exact(response) == reward


def test_values_are_exact_fractions():
    assert exact("30*98/3", {"numbers": [30, 3, 98], "target": 980}) == 1
    assert exact("98/3*30", {"numbers": [30, 3, 98], "target": 980}) == 1
    assert evaluate("1/(3-3)") is None
    assert evaluate("8-3-2")[0] == 3
    assert evaluate("8/4/2")[0] == 1


@pytest.mark.parametrize("text", ["(" * 5000, "9**9", "__import__('os')", "1e9", "-1", "\u0661+1", "9" * 5000, "1_0"])
def test_hostile_text_is_no_expression(text):
    assert evaluate(text) is None
    assert 0 <= progress(text) < 1


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


def _by_ast(node):
    match node:
        case ast.Expression(body=body):
            return _by_ast(body)
        case ast.Constant(value=value):
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _by_ast(left), _by_ast(right)
            return {ast.Add: a.__add__, ast.Sub: a.__sub__, ast.Mult: a.__mul__, ast.Div: a.__truediv__}[type(op)](b)


@given(expressions)
def test_evaluation_agrees_with_pythons_grammar(text):
    try:
        expected = _by_ast(ast.parse(text, mode="eval"))
    except ZeroDivisionError:
        expected = None
    result = evaluate(text)
    assert (result and result[0]) == expected


@given(st.text(ALPHABET, max_size=40))
def test_partial_credit_stays_below_the_answer(text):
    credit = progress(text)
    assert credit == 1.0 if exact(text) else 0 <= credit <= PARTIAL


def test_credit_grows_along_the_way():
    steps = ["", "5", "71", "71+5", "71+33", "71+33-12", "71+33-12;71*33", "71+33-12;71*33-12", "71+33-12;71+33+12"]
    credits = [progress(s) for s in steps]
    assert credits == sorted(set(credits))
    assert credits[0] == 0
    assert credits[-1] == 1


def test_no_credit_for_repeating_or_rambling():
    assert progress("71+33-12;71+33-12") == progress("71+33-12")
    assert progress("71+33-12+5+5+5+5") < progress("71+33-12")
    assert progress("71+33-12;;71+33*12") == progress("71+33-12")


def test_shipped_prompts_are_whole():
    rows = countdown_prompts()
    assert len(rows) == 200
    tokenizer = CharTokenizer(ALPHABET)
    for row in rows:
        assert row["prompt"] == f"{' '.join(map(str, row['numbers']))}={row['target']}:"
        assert tokenizer.decode(tokenizer.encode(row["prompt"]), skip_special_tokens=True) == row["prompt"]


def test_generated_answers_are_right():
    path = Path(__file__).parents[3] / "shared/data/countdown/countdown_1000_seed1.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    puzzles = [json.loads(line) for line in path.read_text().splitlines()]
    meta = [p["metadata"] for p in puzzles]
    rewards = countdown_reward([p["question"] for p in puzzles], [p["answer"] for p in puzzles], meta)
    assert rewards == [1.0] * len(puzzles)
