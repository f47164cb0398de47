"""The entry points, over real sockets and in a real process."""

import re
import signal
import subprocess
import sys
import time

import pytest
from env_doubles import EngineDouble, HubDouble, save_tokenizer
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.served_app import listening
from treadle import envs
from treadle.config.env import EnvConfig, ServerConfig
from treadle.errors import ConfigError, DiskFull
from treadle.launch.preflight import resolve_environment


def add(prompt, request):
    a, b = map(int, re.findall(r"\d+", prompt)[:2])
    return [str(a + b)] * request.n


def test_evaluate_prints_accuracy_and_samples_in_words(tmp_path, capsys):
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    engine.policy_version = lambda: 12
    with listening(engine.app) as url:
        env = EnvConfig(num_eval=5, data_dir_to_save_evals=tmp_path / "evals")
        envs.run_action("evaluate", env, ServerConfig(base_url=f"{url}/v1"))
    printed = capsys.readouterr().out
    assert "arithmetic/addition at policy version 12: 5 of 5 right = 100.0% (95 % interval 56.6% to 100.0%)" in printed
    assert printed.count("(right)") == 3
    assert (tmp_path / "evals" / "eval_step_000012.json").is_file()


def test_evaluate_with_several_answers_prints_pass_at_k_and_writes_files(tmp_path, capsys):
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), lambda p, r: [*add(p, r)[:1], *["?"] * (r.n - 1)])
    with listening(engine.app) as url:
        env = EnvConfig(num_eval=5, eval_samples=4, data_dir_to_save_evals=tmp_path / "evals")
        assert envs.run_action("evaluate", env, ServerConfig(base_url=url)) == 0
    printed = capsys.readouterr()
    assert "arithmetic/addition at policy version 0: 5 prompts, 4 answers each at temperature 0.7, " in printed.out
    assert "pass@1   25.0% (95 % interval " in printed.out
    assert "pass@2   50.0%" in printed.out
    assert "pass@4   100.0%" in printed.out
    assert printed.out.count("(right)") == 3, "the first answers to three prompts"
    assert "prompts: 5 of 5, 25.0% right, mean score 0.250 so far" in printed.err
    assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == [
        "eval_step_000000.json",
        "metrics.json",
        "samples.jsonl",
    ]


def test_serve_delivers_a_run_and_returns(tmp_path):
    engine, hub = EngineDouble(save_tokenizer(tmp_path / "model"), add), HubDouble(num_steps=2)
    with listening(engine.app) as engine_url, listening(hub.app) as hub_url:
        env = EnvConfig(group_size=2, num_eval=3, hub_url=hub_url, data_dir_to_save_evals=tmp_path)
        envs.run_action("serve", env, ServerConfig(base_url=engine_url))
    assert [len(groups) for _, groups in hub.deliveries] == [4, 4]
    assert (tmp_path / "eval_step_000002.json").is_file()


def listing(engine, *models):
    """The engine with GET /v1/models, as this server or that one fills it in."""
    engine.app.router.routes.append(Route("/v1/models", lambda _: JSONResponse({"data": list(models)})))
    return engine


@pytest.mark.parametrize(
    ("models", "serves"),
    [
        ([{"id": "qwen", "root": "/models/qwen", "parent": None, "created": 1, "max_model_len": 512}], "qwen"),
        ([{"id": "gpt-x", "object": "model"}, {"id": "gpt-y"}], "gpt-x, gpt-y"),  # of a foreign server
        (None, "MODEL_FOLDER"),  # one that has no such list
    ],
)
def test_a_model_name_that_the_engine_does_not_serve_is_warned_of_once(tmp_path, caplog, models, serves):
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    if models is not None:
        listing(engine, *models)
    with listening(engine.app) as url:
        envs.run_action("evaluate", EnvConfig(num_eval=2), ServerConfig(base_url=url, model="org/llama"))
    (fields,) = [r.treadle_fields for r in caplog.records if r.getMessage() == "another_model_is_served"]
    assert fields["asked"] == "org/llama"
    assert fields["engine_serves"] == serves.replace("MODEL_FOLDER", str(tmp_path / "model"))
    assert fields["tokenizer"] == str(tmp_path / "model")
    assert fields["fix"] == "leave out --openai.model, or let the engine serve it: treadle engine --model org/llama"


