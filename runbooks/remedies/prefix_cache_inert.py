"""Prefix caching is accepted and can never hit: it is off, or a block is longer than what prompts share.

Only whole blocks are found. On hybrid models the block is padded to the recurrent state and may hold thousands of
tokens; then the context, or a finer unit to match by, is what can move.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import flag_for, has_vllm_flags, prefix_hits_query
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED, why_absent
from runbooks.in_force import value_in_force
from runbooks.isolation_flags import PREFIX_CACHING

ID = "prefix-cache-inert"
BLOCK, LENGTH, UNIT = "--block-size", "--max-model-len", "--prefix-match-unit"
SMALL_BLOCK = 16
USEFUL_BLOCKS = 4  # a context that holds as many lets a cache be of use


def advise(facts: TargetFacts) -> Recommendation:
    """The cache switched on, or a smaller block; else what can move."""
    draft = Draft(ID, facts)
    block, prompt = facts.block_size, facts.traffic.prompt_tokens_mean
    if block is not None and prompt is not None:
        draft.step(
            f"Expect floor({prompt:.0f} / {block}) x {block} = {int(prompt) // block * block} tokens of a prompt to be "
            "found at most; with speculative decoding one block less"
        )
    draft.step("Share what is the same at the front of prompts, two blocks of it at least")
    if not has_vllm_flags(facts.engine):
        return _elsewhere(draft)
    _switch_on(draft)
    if block is None:
        draft.lacks("the block size (cache_config_info, or the start-up log)")
    else:
        _smaller_block(draft, block)
        _longer_context(draft, block)
        _finer_unit(draft, block)
    if not draft.changes:
        return draft.done(_summary(block, prompt))
    return draft.done("Let prompts hit: " + ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes))


def _word(value: object) -> str:
    return {True: "on", None: "unset"}.get(value, str(value)) if value is True or value is None else str(value)


def _summary(block: int | None, prompt: float | None) -> str:
    if block is not None and prompt is not None and prompt >= 2 * block:
        return f"Prompts of {prompt:.0f} tokens have whole blocks of {block}: if nothing hits, see prefix-hit-collapse"
    return "No flag makes it hit: share longer prefixes, or use a version with a finer unit to match by"


def _switch_on(draft: Draft) -> None:
    facts = draft.facts
    now = value_in_force(facts, PREFIX_CACHING).value
    if now is False or (now is None and facts.flags.get(PREFIX_CACHING, 0) is None):
        draft.propose(
            PREFIX_CACHING,
            True,
            why="the prefix cache is off, so 0 tokens can be found.",
            expected="from 0 to what prompts share, in whole blocks, once it was computed",
            cost="not while prefix-isolation-breach is open: switching it off is that page's first aid",
            verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
        )


def _smaller_block(draft: Draft, block: int) -> None:
    facts = draft.facts
    if facts.hybrid and facts.flags.get(BLOCK) is None:
        draft.refuse(BLOCK, SMALL_BLOCK, "will not help: the block of a hybrid model is padded to its recurrent state")
        return
    prompt = facts.traffic.prompt_tokens_mean
    if block <= SMALL_BLOCK:
        draft.refuse(BLOCK, block, f"no change: blocks of {block} tokens are small already")
        return
    if prompt is not None and prompt >= USEFUL_BLOCKS * block:
        draft.refuse(BLOCK, SMALL_BLOCK, f"not the cause: prompts of {prompt:.0f} tokens have whole blocks of {block}")
        return
    lost = "" if prompt is None else f" A prompt of {prompt:.0f} tokens has {int(prompt) // block} whole blocks."
    gain = (
        "" if prompt is None else f"up to {int(prompt) // SMALL_BLOCK * SMALL_BLOCK} tokens of a prompt can be found, "
    )
    draft.propose(
        BLOCK,
        SMALL_BLOCK,
        why=f"only whole blocks are found, and one has {block} tokens.{lost}",
        expected=f"{gain}{block // SMALL_BLOCK} times finer",
        cost="more blocks to look up and to list; the cache starts empty",
        verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
    )


def _longer_context(draft: Draft, block: int) -> None:
    """A context shorter than a block can never have a whole one."""
    facts = draft.facts
    longest = facts.max_model_len
    if longest is None or longest >= USEFUL_BLOCKS * block or any(c.flag == BLOCK for c in draft.changes):
        return
    to = USEFUL_BLOCKS * block
    model = facts.shape.max_position_embeddings if facts.shape is not None else None
    if model is not None and to > model:
        draft.refuse(LENGTH, to, f"will not help: the model takes {model} tokens at most")
        return
    if facts.kv_cache_size_tokens is not None and to > facts.kv_cache_size_tokens:
        draft.refuse(LENGTH, to, f"does not fit: the pool holds {facts.kv_cache_size_tokens} tokens")
        return
    if model is None or facts.kv_cache_size_tokens is None:
        draft.lacks("the longest context of the model and the pool's size")
        return
    draft.propose(
        LENGTH,
        to,
        why=f"a context of {longest} tokens has {longest // block} whole blocks of {block}; {to} has {USEFUL_BLOCKS}.",
        expected=f"prefixes of {block} tokens and more are found",
        cost="longer requests are accepted, and may need more of the pool each",
        verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
    )


def _finer_unit(draft: Draft, block: int) -> None:
    facts = draft.facts
    if facts.engine == EMBEDDED or not facts.hybrid:
        return
    absent = why_absent(facts.engine, facts.version, UNIT)
    if absent is not None:
        draft.refuse(UNIT, None, absent)
    else:
        draft.step(f"Try {UNIT} below {block}: hits then end inside a block. The values it takes depend on the model")


def _elsewhere(draft: Draft) -> Recommendation:
    facts = draft.facts
    if facts.flags.get("--disable-radix-cache"):
        draft.propose(
            "--disable-radix-cache",
            None,
            why="it is set, so 0 tokens can be found.",
            expected="from 0 to what prompts share, in whole pages, once it was computed",
            cost="none for the pool: unused cached tokens give way",
            verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
        )
    flag, page = flag_for(facts.engine, BLOCK), facts.block_size
    prompt = facts.traffic.prompt_tokens_mean
    if page is not None and page > SMALL_BLOCK and prompt is not None and prompt < USEFUL_BLOCKS * page:
        draft.propose(
            flag,
            SMALL_BLOCK,
            why=f"only whole pages are found, one has {page} tokens and a prompt {prompt:.0f}.",
            expected=f"up to {int(prompt) // SMALL_BLOCK * SMALL_BLOCK} tokens of a prompt can be found",
            cost="some attention backends ask for pages of 64 or 128: it may refuse to start",
            verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
        )
    if not draft.changes:
        return draft.done(_summary(page, prompt))
    return draft.done("Let prompts hit: " + ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes))
