"""Lint of flags: what was invented, what is gone, what a parser makes of a value, what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from engine.memory.deployment import Gpu
from runbooks.config_lint import LaunchLineError, LintFinding, lint_flags, read_line, read_yaml
from runbooks.flags import known_versions

SAMPLED = ("0.6.6", "0.8.5", "0.9.2", "0.11.0", "0.16.0", "0.20.0", "0.27.1", "0.28.0", "0.33.0")


def codes(found: list[LintFinding], least: str = "warn") -> list[str]:
    grave = ("error", "warn", "info")[: ("error", "warn", "info").index(least) + 1]
    return sorted(finding.code for finding in found if finding.severity in grave)


def one(found: list[LintFinding], code: str) -> LintFinding:
    return next(finding for finding in found if finding.code == code)


@pytest.mark.parametrize("version", SAMPLED)
@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--prefix-cache-ttl 300", "--prefix-cache-ttl"),
        ("--automatic-prefix-layout", "--automatic-prefix-layout"),
        ("VLLM_SCHEDULER_POLICY=priority vllm serve m", "VLLM_SCHEDULER_POLICY"),
        ("VLLM_SCHEDULER_MAX_TOKENS=8192 vllm serve m", "VLLM_SCHEDULER_MAX_TOKENS"),
    ],
)
def test_what_articles_invented_never_existed(version: str, flags: str, flag: str) -> None:
    found = lint_flags("vllm", version, flags)
    assert [(f.code, f.severity, f.flag) for f in found] == [("never-existed", "error", flag)]
    assert found[0].instead


@pytest.mark.parametrize("version", known_versions("vllm"))
def test_a_switch_takes_no_false_in_any_version(version: str) -> None:
    found = lint_flags("vllm", version, "vllm serve m --enable-prefix-caching false")
    assert codes(found) == ["takes-no-value"]
    assert found[0].instead == "--no-enable-prefix-caching"


@pytest.mark.parametrize(
    ("version", "line", "says"),
    [
        (
            "0.9.2",
            "python -m vllm.entrypoints.openai.api_server --model m --enable-prefix-caching false",
            "usage error",
        ),
        ("0.10.0", "python -m vllm.entrypoints.openai.api_server --model m --enable-prefix-caching false", "stays ON"),
        ("0.11.0", "vllm serve --model m --enable-prefix-caching false", "model's name"),
        ("0.11.1", "vllm serve --model m --enable-prefix-caching false", "usage error"),
        ("0.32.0", "vllm serve m --enable-prefix-caching=false", "usage error"),
    ],
)
def test_what_becomes_of_a_stray_false(version: str, line: str, says: str) -> None:
    assert says in one(lint_flags("vllm", version, line), "takes-no-value").message


@pytest.mark.parametrize(("version", "dropped"), [("0.6.6", True), ("0.27.1", True), ("0.28.0", False)])
def test_false_in_a_configuration_file(version: str, dropped: bool) -> None:
    line = read_yaml("vllm", version, "enable-prefix-caching: false\nmax-num-seqs: 32\n")
    found = lint_flags("vllm", version, line)
    assert codes(found) == (["yaml-false-dropped"] if dropped else [])


def test_false_for_a_flag_that_takes_it_is_kept() -> None:
    line = read_yaml(
        "vllm", "0.8.4", "enable-chunked-prefill: false\nmax-model-len: 2048\nmax-num-batched-tokens: 2048\n"
    )
    assert codes(lint_flags("vllm", "0.8.4", line)) == []


@pytest.mark.parametrize(
    ("version", "flags", "code"),
    [
        ("0.33.0", "--swap-space 4", "removed"),
        ("0.33.0", "--preemption-mode swap", "removed"),
        ("0.33.0", "--use-v2-block-manager", "removed"),
        ("0.33.0", "--num-lookahead-slots 2", "removed"),
        ("0.33.0", "--calculate-kv-scales", "removed"),
        ("0.18.1", "--kv-cache-dtype-skip-layers 0 1", "not-yet"),
        ("0.10.0", "--kv-cache-memory-bytes 1G", "not-yet"),
        ("0.33.0", "--enable-prefix-cache", "never-existed"),
        ("0.33.0", "--kv-cache-dtype int4", "value-refused"),
        ("0.33.0", "--prefix-caching-hash-algo builtin", "value-refused"),
        ("0.11.0", "--block-size 256", "value-refused"),
        ("0.33.0", "--max-num-seqs many", "value-refused"),
        ("0.33.0", "--max-num-seqs", "value-refused"),
        ("0.33.0", "--gpu-memory-utilization 90", "out-of-range"),
        ("0.33.0", "--max-num-seqs 32 --max-num-seqs 64", "given-twice"),
        ("0.33.0", "--enable-prefix-caching --no-enable-prefix-caching", "given-twice"),
        ("0.33.0", "--max-num-batched-tokens 128 --max-num-seqs 256", "budget-below-seqs"),
        ("0.33.0", "--gpu-memory-utilization 0.8 --kv-cache-memory-bytes 1G", "utilization-overridden"),
        ("0.33.0", "--no-enable-chunked-prefill --max-model-len 32768 --max-num-batched-tokens 8192",
         "unchunked-long-prompts"),
        ("0.15.1", """--kv-transfer-config '{"num_pipelines":2,"max_num_blocks_kv":10000}'""", "unknown-field"),
        ("0.33.0", "--disable-log-stats", "metrics-off"),
        ("0.33.0", "--prefix-caching-hash-algo xxhash", "weak-hash"),
    ],
)  # fmt: skip
def test_one_defect_is_one_finding(version: str, flags: str, code: str) -> None:
    assert codes(lint_flags("vllm", version, flags)) == [code]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "vllm serve m -tp 4 --max-model-len 4k --gpu-memory-utilization 0.95 --enable-prefix-caching",
        "vllm serve m --max-model-len auto --kv-cache-memory-bytes 1G --kv-cache-dtype-skip-layers 0 sliding_window",
        """vllm serve m --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'""",
        "vllm serve m --kv_cache_dtype fp8 --compilation-config.level 3 --no-enable-prefix-caching",
        "vllm serve m --disable-prefix-caching --watermark 0.02 --max-num-seqs 256 --max-num-batched-tokens 8192",
    ],
)
def test_a_sound_line_has_no_finding(flags: str) -> None:
    assert codes(lint_flags("vllm", "0.33.0", flags)) == []


