"""`treadle export`: the result of a run as a model folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle import cli
from treadle.config import load_run, save_run
from treadle.engines.model_folder import check_model_folder

IDS = torch.arange(10)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=32, num_layers=2)


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def write_result(model: Path, run: Path, name: str) -> Path:
    """A finished run that trained an adapter of `model`, or a copy of it."""
    result = run / "checkpoints" / name
    result.mkdir(parents=True)
    save_run(load_run(None), run / "config.json")
    if name == "final_model":
        for file in model.iterdir():
            (result / file.name).write_bytes(file.read_bytes())
        (result / "trainer.json").write_text("{}")
        return result
    torch.manual_seed(1)
    adapted = get_peft_model(load(model), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for place, parameter in adapted.named_parameters():
            if ".lora_" in place:
                parameter.copy_(torch.randn_like(parameter))
    adapted.save_pretrained(result)
    return result


def export(source: Path, target: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(source), "--merged", str(target)])
    return int(ended.value.code or 0)


def test_an_adapter_is_merged_into_a_model_with_the_same_logits(model: Path, tmp_path: Path) -> None:
    adapter = write_result(model, tmp_path / "run", "final_adapter")
    assert export(tmp_path / "run", tmp_path / "new" / "merged") == 0
    check_model_folder(tmp_path / "new" / "merged")
    merged = logits(load(tmp_path / "new" / "merged"))
    torch.testing.assert_close(merged, logits(PeftModel.from_pretrained(load(model), adapter)), atol=1e-4, rtol=1e-4)
    assert (merged - logits(load(model))).abs().max() > 0.1
    assert export(adapter, tmp_path / "again") == 0
    assert torch.equal(logits(load(tmp_path / "again")), merged)


def test_a_trained_model_is_copied_without_what_else_lies_there(model: Path, tmp_path: Path) -> None:
    write_result(model, tmp_path / "run", "final_model")
    assert export(tmp_path / "run", tmp_path / "copy") == 0
    assert {file.name for file in (tmp_path / "copy").iterdir()} == {file.name for file in model.iterdir()}


def test_nothing_that_is_there_is_written_over(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "mine").write_text("kept")
    assert export(model, tmp_path) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_run_that_is_not_finished_says_how_to_finish_it(tmp_path: Path, capsys) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save_run(load_run(None), tmp_path / "run" / "config.json")
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert f"run --resume {tmp_path / 'run'}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["final_adapter", "final_model"])
def test_an_engine_is_given_what_a_run_has_trained(name: str, tmp_path: Path, monkeypatch) -> None:
    result = tmp_path / "run" / "checkpoints" / name
    result.mkdir(parents=True)
    save_run(load_run(None), tmp_path / "run" / "config.json")
    served = []
    monkeypatch.setattr("treadle.engines.serve", served.append)
    with pytest.raises(SystemExit):
        cli.main(["engine", "--model", str(tmp_path / "run")])
    assert served[0].model == str(result)
