"""The report made at attach: what is there, what is not and why, for the version at hand."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from prometheus_client import Metric

from probe.collect.canonical import canonical_samples
from probe.collect.coverage import STATUSES, CoverageReport, CoverageRow, coverage
from probe.dialects import ENGINES, canonical_names, load_dialect

Page = Callable[[str], dict[str, Metric]]


def report(page: Page, name: str, engine: str, version: str | None = None) -> CoverageReport:
    families, dialect = page(name), load_dialect(engine, version)
    samples, _ = canonical_samples(families.values(), dialect, "t", 1.0)
    exposed = {s.name for f in families.values() for s in f.samples} | families.keys()
    return coverage(dialect, exposed, version, carried={s.metric for s in samples})


def row(found: CoverageReport, canonical: str) -> CoverageRow:
    result = found.row(canonical)
    assert result is not None
    return result


def test_real_vllm_lacks_nothing_required(page: Page) -> None:
    found = report(page, "vllm-0.33.0-under-load", "vllm", "0.33.0")
    assert found.missing_required == []
    assert found.assumed is None
    assert not found.having("missing")
    assert not found.having("renamed")
    hidden = row(found, "requests_corrupted_total")
    assert hidden.status == "hidden"
    assert hidden.todo is not None
    assert "VLLM_COMPUTE_NANS_IN_LOGITS" in hidden.todo
    assert row(found, "kv_block_evictions_total").status == "not exposed by this engine"


def test_an_old_name_is_read_and_the_new_one_named(page: Page) -> None:
    found = row(report(page, "vllm-v1-old", "vllm", "0.9.1"), "kv_usage_ratio")
    assert (found.status, found.exposed) == ("renamed", "vllm:gpu_cache_usage_perc")
    assert found.todo == "newer versions call it vllm:kv_cache_usage_perc (since 0.9.2)"


def test_blocks_are_said_to_be_read_as_tokens(page: Page) -> None:
    found = row(report(page, "vllm-v1-old", "vllm", "0.8.5"), "prefix_hits_total")
    assert found.status == "renamed"
    assert found.note is not None
    assert "blocks" in found.note


@pytest.mark.parametrize(
    ("name", "version", "why"),
    [("vllm-v1-old", None, "once the version is known"), ("vllm-v1-old-without-config", "0.8.5", "needs block_size")],
)
def test_a_counter_left_out_for_its_unit_is_reported(page: Page, name: str, version: str | None, why: str) -> None:
    found = row(report(page, name, "vllm", version), "prefix_hits_total")
    assert (found.status, found.exposed) == ("missing", "vllm:gpu_prefix_cache_hits_total")
    assert found.todo is not None
    assert why in found.todo


def test_what_a_version_hides_and_which_flag_shows_it() -> None:
    found = coverage(load_dialect("vllm", "0.12.0"), ["vllm:num_requests_running"], "0.12.0")
    idle = row(found, "kv_block_idle_before_evict_seconds")
    assert (idle.status, idle.todo) == ("hidden", "needs --kv-cache-metrics")
    dialect = load_dialect("vllm", "0.11.0")
    assert dialect.hidden_names()["vllm:gpu_cache_usage_perc"] == "--show-hidden-metrics-for-version=0.10"
    waiting = row(found, "requests_waiting_by_reason")
    assert (waiting.status, waiting.todo) == ("missing", "first read in vllm 0.20.0")
    usage = row(found, "kv_usage_ratio")
    assert usage.status == "missing"
    assert usage.required
    assert "kv_usage_ratio" in found.missing_required


def test_versions_that_were_not_read_are_said_to_be_guessed(page: Page) -> None:
    assert report(page, "vllm-v0", "vllm").assumed == "The version of vllm is not known: 0.33.0 is assumed."
    newer = coverage(load_dialect("vllm", "0.40.1"), [], "0.40.1").assumed
    assert newer == "vllm 0.40.1 is newer than what was read: 0.33.0 is assumed."
    middle = coverage(load_dialect("tensorrt-llm", "1.2.1"), [], "1.2.1").assumed
    assert middle is not None
    assert "1.2.1 were not read" in middle


def test_an_untold_version_is_narrowed_by_the_metrics_shown() -> None:
    dialect, names = load_dialect("vllm"), ["vllm:gpu_cache_usage_perc"]
    found = coverage(dialect, names, likely=("0.8.4", "0.8.5"))
    assert (found.version, found.assumed) == (
        None,
        "The version of vllm is not known: 0.8.5 is assumed, by the metrics it shows.",
    )
    assert row(found, "requests_waiting_by_reason").todo == "first read in vllm 0.20.0"
    unit = row(coverage(dialect, ["vllm:gpu_prefix_cache_hits_total"], likely=("0.8.5",)), "prefix_hits_total")
    assert unit.todo is not None
    assert "once the version is known" in unit.todo


def test_what_only_the_old_generation_of_an_engine_has() -> None:
    found = coverage(load_dialect("vllm", "0.7.3"), ["vllm:num_requests_running"], "0.7.3")
    assert row(found, "preemptions_total").todo == "only the V0 engine of vllm has it in this version"


def test_sglang_says_since_when_retractions_are_counted(page: Page) -> None:
    old = row(report(page, "sglang-old", "sglang", "0.5.2"), "preemptions_total")
    assert old.status == "missing"
    assert old.todo is not None
    assert "0.5.10.post1" in old.todo
    assert "gauge" in old.todo
    new = row(report(page, "sglang-new", "sglang", "0.5.23"), "preemptions_total")
    assert (new.status, new.note) == ("present", "retractions: SGLang's preemptions")
    quiet = row(report(page, "sglang-old", "sglang", "0.5.23"), "preemptions_total")
    assert quiet.status == "missing"
    assert quiet.todo is not None
    assert "after its first event" in quiet.todo


def test_tensorrt_llm_by_era(page: Page) -> None:
    first = report(page, "trtllm-first", "tensorrt-llm", "1.0.0")
    assert row(first, "ttft_seconds").status == "renamed"
    assert row(first, "kv_usage_ratio").status == "missing"
    second = coverage(load_dialect("tensorrt-llm", "1.3.0rc5"), ["trtllm_request_success_total"], "1.3.0rc5")
    usage = row(second, "kv_usage_ratio")
    assert (usage.status, usage.todo) == ("hidden", "needs enable_iter_perf_stats: true")
    assert row(second, "preemptions_total").status == "not exposed by this engine"


def test_tgi_is_honest_about_kv(page: Page) -> None:
    found = report(page, "tgi", "tgi", "3.3.7")
    usage = row(found, "kv_usage_ratio")
    assert usage.status == "present"
    assert not usage.required
    assert usage.note is not None
    assert "not KV in use" in usage.note
    assert row(found, "preemptions_total").status == "not exposed by this engine"
    assert row(found, "ttft_seconds").status == "not exposed by this engine"


def test_triton_needs_the_label_not_only_the_name(page: Page) -> None:
    assert row(report(page, "triton", "triton"), "requests_waiting").status == "missing"
    assert row(report(page, "triton-newer", "triton"), "requests_waiting").status == "present"
    assert row(report(page, "triton", "triton", "0.17.0"), "requests_waiting").status == "missing"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_a_row_for_every_metric(engine: str) -> None:
    found = coverage(load_dialect(engine), [])
    assert {r.canonical for r in found.rows} >= {n for n, c in canonical_names().items() if c.measured_by == "engine"}
    assert {r.status for r in found.rows} <= set(STATUSES)
    assert all(r.todo for r in found.rows if r.status in ("missing", "hidden"))
    text = found.text()
    assert text.startswith(engine)
    assert "kv_usage_ratio" in text
    assert json.loads(json.dumps(found.to_dict()))["engine"] == engine