def test_a_switch_off_is_read_in_all_its_spellings() -> None:
    for flags in ("--no-enable-prefix-caching", "--disable-prefix-caching", {"enable_prefix_caching": False},
                  {"--no-enable-prefix-caching": True}, ["--no-enable-prefix-caching"]):  # fmt: skip
        (given,) = read_line("vllm", "0.33.0", flags).given
        assert (given.flag, given.value) == ("--enable-prefix-caching", False)


def test_a_removed_flag_names_what_took_its_place() -> None:
    assert "--kv-offloading-size" in one(lint_flags("vllm", "0.33.0", "--swap-space 4"), "removed").instead
    near = one(lint_flags("vllm", "0.33.0", "--enable-prefix-cache"), "never-existed")
    assert "--enable-prefix-caching" in near.instead


def test_a_false_choice_names_the_hardware_that_takes_it() -> None:
    gpu = Gpu("A100-80GB", 80 * 2**30, (8, 0))
    found = one(lint_flags("vllm", "0.33.0", "--kv-cache-dtype fp8", gpu=gpu), "kv-dtype-unsupported")
    assert found.instead == "--kv-cache-dtype fp8_e5m2"
    fp8 = lint_flags("vllm", "0.33.0", "--kv-cache-dtype fp8", gpu=gpu, checkpoint_quantization="fp8")
    assert one(fp8, "kv-dtype-unsupported").instead == "--kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("engine", "version", "flags", "expected"),
    [
        ("sglang", "0.5.23", "--enable-metrics --tp 2 --mem-fraction-static 0.8", []),
        ("sglang", "0.5.23", "--tp 2", ["metrics-off"]),
        ("sglang", "0.5.23", "--enable-metrics --max-num-seqs 64", ["never-existed"]),
        ("kvoncall", "0.1.0", "--max-num-seqs 8 --prefix-cache-ttl 60", []),
        ("kvoncall", "0.1.0", "--swap-space 4", ["never-existed"]),
        ("kvoncall", "0.1.0", "--max-num-seqs 512 --max-num-batched-tokens 128", ["budget-below-seqs"]),
        ("tensorrt-llm", "1.0.0", "--kv-cache-free-gpu-memory-fraction 0.5", ["never-existed"]),
    ],
)
def test_other_engines(engine: str, version: str, flags: str, expected: list[str]) -> None:
    assert codes(lint_flags(engine, version, flags)) == expected


def test_an_unknown_version_is_said() -> None:
    for version in (None, "0.34.0", "0.6.4", "nightly"):
        assert "version-not-read" in codes(lint_flags("vllm", version, "--max-num-seqs 8"), "info")


def test_flags_that_are_their_defaults_are_only_told() -> None:
    found = lint_flags("vllm", "0.33.0", "--gpu-memory-utilization 0.92 --kv-cache-dtype auto")
    assert [(finding.code, finding.severity) for finding in found] == [("is-default", "info")] * 2
    assert codes(lint_flags("vllm", "0.19.1", "--gpu-memory-utilization 0.92"), "info") == []


@pytest.mark.parametrize("flags", ["--model 'open", '--kv-transfer-config "{'])
def test_a_line_that_cannot_be_read_is_one_sentence(flags: str) -> None:
    with pytest.raises(LaunchLineError) as caught:
        lint_flags("vllm", "0.33.0", flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "x"])
def test_a_file_that_is_no_mapping_is_one_sentence(text: str) -> None:
    with pytest.raises(LaunchLineError):
        read_yaml("vllm", "0.33.0", text)


def test_findings_are_data() -> None:
    found = lint_flags("vllm", "0.33.0", "--swap-space 4 --gpu-memory-utilization 0.92")
    as_json: dict[str, Any] = found[0].to_dict()
    assert set(as_json) == {"code", "severity", "flag", "message", "instead", "source", "runbook"}
    assert found[0].severity == "error"  # the gravest comes first


def test_an_engine_without_a_catalog_is_said_once() -> None:
    found = lint_flags("lmcache", "0.5.0", "--max-local-cpu-size 5 --other 3")
    assert [(finding.code, finding.severity) for finding in found] == [("no-catalog", "info")]


def test_short_spellings_with_and_without_an_equals_sign() -> None:
    for flags in ("-tp 4", "-tp=4", "--tensor-parallel-size=4", "--tensor_parallel_size 4"):
        (given,) = read_line("vllm", "0.33.0", f"vllm serve m {flags}").given
        assert (given.flag, given.value) == ("--tensor-parallel-size", "4")


def test_servers_beside_this_one_count() -> None:
    found = lint_flags("vllm", "0.33.0", "--gpu-memory-utilization 0.5", beside=(0.3, 0.3))
    assert codes(found) == ["sum-above-one"]
    assert codes(lint_flags("vllm", "0.33.0", "--gpu-memory-utilization 0.2", beside=(0.75,))) == []
    early = lint_flags("vllm", "0.8.5", "--gpu-memory-utilization 0.2", beside=(0.75,))
    assert "75%" in one(early, "global-cap").message
