"""Putting one message through: a plain webhook, or any service that apprise knows.

Runs in threads. Nothing here logs or returns an address: those of most services are their password. That is why the
webhook uses urllib, which logs nothing (httpx logs every URL), and why what apprise's libraries log while it sends is
thrown away.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from probe.notify.message import Message, body, payload, title
from probe.notify.receivers import Receiver
from probe.notify.secret_refs import SecretError, redact, resolve

TIMEOUT_S = 10.0
_TALKATIVE = ("apprise", "urllib3.connectionpool", "urllib3.util.retry", "requests_oauthlib.oauth1_session")
AGAIN = (408, 425, 429)  # besides 5xx, as Alertmanager retries


@dataclass(frozen=True)
class Sent:
    """`error` None: delivered. `again`: worth another try. `unconfirmed`: it may have arrived all the same."""

    error: str | None = None
    again: bool = False
    unconfirmed: bool = False

    @property
    def ok(self) -> bool:
        """Whether the receiver confirmed it."""
        return self.error is None


_SENDING: ContextVar[bool] = ContextVar("sending", default=False)  # apprise hands the context on to its threads

Send = Callable[[Receiver, Message], Sent]


class Sender:
    """Sends for a store whose secrets.toml lies beside `store_where`."""

    def __init__(self, store_where: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._where = store_where
        self._timeout_s = timeout_s

    def __call__(self, receiver: Receiver, message: Message) -> Sent:
        """Never raises; errors are one sentence without secrets."""
        try:
            url = resolve(receiver.url, self._where)
            bearer = resolve(receiver.bearer, self._where) if receiver.bearer else ""
        except SecretError as error:
            return Sent(str(error), again=True)  # it may be there after the next edit
        try:
            sent = self._webhook(url, bearer, message) if receiver.kind == "webhook" else self._apprise(url, message)
        except Exception as error:
            sent = Sent(f"Sending failed ({type(error).__name__}).", again=True, unconfirmed=True)
        if sent.error is None:
            return sent
        return Sent(redact(sent.error, [bearer, *_paths(url)]), sent.again, sent.unconfirmed)

    def problem(self, receiver: Receiver) -> str | None:
        """Why the receiver cannot be used now (a secret is missing), or None; sends nothing."""
        try:
            for reference in filter(None, (receiver.url, receiver.bearer)):
                resolve(reference, self._where)
        except SecretError as error:
            return str(error)
        return None

    def _webhook(self, url: str, bearer: str, message: Message) -> Sent:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return Sent("The address is not http:// or https://: correct it.")
        login, _, place = parts.netloc.rpartition("@")
        data = json.dumps(payload(message)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "kvoncall"}
        if bearer or login:
            basic = base64.b64encode(unquote(login).encode()).decode()
            headers["Authorization"] = f"Bearer {bearer}" if bearer else f"Basic {basic}"
        request = urllib.request.Request(urlunsplit(parts._replace(netloc=place)), data, headers)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self._timeout_s):
                return Sent()
        except urllib.error.HTTPError as error:
            error.close()
            return Sent(f"It answered HTTP {error.code}.", again=error.code >= 500 or error.code in AGAIN)
        except (OSError, http.client.HTTPException) as error:
            return _no_answer(error, self._timeout_s)

    def _apprise(self, url: str, message: Message) -> Sent:
        try:
            import apprise
        except ImportError:
            return Sent("apprise is not installed: pip install 'kvoncall[notify]'.", again=True)
        with _unlogged():
            service = apprise.Apprise()
            if not service.add(url):
                return Sent("The address is not one that apprise understands: correct it.")
            kind = apprise.NotifyType.FAILURE if message.status == "firing" else apprise.NotifyType.SUCCESS
            if service.notify(body=body(message), title=title(message), notify_type=kind, body_format="text"):
                return Sent()
        return Sent("The service did not take the message.", again=True)


@contextmanager
def _unlogged() -> Iterator[None]:
    """What the libraries of apprise log meanwhile holds addresses: it goes nowhere, here and in apprise's threads."""
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_is_loggable)
    token = _SENDING.set(True)
    try:
        yield
    finally:
        _SENDING.reset(token)


def _is_loggable(_record: logging.LogRecord) -> bool:
    return not _SENDING.get()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect of a POST would become a GET without the message: it counts as refused."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _no_answer(error: Exception, timeout_s: float) -> Sent:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return Sent(f"It did not answer within {timeout_s:g} s.", again=True, unconfirmed=True)
    if isinstance(reason, ConnectionRefusedError):
        return Sent("It refused the connection.", again=True)
    if isinstance(reason, socket.gaierror):
        return Sent("Its host name is not known.", again=True)
    return Sent(f"The connection failed ({type(reason).__name__}).", again=True, unconfirmed=True)


def _paths(url: str) -> list[str]:
    """What of an address must not be shown: all of it but scheme and host."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return [url, *filter(None, (parts.path.strip("/"), parts.query, parts.fragment, login))]
