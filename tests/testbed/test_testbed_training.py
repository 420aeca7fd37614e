"""The training script: what it puts a loss on, its starting heads, its optimizer, and that a resumed run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.testbed.initial import initial_model
from engine.testbed.muon import orthogonal
from engine.testbed.tasks import EOS, KINDS
from engine.testbed.train import IGNORED, Batches, Stage, learning_rate, main


def test_loss_is_on_answers_and_their_eos_only() -> None:
    batches = Batches(seed=0, tokens_per_batch=512)
    words = {i: w for w, i in batches.vocabulary.items()}
    ids, labels, kinds = batches.make(0, Stage(256, 1, 0.0), shortest=256)
    assert ids.shape == labels.shape == kinds.shape == (2, 256)
    for row, wanted, kind in zip(ids.tolist(), labels.tolist(), kinds.tolist(), strict=True):
        for here, (label, following) in enumerate(zip(wanted, [*row[1:], IGNORED], strict=True)):
            if label == IGNORED:
                continue
            assert label == following
            assert 0 <= kind[here] < len(KINDS)
            starts_or_goes_on = words[row[here]] == ">" or wanted[here - 1] != IGNORED
            assert starts_or_goes_on, "an answer token follows the question's mark or another answer token"
        ends = [i for i, label in enumerate(wanted) if label != IGNORED and wanted[i + 1] == IGNORED]
        assert {words[wanted[i]] for i in ends} == {EOS}


def test_a_drill_is_of_one_kind_and_short() -> None:
    batches = Batches(seed=0, tokens_per_batch=512)
    for number in range(8):
        ids, labels, kinds = batches.make(number, Stage(256, 1, 1.0), shortest=256)
        assert ids.shape == (8, 64)
        assert len(set(kinds[labels != IGNORED].tolist())) == 1


def test_batches_are_the_same_for_a_seed_and_number() -> None:
    stage = Stage(128, 1, 0.3)
    first, again, other = (Batches(seed, 512).make(4, stage, 32)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_starting_heads_fetch_and_match() -> None:
    """At the ">" of a question, head 0 of layer 1 starts on the ";" that closes the fact asked for."""
    model = initial_model(0)
    model.set_attn_implementation("eager")
    vocabulary = Batches(0, 64).vocabulary
    words = ["<bos>", "ax", "=37", ";", "by", "=12", ";", "qe", "=84", ";", "ru", "=05", ";", "?", "by", ">"]
    ids = torch.tensor([[vocabulary[w] for w in words]])
    attention = model(input_ids=ids, output_attentions=True).attentions
    back = attention[0][0]
    assert back[0].diagonal(-1).mean() > 0.8
    assert back[1].diagonal(-2).mean() > 0.8
    assert attention[1][0, 0, -1].argmax() == words.index("=12") + 1


def test_orthogonal_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((64, 128), (256, 128)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.5 < values.min() <= values.max() < 1.5


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


def _train(out: Path, *extra: str) -> None:
    main(["--out", str(out), "--tokens", "128", "--log-every", "1", *extra])


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Same losses as an uninterrupted run: weights, optimizers and batch numbers are all taken up again."""
    stages = ("--stages", "64:2:0,64:2:0.5")
    _train(tmp_path, *stages, "--save-every", "2")
    whole = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    _train(tmp_path / "cut", "--stages", "64:2:0")
    (tmp_path / "cut" / "log.jsonl").unlink()
    _train(tmp_path / "cut", *stages, "--resume")
    resumed = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in resumed] == [3, 4]
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole[2:]], abs=1e-3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model")
    assert sum(p.numel() for p in model.parameters()) < 1.2e6


def test_malformed_stages_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), "--stages", "64"])
    assert ended.value.code == 2
    assert "length:steps:drill" in capsys.readouterr().err
