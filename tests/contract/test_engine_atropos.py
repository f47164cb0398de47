"""What the real atroposlib 0.4.0 asks of an engine besides completions: logprobs of a prompt."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.atropos.parts import OFFLINE, PYTHON, engine, need_atroposlib
from tests.e2e.processes import environment
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
PROMPT = [20, 21, 22, 23, 24]
CLIENT = """
import asyncio, json, sys
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer

url, model, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

async def main():
    server = VLLMServer(APIServerConfig(base_url=url, model_name=model, server_type="vllm", api_key="x"))
    print(json.dumps(await server._get_logprobs_wrapper(input_ids=prompt, top_k=3)))

asyncio.run(main())
"""


@pytest.mark.full  # test_engine_api.py asks for the same without the client
def test_its_client_reads_the_logprobs_of_a_prompt(tmp_path):
    need_atroposlib()
    model = write_tiny_model(tmp_path / "model")
    with engine(model, tmp_path / "engine.log") as url:
        done = subprocess.run(
            [PYTHON, "-c", CLIENT, url, str(model), json.dumps(PROMPT)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(**OFFLINE),
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(plain(torch.tensor([PROMPT])).logits[0], -1)
    assert answer["prompt_tokens"] == PROMPT
    assert answer["prompt_topk_token_ids"][0] == []
    for t in range(1, len(PROMPT)):
        found = dict(zip(answer["prompt_topk_token_ids"][t], answer["prompt_topk_logprobs"][t], strict=True))
        assert {PROMPT[t], *table[t - 1].topk(3).indices.tolist()} == found.keys()
        for token, logprob in found.items():
            assert logprob == pytest.approx(table[t - 1, token].item(), abs=1e-4)
