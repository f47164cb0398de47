"""Conversations with tools: a script in the place of the engine says what the policy says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.unit.envs.env_doubles import CHAT_TEMPLATE, save_tokenizer
from treadle.config.env import EnvConfig
from treadle.envs.base import Item, load_environment
from treadle.envs.chat import Model, RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.envs.tasks.tools import knows_tool_role, make_puzzle, search
from treadle.errors import ConfigError

WITHOUT_TOOL_ROLE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_TOOL_ROLE = WITHOUT_TOOL_ROLE.replace("{{ raise_exception('unknown role') }}", "{% continue %}")


class ScriptedPolicy:
    """Says one text after the other, and keeps the prompts it was given."""

    def __init__(self, tokenizer: ChatTokenizer, texts: list[str], *, finish_reason: str = "stop") -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._finish_reason = finish_reason
        self.prompts: list[str] = []

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=(), conversation=""):
        self.prompts.append(self._tokenizer.decode(prompt_token_ids))
        text = self._texts.pop(0)
        completion = Completion([1] * 3, [-0.5] * 3, text, self._finish_reason, policy_version=0)
        return EngineResult([completion], seconds=0.1)


def tools(**settings):
    return load_environment(EnvConfig(name="tools", **settings))


def scenario(texts, folder: Path, *, template=CHAT_TEMPLATE, **settings):
    return play_with(ChatTokenizer.load(save_tokenizer(folder, template)), texts, **settings)


def play_with(tokenizer, texts, *, item=None, finish_reason="stop", **settings):
    env = tools(**settings)
    policy = ScriptedPolicy(tokenizer, texts, finish_reason=finish_reason)
    model = Model(policy, tokenizer, RolloutSampling(max_tokens=256, temperature=1.0))
    score = asyncio.run(env.rollout(item or env.train_item(0), model))
    return score, policy.prompts, model.transcripts[0].messages


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_looking_up_calculating_and_answering_is_right(tmp_path):
    item = tools().train_item(0)
    texts = [
        f"I look it up. {call('search', query='Tarmouth')}{call('calculator', expression='3 * (14 + 8)')}",
        f"So it is \\boxed{{{item.answer}}}.",
    ]
    score, prompts, messages = scenario(texts, tmp_path, item=item)
    assert (score.reward, score.is_right) == (1.0, True)
    assert score.parts == {"right": 1.0, "calls": 2.0, "invalid_calls": 0.0}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert messages[4]["content"] == "66"
    assert "66" in prompts[1]


@pytest.mark.parametrize(
    ("reply", "reported"),
    [
        ("<tool_call>{'name': 'search'}</tool_call>", "error: not JSON"),
        (call("serach", query="x"), "error: there is no tool 'serach'; there are: search, calculator"),
        (call("search", q="x"), 'error: search takes {"query": "..."}'),
        (call("search", query=["x"]), 'error: search takes {"query": "..."}'),
        (call("calculator", expression="9**9**9"), "error: an exponent is at most 64"),
    ],
)
def test_an_invalid_call_is_answered_with_the_reason_and_penalized(reply, reported, tmp_path):
    item = tools().train_item(0)
    score, _, messages = scenario([reply, f"\\boxed{{{item.answer}}}"], tmp_path, item=item)
    assert messages[3]["content"].startswith(reported)
    assert score.reward == pytest.approx(0.95)
    assert score.parts["invalid_calls"] == 1


def test_the_penalty_can_be_chosen_and_has_an_end(tmp_path):
    broken = "<tool_call>x</tool_call>" * 20
    args = {"invalid_call_penalty": 0.1}
    score, _, _ = scenario([broken, "I give up: 7"], tmp_path, args=args)
    assert (score.reward, score.is_right, score.parts["invalid_calls"]) == (-0.5, False, 20)


def test_turns_are_limited_and_a_call_in_the_last_one_is_no_answer(tmp_path):
    item = tools().train_item(0)
    texts = [f"{item.answer} {call('search', query='x')}"] * 9
    score, prompts, _ = scenario(texts, tmp_path, item=item, args={"max_turns": 3})
    assert len(prompts) == 3
    assert (score.reward, score.is_right, score.parts["calls"]) == (0.0, False, 2)


def test_what_was_cut_off_ends_the_conversation(tmp_path):
    score, prompts, _ = scenario([f"{call('search', query='x')} and then"], tmp_path, finish_reason="length")
    assert (len(prompts), score.reward) == (1, 0.0)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("\\boxed{ANSWER}", True), ("ANSWER", True), ("It is ANSWER.", True), ("\\boxed{ANSWER crowns}", True),
        ("\\boxed{ANSWER.0}", True), ("<think>7</think>ANSWER", True), ("\\boxed{7} ANSWER", False),
        ("\\boxed{}", False), ("ANSWER or 7", False), ("", False), ("<think>ANSWER</think>", False),
        ("\\boxed{nan}", False), ("\\boxed{Infinity}", False), ("\\boxed{1e999999999}", False),
        ("\\boxed{sNaN}", False), ("sNaN", False), ("\\boxed{1-ANSWER}", False), ("\\boxed{7 or ANSWER}", False),
        ("\\boxed{ANSWERe0}", True), ("\\boxed{$ANSWER}", True),
        ("<think>" + call("search", query="x") + "</think>ANSWER", True),  # a call in a thought is no call
    ],
)  # fmt: skip
def test_the_boxed_or_else_the_last_number_is_the_answer(text, is_right, tmp_path):
    item = tools().train_item(0)
    assert scenario([text.replace("ANSWER", item.answer)], tmp_path, item=item)[0].is_right is is_right


def test_a_comma_in_a_box_stands_between_thousands(tmp_path):
    item = Item.ask("?", answer="1240", facts=[])
    for text, is_right in (("\\boxed{1,240}", True), ("\\boxed{12,40}", False), ("\\boxed{1,2,4,0}", False)):
        assert scenario([text], tmp_path, item=item)[0].is_right is is_right


@pytest.mark.parametrize("template", [WITHOUT_TOOL_ROLE, DROPS_TOOL_ROLE, None])
def test_without_a_tool_role_results_come_as_one_message_of_the_user(template, tmp_path):
    reply = f"{call('calculator', expression='20 + 1')}{call('calculator', expression='30 + 2')}"
    _, prompts, messages = scenario([reply, "7"], tmp_path, template=template)
    is_plain = template is None  # without any template, every role is shown
    assert [message["role"] for message in messages[3:-1]] == (["tool", "tool"] if is_plain else ["user"])
    assert "21" in prompts[1]
    assert "32" in prompts[1]


def test_the_default_models_template_shows_tool_results_and_tools():
    folder = next(Path.home().glob(".cache/treadle/models/smollm2-*"), None)
    if folder is None:
        pytest.skip("the default model has not been prepared here")
    tokenizer = ChatTokenizer.load(folder)
    assert knows_tool_role(tokenizer)
    _, prompts, _ = play_with(tokenizer, [call("calculator", expression="20 + 1"), "7"])
    assert '"name": "search"' in prompts[0]
    assert '"name": "calculator"' in prompts[0]
    assert "tool\n21\n" in prompts[1]


def test_items_depend_on_their_index_and_held_out_ones_are_not_trained_on():
    env, again = tools(seed=3), tools(seed=3)
    assert [env.train_item(i) for i in range(50)] == [again.train_item(i) for i in reversed(range(50))][::-1]
    assert tools(seed=4).train_item(0) != env.train_item(0)
    assert tools(seed=4).eval_items() == env.eval_items()
    held_out = {item.prompt for item in env.eval_items()}
    assert len(held_out) == len(env.eval_items()) > 200
    assert not held_out & {env.train_item(i).prompt for i in range(1000)}


def solve(puzzle):
    """Answer a question by the search alone, as a good policy would."""

    def look_up(query, pattern):
        found = [match[1] for fact in search(puzzle.facts, query) if (match := re.fullmatch(pattern, fact))]
        return int(found[0]) if found[0].isdigit() else found[0]

    def age(person):
        return look_up(f"{person} years", rf"{person} is (\d+) years old\.")

    def home(person):
        return look_up(f"{person} lives", rf"{person} lives in (\w+)\.")

    def price(good, town):
        return look_up(f"{good} {town}", rf"In {town}, a {good} costs (\d+) crowns\.")

    def inhabitants(town):
        return look_up(f"{town} inhabitants", rf"{town} has (\d+) inhabitants\.")

    kinds = {
        r"How old will (.+) be in (\d+) years\?": lambda person, years: age(person) + int(years),
        r"How many crowns do (\d+) (\w+)s cost in (\w+)\?": lambda n, good, town: int(n) * price(good, town),
        r"How old are (.+) and (.+) together, in years\?": lambda one, other: age(one) + age(other),
        r"By how many inhabitants do (\w+) and (\w+) differ\?": lambda a, b: abs(inhabitants(a) - inhabitants(b)),
        r"(.+) buys (\d+) (\w+)s in the town where \1 lives\. How many crowns is that\?": (
            lambda person, n, good: int(n) * price(good, home(person))
        ),
        r"How many people besides (.+) live in the town of \1\?": lambda person: inhabitants(home(person)) - 1,
    }
    ((answer, groups),) = [(kinds[kind], m.groups()) for kind in kinds if (m := re.fullmatch(kind, puzzle.question))]
    return answer(*groups)


def test_every_question_can_be_answered_by_looking_facts_up():
    for seed in range(300):
        puzzle = make_puzzle(seed)
        assert solve(puzzle) == puzzle.answer, puzzle.question


def test_a_search_finds_the_facts_that_a_question_is_about():
    puzzle = make_puzzle(1)
    for fact in puzzle.facts:
        assert search(puzzle.facts, fact)[0] == fact
    assert search(puzzle.facts, "zzz") == []
    assert search(puzzle.facts, "") == []


def test_difficulty_chooses_how_many_facts_a_question_takes():
    questions = {level: {make_puzzle(seed, level).question.split()[0] for seed in range(60)} for level in (1, 2, 3)}
    assert "By" in questions[2]
    assert "By" not in questions[1] | questions[3]
    assert make_puzzle(5, 9) == make_puzzle(5, 3)


@pytest.mark.parametrize("args", [{"max_turns": 0}, {"invalid_call_penalty": -1}, {"turns": 3}, {"max_turns": "x"}])
def test_settings_that_cannot_be_are_refused(args):
    with pytest.raises(ConfigError):
        tools(args=args)
