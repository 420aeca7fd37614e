"""What the store hands out: frozen records, free of the database session that read them.

Times are Unix seconds (float). `labels`, `facts`, `data`, `options` and `result` hold JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from probe.notify.matchers import Matcher

ACK_KINDS = ("investigating", "known", "planned", "accepted", "false-alarm")
ABOUT = ("runbook", "alert", "replay")


class StoreError(Exception):
    """The store cannot do what was asked; the message is one sentence for the user."""


class LeaseLostError(StoreError):
    """Another process leads by now; what this one wanted to write was not written."""


@dataclass(frozen=True)
class Target:
    """A server of an LLM: `kind` is "embedded", "drill" or "external".

    `source` says where its samples come from: "metrics" (its own exposition at `url`) or "prometheus" (`url` is the
    Prometheus server, `options["matchers"]` the labels that single it out). `options` never holds a secret, only
    names of environment variables. `time_scale` shortens rule windows for drills.
    """

    id: int
    name: str
    url: str
    kind: str
    engine: str
    flags: list[str]
    facts: dict[str, Any]
    scrape_interval_s: float
    time_scale: float
    active: bool
    created_at: float
    source: str = "metrics"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One value of one series; `ts` is the time of the scrape that read it."""

    target: str
    metric: str
    labels: Mapping[str, str]
    ts: float
    value: float


@dataclass(frozen=True)
class Event:
    """Something that happened once, to a target or (`target` None) to the watch itself."""

    id: int
    target: str | None
    ts: float
    kind: str
    severity: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Acknowledgement:
    """Somebody took an alert on: it is not repeated until it resolves. `kind` is one of `ACK_KINDS`."""

    author: str
    kind: str
    reason: str
    at: float


@dataclass(frozen=True)
class Alert:
    """One incident of one rule on one target; `state` goes from "pending" over "firing" to "resolved".

    `value` is the newest value that breached the threshold, `numerator / denominator` where both are set;
    `store.alerts.transitions(id)` has the value at each change of state and `store.alerts.readings()` the
    present one. `coverage` says what it rests on (engines, span of data, resets, age). `progress_s` is how long
    the condition was seen to hold (pending) or to be clear (firing); time without data does not count.
    `engine` and `model` are those of the target as far as they are known, else "".
    """

    id: int
    rule: str
    target: str
    state: str
    severity: str
    value: float | None
    threshold: float
    numerator: float | None
    denominator: float | None
    window_s: float
    hold_s: float
    summary: str
    coverage: str
    runbook: str
    replay_id: str | None
    progress_s: float
    pending_at: float
    firing_at: float | None
    resolved_at: float | None
    updated_at: float
    engine: str = ""
    model: str = ""
    acknowledgement: Acknowledgement | None = None

    @property
    def labels(self) -> dict[str, str]:
        """What matchers, grouping and routing see (`probe.notify.matchers.LABELS`)."""
        return {
            "rule": self.rule,
            "target": self.target,
            "severity": self.severity,
            "model": self.model,
            "engine": self.engine,
        }


@dataclass(frozen=True)
class Silence:
    """Alerts whose labels meet every matcher are not notified from `starts_at` until `ends_at`."""

    id: int
    matchers: tuple[Matcher, ...]
    starts_at: float
    ends_at: float
    author: str
    reason: str
    created_at: float
    expired_by: str | None = None

    def state(self, now: float) -> Literal["pending", "active", "expired"]:
        """Where `now` lies."""
        if now >= self.ends_at:
            return "expired"
        return "active" if now >= self.starts_at else "pending"


@dataclass(frozen=True)
class Notification:
    """One line of the outbox: one transition of one alert on its way to one receiver.

    `transition`: "firing", "resolved" or "repeat-N". `state`: "pending" (waits for its group, a retry, or the end of a
    mute), "sending", "sent", "failed" (given up; `error` says why) or "dropped" (needless by now; `error` says why).
    `unconfirmed`: a try may have arrived without an answer. `done_at` is set in the last three states.
    """

    id: int
    alert_id: int
    rule: str
    target: str
    transition: str
    receiver: str
    group_key: str
    state: str
    created_at: float
    due_at: float
    done_at: float | None
    tries: int
    unconfirmed: bool
    error: str | None
    claimed_until: float | None

    @property
    def delivered(self) -> bool:
        """Whether the receiver knows of it, or may."""
        return self.state == "sent" or self.unconfirmed


