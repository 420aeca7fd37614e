"""Exact-answer accuracy by task and turn: `python -m engine.testbed.evaluate [--model DIR] [--json]`.

An item is right when greedy decoding gives exactly the answer and then EOS. One forward pass over a whole
conversation judges all its turns: every answer token and its EOS must be the argmax after the true prefix, which
is the same thing as greedy decoding giving them. Earlier turns carry their right answers. Conversations have
held-out seeds only. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.testbed import MODEL_DIR
from engine.testbed.tasks import EOS, HELD_OUT_SEEDS, KINDS, Conversation, Kind, conversation
from kernels.bench.interval import Accuracy, wilson


@dataclass(frozen=True)
class Item:
    """One judged turn: its place, and whether the answer was right."""

    kind: Kind
    turn: int
    distance: int | None
    right: bool


@torch.inference_mode()
def judge(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, talk: Conversation) -> list[Item]:
    """Every turn of one conversation, judged in one forward pass."""
    ids: list[int] = [tokenizer.convert_tokens_to_ids(str(tokenizer.bos_token))]
    spans: list[tuple[int, int]] = []
    for turn in talk.turns:
        ids += tokenizer.encode(turn.prompt, add_special_tokens=False)
        answer = tokenizer.encode(turn.answer + EOS, add_special_tokens=False)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
    row = torch.tensor(ids)
    greedy = model(input_ids=row[None], use_cache=False).logits[0].argmax(-1)
    return [
        Item(turn.kind, number, turn.distance, bool((greedy[start - 1 : end - 1] == row[start:end]).all()))
        for number, (turn, (start, end)) in enumerate(zip(talk.turns, spans, strict=True), start=1)
    ]


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seeds: Iterable[int], turns: int, max_tokens: int
) -> list[Item]:
    """Judge one conversation a seed. Raises ValueError for a seed that training may have seen."""
    items: list[Item] = []
    for seed in seeds:
        if seed not in HELD_OUT_SEEDS:
            raise ValueError(f"seed {seed} is not held out; use 0..{HELD_OUT_SEEDS.stop - 1}")
        items += judge(model, tokenizer, conversation(seed, turns, max_tokens))
    return items


def accuracy(items: Sequence[Item], kind: Kind, turn: int | None = None) -> Accuracy | None:
    """Accuracy of one kind, at one turn or over all; None without items."""
    right = [i.right for i in items if i.kind == kind and turn in (None, i.turn)]
    return wilson(sum(right), len(right)) if right else None


def report(items: Sequence[Item], turns: int) -> dict[str, dict[str, Accuracy | None]]:
    """{kind: {"all" or turn number as text: Accuracy}}."""
    return {
        kind: {"all": accuracy(items, kind)} | {str(t): accuracy(items, kind, t) for t in range(1, turns + 1)}
        for kind in KINDS
    }


def _as_text(cells: dict[str, dict[str, Accuracy | None]]) -> str:
    lines = []
    for kind, by_turn in cells.items():
        for turn, a in by_turn.items():
            shown = f"{a.accuracy:.3f}  [{a.low:.3f}, {a.high:.3f}]  {a.right}/{a.count}" if a else "no items"
            lines.append(f"{kind:9} turn {turn:>3}  {shown}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=2048, help="length each conversation is filled up to")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} holds no model (config.json is missing); train one with python -m engine.testbed.train")
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    seeds = range(args.first_seed, args.first_seed + args.conversations)
    cells = report(evaluate(model, tokenizer, seeds, args.turns, args.max_tokens), args.turns)
    if args.json:
        plain = {k: {t: asdict(a) if a else None for t, a in by.items()} for k, by in cells.items()}
        print(json.dumps({"max_tokens": args.max_tokens, "seeds": [seeds.start, seeds.stop], "accuracy": plain}))
    else:
        print(_as_text(cells))


if __name__ == "__main__":
    main()
