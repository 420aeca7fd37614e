"""Who a request says it is: tenant, session, user and cache salt, as far as the prefix cache is concerned.

A tenant and a session come in headers, which a gateway sets; `user` and `cache_salt` are fields of the body. Nothing
here proves who a client is: a scope is as strong as the gateway that overwrites these headers.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from engine.api.errors import bad_field
from engine.cache_identity import MAX_ID_BYTES, Adapter, CacheIdentity, IdentityPolicy, ImageSpan

TENANT_HEADER = "X-Tenant-ID"
SESSION_HEADER = "X-Session-ID"


@dataclass(frozen=True)
class Caller:
    """What a request says of its sender; `None` where it says nothing."""

    tenant: str | None = None
    session: str | None = None
    user: str | None = None
    cache_salt: str | None = None

    def identity(
        self, policy: IdentityPolicy, adapter: Adapter | None = None, images: tuple[ImageSpan, ...] = ()
    ) -> CacheIdentity:
        """Its identity to the prefix cache, with what makes the KV of its prompt."""
        return CacheIdentity(
            policy.namespace(cache_salt=self.cache_salt, tenant=self.tenant, session=self.session, user=self.user),
            policy.owner(self.tenant, self.session, self.user, self.cache_salt),
            adapter,
            images,
        )


def caller_of(headers: Headers, user: str | None, cache_salt: str | None) -> Caller:
    """The caller of a request whose body's ids are read already; 400 for a header that is no id."""
    return Caller(_header_id(headers, TENANT_HEADER), _header_id(headers, SESSION_HEADER), user, cache_salt)


def checked_id(name: str, value: Any) -> str:
    """`value` when it can be an id: 1 to 256 bytes of UTF-8 without control characters; 400 naming it otherwise."""
    if not isinstance(value, str) or not value:
        raise bad_field(name, "must be a non-empty string if provided")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise bad_field(name, "holds a lone surrogate; send valid Unicode") from None
    if num_bytes > MAX_ID_BYTES:
        raise bad_field(name, f"must be at most {MAX_ID_BYTES} bytes, got {num_bytes}")
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise bad_field(name, "holds a control character")
    return value


def _header_id(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if not values:
        return None
    if len(values) > 1:
        raise bad_field(name, f"is sent {len(values)} times; a gateway must replace the client's header, not add one")
    try:
        text = values[0].encode("latin-1").decode()  # what Starlette decoded byte by byte
    except UnicodeDecodeError:
        raise bad_field(name, "is not valid UTF-8") from None
    return checked_id(name, text)
