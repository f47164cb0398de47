"""`treadle export --gguf`: the same logits and tokens as the model, as transformers reads the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from test_export import write_result
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from treadle import cli
from treadle.gguf_file import _PRE_TOKENIZERS, read_model

TEXTS = ("the quick brown fox, isn't it 12345?\n\n  What", "<turn>What is 28 + 63?<end>")
IDS = torch.arange(5, 40)[None]
SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def write_tokenizer(folder: Path, kind: str) -> None:
    """A byte-level BPE tokenizer of 320 tokens that cuts texts as this kind of model does."""
    own_regex = kind in ("gpt-2", "smollm")
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex)]
    if kind == "smollm":
        cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif not own_regex:
        pattern = next(parts[0] for parts, name in _PRE_TOKENIZERS.items() if name == kind)
        cuts.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<unk>", "<turn>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<turn>", eos_token="<end>", pad_token="<end>", unk_token="<unk>",
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(folder)  # fmt: skip


def write_model(folder: Path, config: PretrainedConfig, tokenizer: str, dtype: torch.dtype) -> Path:
    write_tokenizer(folder, tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.copy_(0.1 * torch.randn_like(parameter) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path, **how: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()(IDS).logits


def export(source: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(source), *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("config", "tokenizer", "dtype"),
    [
        (LlamaConfig(**SIZES, tie_word_embeddings=True), "gpt-2", torch.float32),
        (LlamaConfig(**SIZES, tie_word_embeddings=False), "smollm", torch.bfloat16),
        (Qwen2Config(**SIZES), "qwen2", torch.float16),
        (Qwen3Config(**SIZES, head_dim=128), "qwen2", torch.bfloat16),
    ],
    ids=["llama", "llama-untied-bf16", "qwen2-f16", "qwen3-bf16"],
)
def test_a_gguf_file_has_the_logits_and_tokens_of_the_model(
    config: PretrainedConfig, tokenizer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", config, tokenizer, dtype)
    assert export(model, "--gguf", str(tmp_path / "new" / "m.gguf")) == 0
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["m.gguf"]
    assert torch.equal(logits(tmp_path / "new", gguf_file="m.gguf"), logits(model))
    own, read = (
        AutoTokenizer.from_pretrained(folder, **how)
        for folder, how in ((model, {}), (tmp_path / "new", {"gguf_file": "m.gguf"}))
    )
    assert read.chat_template == own.chat_template
    assert (read.eos_token, read.bos_token) == ("<end>", "<turn>")
    for text in TEXTS:
        assert read(text).input_ids == own(text).input_ids
    fields = GGUFReader(tmp_path / "new" / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == tokenizer
    assert fields["general.architecture"].contents() == config.model_type


def test_llama_3_rotary_positions_are_written_as_factors(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    model = write_model(tmp_path / "model", config, "llama-bpe", torch.float32)
    assert export(model, "--gguf", str(tmp_path / "m.gguf")) == 0
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(plain / torch.tensor(tensors["rope_freqs.weight"]), wanted)


def test_an_adapter_is_merged_into_the_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", LlamaConfig(**SIZES), "gpt-2", torch.float32)
    monkeypatch.chdir(write_result(model, tmp_path / "run", "final_adapter").parent)
    assert export(Path(".."), "--gguf", str(tmp_path / "out" / "m.gguf")) == 0
    assert GGUFReader(tmp_path / "out" / "m.gguf").fields["general.name"].contents() == "run"
    assert export(tmp_path / "run", "--merged", str(tmp_path / "merged")) == 0
    merged = logits(tmp_path / "merged")
    assert torch.equal(logits(tmp_path / "out", gguf_file="m.gguf"), merged)
    assert (merged - logits(model)).abs().max() > 0.1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", {"model_type": "gemma3"}, "a model of type 'gemma3'; GGUF is written for llama, qwen2, qwen3"),
        ("config.json", {"quantization_config": {"bits": 4}}, "are quantized"),
        ("config.json", {"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of type 'yarn'"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Metaspace"}}, "is a BPE tokenizer with the pre-tokenizer"),
        ("config.json", {"vocab_size": 290}, "has token 300, and the model has 290"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    file: str, change: dict[str, object], says: str, tmp_path: Path, capsys
) -> None:
    model = write_model(tmp_path / "model", LlamaConfig(**SIZES), "gpt-2", torch.float32)
    settings = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(settings | change))
    assert export(model, "--gguf", str(tmp_path / "m.gguf")) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    assert export(tmp_path, "--gguf", str(tmp_path / "m.gguf")) == 2
    assert "m.gguf exists" in capsys.readouterr().err
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_a_model_of_one_word_tokens_is_refused_before_it_is_read(tmp_path: Path) -> None:
    from tests.tiny_model import write_tiny_model

    with pytest.raises(Exception, match="is a WordLevel tokenizer"):
        read_model(write_tiny_model(tmp_path / "tiny", hidden_size=32, num_layers=1))
