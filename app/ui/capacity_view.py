"""One plan on the page: verdict, figures, parts of the memory, the articles' estimate, levers, arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from engine.memory.capacity import CapacityPlan
from engine.memory.levers import Lever

POSSIBLE = words.Mark("✔", "possible", "green")
NO_BREAK = "\u00a0"
IMPOSSIBLE = words.Mark("✖", "not here", "gray")


def show_verdict(plan: CapacityPlan) -> None:
    """Fits, at risk or does not fit, by how much, and what to do first."""
    reasons = "  \n".join(words.plain(reason) for reason in plan.reasons)
    text = f"**{verdict_line(plan)}**"
    text = f"{text}  \n{reasons}" if reasons else text
    {"fits": st.success, "at_risk": st.warning, "does_not_fit": st.error}[plan.verdict](text)


def show_subject(plan: CapacityPlan) -> None:
    """What was planned, with every default filled in."""
    told = plan.deployment
    device = f"{told.num_gpus} × {told.gpu.name}" if told.gpu is not None else f"{told.num_gpus} GPUs"
    requests, batched = words.count(plan.max_num_seqs), words.count(plan.max_num_batched_tokens)
    parts = [
        told.shape.name, device, f"TP {told.tp}, PP {told.pp}, DP {told.dp}",
        f"{told.engine} {told.version or '(newest)'}", f"KV {told.kv_cache_dtype}",
        f"longest {words.count(plan.max_model_len)}", f"at most {requests} requests and {batched} tokens a step",
    ]  # fmt: skip
    st.caption(words.plain(" · ".join(parts)))


def verdict_line(plan: CapacityPlan) -> str:
    """`✔ Fits: one request of 131 072 tokens takes 16.0 GiB of 36.1 GiB of KV cache on each GPU, 20.1 GiB to spare.`"""
    needed, pool = words.size(plan.needed_bytes), words.size(max(0, plan.kv_cache_bytes))
    length, margin = words.count(plan.max_model_len), words.size(abs(plan.margin_bytes))
    if plan.kv_cache_bytes <= 0:
        missing = words.size(-plan.kv_cache_bytes)
        return f"✖ Does not fit: {missing} are missing on each GPU before the first KV block"
    of = f"one request of {length} tokens takes {needed} of the {pool} of KV cache on each GPU"
    word = {"fits": "✔ Fits", "at_risk": "▲ At risk", "does_not_fit": "✖ Does not fit"}[plan.verdict]
    return f"{word}: {of}, {margin} {'short' if plan.margin_bytes < 0 else 'to spare'}"


def show_figures(plan: CapacityPlan) -> None:
    """The figures that are asked for first."""
    typical, per_token, fixed = plan.articles, plan.kv_bytes_per_token, plan.kv_fixed_bytes_per_request
    longest, usual = words.count(plan.max_model_len), words.count(typical.tokens_per_request)
    tiles = [
        ("KV tokens", words.count(plan.kv_tokens), "as its log prints"),
        ("KV blocks", words.count(plan.kv_blocks), f"{plan.block_size} tokens, {words.size(plan.kv_bytes_per_block)}"),
        (f"Of {longest} tokens", f"{plan.max_concurrency:.2f}", "requests at once"),
        (f"Of {usual} tokens", f"{typical.exact_concurrency:.2f}", "requests at once"),
        ("Longest that fits", words.count(plan.largest_model_len), "tokens, alone"),
        ("KV of a token", words.size(per_token or 0), f"and {words.size(fixed)} each" if fixed else "on one GPU"),
    ]
    if typical.tokens_per_request == plan.max_model_len:
        del tiles[3]
    with st.container(horizontal=True):
        for label, value, note in tiles:
            st.metric(label, value, delta=note, delta_color="off", delta_arrow="off", border=True, width=168)


def show_parts(plan: CapacityPlan) -> None:
    """The parts in a table: size, share, whether the budget pays for it, and how it was computed."""
    total = sum(part.bytes for part in plan.parts)
    show_table([
        {
            "part": part.name if part.inside_budget else f"{part.name} (outside the budget)",
            "size": words.size(part.bytes).replace(" ", NO_BREAK),
            "of the GPU": words.ratio(part.bytes / total) if total else words.DASH,
            "how": part.how,
        }
        for part in plan.parts
        if part.bytes
    ])  # fmt: skip
    if plan.budget_bytes is not None and plan.gpu_memory_utilization is not None:
        share = words.ratio(plan.gpu_memory_utilization, 0)
        st.caption(f"Budget: {share} of the GPU, {words.size(plan.budget_bytes)}.")


def show_articles(plan: CapacityPlan) -> None:
    """The rule of thumb beside the exact figure, and the guidance on KV use."""
    told = plan.articles
    low, high = told.concurrent_safety_1_5, told.concurrent_safety_1_3
    span = words.count(low) if low == high else f"{words.count(low)} to {words.count(high)}"
    length, each = words.count(told.tokens_per_request), words.size(told.kv_bytes_per_request)
    st.markdown(
        f"**The articles' estimate:** (GPU − weights) / ({each} of a request of {length} tokens × 1.3 to 1.5) = "
        f"**{span}** at once. **Exact: {told.exact_concurrency:.2f}**."
    )
    st.caption(words.plain(told.guidance))


def show_levers(levers: Sequence[Lever], plan: CapacityPlan) -> None:
    """What each change would buy and cost, or why it cannot be done here."""
    show_table([
        {
            "lever": lever.what,
            "gained": gained(lever, plan),
            "KV tokens": words.count(lever.plan.kv_tokens),
            "at once": f"{lever.plan.max_concurrency:.2f}",
            "": POSSIBLE if lever.possible else IMPOSSIBLE,
            "change": flags_text(lever),
            "costs": lever.cost if lever.possible else lever.why_not,
        }
        for lever in levers
    ])  # fmt: skip


def flags_text(lever: Lever) -> str:
    """The flags as they are typed."""
    parts = [
        f"{flag} {'' if value is True else value}".strip() for flag, value in lever.changes.items() if value is not None
    ]
    parts += [f"without {flag}" for flag, value in lever.changes.items() if value is None]
    return " ".join(parts) or words.DASH


def gained(lever: Lever, plan: CapacityPlan) -> str:
    """`+231 424 (×1.9)`."""
    sign = "+" if lever.gained_tokens >= 0 else "\u2212"
    text = f"{sign}{words.count(abs(lever.gained_tokens))}"
    return f"{text} (×{lever.plan.kv_tokens / plan.kv_tokens:.2f})" if plan.kv_tokens > 0 else text


def show_arithmetic(plan: CapacityPlan) -> None:
    """Every step, to check or to copy."""
    with st.expander("The arithmetic, line by line", key="arithmetic"):
        st.code("\n".join(plan.lines), language=None, wrap_lines=True)


def show_warnings(plan: CapacityPlan) -> None:
    """What was assumed."""
    for warning in dict.fromkeys((*plan.deployment.shape.assumptions, *plan.warnings)):
        st.caption(f"▲ {words.plain(warning)}")
