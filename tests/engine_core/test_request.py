from __future__ import annotations

import pytest

from engine.request import Request, RequestStatus, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", "1"),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_sampling_params_name_what_is_wrong(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_sampling_params_accept_the_edges() -> None:
    params = SamplingParams(max_tokens=1, min_tokens=1, temperature=0, top_p=1, top_k=-1, seed=-(2**63), logprobs=0)
    assert params.top_k == 0


@pytest.mark.parametrize("prompt", [[], [1, -1], [2**32]])
def test_a_prompt_without_usable_tokens_is_refused(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        Request("r", prompt, SamplingParams())


def test_tokens_grow_together_and_the_prompt_stays() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt, SamplingParams())
    request.append_output_token(9)
    assert prompt == request.prompt_token_ids == [1, 2, 3]
    assert request.all_token_ids == [1, 2, 3, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 1, 4)


def test_eos_stops_unless_ignored() -> None:
    assert Request("r", [1], SamplingParams(stop_token_ids=[5]), eos_token_id=7).stop_token_ids == {5, 7}
    params = SamplingParams(stop_token_ids=[5], ignore_eos=True)
    assert Request("r", [1], params, eos_token_id=7).stop_token_ids == {5}


def test_finish_reasons() -> None:
    reasons = {status: status.finish_reason for status in RequestStatus if status.is_finished}
    assert reasons == {
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH: "length",
        RequestStatus.FINISHED_ABORTED: "abort",
    }
    assert RequestStatus.PREEMPTED.finish_reason is None
