"""The recall probe: plain keys tell no format from another, structured keys do, and the exact answers stay the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.bench import recall
from kernels.bench.interval import wilson
from kernels.bench.recall import INJECTIONS, main, make_problem, markdown, run_recall, through_cache
from kernels.formats import KV_FORMATS

CPU = torch.device("cpu")
PAIRS = (32, 128)
QUESTIONS = 256


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_recall(PAIRS, QUESTIONS, CPU)


def recall_of(report: dict[str, Any], injection: str, name: str) -> list[float]:
    """By number of pairs."""
    rows = report["results"]
    return [r["recall"]["accuracy"] for r in rows if (r["injection"], r["kv_format"]) == (injection, name)]


@pytest.mark.parametrize("injection", INJECTIONS)
def test_exact_attention_and_the_float_caches_find_everything(report: dict[str, Any], injection: str) -> None:
    for name in ("exact", "float32", "float16", "bfloat16"):
        assert recall_of(report, injection, name) == [1.0, 1.0], name


def test_plain_keys_do_not_tell_the_formats_apart(report: dict[str, Any]) -> None:
    for name in KV_FORMATS:
        assert min(recall_of(report, "plain", name)) >= 0.99, name


def test_outlier_channels_break_the_naive_scheme_alone_and_more_so_among_more_keys(report: dict[str, Any]) -> None:
    few, many = recall_of(report, "outliers", "int4_symmetric")
    assert 0.5 < many < few < 0.95
    for name in KV_FORMATS.keys() - {"int4_symmetric"}:
        assert min(recall_of(report, "outliers", name)) >= 0.98, name


def test_a_key_bias_leaves_the_naive_scheme_guessing(report: dict[str, Any]) -> None:
    for pairs, found in zip(PAIRS, recall_of(report, "bias", "int4_symmetric"), strict=True):
        assert found < 3 / pairs
    for name in KV_FORMATS.keys() - {"int4_symmetric"}:
        assert min(recall_of(report, "bias", name)) >= 0.98, name


def test_injections_leave_exact_attention_as_it_was() -> None:
    """Scaling by a power of two: to the last bit. A shift: but for what float32 keys lose when 60 is added."""
    plain, outliers, bias = (make_problem(128, 3, injection).exact() for injection in INJECTIONS)
    assert torch.equal(outliers, plain)
    torch.testing.assert_close(bias, plain, atol=1e-4, rtol=0)
    assert not torch.equal(make_problem(128, 3, "outliers").keys, make_problem(128, 3, "plain").keys)


def test_an_injection_that_changes_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recall.make_problem

    def only_keys(num_pairs: int, seed: int, injection: str) -> recall.Problem:
        problem = original(num_pairs, seed, injection)
        if injection == "outliers":
            problem.queries[:, recall.OUTLIER_CHANNELS] *= recall.OUTLIER_FACTOR**2
        return problem

    monkeypatch.setattr(recall, "make_problem", only_keys)
    with pytest.raises(ArithmeticError, match="outliers keys changed"):
        run_recall((2048,), 128, CPU)


def test_a_full_precision_cache_gives_exact_attention() -> None:
    """So the questions really read the keys and values that were written, all of them."""
    problem = make_problem(64, 5, "plain")
    found = through_cache(problem, KV_FORMATS["float32"], CPU)
    torch.testing.assert_close(found.double(), problem.exact(), atol=1e-5, rtol=0)


def test_blocks_must_be_full() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        through_cache(make_problem(40, 0, "plain"), KV_FORMATS["int4_kivi"], CPU)
    with pytest.raises(ValueError, match="injection must be one of"):
        make_problem(32, 0, "noise")


def test_command_prints_tables_or_json(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recall, "run_recall", lambda device: report)
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["recall"]["count"] == QUESTIONS
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out == markdown(report) + "\n"
    assert out.count("| int4_symmetric | 136 | ") == len(INJECTIONS)


def test_a_changed_answer_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def changed(device: torch.device | None) -> dict[str, Any]:
        raise ArithmeticError("bias keys changed 3 of 32 exact answers")

    monkeypatch.setattr(recall, "run_recall", changed)
    assert main([]) == 1
    assert capsys.readouterr().err == "bench recall: bias keys changed 3 of 32 exact answers\n"


def test_a_device_that_is_not_there_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_wilson_interval_solves_its_equation() -> None:
    """The ends p are where |share - p| = z * sqrt(p (1 - p) / n)."""
    found = wilson(95, 100)
    for end in (found.low, found.high):
        assert abs(found.accuracy - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 100))
