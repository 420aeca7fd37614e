"""`kvoncall quality`: which arms are measured, on which servers, against which baseline; what is printed.

"embedded" starts an engine of its own for each format and leaves every other server alone; a URL or the name of a
watched target is asked where it runs.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine import gemma
from probe.alerts.quality import ROUND_EVENT
from probe.commands.output import log_dir, open_store
from probe.quality.canary import Canary, canary_spec
from probe.quality.lab import TARGET, Arm, Lab
from probe.quality.lm_eval import run_lm_eval
from probe.quality.run import run_suite
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import QualityRun, Store
from probe.targets import api_key_from, attach_target, find_server

EMBEDDED = "embedded"
DEFAULT_DTYPES = "auto,fp8_e4m3,int8_per_token_head,int8k_int4v,int4_symmetric,int4_per_token_head,int4_kivi"
BASELINE_LABEL = "baseline"
# Gemma 3 270M as float32 does not fit the default device, and likelihoods over its 262,144 tokens take memory beside
# the pool; what the user's flags say comes later and wins.
GEMMA_FLAGS = (
    "--device-memory 5GiB --kv-cache-memory-bytes 512MiB --max-model-len 2048 --max-num-batched-tokens 256 "
    "--max-num-seqs 8"
)
# Of a run's flags, what belongs to its process and not to what it measured.
_OF_THE_PROCESS = frozenset({"--port", "--host", "--api-key", "--exit-with-parent"})

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a command found: JSON-ready, the runs behind it, and the exit code."""

    value: dict[str, Any]
    code: int


def spec_of(options: argparse.Namespace) -> SuiteSpec:
    """The suite the options ask for."""
    tasks = () if options.tasks == "none" else tuple(t.strip() for t in options.tasks.split(",") if t.strip())
    return SuiteSpec(
        kind=options.suite,
        turns=options.turns,
        conversations=options.conversations,
        context=options.context,
        tasks=tasks,
        text_windows=options.windows,
        chat=options.chat,
    )


def measure(options: argparse.Namespace, report: Report) -> Outcome:
    """Runs what the options ask for; raises `QualityError` and the errors of engines, targets and the store."""
    text = _read_text(options.text)
    with open_store(options) as store:
        bench = _Measurement(store, options, spec_of(options), text, report)
        runs = list(bench.resumed(options.resume) if options.resume else bench.arms())
    arms = [arm(run) for run in runs]
    value = {"suite": runs[0].suite, "model": runs[0].model, "arms": arms}
    return Outcome(value, 1 if any(is_worse(found) for found in arms) else 0)


def arm(run: QualityRun) -> dict[str, Any]:
    """A finished run as JSON-ready data: label, run_id, status, facts, and its result."""
    return {"label": run.label, "run_id": run.id, "status": run.status, "facts": run.facts, **(run.result or {})}


def is_worse(found: dict[str, Any]) -> bool:
    """Whether an arm is worse than its baseline, over all or in one task."""
    against = found.get("against")
    return against is not None and "worse" in (against["verdict"], *(t["verdict"] for t in against["tasks"].values()))


def run_canary(options: argparse.Namespace, report: Report) -> Outcome:
    """Rounds on a schedule until `--rounds` are done; a failed round is reported and the next one comes.

    The code is that of the last round. Raises `QualityError` when it failed.
    """
    with open_store(options) as store:
        target, url = _server(store, options.target, attach=True)
        baseline = _stored(store, options.baseline) if options.baseline else None
        key = api_key_from(options.api_key_env)
        canary = Canary(store, target, url, canary_spec(spec_of(options)), baseline, api_key=key)
        runs: list[QualityRun] = []
        for number, outcome in enumerate(canary.rounds(options.every), start=1):
            if isinstance(outcome, QualityError):
                report(f"round {number} failed: {outcome}")
            else:
                runs.append(outcome)
                report(f"round {number}: {store.events.recent(1, target, [ROUND_EVENT])[0].message}")
            if options.rounds and number >= options.rounds:
                break
    if isinstance(outcome, QualityError):
        raise outcome
    arms = [arm(run) for run in runs]
    return Outcome({"suite": runs[-1].suite, "model": runs[-1].model, "arms": arms}, 1 if is_worse(arms[-1]) else 0)


