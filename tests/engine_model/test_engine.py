"""The engine as its users see it: requests, refusals, aborts, observers, prefix cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.cache_identity import CacheIdentity
from engine.config import ConfigError, EngineConfig
from engine.engine import LLMEngine, PromptTooLong, RequestOutput
from engine.request import SamplingParams
from engine.scheduler import QueueFull

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.first: list[float] = []
        self.further: list[float] = []
        self.finished: list[RequestOutput] = []

    def on_step(self, step_seconds: float, scheduled: int, prompt: int, generation: int) -> None:
        assert step_seconds > 0
        self.steps.append((scheduled, prompt, generation))

    def on_first_token(self, ttft_s: float) -> None:
        self.first.append(ttft_s)

    def on_inter_token(self, itl_s: float) -> None:
        self.further.append(itl_s)

    def on_finished(self, output: RequestOutput) -> None:
        self.finished.append(output)


def test_an_observer_hears_of_every_token_once(model_dir: Path, lab: Any) -> None:
    recorder = Recorder()
    config = EngineConfig(model=str(model_dir), num_gpu_blocks_override=100, max_num_seqs=4, max_num_batched_tokens=16)
    engine = LLMEngine(config, observer=recorder)
    lab.generate(engine, lab.prompts(30, 5, 11), GREEDY)
    assert len(recorder.first) == 3
    assert len(recorder.further) == 3 * 7
    assert min(recorder.first + recorder.further) > 0
    assert sum(scheduled for scheduled, _, _ in recorder.steps) == 30 + 5 + 11 + 3 * 7
    assert sum(prompt for _, prompt, _ in recorder.steps) == 30 + 5 + 11
    assert sum(generated for _, _, generated in recorder.steps) == 3 * 8
    assert {output.finish_reason for output in recorder.finished} == {"length"}
    for output in recorder.finished:
        timings = output.metrics
        assert timings is not None
        assert timings.first_scheduled is not None
        assert timings.first_token is not None
        assert timings.last_token is not None
        assert timings.arrival <= timings.first_scheduled < timings.first_token < timings.last_token


def test_an_abort_frees_everything_and_is_told(model_dir: Path, lab: Any) -> None:
    recorder = Recorder()
    engine = LLMEngine(EngineConfig(model=str(model_dir), num_gpu_blocks_override=100), observer=recorder)
    running, waiting = lab.prompts(20, 20)
    engine.add_request("running", running, GREEDY)
    engine.step()
    engine.add_request("waiting", waiting, GREEDY)
    for request_id in ("running", "waiting", "running", "unknown"):
        engine.abort_request(request_id)
    assert not engine.has_unfinished_requests()
    assert engine.stats().kv_usage == 0
    assert [(output.request_id, output.finish_reason) for output in recorder.finished] == [
        ("running", "abort"),
        ("waiting", "abort"),
    ]
    assert recorder.finished[0].num_output_tokens == 1
    assert engine.step() == []


def test_rows_of_the_block_table_are_given_back(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir, max_num_seqs=3)
    for _ in range(4):
        lab.generate(engine, lab.prompts(9, 14, 3, 7, 12), GREEDY)
    engine.add_request("aborted", lab.prompts(5)[0], GREEDY)
    engine.step()
    engine.abort_request("aborted")
    assert sorted(engine.runner._free_rows) == [0, 1, 2]


def test_a_prompt_that_is_too_long_is_told_both_numbers(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir, max_model_len=64)
    with pytest.raises(PromptTooLong, match=r"has 64 tokens.*limit of 64"):
        engine.add_request("a", lab.prompts(64)[0], GREEDY)
    assert not engine.has_unfinished_requests()
    (tokens,) = lab.generate(engine, lab.prompts(63), GREEDY)
    assert len(tokens) == 1


def test_the_context_limit_ends_a_request(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir)
    engine.add_request("a", lab.prompts(250)[0], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    last = lab.run_all(engine)["a"][-1]
    assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == ("length", 250, 6)


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([5, 320], "token id 320"), ([-1], "token id")])
def test_prompts_that_cannot_be_run(model_dir: Path, prompt: list[int], words: str, lab: Any) -> None:
    engine = lab.make_engine(model_dir)
    with pytest.raises(ValueError, match=words):
        engine.add_request("a", prompt, GREEDY)
    assert not engine.has_unfinished_requests()


def test_a_full_queue_refuses(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir, max_num_queued_reqs=1)
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(QueueFull):
        engine.add_request("b", [5], GREEDY)
    assert list(lab.run_all(engine)) == ["a"]


def test_prefix_hits_are_reported_salted_and_forgotten(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir)
    prompt = lab.prompts(41)[0]

    def cached(request_id: str, **kwargs: Any) -> int:
        engine.add_request(request_id, prompt, GREEDY, **kwargs)
        number: int = lab.run_all(engine)[request_id][-1].num_cached_tokens
        return number

    assert cached("a") == 0
    assert cached("b") == 40
    tenant = CacheIdentity(namespace=(("tenant", "a"),))
    assert cached("c", identity=tenant) == 0
    assert cached("d", identity=tenant) == 40
    assert engine.reset_prefix_cache()
    assert cached("e") == 0


def test_several_end_tokens(model_dir: Path, tmp_path: Path, lab: Any) -> None:
    prompt = lab.prompts(12)[0]
    (free,) = lab.generate(lab.make_engine(model_dir), [prompt], GREEDY)
    second = free[3]
    directory = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, second]}))
    engine = lab.make_engine(directory)
    (ended,) = lab.generate(engine, [prompt], SamplingParams(max_tokens=8, temperature=0))
    assert ended == free[: free.index(second) + 1]
    assert lab.generate(engine, [prompt], GREEDY) == [free]


def test_a_model_without_a_tokenizer_is_refused_in_words(model_dir: Path, tmp_path: Path, lab: Any) -> None:
    directory = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        lab.make_engine(directory)


def test_a_checkpoint_dtype_we_do_not_compute_in(model_dir: Path, tmp_path: Path, lab: Any) -> None:
    directory = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    with pytest.raises(ConfigError, match=r"dtype is float64; choose one of .* with --dtype"):
        lab.make_engine(directory)
    assert lab.generate(lab.make_engine(directory, dtype="float32"), [[5]], GREEDY)
