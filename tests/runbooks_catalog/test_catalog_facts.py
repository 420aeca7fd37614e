"""Facts of the catalog typed in by hand from what the releases say, and the rules by which it answers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from runbooks import catalog_data
from runbooks.catalog_data import CatalogError, engines, load, notes, read_file, text_of
from runbooks.flags import (
    all_flags,
    catalog,
    default_of,
    flag_facts,
    known_versions,
    nearest_version,
    needs_version_check,
    why_absent,
    why_value_absent,
)
from runbooks.versions import nearest, order_key, version_key

SCALES, SWAP, KV_DTYPE, BLOCK = "--calculate-kv-scales", "--swap-space", "--kv-cache-dtype", "--block-size"
LAST, SINCE = "last seen", "exists since"


@pytest.fixture(autouse=True)
def _no_additions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_CATALOG", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("engine", "version", "flag", "reason"),
    [
        ("vllm", "0.17.1", SWAP, None),
        ("vllm", "0.18.0", SWAP, f"{LAST} in vllm 0.17.1"),
        ("vllm", "0.6.6", SCALES, f"{SINCE} vllm 0.7.0"),
        ("vllm", "0.27.1", SCALES, None),
        ("vllm", "0.28.0", SCALES, f"{LAST} in vllm 0.27.1"),
        ("vllm", "0.10.1.1", "--kv-cache-memory-bytes", f"{SINCE} vllm 0.10.2"),
        ("vllm", "0.18.1", "--kv-cache-dtype-skip-layers", f"{SINCE} vllm 0.19.0"),
        ("vllm", "0.10.2", "--preemption-mode", None),
        ("vllm", "0.11.0", "--preemption-mode", LAST),
        ("vllm", "0.8.2", "--speculative-model", None),
        ("vllm", "0.8.3", "--speculative-model", "use --speculative-config"),
        ("vllm", "0.23.0", "--watermark", f"{SINCE} vllm 0.24.0"),
        ("vllm", "0.29.0", "--max-num-queued-reqs", None),
        ("vllm", "0.33.0", "--max-num-partial-prefills", f"{LAST} in vllm 0.26.0"),
        ("vllm", "0.33.0", "--prefix-cache-ttl", "not in the flag catalog"),
        ("vllm", "0.33.0", "--automatic-prefix-layout", "not in the flag catalog"),
        ("vllm", "0.20.0", "VLLM_SCHEDULER_POLICY", "instead: --scheduling-policy"),
        ("vllm", "0.11.0", "VLLM_USE_V1", None),
        ("vllm", "0.11.1", "VLLM_USE_V1", "0.11.0"),
        ("sglang", "0.5.23", "--retraction-policy", None),
        ("sglang", "0.5.15.post1", "--retraction-policy", SINCE),
        ("sglang", "0.5.2", "--radix-eviction-policy", SINCE),
        ("sglang", "0.5.23", "--cuda-graph-max-bs", LAST),
        ("tensorrt-llm", "1.0.0", "kv_cache_config.onboard_blocks", None),
        ("tensorrt-llm", "1.3.0rc27", "kv_cache_config.onboard_blocks", LAST),
        ("tensorrt-llm", "1.0.0", "kv_cache_config.tokens_per_block", SINCE),
        ("tgi", "3.3.7", "PREFIX_CACHING", None),
        ("tgi", "3.3.7", "--enable-prefix-caching", "PREFIX_CACHING"),
        ("triton", "1.0.0", "enable_kv_cache_reuse", None),
    ],
)
def test_existence(engine: str, version: str, flag: str, reason: str | None) -> None:
    found = why_absent(engine, version, flag)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("engine", "version", "flag", "default"),
    [
        ("vllm", "0.19.1", "--gpu-memory-utilization", 0.9),
        ("vllm", "0.20.0", "--gpu-memory-utilization", 0.92),
        ("vllm", "0.7.3", "--enable-prefix-caching", False),
        ("vllm", "0.8.0", "--enable-prefix-caching", True),
        ("vllm", "0.33.0", "--max-num-seqs", None),
        ("vllm", "0.33.0", BLOCK, None),
        ("vllm", "0.14.0", "--kv-offloading-backend", "native"),
        ("vllm", "0.6.6", SWAP, 4),
        ("vllm", "0.10.1.1", "--prefix-caching-hash-algo", "builtin"),
        ("vllm", "0.10.2", "--prefix-caching-hash-algo", "sha256"),
        ("vllm", "0.12.0", "--kv-cache-metrics-sample", 0.01),
        ("vllm", "0.19.0", "--scheduler-reserve-full-isl", True),
        ("sglang", "0.4.10.post2", "--hicache-write-policy", "write_through_selective"),
        ("sglang", "0.5.2", "--hicache-write-policy", "write_through"),
        ("sglang", "0.5.2", "--max-queued-requests", None),
        ("sglang", "0.5.23", "--schedule-conservativeness", 1.0),
        ("sglang", "0.4.6.post5", "--page-size", 1),
        ("tensorrt-llm", "1.0.0", "kv_cache_config.free_gpu_memory_fraction", 0.9),
        ("tgi", "3.3.7", "--max-concurrent-requests", 128),
        ("tgi", "3.3.7", "--waiting-served-ratio", 0.3),
        ("triton", "1.0.0", "kv_cache_free_gpu_mem_fraction", 0.9),
    ],
)
def test_defaults(engine: str, version: str, flag: str, default: Any) -> None:
    found = default_of(engine, version, flag)
    assert (found, type(found)) == (default, type(default))


@pytest.mark.parametrize(
    ("engine", "version", "flag", "value", "taken"),
    [
        ("vllm", "0.8.5", BLOCK, 1, True),
        ("vllm", "0.8.4", BLOCK, 1, False),
        ("vllm", "0.11.0", BLOCK, 256, False),
        ("vllm", "0.11.1", BLOCK, 256, True),
        ("vllm", "0.18.0", BLOCK, 48, True),
        ("vllm", "0.19.1", KV_DTYPE, "nvfp4", False),
        ("vllm", "0.20.0", KV_DTYPE, "nvfp4", True),
        ("vllm", "0.25.0", KV_DTYPE, "int4_per_token_head", True),
        ("vllm", "0.24.0", KV_DTYPE, "int4_per_token_head", False),
        ("vllm", None, KV_DTYPE, "int4", False),
        ("vllm", "0.12.0", "--prefix-caching-hash-algo", "xxhash", False),
        ("sglang", "0.5.23", KV_DTYPE, "fp4_e2m1", False),
        ("sglang", "0.5.15.post1", KV_DTYPE, "fp4_e2m1", True),
        ("sglang", "0.5.5.post3", "--radix-eviction-policy", "slru", False),
        ("tgi", "3.3.7", KV_DTYPE, "fp8_e4m3fn", True),
        ("tgi", "3.3.7", KV_DTYPE, "fp8", False),
        ("vllm", "0.33.0", "--mm-processor-device", "cuda", True),  # what its source computes is no list of choices
    ],
)
def test_values(engine: str, version: str | None, flag: str, value: Any, taken: bool) -> None:
    assert (why_value_absent(engine, version, flag, value) is None) == taken


@pytest.mark.parametrize(
    ("version", "flag", "name"),
    [
        ("0.20.1", "--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("0.33.0", "--disable-prefix-caching", "--enable-prefix-caching"),
        ("0.32.0", "--disable-prefix-caching", None),
        ("0.20.1", "--max_model_len", "--max-model-len"),
        ("0.20.1", "-tp", "--tensor-parallel-size"),
        ("0.20.1", "--compilation-config.mode", "--compilation-config"),
        ("0.20.1", "--block-size.mode", None),
        ("0.20.1", "--no-disable-log-stats", None),  # a switch has no such form
        ("0.33.0", "--device-memory-utilization", "--gpu-memory-utilization"),
        ("0.20.0", "--device-memory-utilization", None),
    ],
)
def test_spellings(version: str, flag: str, name: str | None) -> None:
    facts = flag_facts("vllm", version, flag)
    assert (facts.name if facts is not None else None) == name
    assert (why_absent("vllm", version, flag) is None) == (name is not None)


def test_a_name_that_became_an_alias_still_works() -> None:
    facts = flag_facts("sglang", "0.5.23", "--tensor-parallel-size")
    assert facts is not None
    assert facts.name == "--tp-size"
    assert why_absent("sglang", "0.5.23", "--tensor-parallel-size") is None


def test_a_default_that_hardware_decides_is_none_and_told() -> None:
    facts = flag_facts("vllm", "0.8.3", "--max-num-seqs")
    assert facts is not None
    assert facts.default is None
    assert "70 GiB" in (facts.default_note or "")
    assert facts.kv
    assert facts.restart
    assert "preemption" in facts.raising


def test_the_parsers_default_is_kept_beside_the_effective_one() -> None:
    facts = flag_facts("vllm", "0.20.0", "--enable-prefix-caching")
    assert facts is not None
    assert (facts.default, facts.declared_default) == (True, None)


def test_versions_in_their_order() -> None:
    order = ["0.8.4", "0.8.5", "0.8.5.post1", "0.9.0rc1", "0.9.0", "0.9.0.1", "0.29.1rc1", "0.29.1", "1.3.0rc5"]
    assert all(order_key(older) < order_key(newer) for older, newer in itertools.pairwise(order))
    assert order_key("0.20") == order_key("0.20.0") == order_key("v0.20.0+cu129")
    assert version_key("main") == ()


def test_between_two_releases_only_what_both_have_exists() -> None:
    assert why_absent("vllm", "0.17.9", SWAP) is not None  # 0.17.1 has it, 0.18.0 has not
    assert why_absent("vllm", "0.10.1.5", "--kv-cache-memory-bytes") is not None
    assert why_absent("vllm", "0.20.1", KV_DTYPE) is None
    assert why_absent("vllm", "0.34.0", KV_DTYPE) is None  # newer than all: as the newest


def test_the_nearest_version_is_said() -> None:
    assert nearest_version("vllm", "0.20") == ("0.20.0", None)
    for asked, taken, word in (
        ("0.20.1", "0.20.0", "not read"),
        ("0.99.0", "0.33.0", "newer"),
        ("0.2.0", "0.6.6", "older"),
        ("nightly", "0.33.0", "not a version"),
        (None, "0.33.0", "not known"),
    ):
        at, note = nearest_version("vllm", asked)
        assert at == taken
        assert word in (note or "")
    assert nearest("x", "1.0.0rc2", ["0.9.0", "1.0.0"])[0] == "0.9.0"
    with pytest.raises(LookupError):
        nearest_version("ollama", "1")


def test_an_unknown_version_gets_a_caution() -> None:
    assert "0.19.0" in (needs_version_check("vllm", None, "--kv-cache-dtype-skip-layers") or "")
    assert "0.25.0" in (needs_version_check("vllm", None, KV_DTYPE, "int4_per_token_head") or "")
    assert needs_version_check("vllm", None, KV_DTYPE, "fp8") is None


def test_the_embedded_engine_has_facts_too() -> None:
    facts = flag_facts("kvoncall", None, KV_DTYPE)
    assert facts is not None
    assert "int4_kivi" in (facts.choices or ())
    assert {f.name for f in all_flags("kvoncall", None)} > {"--max-num-seqs", "--kv-cache-dtype-layers"}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "tgi", "triton"])
def test_every_catalog_is_sound(engine: str) -> None:
    data = load(engine)
    assert data is not None
    assert list(data.versions) == sorted(data.versions, key=order_key)
    for name, spans in data.flags.items():
        places = [(data.versions.index(s.first), data.versions.index(s.last)) for s in spans]
        assert all(first <= last for first, last in places), name
        assert all(one[1] < other[0] for one, other in itertools.pairwise(places)), name
        for span in spans:
            choices = span.form.choices
            assert choices is None or all(len(str(c)) > 1 or str(c).isdigit() for c in choices), name
    known = notes(engine)
    assert set(known["flags"]) <= set(data.flags)
    assert not set(known["never"]) & set(data.flags)
    for name, note in known["flags"].items():
        assert not note.get("kv") or note["meaning"], name
        target = (note.get("replaced_by") or "").split(" ")[0]
        assert not target or target in data.flags or target in data.names_of_aliases, (name, target)


def test_the_catalogs_cover_what_the_plan_asks_for() -> None:
    assert engines() == ("sglang", "tensorrt-llm", "tgi", "triton", "vllm")
    assert (known_versions("vllm")[0], known_versions("vllm")[-1]) == ("0.6.6", "0.33.0")
    assert len(known_versions("vllm")) == 53
    assert len(all_flags("vllm", "0.33.0")) >= 320
    assert sum(facts.kv for facts in all_flags("vllm", "0.33.0")) >= 80
    assert sum(facts.kv for facts in all_flags("sglang", "0.5.23")) >= 50
    size = sum(f.stat().st_size for f in catalog_data.PACKAGED.glob("*.json"))
    assert size < 600_000


def test_a_users_file_adds_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {
        "engine": "vllm",
        "read": "a test",
        "versions": ["0.34.0"],
        "flags": {"--new-pool": [{"versions": "0.34.0", "kind": "int", "default": 3}]},
    }
    (tmp_path / "vllm.json").write_text(json.dumps(added))
    monkeypatch.setenv("KVONCALL_CATALOG", str(tmp_path))
    assert default_of("vllm", "0.34.0", "--new-pool") == 3
    assert LAST in (why_absent("vllm", "0.34.0", KV_DTYPE) or "")
    assert SINCE in (why_absent("vllm", "0.33.0", "--new-pool") or "")
    assert why_absent("vllm", "0.33.0", KV_DTYPE) is None
    assert catalog("vllm")["newest"] == "0.34.0"
    monkeypatch.delenv("KVONCALL_CATALOG")
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path / "elsewhere"))
    assert catalog("vllm")["newest"] == "0.33.0"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not a catalog file"),
        ('{"engine": "vllm"}', "lacks 'versions'"),
        ('{"engine": "v", "read": "", "versions": ["1"], "flags": {"--x": [{"versions": "2", "kind": "a"}]}}', "range"),
        ("[]", "not a catalog file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "vllm.json"
    file.write_text(text)
    with pytest.raises(CatalogError, match=word) as caught:
        read_file(file)
    assert str(file) in str(caught.value)


def test_the_file_format_survives_reading_and_writing(tmp_path: Path) -> None:
    data = load("sglang")
    assert data is not None
    file = tmp_path / "sglang.json"
    file.write_text(text_of(data), encoding="utf-8")
    assert read_file(file).flags == data.flags
    assert file.read_text(encoding="utf-8") == (catalog_data.PACKAGED / "sglang.json").read_text(encoding="utf-8")