def run_harness(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Runs the user's lm-eval against the target; its figures, JSON-ready."""
    with open_store(options) as store:
        target, url = _server(store, options.target)
        run = run_lm_eval(
            store,
            url,
            options.lm_eval,
            options.lm_eval_args,
            target=target,
            api_key=api_key_from(options.api_key_env),
            progress=report,
        )
    return {"model": run.model, "run_id": run.id, "lm_eval": (run.result or {})["lm_eval"]}


def list_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Stored runs, newest first, JSON-ready."""
    with open_store(options) as store:
        runs = store.quality.list()
    return [{"started_at": run.started_at, "target": run.target, "error": run.error, **arm(run)} for run in runs]


class _Measurement:
    """What the arms of one command share."""

    def __init__(
        self, store: Store, options: argparse.Namespace, spec: SuiteSpec, text: str | None, report: Report
    ) -> None:
        self._store = store
        self._options = options
        self._spec = spec
        self._text = text
        self._report = report

    def arms(self) -> Iterator[QualityRun]:
        """The runs asked for, in order, the baseline first where it is measured here."""
        options = self._options
        baseline = self._baseline(options.baseline) if options.baseline else None
        if baseline is not None and _is_url(options.baseline):
            yield baseline
        if options.target != EMBEDDED:
            if options.dtypes:
                raise QualityError("--dtypes needs --target embedded: a running server keeps its format")
            target, url = _server(self._store, options.target)
            yield self._ask(url, target, target, baseline)
            return
        arms = [Arm(name, {"--kv-cache-dtype": name}) for name in _words(options.dtypes or DEFAULT_DTYPES)]
        with self._lab(self._base_flags()) as lab:
            if baseline is None:
                baseline = lab.measure(arms.pop(0), self._spec, text=self._text)
                yield baseline
            yield from lab.measure_all(arms, self._spec, baseline=baseline, text=self._text)

    def resumed(self, run_id: str) -> Iterator[QualityRun]:
        """An incomplete run, gone on with."""
        run = _stored(self._store, run_id)
        if run.status == "done":
            raise QualityError(f"run {run_id} is complete; there is nothing to resume")
        if run.target == TARGET:
            told = run.facts.get("flags") or {}
            flags = {flag: value for flag, value in told.items() if flag not in _OF_THE_PROCESS}
            with self._lab([]) as lab:
                yield lab.measure(Arm(run.label, flags), self._spec, resume=run, text=self._text)
            return
        where = self._options.target if self._options.target != EMBEDDED else run.target
        _, url = _server(self._store, where)
        yield self._ask(url, run.target, run.label, None, resume=run)

    def _ask(
        self, url: str, target: str, label: str, baseline: QualityRun | None, resume: QualityRun | None = None
    ) -> QualityRun:
        return run_suite(
            self._store,
            url,
            self._spec,
            target=target,
            label=label,
            baseline=baseline,
            resume=resume,
            text=self._text,
            api_key=api_key_from(self._options.api_key_env),
            progress=self._report,
        )

    def _baseline(self, where: str) -> QualityRun:
        if _is_url(where):
            return self._ask(where, where, BASELINE_LABEL, None)
        return _stored(self._store, where)

    def _base_flags(self) -> list[str]:
        try:
            flags = shlex.split(self._options.engine_flags)
        except ValueError as error:
            raise QualityError(f"--engine-flags cannot be read: {error}") from None
        if self._options.model == gemma.NAME:
            self._report(gemma.NOTICE)
            flags = [*GEMMA_FLAGS.split(), *flags]
        return [*flags, "--model", self._options.model] if self._options.model else flags

    def _lab(self, flags: Sequence[str]) -> Lab:
        return Lab(self._store, flags, log_dir=log_dir(self._options), progress=self._report)


def _server(store: Store, where: str, *, attach: bool = False) -> tuple[str, str]:
    """(name, URL) of a stored target or an address; `attach` registers an address that is no target yet."""
    if where == EMBEDDED:
        raise QualityError("this needs a running server: give --target URL, or the name of a watched target")
    name, url = find_server(store, where)
    if attach and store.targets.get(name) is None:
        target = attach_target(store, where)
        return target.name, target.url
    return name, url


def _stored(store: Store, run_id: str) -> QualityRun:
    run = store.quality.get(run_id)
    if run is None:
        raise QualityError(f"there is no quality run {run_id!r}; `kvoncall quality --list` names them")
    return run


def _is_url(where: str) -> bool:
    return urlsplit(where).scheme in ("http", "https")


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) != len(words):
        raise QualityError("--dtypes lists KV formats once each, separated by commas")
    return words


def _read_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QualityError(f"the text {path} cannot be read: {error}") from None
    if not text.strip():
        raise QualityError(f"the text {path} is empty")
    return text