@pytest.mark.parametrize("name", ["org/qwen", "qwen", "/models/qwen/", "/elsewhere/qwen", "my-adapter", None])
def test_a_model_name_that_the_engine_serves_is_fine_in_any_spelling(tmp_path, caplog, name):
    cache = "/cache/models--org--qwen/snapshots/1f3a"
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    listing(engine, {"id": "base", "root": cache}, {"id": "my-adapter", "root": "/adapters/1"})
    named = {} if name is None else {"model": name}
    with listening(engine.app) as url:
        envs.run_action("evaluate", EnvConfig(num_eval=2), ServerConfig(base_url=url, **named))
    assert [record for record in caplog.records if record.getMessage() == "another_model_is_served"] == []


def test_nothing_to_evaluate_is_reported():
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        envs.run_action("evaluate", EnvConfig(num_eval=0), ServerConfig())


def test_an_invalid_temperature_is_reported_before_the_engine_is_used():
    nowhere = ServerConfig(base_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="all 4 answers to a prompt are the same"):
        envs.run_action("evaluate", EnvConfig(eval_samples=4, eval_temperature=0), nowhere)


def test_an_environment_without_held_out_prompts_is_reported(tmp_path):
    (tmp_path / "bare.py").write_text(
        "from treadle.envs import Environment, environment\n\n\n"
        "@environment('bare')\nclass Bare(Environment):\n    rewards = ('length',)\n\n"
        "    def eval_items(self):\n        return []\n"
    )
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    with listening(engine.app) as url, pytest.raises(ConfigError, match="has no held-out prompts"):
        envs.run_action("evaluate", EnvConfig(name=str(tmp_path / "bare.py")), ServerConfig(base_url=url))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_well_and_soon(tmp_path, number):
    engine, hub = EngineDouble(save_tokenizer(tmp_path / "model"), add), HubDouble()
    hub.steps_at_once = False
    with listening(engine.app) as engine_url, listening(hub.app) as hub_url:
        command = [sys.executable, "-m", "treadle", "env", "arithmetic", "serve", "--env.num-eval", "0"]
        urls = ["--openai.base-url", engine_url, "--env.hub-url", hub_url]
        process = subprocess.Popen([*command, *urls], stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 60
            while len(hub.deliveries) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            started = time.monotonic()
            process.send_signal(number)
            _, log = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, log.decode()
    assert time.monotonic() - started < 10  # under a second on an idle machine
    assert hub.disconnected == [7]


BROKEN_TASK = """
from treadle.envs import Environment, Item, environment


@environment("broken-prepare")
class Broken(Environment):
    def prepare(self):
        self.rows = FAULT

    def eval_items(self):
        return []

    def score(self, item, text, completion):
        return 0.0
"""


def broken_task(tmp_path, fault):
    path = tmp_path / "my_task.py"
    path.write_text(BROKEN_TASK.replace("broken-prepare", tmp_path.name).replace("FAULT", fault))
    return path


@pytest.mark.parametrize("action", ["serve", "process", "evaluate"])
def test_an_exception_of_prepare_is_reported_with_its_line_at_the_start(tmp_path, action):
    path = broken_task(tmp_path, '{}["rows"]')
    with pytest.raises(ConfigError) as reported:
        envs.run_action(action, EnvConfig(name=str(path)), ServerConfig(base_url="http://127.0.0.1:9"))
    assert reported.value.message == f"prepare() of the environment '{path}' raised KeyError: 'rows', at {path}:8"
    assert reported.value.fix == f"correct it; treadle env {path} validate"


@pytest.mark.parametrize(
    ("fault", "reported"), [('{}["rows"]', "KeyError: 'rows'"), ("exit('no key')", "SystemExit: no key")]
)
def test_a_run_says_what_prepare_raised(tmp_path, fault, reported):
    path = broken_task(tmp_path, fault)
    with pytest.raises(ConfigError, match=f"raised {reported}, at {path}:8"):
        resolve_environment(EnvConfig(name=str(path)))


def test_a_disk_that_is_full_while_a_task_prepares_is_reported_as_such(tmp_path):
    path = broken_task(tmp_path, "exec(\"raise OSError(28, 'No space left', '/data')\")")
    with pytest.raises(DiskFull, match="/data"):
        resolve_environment(EnvConfig(name=str(path)))
