"""A KV cache format that the GPU, the attention backend, the checkpoint or the version does not take.

The nearest one that works: the same number of bits first, then more. Nothing is measured, so quality is to be.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import flag_for, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED, why_value_absent
from runbooks.hardware import storage_only, why_not_on
from runbooks.kv_dtypes import bits_of

ID = "kv-dtype-unsupported"
_NEAREST = (
    "fp8_e4m3", "fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head",
    "turboquant_k8v4", "turboquant_4bit_nc", "auto",
)  # fmt: skip
STARTS = "up == 1"


def advise(facts: TargetFacts) -> Recommendation:
    """The nearest format that works here."""
    draft = Draft(ID, facts)
    flag = flag_for(facts.engine, "--kv-cache-dtype")
    now = facts.flags.get(flag)
    draft.step("Before traffic: `kvoncall quality --target TARGET`, as another format gives other answers")
    if now is None or now == "auto":
        draft.lacks(f"the {flag} that was refused")
        return draft.done(f"{flag} is {now or 'unset'}: the cache keeps the model's own format, which every GPU takes")
    problem = _problem(facts, flag, str(now))
    if problem is None:
        if facts.compute_capability is None:
            draft.lacks("the GPU's compute capability")
        draft.refuse(
            flag, now, "nothing known speaks against it here; the backend may: its name is in the start-up log"
        )
        return draft.done(f"Nothing known speaks against {now} on this target; see the error for the backend's name")
    chosen = next((v for v in _candidates(str(now)) if v != now and _problem(facts, flag, v) is None), None)
    if chosen is None:
        return draft.done(f"{problem}. No other format is known to work here")
    why_not = [f"{v}: {p}" for v in _candidates(str(now)) if v not in (now, chosen) and (p := _problem(facts, flag, v))]
    for text in why_not[:3]:
        draft.refuse(flag, text.split(":")[0], text.split(": ", 1)[1])
    draft.propose(
        flag,
        chosen,
        why=f"{problem}. {chosen} is the nearest that works: {_bits(chosen)} in place of {_bits(str(now))}.",
        expected=f"it starts; {_room(facts, str(now), chosen)}",
        cost=_cost(facts, chosen),
        verify=STARTS,
    )
    if (
        has_vllm_flags(facts.engine)
        and facts.engine != EMBEDDED
        and "flashinfer" not in str(facts.attention_backend).lower()
    ):
        draft.step(
            "Or another attention backend for the same format: FlashInfer stores fp8 on Ampere since vLLM 0.10.2 "
            "(--attention-backend, before 0.13 VLLM_ATTENTION_BACKEND=FLASHINFER)"
        )
    if not draft.changes:
        return draft.done(f"{problem}. No other format can be recommended")
    return draft.done(f"{problem}: {flag} {chosen}")


def _problem(facts: TargetFacts, flag: str, value: str) -> str | None:
    return why_value_absent(facts.engine, facts.version, flag, value) or why_not_on(
        facts.compute_capability,
        value,
        checkpoint_quantization=facts.checkpoint_quantization,
        attention_backend=facts.attention_backend,
        engine=facts.engine,
        version=facts.version,
        mla=facts.mla,
    )


def _candidates(now: str) -> list[str]:
    """As many bits as the refused format first, then more, fewest first; full precision is last."""
    wanted = sum(bits_of(now) or (8, 8))

    def distance(value: str) -> tuple[int, int]:
        bits = sum(bits_of(value) or (16, 16))
        return (bits - wanted if bits >= wanted else 100 + wanted - bits, _NEAREST.index(value))

    return [v for v in sorted(_NEAREST, key=distance) if sum(bits_of(v) or (16, 16)) >= wanted]


def _bits(value: str) -> str:
    bits = bits_of(value)
    if bits is None:
        return "an unknown number of bits"
    return f"{bits[0]} bits" if bits[0] == bits[1] else f"{bits[0]} bits for keys and {bits[1]} for values"


def _room(facts: TargetFacts, now: str, chosen: str) -> str:
    before, after, pool = bits_of(now), bits_of(chosen), facts.kv_cache_size_tokens
    if before is None or after is None:
        return "how much the pool then holds (0.5 to 2 times) shows in the start-up log"
    factor = sum(before) / sum(after)
    if factor == 1:
        return "the pool holds as many tokens" + (f", {pool}" if pool is not None else ": 1.0 times")
    tokens = "" if pool is None else f", about {int(pool * factor)} in place of {pool}"
    return f"the pool holds {factor:.2g} times the tokens of {now}{tokens}"


def _cost(facts: TargetFacts, chosen: str) -> str:
    if chosen == "auto":
        return "16 bits a value: twice the bytes of an 8-bit format"
    if storage_only(facts.compute_capability, chosen):
        return "storage only on this GPU: half the bytes, computed in 16 bits, no faster; answers may change"
    return "answers may change: other roundings than the format that was meant"
