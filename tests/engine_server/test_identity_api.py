"""Who a request says it is: headers and fields, their limits, and what each scope shares over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from engine.api.errors import APIError
from engine.api.identity import caller_of

pytestmark = pytest.mark.xdist_group("engine_server_identity")

PROMPT = "a prompt of more than two blocks, so that it can be found again"
Serve = Callable[..., TestClient]


@pytest.fixture(scope="module")
def by_scope(serve: Serve) -> Callable[[str], TestClient]:
    clients: dict[str, TestClient] = {}

    def client(scope: str) -> TestClient:
        if scope not in clients:
            clients[scope] = serve(prefix_cache_scope=scope)
        return clients[scope]

    return client


def cached(client: TestClient, headers: dict[str, str] | None = None, **body: Any) -> int:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1} | body, headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def refusal(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def test_scope_global_separates_only_by_salt(by_scope: Callable[[str], TestClient]) -> None:
    client = by_scope("global")
    prompt = "global: " + PROMPT
    assert cached(client, prompt=prompt, user="ann") == 0
    assert cached(client, {"X-Tenant-ID": "other"}, prompt=prompt, user="bob") == 64
    assert cached(client, prompt=prompt, cache_salt="s") == 0


def test_scope_tenant_shares_inside_a_tenant_only(by_scope: Callable[[str], TestClient]) -> None:
    client = by_scope("tenant")
    assert cached(client, {"X-Tenant-ID": "a", "X-Session-ID": "1"}) == 0
    assert cached(client, {"X-Tenant-ID": "a", "X-Session-ID": "2"}) == 48
    assert cached(client, {"X-Tenant-ID": "b", "X-Session-ID": "1"}) == 0
    assert (cached(client, user="c"), cached(client, user="c")) == (0, 48)
    assert cached(client, {"X-Tenant-ID": "a"}, user="c") == 48  # the gateway's word is above the client's


def test_scope_session_shares_inside_a_session_only(by_scope: Callable[[str], TestClient]) -> None:
    client = by_scope("session")
    assert cached(client, {"X-Tenant-ID": "a", "X-Session-ID": "1"}) == 0
    assert cached(client, {"X-Tenant-ID": "a", "X-Session-ID": "1"}) == 48
    assert cached(client, {"X-Tenant-ID": "a", "X-Session-ID": "2"}) == 0
    assert cached(client, {"X-Tenant-ID": "b", "X-Session-ID": "1"}) == 0


@pytest.mark.parametrize("scope", ["tenant", "session"])
def test_who_names_nobody_shares_with_nobody(by_scope: Callable[[str], TestClient], scope: str) -> None:
    client = by_scope(scope)
    assert (cached(client), cached(client)) == (0, 0)


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({}, {"user": 5}, "user"),
        ({}, {"user": ""}, "user"),
        ({}, {"user": "a\nb"}, "user"),
        ({}, {"user": "x" * 257}, "user"),
        ({}, {"cache_salt": ["a"]}, "cache_salt"),
        ({}, {"cache_salt": "é" * 129}, "cache_salt"),
        ({}, {"cache_salt": "\0a"}, "cache_salt"),
        ({"X-Tenant-ID": "x" * 257}, {}, "X-Tenant-ID"),
        ({"X-Tenant-ID": ""}, {}, "X-Tenant-ID"),
        ({"X-Session-ID": "a\tb"}, {}, "X-Session-ID"),
        ([("X-Tenant-ID", "a"), ("X-Tenant-ID", "b")], {}, "X-Tenant-ID"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ids_that_are_none_are_refused_by_name(
    by_scope: Callable[[str], TestClient], path: str, headers: Any, body: dict[str, Any], param: str
) -> None:
    what = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    error = refusal(by_scope("global").post(path, json=what | body, headers=headers))
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_ids_at_the_limit_pass(by_scope: Callable[[str], TestClient]) -> None:
    client = by_scope("global")
    assert cached(client, {"X-Tenant-ID": "x" * 256}, user="é" * 128, cache_salt="ü" * 128) == 0
    assert cached(client, cache_salt="ü" * 128) == 48


def test_headers_are_utf8() -> None:
    def tenant(raw: bytes) -> str | None:
        return caller_of(Headers(raw=[(b"x-tenant-id", raw)]), None, None).tenant

    assert tenant("ж".encode()) == "ж"
    for raw in (b"\xff", "\x85".encode(), "ж".encode() * 129):
        with pytest.raises(APIError, match=r"^X-Tenant-ID: "):
            tenant(raw)


def test_null_ids_are_absent(by_scope: Callable[[str], TestClient]) -> None:
    client = by_scope("global")
    prompt = "nulls: " + PROMPT
    assert (cached(client, prompt=prompt), cached(client, prompt=prompt, user=None, cache_salt=None)) == (0, 64)


def test_all_choices_come_when_they_fork(by_scope: Callable[[str], TestClient]) -> None:
    body = {"prompt": [PROMPT, "short"], "n": 3, "seed": 1, "max_tokens": 5}
    choices = by_scope("session").post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices[:3]}) > 1  # every choice draws with a seed of its own
