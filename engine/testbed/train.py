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
from pathlib import Path

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
STAGES = "64:500,128:500,256:500,512:500,1024:500,2048:700"
TRAINING_WEIGHTS: dict[Kind, float] = {"recall": 2.0, "add": 1.0, "brackets": 1.5}
DRILL_WEIGHTS: dict[Kind, float] = {"recall": 0.0, "add": 1.0, "brackets": 0.0}
DRILL_LENGTH, DRILL_TURNS = 64, 6


class Batches:
    """Batches of training conversations; batch number n of a seed is always the same one."""

    def __init__(self, seed: int, tokens_per_batch: int, drill: float) -> None:
        self.seed = seed
        self.drill = drill
        self.tokens_per_batch = tokens_per_batch
        self.vocabulary: dict[str, int] = build_tokenizer(MAX_LENGTH).get_vocab()

    def make(self, number: int, longest: int, shortest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, labels and kinds, int64 [batch, length].

        labels[t] is the answer token after input t, or IGNORED; kinds[t] is that answer's place in KINDS.
        """
        rng = random.Random(f"batch:{self.seed}:{number}")
        length, drilling = longest, rng.random() < self.drill
        while length > shortest and rng.random() < 0.3:
            length //= 2
        if drilling:  # sums modulo ten take many examples, which long conversations are too sparse to give
            length = DRILL_LENGTH
        rows = [self._row(rng, length, drilling) for _ in range(max(1, self.tokens_per_batch // length))]
        ids, labels, kinds = (torch.tensor(column) for column in zip(*rows, strict=True))
        return ids, labels, kinds

    def _row(self, rng: random.Random, length: int, drilling: bool) -> tuple[list[int], list[int], list[int]]:
        tokens_per_turn = math.exp(rng.uniform(math.log(14), math.log(min(length // 2, 110))))
        turns = DRILL_TURNS if drilling else max(1, int(length / tokens_per_turn))
        weights = DRILL_WEIGHTS if drilling else TRAINING_WEIGHTS
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
    embedding = {"params": [model.model.embed_tokens.weight], "share": EMBEDDING_SHARE}
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
    lengths = [length for length, steps in args.stages for _ in range(steps)]
    run = Run(args)
    if args.resume:
        run.resume()
    batches = Batches(args.seed, args.tokens, args.drill)
    losses: list[float] = []
    hits: list[torch.Tensor] = []
    while run.step < len(lengths):
        lr = learning_rate(run.step, len(lengths), args.lr)
        ids, labels, kinds = batches.make(run.step, lengths[run.step], args.shortest)
        loss, hit = run.advance(ids, labels, lr)
        losses.append(loss)
        hits.append(torch.stack((kinds[labels != IGNORED], hit)))
        if run.step % args.log_every == 0:
            kind_of, right = torch.cat(hits, 1)
            record = {
                "step": run.step,
                "length": lengths[run.step - 1],
                "lr": round(lr, 6),
                "seconds": round(run.seconds),
                "loss": round(sum(losses) / len(losses), 4),
                **{k: round(right[kind_of == n].float().mean().item(), 4) for n, k in enumerate(KINDS)},
            }
            print(json.dumps(record), flush=True)
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            losses, hits = [], []
        if run.step % args.save_every == 0 or run.step == len(lengths):
            run.save()


def _stages(text: str) -> list[tuple[int, int]]:
    """Parse "length:steps,..."."""
    try:
        return [(int(length), int(steps)) for length, steps in (s.split(":") for s in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form length:steps,length:steps") from None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for checkpoint, log and exported model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stages", type=_stages, default="128:1500,256:800,512:500,1024:400,2048:600", help="length:steps,..."
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per batch")
    parser.add_argument("--shortest", type=int, default=64, help="shortest conversations mixed in, in tokens")
    parser.add_argument("--drill", type=float, default=0.4, help="share of batches with nothing but additions")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help="go on from DIR/checkpoint.pt")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
