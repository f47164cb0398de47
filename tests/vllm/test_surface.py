"""The engine's HTTP surface with vLLM behind it: the same tests that the transformers engine is put to."""

from __future__ import annotations

import shutil
import sys

import pytest
from tokenizers import Tokenizer, decoders

from tests.contract.test_engine_surface import *  # noqa: F403
from tests.contract.test_engine_surface import Surface
from tests.e2e.processes import free_port, running, wait_until_healthy

START_S = 240.0  # it is restarted too


class PatientSurface(Surface):
    def post(self, route, timeout=START_S, **body):
        return super().post(route, timeout, **body)


@pytest.fixture(scope="module")
def surface(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = folder / "model"
    shutil.copytree(tiny_model, model)
    # vLLM decodes a completion as what follows its prompt. That is what it is by itself only where a token's text does
    # not depend on the one before, as in real tokenizers.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    port, log = free_port(), folder / "engine.log"
    flags = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--enable-lora"]
    flags += ["--max-lora-rank", "16", "--engine", "vllm", "--vllm-python", sys.executable]
    with running("engine", *flags, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(f"{url}/health", process, log, timeout_s=START_S)
        yield PatientSurface(url, model, str(model))
