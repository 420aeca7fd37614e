"""The OpenAI API of a real server process, through the official client where it can say it."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.xdist_group("engine_server_api")

CONTEXT = 256


@pytest.fixture(scope="module")
def url(start_server: Any) -> str:
    return start_server("--num-gpu-blocks-override", "400", "--max-num-seqs", "16").wait_ready().base_url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def post(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def complete(url: str, **body: Any) -> dict[str, Any]:
    response = post(url, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(url: str, path: str = "/v1/completions", **body: Any) -> list[Any]:
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_models(client: openai.OpenAI, url: str) -> None:
    (model,) = client.models.list().data
    assert model.id == "testbed"
    assert httpx.get(url + "/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
    assert client.models.retrieve("testbed").id == "testbed"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion_is_greedy_deterministic_and_counts_tokens(client: openai.OpenAI) -> None:
    answers = [
        client.completions.create(model="testbed", prompt="hello", max_tokens=12, temperature=0, user="me")
        for _ in range(2)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].finish_reason in ("length", "stop")
    usage = answers[0].usage
    assert usage is not None
    assert usage.prompt_tokens == 5
    assert usage.total_tokens == 5 + usage.completion_tokens


def test_the_four_forms_of_a_prompt_agree(url: str) -> None:
    tokens = post(url, "/tokenize", prompt="abc").json()["tokens"]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    text = complete(url, prompt="abc", **options)["choices"][0]["text"]
    assert complete(url, prompt=tokens, **options)["choices"][0]["text"] == text
    for several in (["abc", "xyz"], [tokens, post(url, "/tokenize", prompt="xyz").json()["tokens"]]):
        answer = complete(url, prompt=several, **options)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 12


def test_stream_says_the_same_as_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="testbed", prompt="stream me", max_tokens=30, temperature=0, logprobs=0)
    stream = client.completions.create(
        model="testbed", prompt="stream me", max_tokens=30, temperature=0, logprobs=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    logprobs = [lp for chunk in chunks[:-1] for lp in chunk.choices[0].logprobs.token_logprobs]
    offsets = [offset for chunk in chunks[:-1] for offset in chunk.choices[0].logprobs.text_offset]
    assert logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)
    assert offsets == whole.choices[0].logprobs.text_offset


def test_stream_without_usage_ends_with_done_and_has_no_usage(url: str) -> None:
    chunks = events(url, prompt="x", max_tokens=3, temperature=0, ignore_eos=True)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_stream_of_several_choices_interleaves_them_by_index(url: str) -> None:
    body: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 8, "seed": 7, "ignore_eos": True}
    whole = complete(url, **body)
    texts = dict.fromkeys(range(4), "")
    chunks = events(url, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert chunk["usage"]["completion_tokens"] >= 1
    assert [texts[index] for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"]["completion_tokens"] == 32
    assert chunks[-1]["usage"]["prompt_tokens"] == 4, "each prompt counts once, whatever n"


def test_seed_reproduces_and_choices_differ(url: str) -> None:
    body: dict[str, Any] = {"prompt": "seeded", "n": 3, "max_tokens": 16, "seed": 11, "ignore_eos": True}
    first, second = complete(url, **body), complete(url, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    other = complete(url, **body | {"seed": 12})
    assert other["choices"][2]["text"] != texts[2]


def test_stop_strings_and_stop_token_ids(url: str) -> None:
    body: dict[str, Any] = {"prompt": "stop", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = complete(url, **body, return_token_ids=True)["choices"][0]
    readable = next(c for c in plain["text"][2:] if c.isascii() and c.isprintable())
    for stop in (readable, ["never here", readable]):
        stopped = complete(url, **body, stop=stop)["choices"][0]
        assert stopped["text"] == plain["text"].split(readable)[0]
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", readable)
    token = plain["token_ids"][5]
    stopped = complete(url, **body, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    assert stopped["token_ids"] == plain["token_ids"][: plain["token_ids"].index(token) + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)
    least = complete(url, **body, stop_token_ids=[token], min_tokens=30)
    assert least["usage"]["completion_tokens"] >= 30


def test_sampling_limits_reach_the_sampler(url: str) -> None:
    greedy = complete(url, prompt="k", max_tokens=10, temperature=0, ignore_eos=True)["choices"][0]["text"]
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        answer = complete(url, prompt="k", max_tokens=10, temperature=1.5, ignore_eos=True, **narrow)
        assert answer["choices"][0]["text"] == greedy


def test_completion_logprobs_have_the_legacy_shape(url: str) -> None:
    answer = complete(url, prompt="lp", max_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["text_offset"][0] == 0
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert top[token] == pytest.approx(max(top.values())), "greedy takes the most likely token"


def test_prompt_logprobs_have_vllms_shape(url: str) -> None:
    tokens = post(url, "/tokenize", prompt="prompt").json()["tokens"]
    choice = complete(url, prompt="prompt", max_tokens=1, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    for token, entry in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert {e["rank"] for e in entry.values()} >= {1, 2}
    chat = post(
        url, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, prompt_logprobs=0
    ).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    options: dict[str, Any] = {"model": "testbed", "temperature": 0, "max_completion_tokens": 9}
    whole = client.chat.completions.create(messages=messages, **options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("user:Hi\nassistant:")
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in whole.choices[0].logprobs.content)

    chunks = list(client.chat.completions.create(messages=messages, **options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_fills_the_context_when_no_limit_is_given(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="testbed", messages=[{"role": "user", "content": "go on"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_chat_template_refusal_is_the_clients_error(url: str) -> None:
    error = refusal(post(url, "/v1/chat/completions", messages=[{"role": "forbidden", "content": "x"}]))
    assert "no such role" in error["message"]


def test_cached_tokens_and_cache_salt(url: str) -> None:
    prompt = "a prompt of more than two blocks, so that it can be found again"

    def cached(**extra: Any) -> int:
        usage = complete(url, prompt=prompt, max_tokens=1, **extra)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 48)
    assert (cached(cache_salt="A"), cached(cache_salt="B"), cached(cache_salt="B")) == (0, 0, 48)
    assert cached(cache_salt="A") == 48
    assert httpx.post(url + "/reset_prefix_cache").json() == {"reset": True}
    assert cached() == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "temperature": -0.1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_p": 1.1}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 129}, "n"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop"),
        ({"prompt": "x", "stop": 3}, "stop"),
        ({"prompt": "x", "stop_token_ids": [257]}, "stop_token_ids"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "x", "priority": 1}, "priority"),
        ({"prompt": "x", "priority": 0.5}, "priority"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 4}, "best_of"),
        ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x", "max_token": 5}, "max_token"),
    ],
)
def test_wrong_fields_are_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    content = json.dumps(body).encode()
    response = httpx.post(url + "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = refusal(response)
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool": 1}]}, "messages[0].tool"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": 1}, "logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
    ],
)
def test_wrong_chat_fields_are_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    assert refusal(post(url, "/v1/chat/completions", **body))["param"] == param


def test_neutral_and_harmless_fields_pass(url: str) -> None:
    complete(
        url, prompt="x", max_tokens=1, model="testbed", user="u", metadata={"a": "b"}, store=False, echo=False,
        best_of=1, suffix=None, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1, logit_bias={},
        min_p=0, response_format={"type": "text"}, priority=0, cache_salt=None, stop=None, top_k=-1,
    )  # fmt: skip


def test_prompt_too_long_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="testbed", prompt="x" * CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert str(CONTEXT) in str(caught.value)
    answer = client.completions.create(
        model="testbed", prompt="x" * (CONTEXT - 1), max_tokens=10, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1, "max_tokens is clamped to what fits"
    assert answer.choices[0].finish_reason == "length"


def test_unknown_model_and_route_and_method(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    refusal(post(url, "/v1/embeddings", input="x"), 404)
    refusal(httpx.get(url + "/v1/completions"), 405)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_object(url: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    refusal(httpx.post(url + "/v1/completions", content=content, headers=headers))


def test_other_content_type_and_huge_body(url: str) -> None:
    refusal(httpx.post(url + "/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    body = b'{"prompt": "' + b"x" * (17 * 1024**2) + b'"}'
    refusal(httpx.post(url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}), 413)


def test_tokenize_and_detokenize(url: str) -> None:
    answer = post(url, "/tokenize", model="testbed", prompt="héllo", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
    assert answer["max_model_len"] == CONTEXT
    assert post(url, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "héllo"}
    chat = post(url, "/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert post(url, "/detokenize", tokens=chat["tokens"]).json()["prompt"] == "user:x\nassistant:"
    assert refusal(post(url, "/tokenize"))["param"] == "prompt"
    assert refusal(post(url, "/detokenize", tokens=[1, "a"]))["param"] == "tokens"


def test_concurrent_requests_get_their_own_answers(url: str) -> None:
    def ask(number: int) -> tuple[str, str]:
        body: dict[str, Any] = {"prompt": f"request {number}", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        if number % 2:
            return "stream", "".join(chunk["choices"][0]["text"] for chunk in events(url, **body))
        return "whole", complete(url, **body)["choices"][0]["text"]

    alone = [ask(number)[1] for number in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = [text for _, text in pool.map(ask, range(12))]
    assert together == alone
