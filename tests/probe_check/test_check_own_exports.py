"""What kvoncall exports itself passes its own check, for every engine."""

from __future__ import annotations

import pytest

from probe.cli import main


@pytest.mark.parametrize(
    "dialect", ["vllm@0.33.0", "vllm@0.9.1", "sglang@0.5.23", "tensorrt-llm", "tgi@3.3.7", "triton@1.0.0"]
)
def test_our_own_rules_and_dashboard_are_clean(dialect, tmp_path, capsys):
    for form in ("prometheus", "prometheusrule", "grafana"):
        assert main(["rules", "export", "--to", form, "--dialect", dialect, "--out", str(tmp_path / form)]) == 0
    assert main(["check", str(tmp_path), "--dialect", dialect]) == 0, capsys.readouterr().out
