"""Claims that name flags, environment variables, commands, values and metrics: looked up in the catalogs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.memory.model_presets import gpu
from runbooks.flags import default_of, flag_facts, known_versions, why_absent, why_value_absent
from runbooks.hardware import why_not_on
from runbooks.knowledge.articles_models import A100, H100, LLAMA_8B, LLAMA_70B, VERSION, per_token, planned
from runbooks.knowledge.outcome import Outcome, same
from runbooks.knowledge.text import Text

VLLM, SGLANG, TGI = "vllm", "sglang", "tgi"
_SDISTS = Text(
    "runbooks/catalog: read from the released sources of every version",
    "runbooks/catalog：读取自各版本发布的源代码",
)
_TRTLLM_SCRIPTS = ("trtllm-build", "-prune", "-refit", "-bench", "-serve", "-eval", "trtllm-llmapi-launch")
_SCRIPTS_SOURCE = Text(
    "console scripts of TensorRT-LLM's setup.py, 1.x", "TensorRT-LLM 1.x setup.py 中的 console scripts"
)
_TGI_SOURCE = Text(
    "TGI repository, commit 34988476 of 2025-12-11; metrics of v3.3.7",
    "TGI 仓库 2025-12-11 提交 34988476；指标取自 v3.3.7",
)
_KV_WORDS = ("kv", "cache", "evict", "preempt")


def having(engine: str, flag: str) -> list[str]:
    """Versions read that have a flag."""
    return [version for version in known_versions(engine) if why_absent(engine, version, flag) is None]


MetricNames = Callable[[str], Mapping[str, Collection[str]]]  # engine -> version, ascending -> names exposed


@dataclass(frozen=True)
class _Shown:
    """What an engine's versions expose."""

    engine: str
    by_version: Mapping[str, Collection[str]]

    def versions(self, metric: str) -> list[str]:
        """Versions read that expose a metric; a histogram is listed without the endings of its series."""
        return [version for version, names in self.by_version.items() if metric in names]

    def line(self, metric: str) -> str:
        """How often the name was found, for the arithmetic."""
        return f"{metric}: in {len(self.versions(metric))} of {len(self.by_version)} versions of {self.engine} read"


def _count(found: Sequence[str], all_of: Sequence[str]) -> Text:
    return Text(f"in {len(found)} of {len(all_of)} versions", f"{len(all_of)} 个版本中 {len(found)} 个")


def _named(engine: str, name: str, found: Sequence[str]) -> str:
    return f"{name}: in {len(found)} of {len(known_versions(engine))} versions of {engine} read"


def _absent_flag(flag: str) -> Outcome:
    vllm, sglang = having(VLLM, flag), having(SGLANG, flag)
    return Outcome(
        (_named(VLLM, flag, vllm), _named(SGLANG, flag, sglang)),
        verdict="wrong" if not vllm else "half",
        figures={
            "found": len(vllm),
            "n": len(known_versions(VLLM)),
            "found_sglang": len(sglang),
            "n_sglang": len(known_versions(SGLANG)),
        },
        shown=_count(vllm, known_versions(VLLM)),
        source=_SDISTS,
    )


def _prefix_caching_false() -> Outcome:
    flag = "--enable-prefix-caching"
    kinds = {facts.kind for version in known_versions(VLLM) if (facts := flag_facts(VLLM, version, flag)) is not None}
    return Outcome(
        (f"{flag}: kind {', '.join(sorted(kinds))} in {len(known_versions(VLLM))} versions",),
        verdict="wrong" if kinds == {"bool"} else "half",
        figures={
            "kind": "/".join(sorted(kinds)),
            "n": len(known_versions(VLLM)),
            "instead": "--no-enable-prefix-caching",
        },
        shown=same("--no-enable-prefix-caching"),
        source=_SDISTS,
    )


def _scheduler_env() -> Outcome:
    names = ("VLLM_SCHEDULER_POLICY", "VLLM_SCHEDULER_MAX_TOKENS")
    found = {name: having(VLLM, name) for name in names}
    policy = flag_facts(VLLM, None, "--scheduling-policy")
    values = ", ".join(map(str, (policy.choices or ()) if policy else ()))
    return Outcome(
        tuple(_named(VLLM, name, versions) for name, versions in found.items()),
        verdict="half" if any(found.values()) else "wrong",
        figures={"policy": "--scheduling-policy", "values": values, "tokens": "--max-num-batched-tokens"},
        shown=same("--scheduling-policy, --max-num-batched-tokens"),
        source=_SDISTS,
    )


def _kv_transfer() -> Outcome:
    flag, offload = "--kv-transfer-config", "--kv-offloading-size"
    has, later = having(VLLM, flag), having(VLLM, offload)
    return Outcome(
        (_named(VLLM, flag, has), _named(VLLM, offload, later)),
        verdict="half" if has else "wrong",
        figures={"since": has[0], "flag": offload, "flag_since": later[0]},
        shown=same(offload),
        source=_SDISTS,
    )


