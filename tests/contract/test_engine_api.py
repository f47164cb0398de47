"""Contract of the engine's HTTP API, the same for every engine.

Another engine runs these tests by `from tests.contract.test_engine_api import *` and an `api` fixture of its own.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.tiny_model import write_tiny_model
from tests.unit.sync.group_peer import Weights
from treadle.engines.tokenizer import ModelTokenizer
from treadle.errors import SyncError
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.sync.gate import PublishGate
from treadle.sync.protocol import EngineLink

PROMPT = [20, 21, 22, 23, 30]
LONG = 200  # tokens: enough that a test can do something in the middle


@dataclass(frozen=True)
class EngineApi:
    """An engine that serves `folder` in fp32 on a CPU, with --weights-file, --enable-lora and --max-lora-rank 16."""

    url: str
    folder: Path
    model_name: str
    tolerance: float = 1e-4  # of logprobs against a plain forward
    has_lora: bool = True

    @property
    def text(self):
        return ModelTokenizer.load(self.folder)

    def post(self, route, timeout=60, **body):
        return httpx.post(self.url + route, json=body, timeout=timeout)

    def get(self, route):
        return httpx.get(self.url + route, timeout=60)

    def generate(self, **fields):
        body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 12, "logprobs": 0, "ignore_eos": True, **fields}
        answer = self.post("/generate", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **fields):
        """Lines of a streamed answer, as they come."""
        body = {"prompt": {"prompt_token_ids": PROMPT}, "ignore_eos": True, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                yield json.loads(line)

    def version(self):
        return self.get("/health").json()["policy_version"]

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("engine"), "cpu") as api:
        yield api


@contextmanager
def serving(folder, device, *, shares=True, adapts=True):
    model = write_tiny_model(folder / "model")
    port, log = free_port(), folder / "engine.log"
    flags = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1"]
    flags += ["--engine", "transformers", "--device", device, "--adapter-root", str(folder.parent)]
    flags += ["--weights-file", str(folder / "weights")] if shares else []
    flags += ["--enable-lora", "--max-lora-rank", "16"] if adapts else []
    with running("engine", *flags, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(f"{url}/health", process, log)
        yield EngineApi(url, model, str(model), has_lora=adapts)


def plain_logprobs(folder, token_ids, adapter=None):
    """[position, token]: what a plain forward of the saved model says about what follows each position."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], -1)


def sampled_logprobs(answer, i=0):
    return [next(iter(position[0].values())) for position in answer["logprobs"][i]]


def check_against_plain(api, answer, folder=None, adapter=None):
    for i, token_ids in enumerate(answer["token_ids"]):
        table = plain_logprobs(folder or api.folder, PROMPT + token_ids, adapter)
        expected = [table[len(PROMPT) - 1 + t, token].item() for t, token in enumerate(token_ids)]
        assert sampled_logprobs(answer, i) == pytest.approx(expected, abs=api.tolerance)


# POST /generate


def test_generate_returns_tokens_logprobs_text_and_versions(api):
    answer = api.generate(n=3, seed=7)
    assert [len(ids) for ids in answer["token_ids"]] == [12, 12, 12]
    assert answer["finish_reasons"] == ["length"] * 3
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["text"] == [api.text.decode_after(PROMPT, ids) for ids in answer["token_ids"]]
    assert answer["policy_versions"] == [[answer["policy_version"]]] * 3
    assert len({tuple(ids) for ids in answer["token_ids"]}) == 3
    check_against_plain(api, answer)
    assert api.generate(n=3, seed=7)["token_ids"] == answer["token_ids"]


def test_a_list_of_prompts_is_answered_by_a_list(api):
    prompts = [{"prompt_token_ids": PROMPT}, "Once upon a time"]
    answers = api.generate(prompt=prompts, n=2, temperature=0.0, max_tokens=4)
    alone = [api.generate(prompt=prompt, n=2, temperature=0.0, max_tokens=4) for prompt in prompts]
    assert [answer["token_ids"] for answer in answers] == [answer["token_ids"] for answer in alone]
    assert [answer["prompt"] for answer in answers] == [api.text.decode(PROMPT), "Once upon a time"]
    check_against_plain(api, answers[0])


def test_what_a_router_adds_to_a_body_changes_nothing(api):
    """smg 1.13.0 sends these with every body of /generate."""
    added = {
        "model": "unknown", "stream": False, "log_metrics": True, "no_logs": False, "background": False,
        "return_text_in_logprobs": False, "return_bytes": False, "return_entropy": False,
    }  # fmt: skip
    body = {"input_ids": PROMPT, "max_tokens": 12, "logprobs": 0, "ignore_eos": True, "seed": 7}
    plain = api.generate(seed=7)
    for more in (added, added | {"model": api.model_name}):
        answer = api.post("/generate", **body, **more)
        assert answer.status_code == 200, answer.text
        assert [answer.json()[key] for key in ("token_ids", "engine_id")] == [plain["token_ids"], plain["engine_id"]]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "hi", "background": True}, "not offered"),
        ({"prompt": "hi", "return_entropy": True}, "not offered"),
        ({"prompt": "hi", "input_ids": PROMPT}, "either prompt or input_ids"),
        ({}, "either prompt or input_ids"),
        ({"prompt": "hi", "input_embeds": [[0.5]]}, "input_embeds"),
        ({"prompt": "hi", "model": "another"}, "there is no model 'another'"),
    ],
)
def test_what_a_router_passes_on_and_we_lack_is_refused(api, body, why):
    answer = api.post("/generate", **body)
    assert answer.status_code in (400, 404)
    assert why in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": []}, "1 to 256 prompts"),
        ({"prompt": ["a"] * 257}, "1 to 256 prompts"),
        ({"prompt": ["a", {"prompt_token_ids": [-1]}]}, "whole numbers"),
        ({"prompt": ["a"], "stream": True}, "a request for each prompt"),
        ({"prompt": ["a"], "wave": {"id": "w", "size": 2, "index": 0}}, "a request for each prompt"),
    ],
)
def test_an_invalid_list_of_prompts_is_refused(api, body, why):
    answer = api.post("/generate", **body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]


def test_logprobs_list_the_sampled_token_first_and_then_the_likeliest(api):
    answer = api.generate(logprobs=3, max_tokens=5, seed=1)
    table = plain_logprobs(api.folder, PROMPT + answer["token_ids"][0])
    for t, (token, position) in enumerate(zip(answer["token_ids"][0], answer["logprobs"][0], strict=True)):
        (entry,) = position
        assert next(iter(entry)) == str(token)
        likeliest = table[len(PROMPT) - 1 + t].topk(3)
        for other, logprob in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
            assert entry[str(other)] == pytest.approx(logprob, abs=api.tolerance)
        assert len(entry) == 3 + (token not in likeliest.indices.tolist())


