"""Which number format a machine's processor is fast in."""

from __future__ import annotations

import pytest

from treadle import support

X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx512f {}\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(support, "_CPUINFO", file)
    support.processor_flags.cache_clear()
    yield file
    support.processor_flags.cache_clear()


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (X86.format("amx_bf16"), "bfloat16"),
        (X86.format("avx512_bf16"), "bfloat16"),
        (X86.format("avx512_vnni"), "float32"),
        (ARM.format("bf16 i8mm"), "bfloat16"),
        (ARM.format("asimddp"), "float32"),
    ],
)
def test_bf16_is_for_processors_that_multiply_it(cpuinfo, text, dtype):
    cpuinfo.write_text(text)
    assert support.fast_dtype("cpu") == dtype
    assert support.fast_dtype("cuda:0") == "bfloat16"


def test_an_unknown_processor_computes_in_float32(cpuinfo):
    assert support.fast_dtype("cpu") == "float32"
    assert support.fast_dtype("mps") == "bfloat16"
