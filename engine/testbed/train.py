"""Trains the testbed model: `python -m engine.testbed.train --out DIR --seed 0`.

A plain loop over freshly generated conversations (none is seen twice, none has a held-out seed). Loss is taken on
answer tokens and the EOS after them. The curriculum grows the context stage by stage, since the circuit that
looks facts up forms quickly in short contexts and then only has to reach further. DIR/checkpoint.pt is written
regularly (`--resume` goes on from it) together with the exported Hugging Face directory DIR/model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from engine.testbed.export import MAX_LENGTH, export
from engine.testbed.initial import initial_model
from engine.testbed.muon import Muon
from engine.testbed.tasks import BOS, EOS, HELD_OUT_SEEDS, KINDS, Kind, conversation, split_tokens
from engine.testbed.tokenizer import build_tokenizer

IGNORED = -100
EMBEDDING_SHARE = 0.1  # of the learning rate
STAGES = "64:300:0,256:450:0.6,512:50:0.3,1024:150:0.25,2048:600:0.25"
TRAINING_WEIGHTS: dict[Kind, float] = {"recall": 3.0, "add": 1.0, "brackets": 1.0}
DRILL_LENGTH = 64
DRILL_TURNS: dict[Kind, int] = {"add": 6, "brackets": 4}  # as many as always fit
DRILL_SHARES = (0.7, 0.3)


@dataclass(frozen=True)
class Stage:
    """`steps` batches of conversations of `length` tokens; a share `drill` of them short and of one kind.

    No drills at first: they would retrain the heads that look facts up before these have learned their use.
    """

    length: int
    steps: int
    drill: float


class Batches:
    """Batches of training conversations; batch number n of a seed is always the same one."""

    def __init__(self, seed: int, tokens_per_batch: int) -> None:
        self.seed = seed
        self.tokens_per_batch = tokens_per_batch
        self.vocabulary: dict[str, int] = build_tokenizer(MAX_LENGTH).get_vocab()

    def make(self, number: int, stage: Stage, shortest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, labels and kinds, int64 [batch, length].

        labels[t] is the answer token after input t, or IGNORED; kinds[t] is that answer's place in KINDS.
        """
        rng = random.Random(f"batch:{self.seed}:{number}")
        length, drilled = stage.length, None
        while length > shortest and rng.random() < 0.3:
            length //= 2
        if rng.random() < stage.drill:  # sums modulo ten take more examples than long conversations give
            length = DRILL_LENGTH
            drilled = rng.choices(tuple(DRILL_TURNS), DRILL_SHARES)[0]
        rows = [self._row(rng, length, drilled) for _ in range(max(1, self.tokens_per_batch // length))]
        ids, labels, kinds = (torch.tensor(column) for column in zip(*rows, strict=True))
        return ids, labels, kinds

    def _row(self, rng: random.Random, length: int, drilled: Kind | None) -> tuple[list[int], list[int], list[int]]:
        if drilled:
            turns = DRILL_TURNS[drilled]
            weights: dict[Kind, float] = {k: float(k == drilled) for k in KINDS}
        else:
            tokens_per_turn = math.exp(rng.uniform(math.log(14), math.log(min(length // 2, 110))))
            turns, weights = max(1, int(length / tokens_per_turn)), TRAINING_WEIGHTS
        talk = conversation(rng.randrange(HELD_OUT_SEEDS.stop, 2**62), turns, length, weights)
        ids, labels, kinds = [self.vocabulary[BOS]], [IGNORED], [IGNORED]
        for turn in talk.turns:
            prompt, answer = split_tokens(turn.prompt), [*split_tokens(turn.answer), EOS]
            ids += [self.vocabulary[t] for t in prompt + answer]
            labels += [IGNORED] * len(prompt) + [self.vocabulary[t] for t in answer]
            kinds += [KINDS.index(turn.kind)] * (len(prompt) + len(answer))
        padding = length - len(ids)
        ids += [self.vocabulary[EOS]] * padding
        ignored = [IGNORED] * (padding + 1)  # labels and kinds move one to the left: they are of the next token
        return ids, labels[1:] + ignored, kinds[1:] + ignored


def learning_rate(step: int, total: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy over answer tokens, and which of them are predicted right (bool, one per answer token)."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels != IGNORED
    logits = model.lm_head(hidden[wanted])
    return functional.cross_entropy(logits, labels[wanted]), logits.argmax(-1) == labels[wanted]


def optimizers_for(model: LlamaForCausalLM, peak: float, muon: bool) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices and AdamW for embedding and norms, or AdamW for all."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    norms = [p for p in model.parameters() if p.dim() == 1]
    # A key's row is seen rarely, and Adam then moves it by a multiple of the rate each time: go slowly.
    embedding: dict[str, Any] = {"params": [model.model.embed_tokens.weight], "share": EMBEDDING_SHARE}
    if muon:
        adam = torch.optim.AdamW([{"params": norms}, embedding], peak, (0.9, 0.98), weight_decay=0.0)
        return [Muon(matrices, peak, 0.95, 0.05), adam]
    return [torch.optim.AdamW([{"params": matrices + norms}, embedding], peak, (0.9, 0.98), weight_decay=0.05)]


class Run:
    """State of one training: model, optimizers, step, seconds spent; saved to and resumed from one file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.model = initial_model(args.seed)
        self.optimizers = optimizers_for(self.model, args.lr, args.muon)
        self.step = 0
        self.seconds = 0.0
        self._checkpoint = self.out / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint in one move, and the exported model beside it."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        fresh = self._checkpoint.with_suffix(".tmp")
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)
        export(self.model, self.out / "model")

    def resume(self) -> None:
        """Take up the state that `save` left."""
        state = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def advance(self, ids: torch.Tensor, labels: torch.Tensor, lr: float) -> tuple[float, torch.Tensor]:
        """One optimizer step. Returns the loss and which answer tokens were predicted right."""
        began = time.monotonic()
        for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
            group["lr"] = lr * group.get("share", 1.0)
        loss, hits = answer_loss(self.model, ids, labels)
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        return loss.item(), hits


def train(args: argparse.Namespace) -> None:
    """Run all stages; leaves DIR/model, DIR/checkpoint.pt and DIR/log.jsonl."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    stage_at = [stage for stage in args.stages for _ in range(stage.steps)]
    run = Run(args)
    if args.resume:
        run.resume()
    batches = Batches(args.seed, args.tokens)
    losses: list[float] = []
    hits: list[torch.Tensor] = []
    while run.step < len(stage_at):
        lr = learning_rate(run.step, len(stage_at), args.lr)
        ids, labels, kinds = batches.make(run.step, stage_at[run.step], args.shortest)
        loss, hit = run.advance(ids, labels, lr)
        losses.append(loss)
        hits.append(torch.stack((kinds[labels != IGNORED], hit)))
        if run.step % args.log_every == 0:
            kind_of, right = torch.cat(hits, 1)
            record: dict[str, float] = {
                "step": run.step,
                "length": stage_at[run.step - 1].length,
                "lr": round(lr, 6),
                "seconds": round(run.seconds),
                "loss": round(sum(losses) / len(losses), 4),
            }
            record |= {k: round(right[kind_of == n].float().mean().item(), 4) for n, k in enumerate(KINDS)}
            print(json.dumps(record), flush=True)
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            losses, hits = [], []
        if run.step % args.save_every == 0 or run.step == len(stage_at):
            run.save()


def _stages(text: str) -> list[Stage]:
    """Parse "length:steps:drill,..."."""
    try:
        fields = [part.split(":") for part in text.split(",")]
        return [Stage(int(length), int(steps), float(drill)) for length, steps, drill in fields]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form length:steps:drill,...") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for checkpoint, log and exported model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=_stages, default=STAGES, help="curriculum, length:steps:drill,...")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per batch")
    parser.add_argument("--shortest", type=int, default=32, help="shortest conversations mixed in, in tokens")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help="go on from DIR/checkpoint.pt")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