def test_logprobs_are_of_the_sampled_distribution(api):
    answer = api.generate(temperature=0.5, top_k=4, seed=2, max_tokens=8)
    table = plain_logprobs(api.folder, PROMPT + answer["token_ids"][0])
    for t, (token, logprob) in enumerate(zip(answer["token_ids"][0], sampled_logprobs(answer), strict=True)):
        row = table[len(PROMPT) - 1 + t] / 0.5
        kept = torch.where(row >= row.topk(4).values[-1], row, -torch.inf)
        assert logprob == pytest.approx(torch.log_softmax(kept, -1)[token].item(), abs=2 * api.tolerance)


def test_prompt_logprobs_equal_a_plain_forward(api):
    answer = api.generate(prompt_logprobs=2, temperature=0.0, max_tokens=1)
    logprobs = answer["prompt_logprobs"]
    assert logprobs[0] is None
    assert len(logprobs) == len(PROMPT)
    table = plain_logprobs(api.folder, PROMPT)
    for t, entry in enumerate(logprobs[1:], 1):
        assert entry[str(PROMPT[t])] == pytest.approx(table[t - 1, PROMPT[t]].item(), abs=api.tolerance)
        likeliest = table[t - 1].topk(2)
        assert [entry[str(i)] for i in likeliest.indices.tolist()] == pytest.approx(
            likeliest.values.tolist(), abs=api.tolerance
        )


