"""Templates name only flags that exist, with values that are taken, change something and fit."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.memory.deployment import Deployment
from engine.memory.model_presets import gpu, model_preset
from engine.memory.plan import plan
from runbooks.catalog_data import load
from runbooks.config_lint import lint_flags
from runbooks.flags import EMBEDDED, default_of
from runbooks.hardware import why_not_on
from runbooks.knowledge.article_templates import all_article_errors, article_config, article_errors
from runbooks.knowledge.engine_flags import launch_command
from runbooks.knowledge.template_load import requests_at_once
from runbooks.knowledge.template_parts import Template, TemplateAdvice
from runbooks.knowledge.template_values import Draft
from runbooks.knowledge.templates import advise, flags_for, template, templates

VERSIONS: tuple[tuple[str, str | None], ...] = (
    *(("vllm", version) for version in ("0.6.6", "0.8.5", "0.10.2", "0.19.1", "0.24.0", "0.33.0")),
    *(("sglang", version) for version in ("0.4.6.post5", "0.5.23")),
    *(("tensorrt-llm", version) for version in ("0.18.2", "1.4.0rc4")),
    ("tgi", "3.3.7"),
    (EMBEDDED, None),
)
NEWEST = (("vllm", "0.33.0"), ("sglang", "0.5.23"))
SERVERS: dict[str, dict[str, Any]] = {
    "8B on an A100": {"model": "Llama-3.1-8B", "gpu": "A100-80GB"},
    "DeepSeek-V3 on eight H200": {"model": "DeepSeek-V3", "gpu": "H200-141GB", "tp": 8},
}
_CAPACITY = {
    "max_num_seqs": ("--max-num-seqs", "--max-running-requests", "--max_batch_size", "--max-batch-size"),
    "max_num_batched_tokens": (
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "--max_num_tokens",
        "--max-batch-prefill-tokens",
    ),
}


def deployment(
    server: str = "8B on an A100", engine: str = "vllm", version: str | None = "0.33.0", **more: Any
) -> Deployment:
    named = {**SERVERS[server], **more}
    tp = named.get("tp", 1)
    shape, card = model_preset(named.pop("model")), gpu(named.pop("gpu"))
    return Deployment(shape, engine=engine, version=version, gpu=card, num_gpus=tp, **named)


def written(advice: TemplateAdvice, flags: tuple[str, ...]) -> Any:
    return next((choice.value for choice in advice.flags if choice.flag in flags), None)


@pytest.mark.parametrize(
    ("engine", "version", "server"),
    [
        *((engine, version, "8B on an A100") for engine, version in VERSIONS),
        *((engine, version, "DeepSeek-V3 on eight H200") for engine, version in NEWEST),
    ],
)
def test_only_flags_of_that_version_with_values_it_takes(engine: str, version: str | None, server: str) -> None:
    data = load(engine)
    for one in templates():
        for choice in flags_for(one, deployment(server, engine, version)):
            if engine == EMBEDDED:
                continue  # the parser below says it
            assert data is not None
            form = data.form_at(choice.flag, version)
            if form is None:  # another spelling of a name in the catalog
                form = next(f for name in data.names_of_aliases[choice.flag] if (f := data.form_at(name, version)))
            assert form.choices is None or str(choice.value) in {str(value) for value in form.choices}, choice
            assert default_of(engine, version, choice.flag) != choice.value, f"{choice} is the default"
            assert choice.reason.en, choice
            assert choice.reason.zh, choice
            assert choice.source, choice


@pytest.mark.parametrize("one", templates(), ids=lambda one: one.id)
def test_the_embedded_engine_starts_with_them(one: Template) -> None:
    advice = advise(one, deployment(engine=EMBEDDED, version=None))
    words = shlex.split(advice.command().replace("\\\n", " "))
    EngineConfig.from_args(words[2:])  # raises on a flag or value it does not take


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.21.0"), ("tgi", "3.3.7")])
@pytest.mark.parametrize("one", templates(), ids=lambda one: one.id)
def test_the_plan_of_the_flags_fits_and_holds_the_sequences(one: Template, engine: str, version: str) -> None:
    asked = deployment(engine=engine, version=version)
    advice = advise(one, asked)
    assert advice.plan.fits
    given = {name: value for name, flags in _CAPACITY.items() if (value := written(advice, flags)) is not None}
    formats = {"kv_cache_dtype": value} if (value := written(advice, ("--kv-cache-dtype",))) else {}
    length = written(advice, ("--max-model-len", "--context-length", "--max-total-tokens"))
    again = plan(replace(asked, max_model_len=length or one.max_model_len, **given, **formats))
    assert again.fits
    if "max_num_seqs" in given:
        held = requests_at_once(one, again)
        assert given["max_num_seqs"] <= held
        if one.itl_ms is None and given["max_num_seqs"] < 1024:
            more = given["max_num_seqs"] + 1
            beyond = plan(
                replace(asked, max_model_len=length or one.max_model_len, **{**given, "max_num_seqs": more}, **formats)
            )
            assert requests_at_once(one, beyond) < more


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.8.5"), ("vllm", "0.19.1"), ("vllm", "0.33.0"), ("sglang", "0.5.23")]
)
def test_the_lint_of_configurations_finds_nothing_wrong(engine: str, version: str) -> None:
    for card in ("A100-80GB", "L4-24GB"):
        asked = deployment(engine=engine, version=version, gpu=card)
        for one in templates():
            advice = advise(one, asked)
            known = {"block_size": advice.plan.block_size, "max_model_len": advice.plan.max_model_len}
            found = lint_flags(engine, version, advice.values(), gpu=asked.gpu, **known)
            assert [finding for finding in found if finding.severity != "info"] == []


def test_sequences_are_pool_tokens_over_tokens_of_a_request() -> None:
    advice = advise(template("multi-tenant"), deployment())
    per_request = -(-template("multi-tenant").tokens_per_request // 16) * 16
    assert written(advice, ("--max-num-seqs",)) == advice.plan.kv_tokens // per_request
    assert [choice.setting for choice in advice.flags][:2] == ["max_model_len", "max_num_seqs"]


def test_eight_bit_kv_only_where_the_hardware_can() -> None:
    for card, tp in (("V100-32GB", 1), ("A100-80GB", 1), ("H100-80GB", 1), ("MI300X-192GB", 1)):
        asked = deployment(gpu=card, tp=tp, model="Llama-3.1-8B")
        value = written(advise(template("long-context"), asked), ("--kv-cache-dtype",))
        assert asked.gpu is not None
        sm = asked.gpu.compute_capability
        if sm is None:
            assert value is None
        else:
            assert value is None or why_not_on(sm, value, version="0.33.0", mla=False) is None
    hopper = advise(template("long-context"), deployment(gpu="H100-80GB"))
    assert written(hopper, ("--kv-cache-dtype",)) == "fp8"
    ampere_old = advise(template("long-context"), deployment(version="0.12.0"))
    assert written(ampere_old, ("--kv-cache-dtype",)) == "fp8_e5m2"


@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", "0.6.6"), ("vllm", "0.7.3"), ("tensorrt-llm", "0.18.2"), ("tensorrt-llm", "1.4.0rc4"), ("tgi", "3.3.7")],
)
def test_a_prompt_longer_than_a_step_is_split_or_the_step_is_as_long(engine: str, version: str) -> None:
    for one in templates():
        advice = advise(one, deployment(engine=engine, version=version, gpu="L4-24GB"))
        if not advice.plan.fits:
            continue
        split = written(advice, ("--enable-chunked-prefill", "--enable_chunked_prefill"))
        longest = written(advice, ("--max-input-tokens",)) or advice.plan.max_model_len
        assert split or advice.plan.max_num_batched_tokens >= longest, one.id
    assert (
        written(advise(template("latency-chat"), deployment(version="0.7.3")), ("--long-prefill-token-threshold",))
        is None
    )


def test_no_e5m2_with_an_fp8_checkpoint() -> None:
    asked = deployment(version="0.12.0")
    asked = replace(asked, shape=replace(asked.shape, quantization="fp8"))
    advice = advise(template("long-context"), asked)
    assert written(advice, ("--kv-cache-dtype",)) is None
    assert any("fp8 checkpoint" in one.reason.en for one in advice.left_out)


def test_a_server_that_is_too_small_says_so_and_shortens_requests() -> None:
    small = advise(template("long-context"), deployment(gpu="L4-24GB"))
    assert small.plan.fits
    length = written(small, ("--max-model-len",))
    assert length is None or length <= small.plan.largest_model_len
    never = advise(template("long-context"), deployment(gpu="T4-16GB"))
    assert not never.plan.fits
    assert any("does not fit" in step.en for step in never.steps)


def test_other_processes_on_the_card_lower_utilization() -> None:
    others = 20 << 30
    advice = advise(template("throughput"), deployment(other_processes_bytes=others))
    value = written(advice, ("--gpu-memory-utilization",))
    assert advice.deployment.gpu is not None
    assert value is not None
    assert value * advice.deployment.gpu.memory_bytes <= advice.deployment.gpu.memory_bytes - others
    alone = advise(template("throughput"), deployment())
    assert written(alone, ("--gpu-memory-utilization",)) is None


def test_latency_runs_fewer_sequences_than_the_pool_holds() -> None:
    advice = advise(template("latency-chat"), deployment())
    seqs = written(advice, ("--max-num-seqs",))
    assert seqs < advice.concurrency
    slower = deployment()
    assert slower.gpu is not None
    assert slower.gpu.memory_bandwidth is not None
    card = replace(slower.gpu, memory_bandwidth=0.9 * slower.gpu.memory_bandwidth)
    assert written(advise(template("latency-chat"), replace(slower, gpu=card)), ("--max-num-seqs",)) < seqs


def test_offload_stays_within_half_of_the_host() -> None:
    host = 64 << 30
    one = template("cpu-offload-tier")
    vllm = advise(one, deployment("DeepSeek-V3 on eight H200", host_memory_bytes=host))
    assert written(vllm, ("--kv-offloading-size",)) <= 32
    sglang = advise(one, deployment("DeepSeek-V3 on eight H200", "sglang", "0.5.23", host_memory_bytes=host))
    assert written(sglang, ("--hicache-size",)) * 8 <= 32  # its flag is of each rank
    assert written(sglang, ("--enable-hierarchical-cache",)) is True


def test_isolation_depends_on_the_version() -> None:
    one = template("multi-tenant")
    old, new = advise(one, deployment(version="0.9.2")), advise(one, deployment())
    assert written(old, ("--prefix-caching-hash-algo",)) == "sha256"
    assert written(new, ("--prefix-caching-hash-algo",)) is None
    assert any("has no `cache_salt`" in step.en for step in advise(one, deployment(version="0.8.5")).steps)
    ours = advise(one, deployment(engine=EMBEDDED, version=None))
    assert written(ours, ("--prefix-cache-scope",)) == "tenant"


def test_launch_command_writes_every_kind_of_flag() -> None:
    flags = {"--enable-prefix-caching": False, "--max-num-seqs": 8, "--block-size": None}
    assert launch_command("vllm", "0.33.0", "org/model", flags) == (
        "vllm serve org/model \\\n  --no-enable-prefix-caching \\\n  --max-num-seqs 8"
    )
    text = launch_command("tensorrt-llm", "1.2.0", "m", {"--tp_size": 2, "kv_cache_config.dtype": "fp8"})
    assert "kv_cache_config:\n  dtype: fp8\n" in text
    assert text.endswith("--extra_llm_api_options kvoncall.yaml")
    with pytest.raises(LookupError):
        launch_command("triton", None, "m", {})


def test_the_articles_templates_are_judged_on_their_own_rig() -> None:
    found = all_article_errors()
    assert set(found) == {"high-concurrency-short", "long-context", "throughput"}
    effects = {(key, one.flag): one.effect for key, findings in found.items() for one in findings}
    assert effects["long-context", "--gpu-memory-utilization"] == "wrong way"
    assert effects["high-concurrency-short", "--enable-prefix-caching"] == "no effect"
    assert effects["throughput", "--max-num-batched-tokens"] == "missing"
    assert effects["long-context", "--quantization"] == "misjudged"
    for key in found:
        named = {one.flag for one in found[key]}
        assert named <= {
            f"--{name.replace('_', '-')}" for name in (*article_config(template(key)), "max_num_batched_tokens")
        }
    assert article_errors(template("small-gpu")) == []


def test_the_most_sequences_are_found_where_each_costs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft(template("throughput"), deployment())
    for most in (50, 333, 1024):
        monkeypatch.setattr(draft, "_held_with", lambda seqs, most=most: 2 * most - seqs)
        assert draft._that_hold_themselves(10, 1024) == min(most, 1024)
