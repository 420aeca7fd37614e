"""Which alerts are exported for one engine's version, under which names, with which words.

Annotations are Prometheus templates; numerator and denominator of a ratio are queried when the alert is written.
Rules that cannot be told there are `left_out` with the reason, never silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from probe.alerts.expr import Arithmetic, Expr, Logical
from probe.alerts.rule import AbsenceSignal, Rule, ValueSignal, scaled
from probe.alerts.rules import DEFAULT_RULES
from probe.dialects import DialectError, load_dialect
from probe.export.naming import RULE_BREACH, ExportError, Names, NotExposedError, job_matcher
from probe.export.promql import duration, promql
from probe.export.stand_in import PROCESS_START, REQUIRED_MISSING, stand_in
from probe.store import Target

DEFAULT_DIALECT = "vllm@0.33.0"
DEFAULT_BASE_URL = "http://localhost:8501"
ALL_MISSING = "KVAllTargetsMissing"


@dataclass(frozen=True)
class Options:
    """What to export for: `dialect` is ENGINE@VERSION, `base_url` where this app answers.

    Windows hold six scrapes at least, and all times are multiplied by `time_scale` (for drills).
    """

    dialect: str = DEFAULT_DIALECT
    base_url: str = DEFAULT_BASE_URL
    jobs: tuple[str, ...] = ()
    by_model: bool = False
    scrape_interval_s: float = 15.0
    time_scale: float = 1.0
    spelling: str | None = None


@dataclass(frozen=True)
class ExportedAlert:
    """One alert of the rule `original`. `rule` is what Prometheus evaluates in its place, as our own evaluator does.

    Not `told_by_rule`: the expression is another one, that only Prometheus has (absent, resets).
    """

    name: str
    original: Rule
    expr: str
    rule: Rule
    severity: str
    hold_s: float
    keep_firing_s: float
    summary: str
    description: str
    runbook_url: str
    static_labels: tuple[tuple[str, str], ...] = ()
    told_by_rule: bool = True

    @property
    def rule_id(self) -> str:
        """The id of the rule."""
        return self.original.id

    @property
    def labels(self) -> dict[str, str]:
        """The labels every instance of it carries."""
        return {"severity": self.severity, "kvoncall_rule": self.rule_id, **dict(self.static_labels)}


@dataclass(frozen=True)
class Recording:
    """A recorded value: what a rule compares, where there is traffic enough to judge it."""

    name: str
    rule_id: str
    expr: str


@dataclass(frozen=True)
class Selection:
    """What is exported. `left_out`: (rule id, why not). `notes`: what to know about names and meanings."""

    names: Names
    options: Options
    alerts: tuple[ExportedAlert, ...]
    recordings: tuple[Recording, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def dialect(self) -> str:
        """ENGINE@VERSION whose names are used."""
        engine = self.names.dialect.engine
        version = self.names.dialect.nearest(self.names.version)[0]
        return f"{engine}@{version}" if version else engine


def names_of(options: Options) -> tuple[Names, str | None]:
    """The names an export uses, and a sentence where the version's are assumed."""
    engine, _, version = options.dialect.partition("@")
    try:
        dialect = load_dialect(engine, version or None, options.spelling)
    except DialectError as error:
        raise ExportError(str(error)) from None
    return Names(dialect, version or None, options.jobs, by_model=options.by_model), dialect.nearest(version or None)[1]


def select(options: Options, rules: Sequence[Rule] = DEFAULT_RULES) -> Selection:
    """Everything that can be exported; raises `ExportError` where the options make no sense."""
    options = dataclasses.replace(options, base_url=_checked_url(options.base_url))
    names, assumed = names_of(options)
    alerts: list[ExportedAlert] = []
    recordings: list[Recording] = []
    left_out: list[tuple[str, str]] = []
    notes = [assumed] if assumed else []
    for rule in rules:
        own = names_for(rule, names)
        try:
            found, recording = _alerts(rule, own, options), _recording(rule, own, options)
        except NotExposedError as error:
            left_out.append((rule.id, str(error)))
            continue
        alerts += found
        recordings += recording
        names.notes.update(own.notes)
    if any(_reads_own(alert.rule) for alert in alerts):
        notes.append(f"{RULE_BREACH} is told by {options.base_url}/metrics: scrape that, too.")
    if not options.jobs:
        notes.append(f"Targets are looked for in the job {names.own_jobs[0]}: name yours with --job.")
    notes += [f"{note}." for note in names.notes.values()]
    return Selection(names, options, tuple(alerts), tuple(recordings), tuple(left_out), tuple(notes))


def names_for(rule: Rule, names: Names) -> Names:
    """The names for one rule: by model only where its metrics are told by model, not where they are the process's."""
    told = isinstance(rule.signal, ValueSignal) and REQUIRED_MISSING not in rule.metrics
    return dataclasses.replace(names, by_model=names.by_model and told, notes={})


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ExportError(f"The address of the app must be http://… or https://…, not {url!r}.")
    if parts.username or parts.password:
        raise ExportError("The address of the app must not contain a user or password: it is written into every alert.")
    return url.rstrip("/")


def alert_name(rule_id: str) -> str:
    """The alert of a rule: eviction-storm is KVEvictionStorm, kv-saturated KVSaturated."""
    return "KV" + "".join(part.capitalize() for part in rule_id.removeprefix("kv-").split("-"))


