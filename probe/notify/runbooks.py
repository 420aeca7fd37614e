"""Which of our runbooks fits an alert that somebody else's rules raised.

In this order: what the alert says itself (label `kvoncall_rule`, a `runbook_url` that ends in one of our ids, our
alert's name), then its words, and those only where the alert is about LLM serving at all. No fit is an answer, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from runbooks.load import list_runbooks

# What says that an alert is about an LLM server; "kv" alone does not (etcd, Consul).
_ABOUT = re.compile(
    r"\b(vllm|sglang|tensorrt ?llm|trt ?llm|triton|tgi\b|llm|kvoncall|inference|"
    r"kv ?cache|ttft|itl\b|tpot|time to first token|inter token)"
)
# The first that matches wins, so causes come before symptoms. Words are looked for in text like "vllm kv cache full".
WORDS: tuple[tuple[str, str], ...] = (
    ("prefix-isolation-breach", r"isolation|cross[ _]tenant|tenant leak"),
    ("oom", r"\boom\b|out of memory|cuda memory|oom ?killed"),
    ("preemption-livelock", r"livelock|live lock|preempt\w* (but|with|without) no|no complet|no progress"),
    ("cache-thrash", r"thrash|evict\w* before reuse"),
    ("eviction-storm", r"preempt|evict|retract|swapp?ed"),
    ("kv-block-leak", r"block leak|kv leak|cache leak"),
    ("gpu-memory-creep", r"memory (creep|leak|growth|growing)"),
    ("prefix-hit-collapse", r"(prefix|cache) (cache )?(hit|miss)|hit ?rate"),
    ("kv-quality-drop", r"quality|accuracy|eval score"),
    ("ttft-slo-burn", r"\bttft\b|time to first token|first token"),
    ("itl-slo-burn", r"\bitl\b|\btpot\b|inter token|time per output token|per token latency"),
    ("kv-saturated", r"(kv|cache|token) (cache )?(usage|utili[sz]ation|full|satur\w*|pressure|exhaust\w*)|kv full"),
    ("head-of-line-block", r"head of line|\bhol\b|queue (time|wait)"),
    ("engine-stall", r"stall|stuck|hang|hung|no tokens"),
    ("metrics-unknown", r"(schema|metrics?) (unknown|changed|missing)"),
    ("target-missing", r"\bdown\b|absent|missing|unreachable|unavailable|not (up|ready|scraped)"),
)


def runbook_for(labels: Mapping[str, str], annotations: Mapping[str, str] | None = None) -> str | None:
    """The id of one of our runbooks, or None."""
    pages = [page.id for page in list_runbooks()]
    known = {_plain(page): page for page in pages}
    known |= {f"kv{_plain(page.removeprefix('kv-'))}": page for page in pages}  # as exported: KVEvictionStorm
    annotations = annotations or {}
    named = [labels.get("kvoncall_rule", ""), *_of_link(annotations.get("runbook_url", ""))]
    for name in [*named, labels.get("alertname", "")]:
        plain = _plain(name)
        found = known.get(plain) or known.get(plain.removeprefix("kvoncall"))
        if found:
            return found
    text = _words([labels.get("alertname", ""), annotations.get("summary", ""), annotations.get("title", "")])
    told = [*labels.values(), *labels.keys(), annotations.get("summary", ""), annotations.get("description", "")]
    if not _ABOUT.search(f"{_words(told)} {_together(told)}"):
        return None
    return next((page for page, pattern in WORDS if page in pages and re.search(pattern, text)), None)


def _of_link(url: str) -> list[str]:
    """What may be a runbook's id in a link: its `runbook` parameter, or its last part."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    last = parts.path.rstrip("/").rpartition("/")[2].removesuffix(".md").removesuffix(".html")
    return [*parse_qs(parts.query).get("runbook", []), last]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(texts: list[str]) -> str:
    """Lower-case words with single spaces; CamelCase is taken apart, `TTFTHigh` too."""
    text = " ".join(texts)
    return _together([re.sub(r"([a-z0-9])([A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\3 \2", text)])


def _together(texts: list[str]) -> str:
    """Lower-case words with single spaces, CamelCase left in one piece (`SGLang`, `vLLM`)."""
    return re.sub(r"[^a-z0-9]+", " ", " ".join(texts).lower()).strip()
