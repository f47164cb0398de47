import html.parser
import json
import shutil
import subprocess
import sys
import time

import pytest

from treadle.envs.group_file import Verdict, WrittenGroup
from treadle.envs.page import embedded, render_page

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


def data_of(page):
    return json.loads(Elements(page).scripts[0])


@pytest.mark.parametrize("text", NASTY)
def test_what_a_model_wrote_stays_text(text):
    plain = Elements(render_page("groups", [group("a", "b")]))
    page = render_page(text, [group(text, "b", prompt=text, answer=text)])
    shown = Elements(page)
    assert shown.tags == plain.tags, "no element comes of it"
    assert shown.scripts[1] == plain.scripts[1]
    (read,) = data_of(page)["groups"]
    assert read["prompt"] == [{"role": "user", "text": text}]
    assert read["rollouts"][0]["messages"][0]["text"] == text
    assert read["answer"] == text


def test_nothing_that_html_or_scripts_give_a_meaning_to_is_in_the_data():
    assert not set(embedded(NASTY)) & set("<>&\u2028\u2029")
    assert json.loads(embedded(NASTY)) == NASTY


def test_the_page_asks_nothing_of_anybody():
    page = render_page("groups", [group("a", "b")])
    assert Elements(page).addresses == []
    assert not {"link", "img", "iframe", "object", "embed"} & set(Elements(page).tags)
    assert "default-src 'none'" in page
    for call in ("fetch(", "XMLHttpRequest", "import(", "innerHTML", "document.write", "eval(", "@import", "url("):
        assert call not in page


def test_a_group_on_the_page():
    (read,) = data_of(render_page("groups", [group("4", "fünf")]))["groups"]
    assert (read["item"], read["version"], len(read["rollouts"])) == (0, 3, 2)
    second = read["rollouts"][1]
    assert (second["score"], second["is_right"], second["parts"], second["num_tokens"]) == (
        1.0,
        True,
        {"accuracy": 1.0},
        4,
    )
    (said,) = second["messages"]
    assert said == {"role": "assistant", "text": "fünf", "lengths": [1, 1, 1, 1], "percents": [61, 61, 61, 61]}


def test_what_was_not_scored_says_why():
    broken = group("a", "b")
    broken.verdicts[0] = Verdict(rollout=0, is_right=False, reward=None, outcome="timed_out", error="after 10 s")
    (read,) = data_of(render_page("groups", [broken]))["groups"]
    assert (read["rollouts"][0]["score"], read["rollouts"][0]["problem"]) == (None, "timed_out: after 10 s")


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
    (read,) = data_of(render_page("groups", [spoken]))["groups"]
    first, tool, second = read["rollouts"][0]["messages"]
    assert (first["percents"], second["percents"]) == ([90, 50], [100])
    assert tool == {"role": "tool", "text": "4"}


def test_a_file_of_another_program_is_shown_too():
    """Atropos' lines have no verdicts; some have no messages, or contents that are lists of parts."""
    parts = [{"type": "text", "text": "Hi"}]
    bare = WrittenGroup(tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.5])
    told = WrittenGroup(
        tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.5], messages=[[{"role": "user", "content": parts}]]
    )
    first, second = data_of(render_page("groups", [bare, told]))["groups"]
    assert (first["rollouts"][0]["score"], first["prompt"]) == (0.5, [])
    assert json.loads(second["prompt"][0]["text"]) == parts


def test_a_thousand_groups_are_made_soon():
    many = [group(*["so many words " * 20] * 8, item=i) for i in range(1000)]
    started = time.process_time()
    page = render_page("groups", many)
    took = time.process_time() - started
    print(f"1,000 groups of 8 rollouts, {len(page) / 1e6:.1f} MB in {took:.1f} s of CPU time")
    assert took < 20
    assert len(page) < 40e6


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine to check with")
def test_the_script_is_valid(tmp_path):
    (tmp_path / "page.js").write_text(Elements(render_page("groups", [group("a", "b")])).scripts[1])
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True, capture_output=True)


@pytest.mark.parametrize("words", [[], ["nowhere.jsonl"]])
def test_the_command_says_what_it_needs(words):
    done = subprocess.run(
        [sys.executable, "-m", "treadle.envs.page", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert ("nowhere.jsonl" if words else "usage") in done.stderr
    assert "Traceback" not in done.stderr