def _trtllm_quantize() -> Outcome:
    return Outcome(
        (f"console scripts: {', '.join(_TRTLLM_SCRIPTS)}",),
        verdict="right" if "trtllm-quantize" in _TRTLLM_SCRIPTS else "wrong",
        figures={"scripts": ", ".join(_TRTLLM_SCRIPTS)},
        shown=Text("no such command", "没有该命令"),
        source=_SCRIPTS_SOURCE,
    )


def _usage_metric(shown: _Shown) -> Outcome:
    name, new, old = "vllm:cache_usage_percent", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
    found, newer, older = (shown.versions(one) for one in (name, new, old))
    return Outcome(
        tuple(shown.line(one) for one in (name, new, old)),
        verdict="right" if found else "wrong",
        figures={
            "found": len(found),
            "n": len(shown.by_version),
            "new": new,
            "new_since": newer[0],
            "old": old,
            "old_until": older[-1],
        },
        shown=same(new),
        source=_SDISTS,
    )


def _eviction_metric(shown: _Shown) -> Outcome:
    names = ("vllm_num_cache_evictions", "vllm:num_cache_evictions", "vllm:num_cache_evictions_total")
    found = [version for name in names for version in shown.versions(name)]
    preemptions, idle = "vllm:num_preemptions_total", "vllm:kv_block_idle_before_evict_seconds"
    return Outcome(
        tuple(shown.line(name) for name in (*names, preemptions, idle)),
        verdict="right" if found else "wrong",
        figures={
            "found": len(found),
            "n": len(shown.by_version),
            "preemptions": preemptions,
            "idle": idle,
            "idle_since": shown.versions(idle)[0],
        },
        shown=same(preemptions),
        source=_SDISTS,
    )


def _throughput_metric(shown: _Shown) -> Outcome:
    name, was = "vllm_avg_generation_throughput", "vllm:avg_generation_throughput_toks_per_s"
    found = shown.versions(name)
    return Outcome(
        (shown.line(name), shown.line(was)),
        verdict="right" if found else "wrong",
        figures={
            "found": len(found),
            "n": len(shown.by_version),
            "was": was,
            "until": shown.versions(was)[-1],
            "counter": "vllm:generation_tokens_total",
        },
        shown=same("rate(vllm:generation_tokens_total[1m])"),
        source=_SDISTS,
    )


def _underscores(shown: _Shown) -> Outcome:
    written = ("vllm_num_requests_running", "vllm_num_requests_waiting", "vllm_gpu_cache_usage_perc")
    proper = [name.replace("vllm_", "vllm:", 1) for name in written]
    newest = list(shown.by_version)[-1]
    found = [name for name in written if shown.versions(name)]
    there = [name for name in proper if newest in shown.versions(name)]
    gone = next(name for name in proper if name not in there)
    return Outcome(
        tuple(shown.line(name) for name in (*written, *proper)),
        verdict="half" if there and not found else "wrong",
        figures={
            "colon": ", ".join(there),
            "version": newest,
            "found": len(found),
            "gone": gone,
            "gone_until": shown.versions(gone)[-1],
        },
        shown=same(", ".join(there)),
        source=_SDISTS,
    )


def _tgi(shown: _Shown) -> Outcome:
    version, names = list(shown.by_version.items())[-1]
    found = [name for name in names if any(word in name for word in _KV_WORDS)]
    return Outcome(
        (f"TGI {version}: {len(names)} metrics, of KV use, eviction or preemption {len(found)}",),
        verdict="wrong",
        figures={"kv_metrics": len(found)},
        shown=Text("maintenance mode since 2025-12-11", "2025-12-11 起进入维护模式"),
        source=_TGI_SOURCE,
    )


def _taking(flag: str, value: str) -> list[str]:
    return [version for version in having(VLLM, flag) if why_value_absent(VLLM, version, flag, value) is None]


def _fp8_since() -> Outcome:
    taking = _taking("--kv-cache-dtype", "fp8")
    return Outcome(
        (f"--kv-cache-dtype fp8: in {len(taking)} versions, the first {taking[0]}",),
        verdict="right" if taking[0].startswith("0.15") else "wrong",
        figures={"since": taking[0], "n": len(taking) - 1},
        shown=same(f"{taking[0]}"),
        source=_SDISTS,
    )


def _speculative() -> Outcome:
    old, new = "--speculative-model", "--speculative-config"
    had, has = having(VLLM, old), having(VLLM, new)
    return Outcome(
        (_named(VLLM, old, had), _named(VLLM, new, has)),
        verdict="right" if had[0].startswith("0.20") else "wrong",
        figures={"old": old, "old_since": had[0], "new": new, "new_since": has[0]},
        shown=same(had[0]),
        source=_SDISTS,
    )


def _e5m2() -> Outcome:
    taking, all_of = _taking("--kv-cache-dtype", "fp8_e5m2"), known_versions(VLLM)
    ratio = per_token(LLAMA_70B, "fp8_e5m2") / per_token(LLAMA_70B)
    right = len(taking) == len(all_of) and ratio == 0.5
    return Outcome(
        (f"--kv-cache-dtype fp8_e5m2: in {len(taking)} of {len(all_of)} versions; bytes x {ratio:g}",),
        verdict="right" if right else "half",
        figures={"n": len(taking), "ratio": ratio},
        shown=same(f"x {ratio:g}"),
        source=_SDISTS,
    )