def _fitted(rule: Rule, options: Options) -> Rule:
    """The rule's times for targets that are scraped at the interval."""
    target = Target(
        0, "", "", "external", "", [], {}, options.scrape_interval_s, options.time_scale, active=True, created_at=0.0
    )
    return scaled(rule, target)


def _alerts(rule: Rule, names: Names, options: Options) -> list[ExportedAlert]:
    reset_alert = rule.id == "oom" and not names.has(PROCESS_START)
    said = stand_in(_fitted(rule, options), names)
    assert isinstance(said.signal, ValueSignal)
    assert said.condition is not None
    on = "{{ $labels.target }}" if said.comparison == "==" and _reads_own(said) else "{{ $labels.instance }}"
    main = ExportedAlert(
        name=alert_name(rule.id),
        original=rule,
        expr=_resets(said, names) if reset_alert else promql(said.condition, names),
        rule=said,
        told_by_rule=not reset_alert,
        severity=rule.severity,
        hold_s=said.hold_s,
        keep_firing_s=said.keep_firing_s,
        summary=f"{rule.title}: {on}",
        description=_description(said, said.signal, names),
        runbook_url=f"{options.base_url}/runbooks?runbook={quote(rule.runbook)}",
    )
    if not isinstance(rule.signal, AbsenceSignal):
        return [main]
    return [main, *(_all_missing(main, job) for job in names.own_jobs)]


def _reads_own(rule: Rule) -> bool:
    return RULE_BREACH in rule.metrics


def _all_missing(main: ExportedAlert, job: str) -> ExportedAlert:
    """Fires when no target of a job is up, also when none is left to be scraped: other rules see nothing then."""
    return dataclasses.replace(
        main,
        name=ALL_MISSING,
        expr=f"absent(up{{{job_matcher((job,))}}} == 1)",
        told_by_rule=False,
        summary=f"No target of job {job} is up",
        description="every target is down, or gone from service discovery",
        static_labels=(("job", job),),
    )


def _resets(said: Rule, names: Names) -> str:
    """A restart told by a counter that begins again, for engines that do not tell when they started."""
    counters = ("requests_finished_total", "generation_tokens_total", "prompt_tokens_total")
    counter = next((name for name in counters if names.has(name)), None)
    if counter is None:
        raise NotExposedError(f"{names.dialect.engine} exposes neither when it started nor a counter of its work")
    return f"max by (job, instance) (resets({names.select(counter).selector}[{duration(said.window_s)}])) > 0"


def _recording(rule: Rule, names: Names, options: Options) -> list[Recording]:
    if not isinstance(rule.signal, ValueSignal) or REQUIRED_MISSING in rule.metrics:
        return []
    said = stand_in(_fitted(rule, options), names)
    signal = said.signal
    assert isinstance(signal, ValueSignal)
    value = signal.value if signal.floor is None else Logical("and", signal.value, signal.floor)
    level = "_".join(label for label in names.labels(signal.per) if label != "job")
    name = f"{level}:kvoncall_{rule.id.replace('-', '_')}:{duration(said.window_s)}"
    return [Recording(name, rule.id, promql(value, names))]


def _description(rule: Rule, signal: ValueSignal, names: Names) -> str:
    parts = {"numerator": signal.numerator, "denominator": signal.denominator}
    return signal.sentence.format(
        value=value_template(signal.unit, "$value"),
        window=duration(rule.window_s),
        threshold=rule.threshold,
        where="",
        **{name: "" if part is None else _queried(part, signal, names) for name, part in parts.items()},
    )


def _queried(part: Expr, signal: ValueSignal, names: Names) -> str:
    """A template that reads an expression for the alert's own target."""
    labels = names.labels(())
    matchers = tuple(f"{label}=%[{i}]q" for i, label in enumerate(labels, 1))
    text = " ".join(promql(part, dataclasses.replace(names, jobs=(), matchers=matchers)).split())
    arguments = " ".join(f"$labels.{label}" for label in labels)
    value = value_template(part_unit(part, signal), "")
    return f"{{{{ with printf `{text}` {arguments} | query }}}}{value}{{{{ else }}}}?{{{{ end }}}}"


def part_unit(part: Expr, signal: ValueSignal) -> str:
    """How a numerator or denominator is said: a ratio of its own in percent, anything else as a count."""
    return "percent" if signal.unit == "percent" and _is_ratio(part) else "count"


def _is_ratio(part: Expr) -> bool:
    return isinstance(part, Arithmetic) and part.op == "/"


def value_template(unit: str, variable: str) -> str:
    """A template of a number: `variable` "" reads the result of a query."""
    subject = variable or ". | first | value"
    shown = "humanizePercentage" if unit == "percent" else "humanize"
    return f"{{{{ {subject} | {shown} }}}}"


def said(unit: str, value: float) -> str:
    """The text that `value_template` gives for 0 or a finite value of 1 or more (percent: any finite value)."""
    if unit == "percent":
        return f"{value * 100:.4g}%"
    power = 0
    while value >= 1000 and power < 3:
        value, power = value / 1000, power + 1
    return f"{value:.4g}{('', 'k', 'M', 'G')[power]}"
