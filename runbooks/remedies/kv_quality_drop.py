"""Quality drop of a quantized KV cache: the format that holds quality on this very model with the fewest bytes.

Measured candidates decide. Without them only full precision is sure; cheaper formats are named, as not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.memory import kv_bytes_per_token
from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.flags import default_of, why_absent, why_value_absent
from runbooks.kv_dtypes import FP8, FULL_PRECISION
from runbooks.quality_candidates import HOLDS_DROP, QualityCandidate, is_set
from runbooks.remedies.format_pool import PoolAfter, cost_in_words, pool_after, storm_warning

DTYPE = "--kv-cache-dtype"
SKIP_LAYERS = "--kv-cache-dtype-skip-layers"
LAYERS = "--kv-cache-dtype-layers"
SCALES = "--calculate-kv-scales"
MEASURE = "kvoncall quality --target TARGET --baseline RUN_ID"


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `kv-quality-drop` runbook."""
    draft = Draft("kv-quality-drop", facts)
    return _by_measurement(draft) if facts.quality_candidates else _without_measurement(draft)


def _by_measurement(draft: Draft) -> Recommendation:
    facts = draft.facts
    running = next((c for c in facts.quality_candidates if _in_force(facts, c.settings)), None)
    if running is not None and running.holds:
        return draft.done(
            f"No change: {running.name} runs and holds quality as measured on this model ({running.fall}); look for "
            "another cause: engine version, attention backend, chat template, or a baseline of another model"
        )
    fit: list[tuple[QualityCandidate, PoolAfter]] = []
    for candidate in facts.quality_candidates:
        pool = pool_after(facts, candidate.settings, candidate.kv_bytes_per_token)
        if candidate is running:
            draft.refuse(*candidate.key_flag, f"{candidate.name}: no change, it runs now and {candidate.fall}")
            continue
        reason = _why_unusable(facts, candidate) or (f"does not fit: {pool.problem}" if pool.problem else None)
        if reason is None:
            fit.append((candidate, pool))
        else:
            draft.refuse(*candidate.key_flag, f"{candidate.name}: {reason}")
    if not fit:
        draft.lacks("a measured format that holds quality and fits; measure more with `kvoncall quality`")
        return draft.done("None of the formats measured on this model both holds quality and can run on this target")
    best, pool = min(fit, key=lambda found: _rank(found[0]))
    for candidate, _ in fit:
        if candidate is not best:
            draft.refuse(*candidate.key_flag, f"{candidate.name}: {_why_not_best(candidate, best)}")
    _propose(draft, best, running, pool)
    return draft.done(_summary(facts, best, running))


def _rank(candidate: QualityCandidate) -> tuple[float, float, float]:
    return candidate.kv_bytes_per_token, candidate.drop, candidate.mean_kl or 0.0


def _why_unusable(facts: TargetFacts, candidate: QualityCandidate) -> str | None:
    for flag, value in candidate.flags.items():
        if is_set(value):
            absent = why_absent(facts.engine, facts.version, flag)
            absent = absent or why_value_absent(facts.engine, facts.version, flag, value)
            if absent is not None:
                return absent
    if candidate.holds:
        return None
    if candidate.drop > HOLDS_DROP:
        return f"{candidate.fall} at {candidate.kv_bytes_per_token} bytes per token"
    return f"{candidate.fall}: little, but beyond doubt"


def _why_not_best(candidate: QualityCandidate, best: QualityCandidate) -> str:
    mine, least = candidate.kv_bytes_per_token, best.kv_bytes_per_token
    held = candidate.fall if candidate.full_precision else f"holds: {candidate.fall}"
    if mine == least:
        return f"{held}, at the same {mine} bytes per token as {best.name}, which falls no more"
    return f"{held}, but takes {mine / least:.1f}x the bytes ({mine} per token, {best.name} {least})"


def _propose(draft: Draft, best: QualityCandidate, running: QualityCandidate | None, pool: PoolAfter) -> None:
    facts = draft.facts
    full = next((c for c in facts.quality_candidates if c.full_precision), None)
    before = facts.kv_bytes_per_token or (running.kv_bytes_per_token if running else None)
    share = ""
    if full is not None and full is not best:
        part = best.kv_bytes_per_token / full.kv_bytes_per_token
        share = f", {part:.0%} of the {full.kv_bytes_per_token} of full precision"
    why = f"measured on this model: {best.name} {best.fall}"
    if running is not None:
        why += f"; {running.name}, which runs, {running.fall}"
    why += (
        f". Of {len(facts.quality_candidates)} formats measured, it holds quality with the fewest bytes: "
        f"{best.kv_bytes_per_token} per token{share}."
    )
    expected = (
        f"accuracy {best.accuracy:.1%}, that of full precision as measured"
        if best.full_precision
        else (f"accuracy {best.accuracy:.1%} on the questions measured, within 1 point of full precision")
    )
    for flag, value in best.settings.items():
        if not _same(facts, flag, value):
            draft.propose(
                flag,
                value,
                why=why,
                expected=expected,
                cost=cost_in_words(facts, before, best.kv_bytes_per_token, pool),
                verify=MEASURE,
            )


def _summary(facts: TargetFacts, best: QualityCandidate, running: QualityCandidate | None) -> str:
    words = f"Set the KV cache to {best.name}, measured on this model: {best.fall}, {best.kv_bytes_per_token} bytes "
    words += "per token"
    now = facts.kv_bytes_per_token or (running.kv_bytes_per_token if running else None)
    return words + (f" in place of {now}" if now is not None else "")