def _mixed_layers() -> Outcome:
    flag = "--kv-cache-dtype-skip-layers"
    exact = ("0", "1", "2", "77", "78", "79")
    mixed, whole = per_token(LLAMA_70B, "int8_per_token_head", skip_layers=exact), per_token(LLAMA_70B)
    has = having(VLLM, flag)
    return Outcome(
        (_named(VLLM, flag, has), f"Llama-3-70B: {mixed:,} B a token against {whole:,} B = {mixed / whole:.1%}"),
        verdict="half" if has else "wrong",
        figures={"flag": flag, "since": has[0], "bytes": mixed, "share": 100 * mixed / whole},
        shown=same(flag),
        source=_SDISTS,
    )


def _ampere() -> Outcome:
    sm = gpu(A100).compute_capability
    why = why_not_on(sm, "fp8_e4m3")
    shown = ".".join(map(str, sm or ()))
    return Outcome(
        (f"A100: compute capability {shown}; e4m3 needs 8.9", why or ""),
        verdict="wrong" if why else "right",
        figures={
            "sm": shown,
            "why": Text(f"{why}.", "FP8 KV（e5m2）在其上只是存储格式，计算仍为 16 位，且不能与 fp8 检查点同用。"),
        },
        shown=Text("Ada (8.9) and later", "Ada（8.9）及以后"),
        source=Text(
            "vLLM platforms/cuda.py: supports_fp8 asks for compute capability 8.9",
            "vLLM platforms/cuda.py：supports_fp8 要求计算能力 ≥ 8.9",
        ),
    )


def _python_m() -> Outcome:
    return Outcome(
        ("a DeprecationWarning in vllm/entrypoints/openai/api_server.py from 0.29.0 on",),
        verdict="half",
        shown=same("vllm serve MODEL"),
        source=Text(
            "vllm/entrypoints/openai/api_server.py of 0.29.0", "vLLM 0.29.0 vllm/entrypoints/openai/api_server.py"
        ),
    )


def _seqs_default() -> Outcome:
    a100 = planned(LLAMA_8B, A100, max_model_len=8192).max_num_seqs
    h100 = planned(LLAMA_8B, H100, max_model_len=8192).max_num_seqs
    return Outcome(
        (f"vLLM {VERSION}: {a100} on {A100}, {h100} on {H100}",),
        float(a100),
        "right" if a100 == h100 == 256 else "half",
        {"a100": a100, "h100": h100, "version": VERSION},
    )


def _utilization_default() -> Outcome:
    flag = "--gpu-memory-utilization"
    defaults = {version: default_of(VLLM, version, flag) for version in known_versions(VLLM)}
    old, new = (defaults[known_versions(VLLM)[at]] for at in (0, -1))
    until = [version for version, value in defaults.items() if value == old][-1]
    since = next(version for version, value in defaults.items() if value == new)
    return Outcome(
        (f"{flag}: {old:g} up to {until}, {new:g} from {since}",),
        new,
        "half" if old == 0.9 != new else None,
        {"old": old, "new": new, "until": until, "since": since},
        source=_SDISTS,
    )


COMPUTED: Mapping[str, Callable[[], Outcome]] = {
    "flag-enable-prefix-caching-false": _prefix_caching_false,
    "flag-prefix-cache-ttl": lambda: _absent_flag("--prefix-cache-ttl"),
    "flag-automatic-prefix-layout": lambda: _absent_flag("--automatic-prefix-layout"),
    "env-scheduler-policy": _scheduler_env,
    "flag-kv-transfer-config": _kv_transfer,
    "tool-trtllm-quantize": _trtllm_quantize,
    "fp8-since-0-15": _fp8_since,
    "spec-decode-since-0-20": _speculative,
    "e5m2-is-a-value": _e5m2,
    "mixed-layers-config": _mixed_layers,
    "ampere-fp8-native": _ampere,
    "python-m-api-server": _python_m,
    "max-num-seqs-default": _seqs_default,
    "utilization-default": _utilization_default,
}
_FROM_METRICS: Mapping[str, tuple[str, Callable[[_Shown], Outcome]]] = {
    "metric-cache-usage-percent": (VLLM, _usage_metric),
    "metric-num-cache-evictions": (VLLM, _eviction_metric),
    "metric-avg-generation-throughput": (VLLM, _throughput_metric),
    "metric-underscores": (VLLM, _underscores),
    "tgi-enterprise": (TGI, _tgi),
}


def from_metrics(metrics: MetricNames) -> dict[str, Callable[[], Outcome]]:
    """The claims about names of metrics, which are known above this layer."""

    def asked(engine: str, compute: Callable[[_Shown], Outcome]) -> Callable[[], Outcome]:
        return lambda: compute(_Shown(engine, metrics(engine)))

    return {claim: asked(engine, compute) for claim, (engine, compute) in _FROM_METRICS.items()}
