import html.parser
import json
import shutil
import subprocess
import sys
import time

import pytest

from treadle.dash.export import export_page
from treadle.envs.group_file import Verdict, WrittenGroup
from treadle.envs.group_writer import page_answers

NASTY = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>&lt;&amp;",
    "line\u2028separators\u2029and \x00 \x1b[31m controls",
    "right to left \u202e and back",
    "{{data}} {{title}} {{script_hash}} \\1 \\g<0>",
    '"quotes" \\ backslash 🌍',
]


class Elements(html.parser.HTMLParser):
    """The elements of a page as a browser sees them, and the text of each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.addresses = [], [], []
        self._in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def group(*texts, item=0, prompt="What?", **more):
    """One token a character, the prompt one token; rewards 0, 1, 2 and so on."""
    return WrittenGroup(
        tokens=[[0, *map(ord, text)] for text in texts],
        masks=[[-100, *map(ord, text)] for text in texts],
        scores=[float(i) for i in range(len(texts))],
        inference_logprobs=[[1.0] + [-0.5] * len(text) for text in texts],
        messages=[[{"role": "user", "content": prompt}, {"role": "assistant", "content": text}] for text in texts],
        policy_version=3,
        item=item,
        verdicts=[
            Verdict(rollout=i, is_right=i > 0, reward=float(i), parts={"accuracy": float(i > 0)})
            for i in range(len(texts))
        ],
        pieces=[list(text) for text in texts],
        **more,
    )


def view_of(page, number=1):
    return json.loads(Elements(page).scripts[0])["views"][str(number)]


def text_of(rollout):
    return "".join(rollout["pieces"])


@pytest.mark.parametrize("text", NASTY)
def test_what_a_model_wrote_stays_text(text):
    plain = Elements(export_page("groups", page_answers("groups", [group("a", "b")])))
    page = export_page(text, page_answers(text, [group(text, "b", prompt=text, answer=text)]))
    shown = Elements(page)
    assert shown.tags == plain.tags, "no element comes of it"
    assert shown.scripts[1:] == plain.scripts[1:]
    read = view_of(page)
    assert read["prompt"] == [{"role": "user", "content": text}]
    assert text_of(read["rollouts"][0]) == text
    assert read["answer"] == text


def test_a_group_on_the_page():
    read = view_of(export_page("groups", page_answers("groups", [group("4", "fünf")])))
    summary = read["summary"]
    assert (summary["item"], summary["policy_version"], summary["score"], summary["longest"]) == (0, 3, 0.5, 4)
    assert len(read["rollouts"]) == 2
    second = read["rollouts"][1]
    assert (second["score"], second["details"]["is_right"], second["details"]["parts"], second["num_trained"]) == (
        1.0,
        True,
        {"accuracy": 1.0},
        4,
    )
    assert (second["pieces"], second["logprobs"], second["is_trained"]) == (list("fünf"), [-0.5] * 4, [1] * 4)


def test_what_was_not_scored_says_why():
    broken = group("a", "b")
    broken.verdicts[0] = Verdict(rollout=0, is_right=False, reward=None, outcome="timed_out", error="after 10 s")
    read = view_of(export_page("groups", page_answers("groups", [broken])))
    assert (read["rollouts"][0]["score"], read["summary"]["score"]) == (None, 1.0)
    assert read["rollouts"][0]["details"].items() >= {"outcome": "timed_out", "error": "after 10 s"}.items()


def test_each_turn_of_a_conversation_has_its_own_tokens():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "ab"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "c"},
    ]
    spoken = WrittenGroup(
        tokens=[[1, 2, 3, 4, 5]],
        masks=[[-100, 2, 3, -100, 5]],
        scores=[1.0],
        inference_logprobs=[[1.0, -0.1, -0.7, 1.0, 0.0]],
        messages=[turns],
        pieces=[["a", "b", "c"]],
    )
    (rollout,) = view_of(export_page("groups", page_answers("groups", [spoken])))["rollouts"]
    assert text_of(rollout) == "assistant: ab\n\ntool: 4\n\nassistant: c"
    sampled = [row for row, is_sampled in enumerate(rollout["is_trained"]) if is_sampled]
    assert [rollout["pieces"][row] for row in sampled] == ["a", "b", "c"]
    assert [rollout["logprobs"][row] for row in sampled] == [-0.1, -0.7, 0.0]


def test_a_file_of_another_program_is_shown_too():
    """Atropos' lines have no verdicts; some have no messages, or contents that are lists of parts."""
    parts = [{"type": "text", "text": "Hi"}]
    bare = WrittenGroup(tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.5])
    with_parts = WrittenGroup(
        tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.5], messages=[[{"role": "user", "content": parts}]]
    )
    page = export_page("groups", page_answers("groups", [bare, with_parts]))
    (first,) = view_of(page, 1)["rollouts"]
    assert (first["score"], first["ids"], first["is_trained"]) == (0.5, [1, 2], [0, 1])
    assert json.loads(view_of(page, 2)["prompt"][0]["content"]) == parts


def test_a_thousand_groups_are_made_soon():
    many = [group(*["several words " * 20] * 8, item=i) for i in range(1000)]
    started = time.process_time()
    page = export_page("groups", page_answers("groups", many))
    took = time.process_time() - started
    print(f"1,000 groups of 8 rollouts, {len(page) / 1e6:.1f} MB in {took:.1f} s of CPU time")
    assert took < 20
    assert len(page) < 40e6


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine to check with")
def test_the_script_is_valid(tmp_path):
    page = export_page("groups", page_answers("groups", [group("a", "b")]))
    (tmp_path / "page.mjs").write_text(Elements(page).scripts[2])
    subprocess.run(["node", "--check", str(tmp_path / "page.mjs")], check=True, capture_output=True)


@pytest.mark.parametrize("words", [[], ["nowhere.jsonl"]])
def test_the_command_says_what_it_needs(words):
    done = subprocess.run(
        [sys.executable, "-m", "treadle.envs.group_writer", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert ("nowhere.jsonl" if words else "usage") in done.stderr
    assert "Traceback" not in done.stderr
