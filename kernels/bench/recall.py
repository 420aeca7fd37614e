"""`python -m kernels.bench.recall`, or `kvoncall bench recall`: what each KV format still finds, without any model.

N pairs of a random key and a random value are written to a paged cache; a question is one of the keys with noise added;
the answer is the value nearest to what attention returns. More pairs are more competitors, as more turns of a
conversation are. The same questions are asked under three kinds of keys:

- plain: independent Gaussian channels, on which formats hardly differ;
- outliers: two rotary pairs of channels are OUTLIER_FACTOR times as large, and those of the query as much smaller;
- bias: the same two channels of every key have KEY_BIAS added, as the key bias of Qwen2.5 does.

Neither of the latter changes the function: products stay what they were, and softmax ignores what it adds to all
scores. So the exact answers must be the same under all three, which is checked: exit code 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions, backend_name, paged_attention, reshape_and_cache
from kernels.bench.interval import Accuracy, wilson
from kernels.bench.report import describe_device
from kernels.formats import KV_FORMATS, KVFormat
from kernels.kv_cache import allocate_kv_cache

HEAD_DIM = 128
BLOCK_SIZE = 32  # the group of keys that KIVI's paper shares a channel's scale among
PAIRS = (32, 128, 512, 2048)
QUESTIONS = 1024
QUESTIONS_A_SEED = 128
QUERY_HEADS = 32  # questions of one sequence; all of them read the one KV head
NOISE = 0.5
OUTLIER_CHANNELS = (60, 61, 124, 125)  # rotary pairs 60 and 61: channels i and i + HEAD_DIM / 2
OUTLIER_FACTOR = 16.0
BIAS_CHANNELS = (60, 124)
KEY_BIAS = 60.0
INJECTIONS = ("plain", "outliers", "bias")


@dataclass(frozen=True)
class Problem:
    """keys, values: [N, HEAD_DIM]; queries: [questions, HEAD_DIM]; answers: [questions], which pair each asks for."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    answers: Tensor

    def nearest(self, outputs: Tensor) -> Tensor:
        """[questions]: the pair whose value is nearest to each attention output [questions, HEAD_DIM]."""
        return torch.cdist(outputs.double(), self.values.double()).argmin(-1)

    def exact(self) -> Tensor:
        """Attention in float64 without a cache, [questions, HEAD_DIM]."""
        scores: Tensor = self.queries.double() @ self.keys.double().T * HEAD_DIM**-0.5
        return torch.softmax(scores, -1) @ self.values.double()


