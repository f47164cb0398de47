"""The doctor's judgement of facts that a test can choose."""

from __future__ import annotations

from treadle.launch.doctor import check_cpu, check_ports, check_python


def test_an_old_python_is_a_problem() -> None:
    assert check_python((3, 10, 4)).verdict == "problem"
    assert check_python((3, 12, 0)).verdict == "ok"


def test_matrix_units_are_seen() -> None:
    assert check_cpu(2, frozenset({"avx512f", "amx_bf16"})).verdict == "ok"
    assert check_cpu(2, frozenset({"avx2"})).verdict == "warning"


def test_a_busy_default_port_is_only_a_warning() -> None:
    checks = check_ports({"hub": ("127.0.0.1", 8000), "engine": ("127.0.0.1", 9001)}, lambda _, port: port == 8000)
    assert [check.verdict for check in checks] == ["warning", "ok"]
