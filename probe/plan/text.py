"""A plan as text for a terminal: the verdict first, then what decides it, then where the memory goes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from engine.memory.capacity import CapacityPlan
from engine.memory.levers import Lever
from engine.memory.units import gib
from runbooks.knowledge.attention import AttentionRow
from runbooks.knowledge.template_parts import TemplateAdvice

WIDTH, WIDE = 100, 120
_BAR = 24
_VERDICTS = {"fits": "FITS", "at_risk": "AT RISK", "does_not_fit": "DOES NOT FIT"}


def plan_text(
    plan: CapacityPlan, notes: Sequence[str] = (), *, cautions: Sequence[str] = (), explain: bool = False
) -> str:
    """One plan. cautions: why it does not run so, whatever fits. explain: the arithmetic, one step a line."""
    sections = [_head(plan), _pool(plan)]
    if cautions:
        sections.insert(1, "DOES NOT RUN SO\n" + _bullets(cautions))
    if plan.parts:
        sections.append(_memory(plan))
    said = list(dict.fromkeys((*notes, *plan.warnings)))
    if said:
        sections.append("Note\n" + _bullets(said))
    sections.append(_articles(plan))
    if explain:
        sections.append("Arithmetic\n" + "\n".join(f"  {line}" for line in plan.lines))
    return "\n\n".join(sections)


def verdict_word(plan: CapacityPlan) -> str:
    """FITS, AT RISK or DOES NOT FIT."""
    return _VERDICTS[plan.verdict]


def server_name(plan: CapacityPlan) -> str:
    """What was planned, in one line: `Llama-3.1-70B on 4 x H100-80GB, tp 4, vllm 0.33.0`."""
    made = plan.deployment
    gpus = made.tp * made.pp
    where = f"{gpus} x {made.gpu.name}" if made.gpu else f"{gpus} GPU{'s' if gpus > 1 else ''} of no stated kind"
    split = f", tp {made.tp}" + (f", pp {made.pp}" if made.pp > 1 else "") + (f", dp {made.dp}" if made.dp > 1 else "")
    dtype = made.shape.quantization or made.shape.dtype
    return f"{made.shape.name} ({dtype}) on {where}{split}, {made.engine} {made.version or ''}".rstrip()


def _head(plan: CapacityPlan) -> str:
    first, *more = plan.reasons or ("",)
    lines = [f"{verdict_word(plan)}  {server_name(plan)}", _wrapped(first, "  ")]
    return "\n".join([*lines, *(_wrapped(reason, "  ") for reason in more)])


def _pool(plan: CapacityPlan) -> str:
    made = plan.deployment
    per_token = (
        "nothing grows with the context" if plan.kv_bytes_per_token is None else f"{plan.kv_bytes_per_token:,} B"
    )
    rows = [
        ("KV cache of one GPU", gib(plan.kv_cache_bytes)),
        ("KV of one token, one GPU", per_token),
        ("KV tokens", f"{plan.kv_tokens:,} in {plan.kv_blocks:,} blocks of {plan.block_size}"),
        (f"requests of {plan.max_model_len:,}", f"{plan.max_concurrency:,.2f} at once"),
        ("longest request that fits", f"{plan.largest_model_len:,} tokens"),
        ("one request needs", f"{gib(plan.needed_bytes)}; margin {gib(plan.margin_bytes)}"),
        ("limits", f"{plan.max_num_seqs:,} requests, {plan.max_num_batched_tokens:,} tokens a step"),
    ]
    if plan.kv_fixed_bytes_per_request:
        rows.insert(2, ("KV of one request besides", gib(plan.kv_fixed_bytes_per_request)))
    if made.kv_cache_dtype != "auto":
        rows.insert(1, ("KV format", made.kv_cache_dtype))
    return _pairs(rows)


def _memory(plan: CapacityPlan) -> str:
    made = plan.deployment
    total = made.gpu.memory_bytes if made.gpu else sum(part.bytes for part in plan.parts)
    lines = []
    for part in plan.parts:
        if not part.bytes:
            continue
        how = part.how
        if part.name == "weights" and made.weights_bytes is None and made.tp * made.pp > 1:
            how += f" over {made.tp * made.pp} ranks"
        if not part.inside_budget:
            how += " (outside the budget)"
        bar = "#" * max(0, round(_BAR * part.bytes / total))
        start = f"  {part.name:18} {gib(part.bytes):>12}  {bar:{_BAR}}  "
        lines.append(textwrap.fill(how, WIDE, initial_indent=start, subsequent_indent=" " * len(start)))
    budget = ""
    if plan.budget_bytes is not None and plan.gpu_memory_utilization is not None:
        budget = f", budget {gib(plan.budget_bytes)} at {plan.gpu_memory_utilization:g}"
    return f"Memory of one GPU: {gib(total)}{budget}\n" + "\n".join(lines)


def _articles(plan: CapacityPlan) -> str:
    rule = plan.articles
    low, high = rule.concurrent_safety_1_5, rule.concurrent_safety_1_3
    about = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    length = f"requests of {rule.tokens_per_request:,} tokens"
    return _wrapped(
        f"Rule of thumb, (GPU - weights) / (KV of a request x 1.3 to 1.5): {about} {length}; "
        f"exact {rule.exact_concurrency:,.2f}. {rule.guidance}",
        "",
    )


def levers_text(levers: Iterable[Lever]) -> str:
    """What each change would buy, in a table; what is not possible at the end with its reason."""
    header = ("change", "KV tokens", "gained", "requests", "verdict", "cost")
    rows, refused = [header], []
    for lever in levers:
        changes = " ".join(f"{flag} {value}" if value is not True else flag for flag, value in lever.changes.items())
        if not lever.possible:
            refused.append(f"{lever.what}: {lever.why_not}")
            continue
        made = lever.plan
        rows.append(
            (
                changes or lever.what,
                f"{made.kv_tokens:,}",
                f"{lever.gained_tokens:+,}",
                f"{made.max_concurrency:,.2f}",
                verdict_word(made).lower(),
                lever.cost,
            )
        )
    text = "Levers\n" + table(rows)
    return text + ("\n\nNot possible\n" + _bullets(refused) if refused else "")


def attention_text(rows: Iterable[AttentionRow]) -> str:
    """MHA, GQA, MQA and latent attention of one model, in bytes of one token."""
    header = ("attention", "KV heads", "16-bit, a layer", "8-bit", "4-bit", "16-bit, all layers", "of MHA", "")
    lines: list[Sequence[str]] = [header]
    lines.extend(
        (
            row.kind,
            f"{row.kv_heads}" if row.kv_heads else "latent",
            f"{row.bytes_16:,} B",
            f"{row.bytes_8:,} B",
            f"{row.bytes_4:,} B",
            f"{row.all_16:,} B",
            f"{row.share_of_mha:.1%}",
            "this model" if row.own else "",
        )
        for row in rows
    )
    return "KV of one token by kind of attention (whole model, before tensor parallelism)\n" + table(lines)


def template_text(advice: TemplateAdvice) -> str:
    """The flags of a template with their reasons, what was left out, and the command."""
    lines = [f"Template {advice.template.id}: {advice.template.title.en}"]
    for choice in advice.flags:
        value = "" if choice.value is True else f" {choice.value}"
        lines.append(_wrapped(f"{choice.flag}{value}: {choice.reason.en}", "  "))
    if advice.left_out:
        lines.append("Left out\n" + _bullets(f"{one.setting} {one.value}: {one.reason.en}" for one in advice.left_out))
    if advice.steps:
        lines.append("Besides\n" + _bullets(step.en for step in advice.steps))
    return "\n".join([*lines, "", f"  {advice.command()}"])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, the first and last column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(s, WIDTH, initial_indent="  - ", subsequent_indent="    ") for s in sentences)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
