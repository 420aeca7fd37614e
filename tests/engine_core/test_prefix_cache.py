from __future__ import annotations

from engine.prefix_cache import RecentEvictions


def test_recent_evictions_forget_the_oldest_and_count_once() -> None:
    recent = RecentEvictions(2)
    for name in (b"a", b"b", b"a", b"c"):  # a is evicted again, so b is the oldest
        recent.add(name)
    assert len(recent) == 2
    assert recent.take([b"a", b"b", b"c"]) == 2
    assert recent.take([b"a", b"b", b"c"]) == 0
    recent.add(b"a")
    recent.discard(b"a")
    assert recent.take([b"a"]) == 0
