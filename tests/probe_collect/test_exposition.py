"""Exposition text: remembered series read as the official parser reads them, and every kind of damage."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from probe.collect import exposition
from probe.collect.changes import ChangeDetector, Observation
from probe.collect.exposition import Exposition, ExpositionReader, ScrapeError
from probe.collect.scrape import MAX_BYTES, Scrape, get, read_scrape, scrape
from probe.dialects import load_dialect

NOW = 1_800_000_000.0
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

PAGE = """# HELP vllm:num_requests_running Running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} %d
# TYPE vllm:ttft histogram
vllm:ttft_bucket{le="0.5"} %d
vllm:ttft_bucket{le="+Inf"} %d
vllm:ttft_sum %f
vllm:ttft_count %d
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} %d
plain 3
"""


def page(n: int) -> bytes:
    return (PAGE % (n, n, n + 1, n / 3, n + 1, n)).encode()


def shape(found: Exposition) -> list[tuple[str, str, list[tuple[str, dict[str, str], float]]]]:
    return [(f.name, f.type, [(s.name, dict(s.labels), s.value) for s in f.samples]) for f in found.families]


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers share what they learn; each test begins without."""
    monkeypatch.setattr(exposition, "_shapes", {})


def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that reach an official parser from now on."""
    seen: list[str] = []
    original = exposition.parse

    def count(text: str, url: str, *, openmetrics: bool = False) -> Any:
        seen.append(text)
        return original(text, url, openmetrics=openmetrics)

    monkeypatch.setattr(exposition, "parse", count)
    return seen


def test_a_repeated_page_is_read_without_the_parser_and_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, seen = ExpositionReader(), parses(monkeypatch)
    for n in range(5):
        again = reader.read(page(n), TEXT, "u", NOW)
        assert again.num_samples == 7
        monkeypatch.setattr(exposition, "_shapes", {})
        assert shape(again) == shape(ExpositionReader().read(page(n), TEXT, "u", NOW))
    assert len(seen) == 1 + 5


def test_readers_share_what_they_learn_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = parses(monkeypatch)
    readers = [ExpositionReader() for _ in range(5)]
    for n, reader in enumerate(readers):
        assert reader.read(page(n), TEXT, "u", NOW).families[0].samples[0].value == n
    assert len(seen) == 1
    with pytest.raises(ScrapeError, match="not in the Prometheus text format"):
        ExpositionReader().read(page(7).replace(b"plain 3", b"plain x"), TEXT, "u", NOW)
    for n in range(200):  # endless shapes are not kept
        ExpositionReader().read(b'a{i="%d"} 1\n' % n, TEXT, "u", NOW)
    assert len(exposition._shapes) <= 64


def test_new_series_and_changed_metadata_go_through_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, seen = ExpositionReader(), parses(monkeypatch)
    reader.read(page(1), TEXT, "u", NOW)
    longer = page(2) + b'vllm:request_success_total{finished_reason="abort"} 1\n'
    assert reader.read(longer, TEXT, "u", NOW).num_samples == 8
    assert reader.read(page(3), TEXT, "u", NOW).num_samples == 7  # one series is gone again: known ones are
    assert len(seen) == 2
    gauge = page(4).replace(b"counter", b"gauge")
    assert "vllm:request_success_total" in {f.name for f in reader.read(gauge, TEXT, "u", NOW).families}
    assert len(seen) == 3


@pytest.mark.parametrize(
    "damage",
    [b"plain three\n", b"plain \n", b"plain 1_0\n", b'plain{a="b} 1\n', b"3plain 1\n", b"plain\n"],
)
def test_damage_is_found_on_known_pages_too(damage: bytes) -> None:
    reader = ExpositionReader()
    reader.read(page(1), TEXT, "u", NOW)
    with pytest.raises(ScrapeError, match="u is not in the Prometheus text format") as caught:
        reader.read(page(2).replace(b"plain 3\n", damage), TEXT, "u", NOW)
    assert "\n" not in str(caught.value)
    assert reader.read(page(3), TEXT, "u", NOW).num_samples == 7


def test_a_page_cut_short_is_no_page() -> None:
    reader = ExpositionReader()
    whole = page(123)
    reader.read(whole, TEXT, "u", NOW)
    for cut in (whole[:-1], whole[:-12]):
        with pytest.raises(ScrapeError, match="not in the Prometheus text format"):
            reader.read(cut, TEXT, "u", NOW)


def test_openmetrics_has_its_own_parser_and_its_end() -> None:
    text = b'# TYPE vllm:request_success counter\nvllm:request_success_total 3 # {trace="1"} 1.0\n# EOF\n'
    reader = ExpositionReader()
    for _ in range(2):
        assert shape(reader.read(text, OPENMETRICS, "u", NOW)) == [
            ("vllm:request_success", "counter", [("vllm:request_success_total", {}, 3.0)])
        ]
    plain = text.replace(b' # {trace="1"} 1.0', b"")
    for _ in range(2):
        reader.read(plain, OPENMETRICS, "u", NOW)
        with pytest.raises(ScrapeError, match="EOF"):
            reader.read(plain.replace(b"# EOF\n", b""), OPENMETRICS, "u", NOW)


def test_of_a_series_that_appears_twice_the_first_counts() -> None:
    text = b'a{x="1",y="2"} 1\na{y="2",x="1"} 2\nb 5\nb 6\n'
    reader = ExpositionReader()
    for _ in range(2):
        found = reader.read(text, TEXT, "u", NOW)
        assert [s.value for f in found.families for s in f.samples] == [1.0, 5.0]
        assert found.duplicates == 2


def test_timestamps_are_not_used_but_old_samples_are_left_out() -> None:
    text = f"a 1 {round((NOW - 10) * 1000)}\nb 2 {round((NOW - 400) * 1000)}\nc 3\n".encode()
    reader = ExpositionReader()
    for _ in range(2):
        found = reader.read(text, TEXT, "u", NOW)
        assert [(s.name, s.value) for f in found.families for s in f.samples] == [("a", 1.0), ("c", 3.0)]
        assert found.outdated == 1


def test_a_million_series_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = parses(monkeypatch)
    body = b"".join(b'a{i="%d"} 1\n' % i for i in range(60_000))
    with pytest.raises(ScrapeError, match="exposes 60,000 series, more than 50,000"):
        ExpositionReader().read(body, TEXT, "u", NOW)
    assert seen == []


def test_a_label_of_many_characters_is_refused() -> None:
    with pytest.raises(ScrapeError, match=r"label of a\{x\} has 3,000 characters"):
        ExpositionReader().read(b'a{x="' + b"y" * 3000 + b'"} 1\n', TEXT, "u", NOW)


def test_nothing_at_all() -> None:
    with pytest.raises(ScrapeError, match="without a single metric"):
        ExpositionReader().read(b"", TEXT, "u", NOW)


def read(url: str, **options: Any) -> Scrape:
    async def go() -> Scrape:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await scrape(client, url, load_dialect("vllm"), "t", ts=NOW, timeout_s=20.0, **options)

    return asyncio.run(go())


def test_what_no_rule_could_use_is_left_out_and_told_once(target: Callable[..., Any]) -> None:
    body = (
        b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} +Inf\n'
        b'vllm:num_preemptions_total{engine="0"} -4\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    )
    found = _of(body)
    assert {s.metric for s in found.samples} == {"kv_usage_ratio"}
    assert found.refused == {"requests_waiting is infinite": 1, "the counter preemptions_total is negative": 1}
    detector = ChangeDetector(load_dialect("vllm").counters)
    told = [
        [f.kind for f in detector.observe(Observation(target(), NOW + i, scraped))]
        for i, scraped in enumerate((found, found, _of(body.replace(b"-4", b"4")), found))
    ]
    assert ["samples_refused" in kinds for kinds in told] == [True, False, False, True]


def _of(body: bytes) -> Scrape:
    found = ExpositionReader().read(body, TEXT, "u", NOW)
    return read_scrape(found.families, load_dialect("vllm"), "t", NOW)


def test_gzip_by_agreement_and_nothing_else(server: Any, reply: Any) -> None:
    members = gzip.compress(page(1)[:100]) + gzip.compress(page(1)[100:])
    server.replies["/metrics"] = reply(members, headers={"Content-Encoding": "gzip", "Content-Type": TEXT})
    assert read(server.url).exposed == 7
    _, headers, _ = server.requests[-1]
    assert headers["Accept-Encoding"] == "gzip"
    assert "application/openmetrics-text" in headers["Accept"]
    server.replies["/metrics"] = reply(page(1), headers={"Content-Encoding": "br"})
    with pytest.raises(ScrapeError, match="encoding 'br', which was not asked for"):
        read(server.url)


@pytest.mark.parametrize("damage", [lambda z: z[:-20], lambda z: z[:30] + b"\0\0\0\0" + z[34:], lambda z: b"plain"])
def test_damaged_gzip(server: Any, reply: Any, damage: Callable[[bytes], bytes]) -> None:
    body = damage(gzip.compress(page(1)))
    server.replies["/metrics"] = reply(body, headers={"Content-Encoding": "gzip"})
    with pytest.raises(ScrapeError, match="gzip data"):
        read(server.url)


def test_a_gzip_bomb_is_stopped_at_the_limit(server: Any, reply: Any) -> None:
    """200 MB in 200 kB: never more than the limit and one piece are unpacked."""
    bomb = gzip.compress(b"a 1\n" * 50_000_000, compresslevel=1)
    server.replies["/metrics"] = reply(bomb, headers={"Content-Encoding": "gzip"})

    async def go() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await get(client, f"{server.url}/metrics", timeout_s=20)

    tracemalloc.start()
    try:
        with pytest.raises(ScrapeError, match=f"more than {MAX_BYTES:,} bytes"):
            asyncio.run(go())
        assert tracemalloc.get_traced_memory()[1] < 6 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_headers_of_the_target_are_sent(server: Any, reply: Any) -> None:
    server.replies["/metrics"] = reply(page(1))
    read(server.url, headers={"Authorization": "Bearer x"})
    assert server.requests[-1][1]["Authorization"] == "Bearer x"
