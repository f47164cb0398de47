"""Check that the installed vLLM has the internals that Treadle uses beyond its routes and flags."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest


def test_the_core_client_has_direct_calls_for_holds_and_updates():
    from vllm.v1.engine.core_client import AsyncMPClient

    for method in ("pause_scheduler_async", "call_utility_async"):
        assert inspect.iscoroutinefunction(getattr(AsyncMPClient, method)), method


def test_the_engine_client_returns_flat_logprobs():
    from vllm.inputs import tokens_input
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    assert tokens_input([5, 6], cache_salt="v1") == {"type": "token", "prompt_token_ids": [5, 6], "cache_salt": "v1"}
    assert {"lora_request", "priority"} <= set(inspect.signature(AsyncLLM.generate).parameters)
    assert {"flat_logprobs", "detokenize", "output_kind"} <= set(inspect.signature(SamplingParams).parameters)
    assert {"start_indices", "end_indices", "token_ids", "logprobs"} <= {field.name for field in fields(FlatLogprobs)}


def test_the_lora_manager_stores_the_matrices_of_adapters():
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    assert "adapter_id" in inspect.signature(LoRAModelManager.get_adapter).parameters
    assert "self.packed_modules" in inspect.getsource(LoRAModelManager.__init__)
    assert "_adapter_manager" in WorkerLoRAManager.__annotations__ or "_adapter_manager" in inspect.getsource(
        WorkerLoRAManager
    )
    assert "self.lora_manager" in inspect.getsource(LoRAModelRunnerMixin)
    assert {"lora_a", "lora_b"} <= set(inspect.signature(LoRALayerWeights.__init__).parameters)


def test_the_cpu_lora_class_can_be_replaced():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("it is replaced on a CPU only")
    assert "PunicaWrapper" in current_platform.get_punica_wrapper()