def test_completions_give_logprobs_of_the_prompt_in_vllms_form(api):
    wanted = api.generate(prompt_logprobs=0, temperature=0.0, max_tokens=1)["prompt_logprobs"]
    body = {"prompt": [PROMPT, PROMPT[:2]], "n": 2, "max_tokens": 1, "prompt_logprobs": 0}
    choices = api.post("/v1/completions", **body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [5, 5, 2, 2]
    for choice in choices:
        assert choice["prompt_logprobs"][0] is None
        for entry, own in zip(choice["prompt_logprobs"][1:], wanted[1:], strict=False):
            assert {token: found["logprob"] for token, found in entry.items()} == pytest.approx(own, abs=api.tolerance)
    assert "prompt_logprobs" not in api.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()["choices"][0]
    refused = api.post("/v1/completions", **{**body, "n": 1, "stream": True})
    assert (refused.status_code, "prompt_logprobs" in refused.text) == (400, True)


def test_streamed_deltas_add_up_to_the_full_response_in_the_last_line(api):
    *lines, last = api.stream(n=2, seed=5, max_tokens=10, logprobs=0)
    assert last["token_ids"] == api.generate(n=2, seed=5, max_tokens=10)["token_ids"]
    for i in range(2):
        mine = [line for line in lines if line["index"] == i]
        assert len(mine) > 1, "it came in one piece"
        assert [token for line in mine for token in line["token_ids"]] == last["token_ids"][i]
        assert "".join(line["text"] for line in mine) == last["text"][i]
        assert [entry for line in mine for entry in line["logprobs"]] == last["logprobs"][i]
        assert [line.get("finish_reason") for line in mine if "finish_reason" in line] == ["length"]
        assert {line["policy_version"] for line in mine} == {last["policy_version"]}


def test_a_stop_string_ends_a_completion_and_is_never_streamed(api):
    whole = api.generate(temperature=0.0, max_tokens=20)["text"][0]
    word = whole[7:12]
    before = whole[: whole.index(word)]
    cut = api.generate(temperature=0.0, max_tokens=20, stop=[word, "never there"])
    assert (cut["text"], cut["finish_reasons"]) == ([before], ["stop"])
    *lines, last = api.stream(temperature=0.0, max_tokens=20, stop=word)
    assert "".join(line["text"] for line in lines) == before == last["text"][0]


def test_text_prompts_are_tokenized_by_the_models_own_tokenizer(api):
    answer = api.generate(prompt="Say 7", max_tokens=3)
    assert answer["prompt"] == "Say 7"
    assert answer["prompt_token_ids"] == api.text.encode("Say 7")


def test_a_stop_token_ends_a_completion_and_is_not_in_its_text(api):
    free = api.generate(max_tokens=12, temperature=0.0)["token_ids"][0]
    last = free[5]
    asked = {"max_tokens": 12, "temperature": 0.0, "stop_token_ids": [last]}
    stopped = api.generate(**asked)
    assert stopped["token_ids"] == [free[: free.index(last) + 1]]
    assert stopped["finish_reasons"] == ["stop"]
    before = api.generate(max_tokens=max(free.index(last), 1), temperature=0.0)["text"][0]
    assert stopped["text"] == ([before] if free.index(last) else [""])
    *lines, whole = api.stream(**asked)
    assert "".join(line["text"] for line in lines) == stopped["text"][0] == whole["text"][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "hi", "max_tokens": 10_000}, "max-model-len"),
        ({"prompt": {"prompt_token_ids": [99999999]}}, "prompt_token_ids"),
        ({"prompt": "hi", "temprature": 1.0}, "temprature"),
        ({"prompt": "hi", "n": 0}, "n and max_tokens"),
        ({"prompt": "hi", "n": 100000}, "max-num-seqs"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": "hi", "top_p": 0}, "out of range"),
        ({"prompt": "hi", "stop": [""]}, "stop takes"),
        ({"prompt": "hi", "stop": ["x"] * 10_000}, "stop takes"),
        ({"prompt": "hi", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "hi", "stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"prompt": {"prompt_token_ids": [-1]}}, "prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [2**70]}}, "prompt_token_ids"),
        ({"prompt": "hi", "max_tokens": 2**70}, "max-model-len"),
        ({"prompt": "hi", "n": 2**70}, "max-num-seqs"),
        ({"prompt": "hi", "temperature": 101}, "out of range"),
        ({"prompt": "hi", "logit_bias": {"1": 100}}, "logit_bias"),
        ({"prompt": "hi", "logprobs": 1000}, "0 to 20"),
        ({"prompt": "hi", "adapter": "nobody"}, "nobody"),
        ({"prompt": "7" * 300_000}, "300,000 characters"),  # refused before the tokenizer takes seconds for it
    ],
)
def test_an_invalid_request_gets_an_error_that_names_the_problem(api, body, words):
    answer = api.post("/generate", **body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_invalid_json_and_unknown_routes_are_errors(api):
    assert httpx.post(f"{api.url}/generate", content=b"{nonsense").status_code == 400
    assert httpx.post(f"{api.url}/generate", data={"a": "b"}).status_code == 400
    assert api.get("/nothing").status_code == 404
    assert "error" in api.get("/generate").json()


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_values_that_are_not_finite_numbers_are_refused(api, field, number):
    body = f'{{"prompt": "hi", "max_tokens": 2, "{field}": {number}}}'
    answer = httpx.post(f"{api.url}/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]


def test_numbers_of_any_size_are_accepted_or_refused_with_a_message(api):
    for fields in ({"top_k": 2**70}, {"seed": 10**300}, {"seed": -(2**63)}):
        assert api.generate(max_tokens=2, **fields)["num_tokens"] == 2
    for version in (-1, 2**63, 2**70):
        for route, body in (
            ("/bridge/resume", {}),
            ("/bridge/fingerprints", {}),
            ("/reload_weights", {"path": str(api.folder)}),
            ("/bridge/restart", {"model_path": str(api.folder)}),
            ("/lora/load", {"adapter_path": "adapter"}),
        ):
            answer = api.post(route, policy_version=version, **body)
            assert answer.status_code == 400, f"{route}: {answer.text}"
            assert "policy_version" in answer.json()["error"]


def test_deeply_nested_bodies_are_refused_with_a_message(api):
    deep = 50_000  # how deep is too deep depends on the version of Python
    for body in (b"[" * deep, b'{"prompt":' * deep, b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}"):
        for route in ("/generate", "/v1/chat/completions", "/bridge/pause", "/lora/load"):
            answer = httpx.post(api.url + route, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert len(answer.text) < 1000


def test_hundreds_of_unfinished_requests_do_not_block_others(api):
    url, connections = httpx.URL(api.url), []
    try:
        for _ in range(500):
            connections.append(socket.create_connection((url.host, url.port)))
            head = f"POST /generate HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Length: 1000\r\n\r\n{{"
            connections[-1].sendall(head.encode())
        assert api.generate(max_tokens=2)["num_tokens"] == 2
    finally:
        for connection in connections:
            connection.close()


def test_a_client_that_disconnects_frees_its_slots(api):
    with pytest.raises(httpx.ReadTimeout):
        api.post("/generate", timeout=0.15, prompt={"prompt_token_ids": PROMPT}, max_tokens=LONG, n=32,
                     ignore_eos=True)  # fmt: skip
    lines = api.stream(max_tokens=LONG, n=2)
    next(lines)
    lines.close()
    deadline = time.monotonic() + 10
    while (health := api.get("/health").json())["num_running"] + health["num_waiting"]:
        assert time.monotonic() < deadline, f"still there: {health}"
        time.sleep(0.01)


def test_a_disconnect_before_the_whole_body_is_not_a_server_error(api):
    def num_left():
        line = 'engine_http_requests_total{route="/generate",status="499"} '
        return float(api.get("/metrics").text.partition(line)[2].partition("\n")[0] or 0)

    before, url = num_left(), httpx.URL(api.url)
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Length: 1000\r\n\r\n{{"
        connection.sendall(head.encode())
    deadline = time.monotonic() + 10
    while num_left() != before + 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tiny_temperature_is_greedy(api):
    greedy = api.generate(temperature=0.0)
    for temperature in (1e-38, 1e-300, 0.009):
        answer = api.generate(temperature=temperature)
        assert answer["token_ids"] == greedy["token_ids"]
        assert sampled_logprobs(answer) == pytest.approx(sampled_logprobs(greedy), abs=api.tolerance)


# OpenAI's client


def test_openai_chat(api):
    answer = api.client().chat.completions.create(
        model=api.model_name,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "7"}]}],
        n=2,
        max_completion_tokens=6,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    reply = answer.model_dump()
    assert [api.text.token(token) for token in reply["prompt_token_ids"]] == [*"Say 7", "<turn>"]
    assert answer.usage.completion_tokens == 12
    assert answer.object == "chat.completion"
    for choice, raw in zip(answer.choices, reply["choices"], strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == api.text.decode_after(reply["prompt_token_ids"], raw["token_ids"])
        assert choice.finish_reason == "length"
        assert [entry.token for entry in choice.logprobs.content] == [api.text.token(t) for t in raw["token_ids"]]
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert raw["policy_versions"] == [reply["policy_version"]]


def test_an_endless_chat_template_does_not_block_others(api):
    asked = {"model": api.model_name, "messages": [{"role": "user", "content": "Say 7"}], "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(api.post, "/v1/chat/completions", **asked, chat_template_kwargs={"waste": 99_999})
        while not rendering.done():
            assert api.get("/health").status_code == 200
    answer = rendering.result()
    assert answer.status_code == 400
    assert "of processor time" in answer.json()["error"]["message"]
    assert api.post("/v1/chat/completions", **asked).status_code == 200


def test_a_request_may_not_set_a_chat_template(api):
    own = {"chat_template": "{{ 'mine' }}"}
    answer = api.post(
        "/v1/chat/completions", model=api.model_name, messages=[{"role": "user"}], chat_template_kwargs=own
    )
    assert answer.status_code == 400
    assert "may not set chat_template" in answer.json()["error"]["message"]


def test_openai_chat_streamed(api):
    asked = {
        "model": api.model_name,
        "messages": [{"role": "user", "content": "Say 7"}],
        "max_tokens": 8,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    whole = api.client().chat.completions.create(**asked).choices[0].message.content
    chunks = list(api.client().chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8
    raw = api.post("/v1/chat/completions", messages=asked["messages"], max_tokens=2, stream=True).text
    assert raw.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("Say 7", 1), (["Say 7", "Say 8"], 2), (PROMPT, 1), ([PROMPT, PROMPT[:2]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_openai_completions_accept_every_kind_of_prompt(api, prompt, num_prompts):
    answer = api.client().completions.create(
        model=api.model_name, prompt=prompt, n=2, max_tokens=4, seed=1, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 4
        assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs)
    assert answer.usage.completion_tokens == 8 * num_prompts
    streamed = api.client().completions.create(
        model=api.model_name, prompt=prompt, n=2, max_tokens=4, seed=1, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [""] * (2 * num_prompts)
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_openai_errors_have_openais_format(api):
    with pytest.raises(openai.BadRequestError) as error:
        api.client().completions.create(model=api.model_name, prompt="hi", max_tokens=100_000)
    assert "max-model-len" in error.value.body["message"]
    assert error.value.body["type"] == "invalid_request_error"
    assert error.value.body["code"] == 400
    with pytest.raises(openai.NotFoundError, match="no model 'nobody'"):
        api.client().completions.create(model="nobody", prompt="hi")
    for field in ({"echo": True}, {"frequency_penalty": 1.0}, {"nonsense": 1}):
        with pytest.raises(openai.BadRequestError, match=next(iter(field)).split("_")[-1][:6]):
            api.client().completions.create(model=api.model_name, prompt="hi", extra_body=field)


def test_openai_tools_need_a_template_that_supports_them(api):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        api.client().chat.completions.create(
            model=api.model_name, messages=[{"role": "user", "content": "hi"}], tools=tools
        )


# Health and metrics


def test_health_reports_the_version_and_health_generate_samples(api):
    health = api.get("/health").json()
    assert health["status"] == "ok"
    assert health["model"] == str(api.folder)
    assert api.get("/health_generate").json()["status"] == "ok"


def test_metrics_are_prometheus_text(api):
    api.generate(max_tokens=5)
    found = {family.name: family for family in text_string_to_metric_families(api.get("/metrics").text)}
    assert found["engine_up"].samples[0].value == 1
    assert found["engine_generated_tokens"].samples[0].value >= 5
    routes = {sample.labels["route"] for sample in found["engine_http_requests"].samples}
    assert "/generate" in routes


def test_list_endpoints_lists_every_route(api):
    listed = {entry["path"] for entry in api.get("/bridge/list_endpoints").json()["endpoints"]}
    assert {"/generate", "/v1/models", "/bridge/pause", "/lora/load", "/reload_weights", "/metrics"} <= listed
    assert api.post("/bridge/sleep").json() == {"status": "not_supported"}
    assert api.get("/bridge/is_sleeping").json() == {"is_sleeping": False}
    assert api.get("/bridge/debug").json()["facts"]["folder"] == str(api.folder)


# Holds and versions


def paused(api, mode):
    answer = api.post("/bridge/pause", mode=mode)
    assert answer.json()["status"] == "paused", answer.text


def test_a_limited_pause_ends_by_itself(api):
    for at_most_s in (0.2, 1.0, 5.0):  # on a busy machine a short pause may be over before the second request arrives
        api.post("/bridge/pause", mode="keep", at_most_s=at_most_s)
        if is_paused := api.get("/bridge/is_paused").json()["is_paused"]:
            break
    assert is_paused
    deadline = time.monotonic() + 60
    while api.get("/bridge/is_paused").json()["is_paused"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert api.get("/health").json()["status"] == "ok"


def test_a_later_pause_replaces_the_limit_of_an_earlier_one(api):
    api.post("/bridge/pause", mode="keep", at_most_s=0.2)
    api.post("/bridge/pause", mode="keep")
    time.sleep(0.6)
    assert api.get("/bridge/is_paused").json() == {"is_paused": True}
    api.post("/bridge/resume")


def freeze_a_stream(api, attempts=5):
    """A stream that a hold caught in the middle: (its first line, the lines to come). On a busy machine a pause may be
    too late, after the last token; then another stream is tried."""
    for _ in range(attempts):
        lines = api.stream(max_tokens=LONG, temperature=0.0, logprobs=0)
        first = next(lines)
        paused(api, "keep")
        if api.get("/health").json()["num_running"] == 1:
            return first, lines
        api.post("/bridge/resume")
    raise AssertionError(f"{attempts} streams of {LONG} tokens were over before a pause arrived")


def test_held_requests_continue_under_the_next_version(api):
    before = api.version()
    first, lines = freeze_a_stream(api)
    got = [first]
    assert api.get("/bridge/is_paused").json() == {"is_paused": True}
    assert api.get("/health").json()["status"] == "paused"
    resumed = api.post("/bridge/resume", policy_version=before + 1).json()
    assert resumed.pop("held_s") > 0
    assert resumed == {"status": "resumed", "policy_version": before + 1}
    *rest, last = lines
    got += rest
    assert last["policy_versions"] == [[before, before + 1]]
    assert last["policy_version"] == before
    assert {line["policy_version"] for line in got} == {before, before + 1}
    assert len(last["token_ids"][0]) == LONG
    check_against_plain(api, last)  # the weights are the same: so must every logprob be


def test_no_token_is_sampled_while_held(api):
    with ThreadPoolExecutor(1) as pool:
        paused(api, "keep")
        asked = pool.submit(api.generate, max_tokens=2)
        deadline = time.monotonic() + 10
        while api.get("/health").json()["num_waiting"] + api.get("/health").json()["num_running"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tokens = api.get("/health").json()["generated_tokens"]
        time.sleep(0.3)
        assert not asked.done()
        assert api.get("/health").json()["generated_tokens"] == tokens
        api.post("/bridge/resume")
        assert asked.result(30)["num_tokens"] == 2


def test_a_waiting_hold_lets_requests_finish_under_their_version(api):
    before = api.version()
    with ThreadPoolExecutor(1) as pool:
        lines = api.stream(max_tokens=LONG)
        next(lines)
        reading = pool.submit(list, lines)
        paused(api, "wait")
        api.post("/bridge/resume", policy_version=before + 1)
        assert reading.result(30)[-1]["policy_versions"] == [[before]]
    assert api.generate()["policy_versions"] == [[before + 1]]


def test_an_aborting_hold_returns_partial_completions(api):
    lines = api.stream(max_tokens=LONG, n=2)
    next(lines)
    paused(api, "abort")
    *_, last = lines
    api.post("/bridge/resume")
    assert last["finish_reasons"] == ["abort", "abort"]
    assert all(1 <= len(ids) < LONG for ids in last["token_ids"])


def test_a_version_is_accepted_only_while_held(api):
    before = api.version()
    answer = api.post("/bridge/resume", policy_version=before + 5)
    assert answer.status_code == 503
    assert "pause" in answer.json()["error"]
    assert api.version() == before


def at_the_gate(api, version, write, **changes):
    """A publish as a trainer makes it: the answer of /bridge/adopt; `write(gate, number)` while it stands still."""
    gate = PublishGate(Path(api.get("/bridge/state_dict_info").json()["gate"]))
    number = secrets.randbits(62) + 1
    order = {"policy_version": version, "number": number, "gate": gate.inode, "timeout_s": 60.0, **changes}
    with ThreadPoolExecutor(1) as pool:
        with gate.publishing(number):
            adopting = pool.submit(api.post, "/bridge/adopt", **order)
            if gate.wait_until_paused(number, is_over=adopting.done):
                write(gate, number)
        return adopting.result(60)


def test_requests_wait_for_the_write_and_continue_under_the_next_version(api):
    for _ in range(5):  # on a busy machine a stream may be over before
        before = api.version()
        lines = api.stream(max_tokens=LONG, temperature=0.0, logprobs=0)
        next(lines)

        def write(gate, number):
            tokens = api.get("/metrics").text.partition("engine_generated_tokens_total ")[2].split()[0]
            time.sleep(0.3)
            assert api.get("/metrics").text.partition("engine_generated_tokens_total ")[2].split()[0] == tokens
            gate.mark_written(number)

        adopted = at_the_gate(api, before + 1, write).json()
        assert adopted.pop("held_s") >= 0.3
        assert adopted == {"status": "adopted", "policy_version": before + 1}
        *_, last = lines
        assert len(last["token_ids"][0]) == LONG
        check_against_plain(api, last)  # the weights are the same: so must every logprob be
        if last["policy_versions"] == [[before, before + 1]]:
            return
    raise AssertionError("no stream was caught in the middle")


def test_a_trainer_that_dies_while_writing_leaves_the_engine_held(api):
    before = api.version()
    answer = at_the_gate(api, before + 1, lambda _gate, _number: None)  # its lock goes with it
    assert answer.status_code == 503
    assert "did not finish writing" in answer.json()["error"]
    assert api.get("/bridge/is_paused").json() == {"is_paused": True}
    refused = api.post("/bridge/resume")
    assert refused.status_code == 503
    assert "came in part" in refused.json()["error"]
    assert at_the_gate(api, before + 1, PublishGate.mark_written).status_code == 200
    assert api.get("/bridge/is_paused").json() == {"is_paused": False}
    assert api.generate(max_tokens=2)["policy_version"] == before + 1


def test_the_engine_cannot_be_released_while_a_trainer_writes(api):
    before = api.version()
    refused = []

    def write(gate, number):
        with ThreadPoolExecutor(1) as pool:  # one engine refuses at once, the other when the publish is through
            asked = pool.submit(api.post, "/bridge/resume")
            time.sleep(0.3)
            assert api.get("/bridge/is_paused").json() == {"is_paused": True}
            gate.mark_written(number)
            refused.append(asked.result(60).status_code)

    assert at_the_gate(api, before + 1, write).status_code == 200
    assert refused[0] in (200, 503)
    assert api.generate(max_tokens=2)["policy_version"] == before + 1


def test_adopting_without_a_trainer_changes_nothing(api):
    before = api.version()
    gate = PublishGate(Path(api.get("/bridge/state_dict_info").json()["gate"]))
    answer = api.post("/bridge/adopt", policy_version=before + 1, number=secrets.randbits(62) + 1, gate=gate.inode)
    assert answer.status_code == 400
    assert "no trainer is at the gate" in answer.json()["error"]
    assert api.generate(max_tokens=2)["policy_version"] == before


@pytest.mark.parametrize(
    ("changes", "expected_error"),
    [
        ({"after_version": 10_000}, "where 10000 was published last: it was restarted"),
        ({"gate": 1}, "its weights lie elsewhere"),
        ({"number": "seven"}, "number"),
        ({"number": 2**63}, "number"),
        ({"number": 0}, "number"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": None}, "timeout_s"),
    ],
)
def test_an_invalid_adopt_order_is_refused_and_changes_nothing(api, changes, expected_error):
    before = api.version()
    answer = at_the_gate(api, before + 1, PublishGate.mark_written, **changes)
    assert answer.status_code == 400
    assert expected_error in answer.json()["error"]
    assert api.generate(max_tokens=2)["policy_version"] == before


def test_bridge_info_reports_version_and_engine(api):
    info = api.get("/bridge/info").json()
    assert info["update_count"] == api.version()
    assert (info["enabled"], info["is_paused"], info["dtype"]) == (True, False, "float32")
    assert info["has_lora"] == api.has_lora
    assert info["max_num_seqs"] > 0
    assert Path(info["adapter_root"]).is_dir()


# Weights


def fingerprints(api, version):
    return api.post("/bridge/fingerprints", policy_version=version).json()["fingerprints"]


def expected_fingerprints(file, version):
    return fingerprints_of(load_file(file).items(), version)


def test_fingerprints_use_the_trainers_weight_names(api):
    for version in (0, 3):
        assert fingerprints(api, version) == expected_fingerprints(api.folder / "model.safetensors", version)


@pytest.fixture
def as_before(api):
    """Whatever a test loads, the next one finds the first weights."""
    yield
    assert api.post("/reload_weights", path=str(api.folder)).status_code == 200


@pytest.fixture
def other_weights(tmp_path_factory, api):
    """The same model with other numbers in it."""
    folder = tmp_path_factory.mktemp("other") / "model"
    model = AutoModelForCausalLM.from_pretrained(api.folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    for file in api.folder.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_running_requests_continue_under_reloaded_weights(api, other_weights, as_before):
    before = api.version()
    lines = api.stream(max_tokens=LONG, logprobs=0, seed=1)
    next(lines)
    answer = api.post("/reload_weights", path=str(other_weights), policy_version=before + 3)
    assert answer.json()["policy_version"] == before + 3, answer.text
    assert 0 < answer.json()["held_s"] < answer.json()["seconds"]
    *_, last = lines
    assert last["policy_versions"] == [[before, before + 3]]
    assert fingerprints(api, 0) == expected_fingerprints(other_weights / "model.safetensors", 0)
    check_against_plain(api, api.generate(seed=4), other_weights)
    # The last tokens of what ran: sampled from the new weights, with nothing left of what the old ones had computed.
    tokens = last["token_ids"][0]
    table = plain_logprobs(other_weights, PROMPT + tokens)
    expected = [table[len(PROMPT) - 1 + t, tokens[t]].item() for t in range(LONG - 5, LONG)]
    assert sampled_logprobs(last)[-5:] == pytest.approx(expected, abs=api.tolerance)


def test_without_a_body_the_engines_own_model_is_reloaded(api, other_weights, as_before):
    api.post("/reload_weights", path=str(other_weights))
    answer = httpx.post(f"{api.url}/reload_weights", timeout=60)
    assert answer.json()["status"] == "ok", answer.text
    assert fingerprints(api, 0) == expected_fingerprints(api.folder / "model.safetensors", 0)


def test_a_subset_of_the_weights_may_be_reloaded(api, other_weights, tmp_path, as_before):
    name = "model.layers.1.mlp.down_proj.weight"
    changed = load_file(other_weights / "model.safetensors")[name]
    save_file({name: changed}, tmp_path / "delta.safetensors")
    expected = fingerprints(api, 0) | fingerprints_of([(name, changed)], 0)
    before = api.version()
    assert api.post("/reload_weights", path=str(tmp_path)).json()["policy_version"] == before + 1
    assert fingerprints(api, 0) == expected


def test_weights_that_do_not_fit_change_nothing(api, tmp_path):
    before, served = api.version(), fingerprints(api, 0)
    good = load_file(api.folder / "model.safetensors")
    for name, tensor, words in (
        ("model.layers.0.nothing.weight", torch.zeros(2), "model.layers.0.nothing.weight"),
        ("model.norm.weight", torch.zeros(2), "model.norm.weight"),
    ):
        save_file({**{n: t + 1 for n, t in good.items()}, name: tensor}, tmp_path / "model.safetensors")
        answer = api.post("/reload_weights", path=str(tmp_path))
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert api.post("/reload_weights", path=str(tmp_path)).status_code == 400
    (tmp_path / "model.safetensors").unlink()
    assert api.post("/reload_weights", path=str(tmp_path)).status_code == 400
    assert api.post("/reload_weights", path=str(tmp_path / "away")).status_code == 404
    assert (api.version(), fingerprints(api, 0)) == (before, served)


def weights_of(folder):
    """As a trainer has them: a tied one once."""
    return Weights(load_file(folder / "model.safetensors"))


def link_to(api):
    return WeightBroadcaster([Receiver(EngineLink(api.url, 120.0))], "gloo", timeout_s=60.0, bucket_bytes=64 << 10)


def test_running_requests_continue_under_broadcast_weights(api, other_weights, as_before):
    before = api.version()
    link, trainers = link_to(api), weights_of(other_weights)
    link.join(trainers)
    check_against_plain(api, api.generate(seed=4))  # it serves on, and nothing has changed
    _, lines = freeze_a_stream(api)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(link.send, trainers)
        while not sending.done():
            assert api.get("/health").status_code == 200
    assert sending.result() == sum(w.nbytes for w in trainers.weights.values())
    unnamed = api.post("/bridge/resume")  # as the version before, with its caches: never
    assert unnamed.status_code == 503
    assert "wait for their version" in unnamed.json()["error"]
    assert api.post("/bridge/resume", policy_version=before + 1).status_code == 200
    *_, last = lines
    assert last["policy_versions"] == [[before, before + 1]]
    assert fingerprints(api, 0) == expected_fingerprints(other_weights / "model.safetensors", 0)
    check_against_plain(api, api.generate(seed=4), other_weights)


def test_a_broadcast_needs_a_hold_and_the_trainer_that_joined(api):
    link, trainers = link_to(api), weights_of(api.folder)
    link.join(trainers)
    with pytest.raises(SyncError, match="weights may change only while the engine is"):
        link.send(trainers)
    paused(api, "keep")
    answer = api.post("/bridge/receive", group="another", timeout_s=5.0)
    assert answer.status_code == 400
    assert "this engine is in no group with this trainer" in answer.json()["error"]
    assert api.post("/bridge/resume").status_code == 200  # nothing was written


def test_a_failed_join_keeps_the_present_group_and_times_out(api):
    link, trainers = link_to(api), weights_of(api.folder)
    link.join(trainers)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for host, port in (("127.0.0.1", silent.getsockname()[1]), ("127.0.0.1", 1), ("a" * 70, 80)):
            body = {
                "group": "b", "host": host, "port": port, "backend": "gloo", "dtype": "float32", "timeout_s": 2.0,
                "bucket_bytes": 1 << 20, "weights": [(name, list(w.shape)) for name, w in trainers.weights.items()],
            }  # fmt: skip
            started = time.monotonic()
            answer = api.post("/bridge/join", **body)
            assert 400 <= answer.status_code <= 503
            assert "cannot reach" in answer.json()["error"]
            assert time.monotonic() - started < 20
    paused(api, "keep")
    link.send(trainers)
    assert api.post("/bridge/resume", policy_version=api.version() + 1).status_code == 200


def test_a_join_with_other_weights_is_refused_by_weight_name(api):
    served = fingerprints(api, 0)
    good = weights_of(api.folder).weights
    norm = "model.norm.weight"
    for given, words in (
        ({**good, norm: torch.zeros(2)}, norm),
        ({**good, "model.nothing.weight": torch.zeros(2)}, "model.nothing.weight"),
        ({name: w for name, w in good.items() if name != norm}, norm),
        ({name: w.bfloat16() for name, w in good.items()}, "bfloat16 at the trainer and float32"),
    ):
        with pytest.raises(SyncError, match=words):
            link_to(api).join(Weights(given))
    body = {
        "group": "a", "host": "127.0.0.1", "port": 1, "backend": "nccl", "dtype": "float32", "bucket_bytes": 1 << 20,
        "weights": [(name, list(w.shape)) for name, w in good.items()], "timeout_s": 5.0,
    }  # fmt: skip
    expected_error = "NCCL is between GPUs" if api.get("/bridge/info").json()["device"] == "cpu" else "cannot reach"
    assert expected_error in api.post("/bridge/join", **body).json()["error"]
    assert api.post("/bridge/join", **body | {"timeout_s": 0}).status_code == 400
    assert fingerprints(api, 0) == served


def test_a_broken_broadcast_holds_the_engine_until_a_complete_one(api, other_weights, as_before):
    before = api.version()
    link = link_to(api)
    trainers = weights_of(other_weights)
    link.join(trainers)
    paused(api, "keep")
    half = dict(list(trainers.weights.items())[: len(trainers.weights) // 2])
    with pytest.raises(SyncError, match="nothing is to be sent where"):
        link.send(Weights(half))
    for version in (before + 1, None):
        answer = api.post("/bridge/resume", policy_version=version)
        assert answer.status_code == 503
        assert "new weights came in part" in answer.json()["error"]
    assert api.get("/health").json()["status"] == "paused"
    again = link_to(api)
    again.join(trainers)
    again.send(trainers)
    assert api.post("/bridge/resume", policy_version=before + 1).status_code == 200
    check_against_plain(api, api.generate(seed=4), other_weights)


def test_only_a_full_reload_repairs_a_broken_broadcast(api, other_weights, tmp_path, as_before):
    before = api.version()
    link, trainers = link_to(api), weights_of(other_weights)
    link.join(trainers)
    paused(api, "keep")
    with pytest.raises(SyncError, match="nothing is to be sent where"):
        link.send(Weights(dict(list(trainers.weights.items())[:2])))
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({name: trainers.weights[name]}, tmp_path / "model.safetensors")
    part = api.post("/reload_weights", path=str(tmp_path))
    assert part.status_code == 400
    assert "are a mixture since a publish broke off" in part.json()["error"]
    assert api.post("/bridge/resume").status_code == 503
    assert api.post("/reload_weights", path=str(other_weights), policy_version=before + 1).status_code == 200
    assert api.get("/bridge/is_paused").json() == {"is_paused": False}  # nobody else would let it go
    check_against_plain(api, api.generate(seed=4), other_weights)
    assert api.version() == before + 1


def test_a_restart_serves_a_saved_model_and_requests_wait_for_it(api, other_weights):
    before = api.version()
    stop = threading.Event()

    def ask_until_stopped():
        answers = []
        while not stop.is_set():
            answers.append(api.generate(max_tokens=4))
        return answers

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_until_stopped)
        try:
            answer = api.post("/bridge/restart", timeout=300, model_path=str(other_weights), policy_version=before + 1)
        finally:
            stop.set()
        assert answer.json()["policy_version"] == before + 1, answer.text
        assert len(asking.result(60)) >= 1, "a request failed meanwhile"
    check_against_plain(api, api.generate(seed=4), other_weights)
    assert api.post("/bridge/restart", model_path=str(other_weights / "no"), policy_version=9).status_code == 404
    back = api.post("/bridge/restart", timeout=300, model_path=str(api.folder), policy_version=before + 2)
    assert back.json()["status"] == "ok"
    check_against_plain(api, api.generate(seed=4))


# Adapters


def write_adapter(model_folder, folder, *, seed, rank=4, targets=("q_proj", "v_proj")):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def no_adapters_left(api):
    yield
    for adapter in api.get("/lora/status").json()["adapters"]:
        api.post("/lora/unload", adapter_name=adapter["name"])


def test_a_newer_policy_adapter_serves_requests_without_an_adapter(api, tmp_path, no_adapters_left):
    before = api.version()
    adapters = [write_adapter(api.folder, tmp_path / f"v{i}", seed=i) for i in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        lines = api.stream(max_tokens=LONG, logprobs=0)
        next(lines)
        reading = pool.submit(list, lines)
        for i, adapter in enumerate(adapters, 1):
            answer = api.post("/lora/load", adapter_path=str(adapter), policy_version=before + i)
            assert answer.json()["status"] == "ok", answer.text
            assert answer.json()["adapter_config"]["r"] == 4
            assert answer.json()["policy_version"] == before + i
        finished = reading.result(60)[-1]
    assert finished["policy_versions"] == [[before]], "it finishes under its own version"
    check_against_plain(api, finished)
    answer = api.generate(seed=1)
    assert answer["policy_versions"] == [[before + 2]]
    check_against_plain(api, answer, adapter=adapters[1])
    named = api.generate(seed=1, adapter="v1")
    assert named["policy_versions"] == [[before + 1]]
    check_against_plain(api, named, adapter=adapters[0])
    status = api.get("/lora/status").json()
    assert (status["lora_available"], status["active_adapter_name"]) == (True, "v2")
    assert {a["name"]: a["rank"] for a in status["adapters"]} == {"v1": 4, "v2": 4}
    models = [model.id for model in api.client().models.list()]
    assert models == [api.model_name, "v1", "v2"]
    by_name = api.client().completions.create(
        model="v1", prompt=PROMPT, max_tokens=12, seed=1, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert by_name.model_dump()["choices"][0]["token_ids"] == named["token_ids"][0]
    assert fingerprints(api, 0) == expected_fingerprints(api.folder / "model.safetensors", 0)


def test_an_adapter_without_a_version_serves_as_the_next_one(api, tmp_path, no_adapters_left):
    adapter = write_adapter(api.folder, tmp_path / "step_1", seed=5)
    versions = [
        api.post("/lora/load", adapter_path=str(adapter), adapter_name="step_1").json()["policy_version"]
        for _ in range(2)  # again, because its answer was lost
    ]
    first = versions[0]
    assert versions == [first, first]
    answer = api.generate(seed=1)
    assert answer["policy_versions"] == [[first]]
    check_against_plain(api, answer, adapter=adapter)
    newer = write_adapter(api.folder, tmp_path / "step_2", seed=6)
    assert api.post("/lora/load", adapter_path=str(newer)).json()["policy_version"] == first + 1
    back = api.post("/lora/load", adapter_path=str(adapter), adapter_name="step_1")
    assert back.status_code == 400, "it is there, and the newer one serves: nothing would change"
    assert "new name" in back.json()["error"]
    api.post("/lora/unload", adapter_name="step_2")
    again = api.post("/lora/load", adapter_path=str(newer), adapter_name="step_3")
    assert again.json()["policy_version"] == first + 2, "no version twice"


def test_adapter_fingerprints_are_of_the_matrices_in_use(api, tmp_path, no_adapters_left):
    adapter = write_adapter(api.folder, tmp_path / "fingerprinted", seed=6)
    api.post("/lora/load", adapter_path=str(adapter), adapter_name="fingerprinted")
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / 4
    dtype = getattr(torch, api.get("/bridge/info").json()["dtype"])
    expected = {}
    for name, saved in load_file(adapter / "adapter_model.safetensors").items():
        weight = saved.to(dtype)
        short = name.removeprefix("base_model.model.").removesuffix(".weight")
        expected |= fingerprints_of([(short, weight * scale if short.endswith("lora_B") else weight)], 3)
    answer = api.post("/bridge/fingerprints", policy_version=3, adapter="fingerprinted")
    assert answer.json()["fingerprints"] == expected
    assert api.post("/bridge/fingerprints", policy_version=3, adapter="nobody").status_code == 400


def test_unloading_an_adapter_restores_the_base_model(api, tmp_path, no_adapters_left):
    base, before = api.generate(temperature=0.0)["token_ids"], api.version()
    adapter = write_adapter(api.folder, tmp_path / "adapter", seed=3, rank=8)
    api.post("/lora/load", adapter_path=str(adapter), adapter_name="p", policy_version=before + 1)
    check_against_plain(api, api.generate(seed=1), adapter=adapter)
    assert api.post("/lora/unload").json()["previous_name"] == "p"
    answer = api.generate(temperature=0.0)
    assert answer["token_ids"] == base
    assert answer["policy_version"] == before  # of these weights: the adapter's is of others
    check_against_plain(api, answer)
    assert api.post("/lora/unload", adapter_name="p").status_code == 404
    assert api.post("/lora/unload").json()["previous_name"] is None


def test_adapters_can_be_loaded_by_vllms_routes_too(api, tmp_path, no_adapters_left):
    adapter = write_adapter(api.folder, tmp_path / "adapter", seed=4)
    assert api.post("/v1/load_lora_adapter", lora_name="hand", lora_path=str(adapter)).status_code == 200
    check_against_plain(api, api.generate(seed=1))  # loaded by hand: only who names it gets it
    check_against_plain(api, api.generate(seed=1, adapter="hand"), adapter=adapter)
    assert api.post("/v1/unload_lora_adapter", lora_name="hand").status_code == 200
    assert api.post("/v1/unload_lora_adapter", lora_name="hand").status_code == 404


def test_an_adapter_that_does_not_fit_is_refused(api, tmp_path, no_adapters_left):
    before = api.version()
    too_large = write_adapter(api.folder, tmp_path / "large", seed=1, rank=32)
    stranger = write_tiny_model(tmp_path / "stranger", hidden_size=64)
    foreign = write_adapter(stranger, tmp_path / "foreign", seed=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, status, words in (
        (too_large, 400, "--max-lora-rank 32"),
        (foreign, 400, "was made for"),
        (empty, 400, "adapter_config.json"),
        (tmp_path / "away", 404, "no folder"),
    ):
        answer = api.post("/lora/load", adapter_path=str(path), policy_version=before + 1)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]
    assert api.get("/lora/status").json()["adapters"] == []
    assert api.version() == before
    check_against_plain(api, api.generate(seed=1))


def test_two_adapters_cannot_have_the_same_name(api, tmp_path, no_adapters_left):
    first = write_adapter(api.folder, tmp_path / "first", seed=1)
    second = write_adapter(api.folder, tmp_path / "second", seed=2)
    for _ in range(2):  # the same call again is no error: its answer may have been lost
        assert api.post("/lora/load", adapter_path=str(first), adapter_name="x").status_code == 200
    answer = api.post("/lora/load", adapter_path=str(second), adapter_name="x")
    assert answer.status_code == 400
    assert "new name" in answer.json()["error"]


def changed_adapter(api, folder, **settings):
    """An adapter whose configuration says something else than PEFT saved."""
    write_adapter(api.folder, folder, seed=1)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"layer_replication": [[0, 2], [1, 9]]},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"lora_alpha": "16"},
    ],
    ids=str,
)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_its_setting(api, tmp_path, no_adapters_left, settings):
    before, version = fingerprints(api, 0), api.version()
    adapter = changed_adapter(api, tmp_path / "adapter", **settings)
    for answer in (
        api.post("/lora/load", adapter_path=str(adapter)),
        api.post("/v1/load_lora_adapter", lora_name="hand", lora_path=str(adapter)),
        api.post("/bridge/restart", model_path=str(api.folder), adapter_path=str(adapter), policy_version=9),
    ):
        assert answer.status_code == 400, answer.text
        assert next(iter(settings)) in str(answer.json()["error"])
    assert api.get("/lora/status").json()["adapters"] == []
    assert (fingerprints(api, 0), api.version()) == (before, version)
    check_against_plain(api, api.generate(seed=1))


def test_adapters_are_loaded_only_from_the_adapter_root(api, tmp_path, no_adapters_left):
    adapter = write_adapter(api.folder, tmp_path / "inside", seed=1)
    (tmp_path / "link").symlink_to("/usr")
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    shutil.copy(adapter / "adapter_model.safetensors", borrowed)
    (borrowed / "adapter_config.json").symlink_to("/etc/hostname")
    for path in ("/etc", "/nothing/there", "..", f"{adapter}/../../../..", str(tmp_path / "link"), str(borrowed)):
        for route, body in (
            ("/lora/load", {"adapter_path": path}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}),
            ("/bridge/restart", {"model_path": str(api.folder), "adapter_path": path, "policy_version": 9}),
        ):
            answer = api.post(route, **body)
            assert answer.status_code == 400, answer.text
            assert "--adapter-root" in str(answer.json()["error"])
    root = api.folder.parents[1]
    answer = api.post("/lora/load", adapter_path=str(adapter.relative_to(root)), adapter_name="by hand")
    assert answer.json()["adapter_path"] == str(adapter), answer.text


def test_weights_are_loaded_only_from_that_folder_or_the_own_model(api, tmp_path):
    before, version = fingerprints(api, 0), api.version()
    (tmp_path / "link").symlink_to("/usr")
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    (borrowed / "model.safetensors").symlink_to("/etc/hostname")
    for path in ("/etc", "/nothing/there", "..", str(tmp_path / "link"), str(borrowed)):
        for route, body in (
            ("/reload_weights", {"path": path}),
            ("/bridge/restart", {"model_path": path, "policy_version": 9}),
        ):
            answer = api.post(route, **body)
            assert answer.status_code == 400, answer.text
            assert "--adapter-root" in answer.json()["error"]
    assert (fingerprints(api, 0), api.version()) == (before, version)


def test_an_adapter_does_not_change_the_base_weights(api, tmp_path, no_adapters_left):
    """transformers: PEFT loads it, and the engine compares the weights. vLLM: A and B lie in tensors of their own
    beside each layer, and no setting of an adapter reaches the layer's weight."""

    def own_weights():
        return [fingerprints(api, version) for version in range(16)]  # each reads another part of them

    before = own_weights()
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapter = write_adapter(api.folder, tmp_path / "adapter", seed=3, rank=8, targets=targets)
    assert api.post("/lora/load", adapter_path=str(adapter), adapter_name="p", policy_version=7).status_code == 200
    check_against_plain(api, api.generate(seed=1), adapter=adapter)
    assert own_weights() == before
    assert api.post("/lora/unload", adapter_name="p").status_code == 200
    assert own_weights() == before


@pytest.mark.parametrize(
    "path",
    ["x/" * 4000, "y" * 300, "~nobody-of-this-name/adapter", "a\0b", "", "."],
    ids=["long", "long name", "home of nobody", "NUL", "empty", "the root"],
)
def test_an_invalid_adapter_path_is_refused_with_a_message(api, path, no_adapters_left):
    for route, body in (
        ("/lora/load", {"adapter_path": path}),
        ("/reload_weights", {"path": path or "no/such/folder"}),
    ):
        answer = api.post(route, **body)
        assert answer.status_code in (400, 404), answer.text
        assert len(answer.json()["error"]) < 1000
    assert api.get("/lora/status").json()["adapters"] == []
