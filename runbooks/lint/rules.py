"""What a configuration is linted as: a finding, and the subject every rule looks at.

A rule is a function from a `Subject` to findings. Rules judge what was written against one version of one engine; a
default that nobody wrote is only judged where the operator's hardware or limits are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.memory.deployment import Gpu
from runbooks.flags import default_of, version_key
from runbooks.launch_line import Given
from runbooks.lint.lookup import version_of

Severity = Literal["error", "warn", "info"]
_TENSOR = ("--tensor-parallel-size", "--tp-size", "--tp_size", "--num-shard")
_PIPELINE = ("--pipeline-parallel-size", "--pp-size", "--pp_size")
RANK = {"error": 0, "warn": 1, "info": 2}


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong with a configuration.

    error: the server does not start, ignores what was written, or is unsafe. warn: it starts, but not as meant, or at
    risk. info: worth knowing. `instead` says what to write, "" where nothing has to be; `runbook` is a runbook's id.
    """

    code: str
    severity: Severity
    flag: str
    message: str
    instead: str
    source: str
    runbook: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Subject:
    """A configuration, and what is known of the place it runs in; None: not known.

    `checkpoint_quantization` is the method of the weights ("fp8", "awq", None: not known, "" none). `kv_tokens` is the
    pool as the engine reports it. `multi_tenant`: requests of different customers meet in one server.
    `offload_bytes_per_rank` are host tiers stated outside of the flags (LMCache's file). `beside`: utilizations of
    servers on the same GPU that were started before this one.
    """

    engine: str
    version: str | None = None
    given: tuple[Given, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    from_yaml: bool = False
    gpu: Gpu | None = None
    checkpoint_quantization: str | None = None
    attention_backend: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    multi_tenant: bool | None = None
    python: str | None = None
    host_memory_bytes: int | None = None
    host_base_bytes: int = 0
    offload_bytes_per_rank: int | None = None
    offload_disk_bytes_per_rank: int | None = None
    disk_bytes: int | None = None
    beside: tuple[float, ...] = ()

    @property
    def at(self) -> str:
        """The version whose facts are used."""
        return version_of(self.engine, self.version)[0]

    def older_than(self, version: str) -> bool:
        """Whether the subject's version comes before another."""
        return version_key(self.at) < version_key(version)

    def within(self, first: str, last: str) -> bool:
        """Whether the subject's version is one of `first` to `last`."""
        return version_key(first) <= version_key(self.at) <= version_key(last)

    def find(self, *flags: str) -> Given | None:
        """The last mention of any of the flags: it is the one in force."""
        return next((given for given in reversed(self.given) if given.flag in flags), None)

    def value(self, flag: str) -> Any:
        """What was written for a flag, None where it was not."""
        given = self.find(flag)
        return None if given is None else given.value

    def in_force(self, flag: str) -> Any:
        """What was written, or the version's default where it is known."""
        given = self.find(flag)
        return default_of(self.engine, self.version, flag) if given is None else given.value

    def number(self, flag: str, *, written: bool = False) -> float | None:
        """The value of a flag as a number; None where it is unset or none. `written`: defaults do not count."""
        return as_number(self.value(flag) if written else self.in_force(flag))

    def is_on(self, flag: str) -> bool | None:
        """Whether a switch is on, None where its default is not known."""
        value = self.in_force(flag)
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.lower())
        return None if value is None else bool(value)

    @property
    def caches_prefixes(self) -> bool | None:
        """Whether the prefix cache is on."""
        if self.engine == "sglang":
            return not self.is_on("--disable-radix-cache")
        return self.is_on("--enable-prefix-caching")

    @property
    def ranks(self) -> int:
        """GPUs that share one server's KV cache."""
        tp = next((n for name in _TENSOR if (n := self.number(name)) is not None), 1)
        return int(tp * next((n for name in _PIPELINE if (n := self.number(name)) is not None), 1))


Rule = Callable[[Subject], Iterable[LintFinding]]
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def as_number(value: Any) -> float | None:
    """A flag's value as a number, with vLLM's suffixes (4k is 4000, 4K is 4096); None where it is no number."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value).strip()
    factor = _UNITS.get(text[-1:], 1)
    try:
        return float(text[:-1] if factor != 1 else text) * factor
    except ValueError:
        return None