def make_problem(num_pairs: int, seed: int, injection: str) -> Problem:
    """float32 on the CPU; the same pairs and questions for every injection."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_pairs, HEAD_DIM, generator=generator)
    answers = torch.randperm(num_pairs, generator=generator)[:QUESTIONS_A_SEED]
    queries = keys[answers] + NOISE * torch.randn(len(answers), HEAD_DIM, generator=generator)
    if injection == "outliers":
        keys[:, OUTLIER_CHANNELS] *= OUTLIER_FACTOR
        queries[:, OUTLIER_CHANNELS] /= OUTLIER_FACTOR
    elif injection == "bias":
        keys[:, BIAS_CHANNELS] += KEY_BIAS
    elif injection != "plain":
        raise ValueError(f"injection must be one of {', '.join(INJECTIONS)}, got {injection!r}.")
    return Problem(keys, values, queries, answers)


def through_cache(problem: Problem, kv_format: KVFormat, device: torch.device) -> Tensor:
    """Attention outputs [questions, HEAD_DIM] of the real kernels: the pairs are one prefill, the questions decodes.

    All questions share the blocks, as requests with one prefix do. The number of pairs must fill its blocks, so that
    formats that keep open blocks have quantized every key.
    """
    num_pairs, num_seqs = len(problem.keys), len(problem.queries) // QUERY_HEADS
    num_blocks = num_pairs // BLOCK_SIZE
    if num_pairs % BLOCK_SIZE or len(problem.queries) % QUERY_HEADS:
        raise ValueError(f"{num_pairs} pairs and {len(problem.queries)} questions must be multiples of {BLOCK_SIZE}.")
    cache = allocate_kv_cache(kv_format, 1 + num_blocks, 1, BLOCK_SIZE, HEAD_DIM, device=device, num_open_rows=num_seqs)
    blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)
    slots = torch.arange(BLOCK_SIZE, (num_blocks + 1) * BLOCK_SIZE, device=device)
    keys, values = (part[:, None].to(device) for part in (problem.keys, problem.values))
    reshape_and_cache(keys, values, cache, _metadata([num_pairs], num_pairs, blocks, slots, num_decodes=0))
    no_slots = torch.full((num_seqs,), -1, dtype=torch.int64, device=device)
    decodes = _metadata([1] * num_seqs, num_pairs, blocks, no_slots, num_decodes=num_seqs)
    queries = problem.queries.reshape(num_seqs, QUERY_HEADS, HEAD_DIM).to(device)
    outputs = paged_attention(queries, cache, decodes, AttentionOptions(scale=HEAD_DIM**-0.5))
    return outputs.reshape(-1, HEAD_DIM).cpu()


def _metadata(
    query_lens: list[int], seq_len: int, blocks: Tensor, slot_mapping: Tensor, num_decodes: int
) -> AttentionMetadata:
    """Sequences of seq_len tokens that all lie in the same blocks."""
    num_seqs, device = len(query_lens), blocks.device
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device),
        block_table=blocks.expand(num_seqs, -1).contiguous(),
        slot_mapping=slot_mapping,
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
        num_decodes=num_decodes,
        open_rows=torch.arange(num_seqs, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class Cell:
    """Recall of one format, one kind of keys and one number of pairs; kv_format "exact" is float64 without a cache."""

    injection: str
    kv_format: str
    pairs: int
    recall: Accuracy


def measure(num_pairs: int, injection: str, questions: int, device: torch.device) -> list[Cell]:
    """One cell for exact attention and one for every KV format. Raises ArithmeticError: see `_check_exact`."""
    right: dict[str, int] = dict.fromkeys(("exact", *KV_FORMATS), 0)
    asked = seed = 0
    while asked < questions:
        problem = make_problem(num_pairs, seed, injection)
        exact = problem.nearest(problem.exact())
        _check_exact(exact, make_problem(num_pairs, seed, "plain"), injection)
        right["exact"] += int((exact == problem.answers).sum())
        for name, kv_format in KV_FORMATS.items():
            found = problem.nearest(through_cache(problem, kv_format, device))
            right[name] += int((found == problem.answers).sum())
        asked, seed = asked + len(problem.answers), seed + 1
    return [Cell(injection, name, num_pairs, wilson(count, asked)) for name, count in right.items()]


def _check_exact(answers: Tensor, plain: Problem, injection: str) -> None:
    """ArithmeticError when an injection changed an exact answer: what is measured would not be the format."""
    changed = int((answers != plain.nearest(plain.exact())).sum())
    if changed:
        raise ArithmeticError(f"{injection} keys changed {changed} of {len(answers)} exact answers")


def run_recall(
    pairs: Sequence[int] = PAIRS, questions: int = QUESTIONS, device: torch.device | None = None
) -> dict[str, Any]:
    """The whole probe, ready for JSON: {"results": [Cell as dict], what was measured and on what}."""
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        cells = [cell for injection in INJECTIONS for n in pairs for cell in measure(n, injection, questions, where)]
    return {
        "schema": 1,
        **describe_device(where),
        "backend": backend_name(where),
        "head_dim": HEAD_DIM,
        "block_size": BLOCK_SIZE,
        "noise": NOISE,
        "outliers": {"channels": OUTLIER_CHANNELS, "factor": OUTLIER_FACTOR},
        "bias": {"channels": BIAS_CHANNELS, "added": KEY_BIAS},
        "results": [asdict(cell) for cell in cells],
    }


def markdown(report: dict[str, Any]) -> str:
    """One table for each kind of keys: formats down, pairs across."""
    rows = report["results"]
    sizes = list(dict.fromkeys(row["pairs"] for row in rows))
    lines = [
        "# Recall through the paged KV cache",
        "",
        "Questions answered right, with the 95 % Wilson interval; a guess is right once in as many times as there are",
        "pairs. Bytes are those of a token's key and value in one head.",
    ]
    for injection in dict.fromkeys(row["injection"] for row in rows):
        lines += ["", f"## Keys: {injection}", ""]
        lines += ["| format | bytes a token | " + " | ".join(f"{n} pairs" for n in sizes) + " |"]
        lines += ["| --- " * (len(sizes) + 2) + "|"]
        for name in dict.fromkeys(row["kv_format"] for row in rows):
            found = [row["recall"] for row in rows if (row["injection"], row["kv_format"]) == (injection, name)]
            cells = " | ".join(f"{r['right']}/{r['count']} [{r['low']:.3f}, {r['high']:.3f}]" for r in found)
            lines.append(f"| {name} | {_bytes_a_token(name)} | {cells} |")
    return "\n".join(lines) + "\n"


def _bytes_a_token(name: str) -> str:
    """Of key and value of one head, parameters included."""
    if name not in KV_FORMATS:
        return "-"
    return f"{KV_FORMATS[name].bytes_per_block_head(HEAD_DIM, BLOCK_SIZE) / BLOCK_SIZE:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the probe, prints the tables and returns the exit code: 1 see above, 2 no such device."""
    parser = argparse.ArgumentParser(
        prog="kvoncall bench recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench recall: there is no CUDA device; leave --device out to measure the CPU", file=sys.stderr)
        return 2
    try:
        report = run_recall(device=torch.device(options.device) if options.device else None)
    except ArithmeticError as error:
        print(f"bench recall: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1) if options.json else markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
