"""What a round of the isolation probe is asked to do, and the budget it states before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from probe.isolation.client import ProbeError
from probe.isolation.twins import ANSWER_TOKENS, FACTS, Kind

CHECKS = ("leak-canary", "side-channel", "cache-salt")
TENANTS_BY = ("all", "header", "user", "salt")
DEFAULT_PROBES = 80
FEWEST_PROBES = 5
MOST_PROBES = 5000
DEFAULT_PREFIX_TOKENS = 1024
FEWEST_PREFIX_TOKENS = 64
OWN_EVERY = 4  # one pair in so many also asks whether a tenant's own repeat is told from a new prompt
TAIL_TOKENS = 16  # what an asker adds to a prefix
HIT_SHARE = 0.25  # of a prefix; a chat template's few shared tokens are no hit
_CANARY_REQUESTS = 6
_SALT_REQUESTS = 5
_FACT_TOKENS = {"testbed": 3, "plain": 16}  # at most, whatever the tokenizer
_OTHER_TOKENS = {"testbed": 16, "plain": 140}  # of a twin prompt: question, instruction, example, chat template
_FEWEST_FACTS = 4


@dataclass(frozen=True)
class IsolationOptions:
    """What to check and how.

    probes: cross-tenant probes of the leak canary and of `cache-salt`, and pairs of the side channel (twice as many
    where those cannot decide). tenants_by: how callers say who they are: X-Tenant-ID and X-Session-ID ("header"),
    `user`, `cache_salt` ("salt"), or both header and user ("all"). salted: besides, each sends a salt of its own.
    chat: ask through /v1/chat/completions. prefix_tokens: length of the side channel's prefixes (None: 1,024, or half
    the context where that is less).
    """

    checks: tuple[str, ...] = CHECKS
    probes: int = DEFAULT_PROBES
    tenants_by: str = "all"
    salted: bool = False
    chat: bool = False
    prefix_tokens: int | None = None
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        unknown = [check for check in self.checks if check not in CHECKS]
        if unknown or not self.checks or len(set(self.checks)) != len(self.checks):
            raise ProbeError(
                f"checks are some of {', '.join(CHECKS)}, once each, not {', '.join(self.checks) or 'none'}"
            )
        if not FEWEST_PROBES <= self.probes <= MOST_PROBES:
            raise ProbeError(f"probes must be {FEWEST_PROBES} to {MOST_PROBES}, not {self.probes}")
        if self.tenants_by not in TENANTS_BY:
            raise ProbeError(f"tenants are told by one of {', '.join(TENANTS_BY)}, not {self.tenants_by!r}")
        if self.prefix_tokens is not None and self.prefix_tokens < FEWEST_PREFIX_TOKENS:
            raise ProbeError(f"a prefix needs at least {FEWEST_PREFIX_TOKENS} tokens, not {self.prefix_tokens}")
        if self.timeout_s <= 0:
            raise ProbeError(f"the time limit of a request must be above 0 s, not {self.timeout_s:g}")

    def salt_trials(self, *, by_tokens: bool) -> int:
        """Trials of `cache-salt`, each with two probes: another salt and none. Exact counts need half as many."""
        return max(FEWEST_PROBES, self.probes // 2) if by_tokens else self.probes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """What the checks must know of the server: language and size of the twins, vocabulary (None: prompts are text)."""

    kind: Kind
    prefix_tokens: int
    vocab_size: int | None = None
    facts: int | None = None


def is_hit(cached_tokens: int, of_new: int, prefix_tokens: int) -> bool:
    """Whether a prompt took much more from the cache than a prompt with a new prefix did."""
    return cached_tokens - of_new >= HIT_SHARE * prefix_tokens


@dataclass(frozen=True)
class Budget:
    """At most so many requests, tokens of prompts (about) and generated tokens; `by_check`: requests of each check."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    by_check: Mapping[str, int]

    @property
    def sentence(self) -> str:
        parts = ", ".join(f"{check} {count:,}" for check, count in self.by_check.items())
        return (
            f"at most {self.requests:,} requests ({parts}) with about {self.prompt_tokens:,} prompt tokens and "
            f"{self.generated_tokens:,} generated ones, one request at a time"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_check": dict(self.by_check)}


def fitted_prefix(options: IsolationOptions, max_model_len: int | None) -> int:
    """Tokens of a side channel's prefix in this context; raises `ProbeError` where none fits."""
    room = None if max_model_len is None else max_model_len - TAIL_TOKENS - 8
    if options.prefix_tokens is not None:
        if room is not None and options.prefix_tokens > room:
            raise ProbeError(f"a prefix of {options.prefix_tokens} tokens does not fit a context of {max_model_len}")
        return options.prefix_tokens
    prefix = DEFAULT_PREFIX_TOKENS if max_model_len is None else min(DEFAULT_PREFIX_TOKENS, max_model_len // 2)
    if prefix < FEWEST_PREFIX_TOKENS:
        raise ProbeError(f"a context of {max_model_len} tokens is too short for this probe")
    return prefix


def fitted_facts(kind: Kind, max_model_len: int | None) -> int:
    """Facts of a twin prompt in this context; raises `ProbeError` where too few fit."""
    if max_model_len is None:
        return FACTS[kind]
    facts = (max_model_len - ANSWER_TOKENS[kind] - _OTHER_TOKENS[kind]) // _FACT_TOKENS[kind]
    if facts < _FEWEST_FACTS:
        raise ProbeError(f"a context of {max_model_len} tokens is too short for twin prompts")
    return min(FACTS[kind], facts)


def plan_budget(options: IsolationOptions, setting: Setting | None = None) -> Budget:
    """The most a round may send: every extension taken, every suspicion followed up. `setting` None: any."""
    setting = setting or Setting("plain", fitted_prefix(options, None))
    kind = setting.kind
    by_check: dict[str, int] = {}
    tokens = generated = 0
    if "leak-canary" in options.checks:
        by_check["leak-canary"] = _CANARY_REQUESTS * options.probes
        tokens += by_check["leak-canary"] * ((setting.facts or FACTS[kind]) * _FACT_TOKENS[kind] + _OTHER_TOKENS[kind])
        generated += by_check["leak-canary"] * ANSWER_TOKENS[kind]
    if "side-channel" in options.checks:
        pairs = 2 * options.probes
        by_check["side-channel"] = 3 * pairs + -(-pairs // OWN_EVERY) + 1
    if "cache-salt" in options.checks:
        by_check["cache-salt"] = _SALT_REQUESTS * options.salt_trials(by_tokens=False)
    of_prefixes = by_check.get("side-channel", 0) + by_check.get("cache-salt", 0)
    requests = sum(by_check.values()) + 1  # one that tells how long a word is
    return Budget(
        requests, tokens + of_prefixes * (setting.prefix_tokens + TAIL_TOKENS), generated + of_prefixes, by_check
    )