def _in_force(facts: TargetFacts, flags: Mapping[str, Any]) -> bool:
    return all(_same(facts, flag, value) for flag, value in flags.items())


def _same(facts: TargetFacts, flag: str, value: Any) -> bool:
    """Whether a flag has this value now; a flag that is not known to be set has its default."""
    now, default = facts.flags.get(flag), default_of(facts.engine, facts.version, flag)
    now = now if is_set(now) else default
    value = value if is_set(value) else default
    return now == value or (not is_set(now) and not is_set(value))


def _without_measurement(draft: Draft) -> Recommendation:
    """Back to the model's own precision; 8 bits where that pool would not carry the load."""
    facts = draft.facts
    now, layers = facts.flags.get(DTYPE), is_set(facts.flags.get(LAYERS))
    if now is None:
        draft.lacks(f"the {DTYPE} in force")
        return draft.done("Nothing can be computed before the format of the KV cache is known")
    if now in FULL_PRECISION and not layers:
        return draft.done(
            f"No change: {DTYPE} is {now}, so the cache keeps what the model computes; look for another cause: engine "
            "version, attention backend, chat template, or a baseline of another model"
        )
    draft.lacks(f"measured formats: `kvoncall quality --target embedded --model MODEL --dtypes auto,{now},...`")
    if facts.dims is None:
        draft.lacks("the model's dimensions, to compute bytes per token and what the pool then holds")
    flags: dict[str, Any] = {DTYPE: "auto"}
    if layers:
        flags[LAYERS] = None
    eight_bit = _eight_bit(facts, now)
    pool = pool_after(facts, flags, _bytes(facts, "auto"))
    short = pool.problem or storm_warning(facts, pool.tokens)
    to = "auto"
    if short and eight_bit is not None:
        draft.refuse(DTYPE, "auto", f"restores quality for sure, but the pool would be too small: {short}")
        to, flags[DTYPE] = eight_bit, eight_bit
        pool = pool_after(facts, flags, _bytes(facts, eight_bit))
    elif pool.problem:
        draft.refuse(DTYPE, "auto", f"does not fit: {pool.problem}")
        return draft.done("Full precision does not fit this target; shorten --max-model-len or measure other formats")
    _propose_unmeasured(draft, flags, to, pool)
    _name_alternatives(draft, now, to, eight_bit)
    return draft.done(f"Set {DTYPE} to {to}; not measured on this model. Measure formats before choosing a cheaper one")


def _propose_unmeasured(draft: Draft, flags: Mapping[str, Any], to: str, pool: PoolAfter) -> None:
    facts = draft.facts
    now = facts.flags[DTYPE]
    if to == "auto":
        why = f"{now} quantizes the cache; auto keeps keys and values at the model's own precision (16 bits as a rule)."
        expected = "the quality of the unquantized model (16 bits as a rule); this needs no measurement"
    else:
        why = (
            f"{to} keeps keys and values in 8 bits, {now} does with less or with one scale for all; keys carry the "
            "damage, and published measurements of 8-bit formats are within noise. It is not measured on this model."
        )
        expected = "most or all of the fall repaired; measure before relying on it"
    for flag, value in flags.items():
        if not _same(facts, flag, value):
            draft.propose(
                flag,
                value,
                why=why,
                expected=expected,
                cost=cost_in_words(facts, facts.kv_bytes_per_token, _bytes(facts, to), pool),
                verify=MEASURE,
            )


def _name_alternatives(draft: Draft, now: Any, chosen: str, eight_bit: str | None) -> None:
    """What may cost less, for a measurement to decide; only what exists for this engine and version."""
    facts = draft.facts
    unmeasured = "not measured on this model"
    if eight_bit is not None and eight_bit != chosen:
        draft.refuse(DTYPE, eight_bit, f"{unmeasured}: about half the bytes of 16 bits, within noise where published")
    if now in FP8 and not facts.flags.get(SCALES) and why_absent(facts.engine, facts.version, SCALES) is None:
        draft.refuse(
            SCALES,
            True,
            f"{unmeasured}: scales of 1.0 clip large keys; scales from the first batch repair most of that",
        )
    absent = why_absent(facts.engine, facts.version, SKIP_LAYERS)
    draft.refuse(
        SKIP_LAYERS,
        "the most sensitive layers",
        absent or f"{unmeasured}: which layers is found by measuring them one by one, not by rule",
    )


def _eight_bit(facts: TargetFacts, now: Any) -> str | None:
    """The finest format below full precision that this engine and version has, if it is finer than the one in force."""
    if now in (*FULL_PRECISION, "int8_per_token_head", "fp8_per_token_head"):
        return None
    choices = ("int8_per_token_head",) if now in FP8 else ("int8_per_token_head", "fp8")
    exists = (v for v in choices if why_value_absent(facts.engine, facts.version, DTYPE, v) is None)
    return next(exists, None)


def _bytes(facts: TargetFacts, kv_cache_dtype: str) -> int | None:
    """Bytes per token of a format for all layers; None for a model or a format that is not known here."""
    if facts.dims is None or facts.block_size is None:
        return None
    try:
        return kv_bytes_per_token(facts.dims, kv_cache_dtype, facts.block_size)
    except ValueError:
        return None