@dataclass(frozen=True)
class NoteVersion:
    """One wording of a note."""

    author: str
    at: float
    text: str


@dataclass(frozen=True)
class Note:
    """What somebody wrote about a runbook, an alert or a replay: `about` is one of `ABOUT`, `key` its id.

    `versions` has every wording, oldest first.
    """

    id: int
    about: str
    key: str
    versions: tuple[NoteVersion, ...]
    removed_at: float | None = None
    removed_by: str | None = None

    @property
    def version(self) -> int:
        """The number of the newest wording; the first is 1."""
        return len(self.versions)

    @property
    def first(self) -> NoteVersion:
        """Who wrote it, and when."""
        return self.versions[0]

    @property
    def current(self) -> NoteVersion:
        """What it says."""
        return self.versions[-1]


@dataclass(frozen=True)
class Tick:
    """Somebody said of a step of a checklist that it is done, or that it is not. `text`: the step as it read then."""

    step: str
    text: str
    done: bool
    author: str
    at: float


@dataclass(frozen=True)
class ImportedAlert:
    """An alert of somebody else's Alertmanager, as its webhook told it last.

    `status`: "firing" or "resolved". `runbook`: the id of our runbook that fits, or None. Links that are not http are
    left out ("").
    """

    fingerprint: str
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: float
    ends_at: float | None
    generator_url: str
    external_url: str
    receiver: str
    received_at: float
    runbook: str | None = None

    @property
    def name(self) -> str:
        """`alertname`, or "" where the sender gave none."""
        return self.labels.get("alertname", "")


@dataclass(frozen=True)
class Reading:
    """The newest evaluation of one rule on one target, alerting or not.

    `verdict`: "breach", "ok", "no_data" or "below_floor" (too little traffic to alert on). `state` is the alert state
    after it ("inactive" when there is no active alert).
    """

    rule: str
    target: str
    verdict: str
    state: str
    value: float | None
    threshold: float
    numerator: float | None
    denominator: float | None
    window_s: float
    summary: str
    coverage: str
    updated_at: float


@dataclass(frozen=True)
class AlertUpdate:
    """What one evaluation changes: the reading, and the alert it moves.

    `transitions` are (from, to) pairs that happened now. `reading.state` "inactive" removes a pending alert.
    """

    reading: Reading
    severity: str
    hold_s: float
    runbook: str
    progress_s: float
    transitions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Replay:
    """One run of an incident scenario; its journal is read with `store.replays.journal(id)`.

    `status` is "running", "waiting_apply", "done", "failed" or "interrupted".
    """

    id: str
    scenario: str
    target: str
    status: str
    step: str | None
    options: dict[str, Any]
    result: dict[str, Any] | None
    started_at: float
    ended_at: float | None
    owner_pid: int


@dataclass(frozen=True)
class JournalEntry:
    """One line of a replay's journal; `seq` counts from 1 without gaps."""

    seq: int
    ts: float
    step: str
    message: str
    data: dict[str, Any] | None


@dataclass(frozen=True)
class QualityRun:
    """One suite of checkable questions put to one server under one configuration (`label`).

    `status`: "running", "done" or "incomplete" (it can be resumed). Runs with the same `suite_key` asked items that
    mean the same, whose answers pair up by key. `facts` is what the server told about itself: engine, version, flags,
    kv_cache_dtype, kv_layer_dtypes, kv_bytes_per_token, dims; what it did not tell is missing.
    `result` is what `probe.quality.score.summarize` made of the items.
    """

    id: str
    target: str
    label: str
    model: str
    suite: dict[str, Any]
    suite_key: str
    facts: dict[str, Any]
    baseline_id: str | None
    status: str
    result: dict[str, Any] | None
    error: str | None
    started_at: float
    ended_at: float | None


@dataclass(frozen=True)
class QualityItem:
    """One asked question, or (task "text") the log-likelihoods of one window of text.

    `key` is the same for the same item of another run. `right` None: not a question; `valid`: the answer has the
    form that was asked for.
    """

    key: str
    task: str
    turn: int | None
    right: bool | None
    valid: bool | None
    data: dict[str, Any]


@dataclass(frozen=True)
class Lease:
    """Who may collect into this store, until when. `token` grows with every change of hands."""

    name: str
    owner: str
    token: int
    expires_at: float
