"""How a source is reached: request headers and TLS, from a target's options. Secrets come from the environment only.

`options` may hold "headers_env" (header -> name of the variable with the whole header value), "bearer_env" (variable
with a token), "basic_env" (variable with USER:PASSWORD), "ca_file" and "verify".
"""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx


class AccessError(Exception):
    """A source cannot be reached as configured; the message is one sentence for the user and holds no secret."""


@dataclass(frozen=True)
class Access:
    """Headers to send (never shown), and how certificates are checked: a CA file, the system's (True), or not."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True

    def ssl_context(self) -> ssl.SSLContext:
        """How certificates are checked, as a context; raises `AccessError` for a CA file without certificates."""
        if not isinstance(self.verify, str):
            return httpx.create_ssl_context(verify=self.verify, trust_env=False)
        try:
            return ssl.create_default_context(cafile=self.verify)
        except (OSError, ssl.SSLError):
            raise AccessError(f"{self.verify} holds no CA certificate in PEM form.") from None


def access_from(options: Mapping[str, Any], url: str = "") -> Access:
    """What `options` say, with secrets from the environment; raises `AccessError` for what cannot be used."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise AccessError(f"The address of {parts.hostname} holds a password: name an environment variable instead.")
    headers = {name: _secret(variable, f"the header {name}") for name, variable in _pairs(options, "headers_env")}
    if variable := options.get("bearer_env"):
        headers["Authorization"] = f"Bearer {_secret(variable, 'the bearer token')}"
    if variable := options.get("basic_env"):
        secret = _secret(variable, "USER:PASSWORD")
        if ":" not in secret:
            raise AccessError(f"The environment variable {variable} must hold USER:PASSWORD.")
        headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
    return Access(headers, _verify(options))


def _verify(options: Mapping[str, Any]) -> bool | str:
    if options.get("verify") is False:
        return False
    file = options.get("ca_file")
    if not file:
        return True
    if not Path(str(file)).is_file():
        raise AccessError(f"The CA file {file} is not there.")
    return str(file)


def _pairs(options: Mapping[str, Any], key: str) -> list[tuple[str, str]]:
    value = options.get(key) or {}
    if not isinstance(value, Mapping):
        raise AccessError(f"The option {key} must map names to environment variables.")
    return [(str(name), str(variable)) for name, variable in value.items()]


def _secret(variable: str, what: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise AccessError(f"The environment variable {variable} is empty: it must hold {what}.")
    if "\n" in value or "\r" in value:
        raise AccessError(f"The environment variable {variable} must hold one line.")
    return value
