"""Who a request is to the prefix cache: what must be equal, besides its tokens, for its KV to be another's.

Two kinds of parts. What *makes* the KV: adapter, images and weights; with another one the numbers differ. And who
may *see* it: the namespace, which follows from `--prefix-cache-scope`. Ids come from the client unless a gateway
sets them, so a scope is as strong as the gateway in front. Pure Python.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

PrefixScope = str  # one of PREFIX_SCOPES
PREFIX_SCOPES = ("global", "tenant", "session")
MAX_ID_BYTES = 256  # of a salt, tenant or session id: more is a mistake, and every block would hash it

Namespace = tuple[tuple[str, str], ...]
"""Tagged parts that enter the first block a request does not share with everybody; empty: all share."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as loaded: the same name loaded again is another version, with other KV."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image of a prompt: its placeholder tokens start at `offset`; `digest` names its content (SHA-256, hex)."""

    offset: int
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What the prefix cache must know of a request besides its tokens.

    namespace: who may see its blocks. owner: a short label for views and metrics, never the id itself.
    adapter, images: what made the KV.
    """

    namespace: Namespace = ()
    owner: str = ""
    adapter: Adapter | None = None
    images: tuple[ImageSpan, ...] = ()


ANONYMOUS = CacheIdentity()


class IdentityPolicy:
    """Turns what a request says of itself into a namespace, by the scope the operator chose.

    global: only `cache_salt` separates, as in vLLM. tenant: the tenant's id separates as well; session: also the
    session's. A request without the id its scope asks for shares with nobody: it gets an id of its own.
    Owner labels are keyed with a secret of this process: they tell owners apart and cannot be guessed back.
    """

    def __init__(self, scope: PrefixScope = "global") -> None:
        self.scope = scope
        self._key = secrets.token_bytes(32)

    def namespace(
        self, *, cache_salt: str | None = None, tenant: str | None = None, session: str | None = None,
        user: str | None = None,
    ) -> Namespace:  # fmt: skip
        """tenant, session: from headers, set by a gateway. user: the field of OpenAI's API.

        The tenant is the header's, else `user`, else the salt; the session is the header's, else the salt, else
        `user`. In scope session a tenant's id is optional.
        """
        parts: list[tuple[str, str]] = []
        if self.scope == "tenant":
            parts.append(("tenant", tenant or user or cache_salt or self._nobody()))
        elif self.scope == "session":
            if tenant:
                parts.append(("tenant", tenant))
            parts.append(("session", session or cache_salt or user or self._nobody()))
        if cache_salt is not None:
            parts.append(("cache_salt", cache_salt))
        return tuple(parts)

    def owner(self, tenant: str | None, session: str | None, user: str | None, cache_salt: str | None) -> str:
        """A label of 8 hex digits for whoever sent the request; empty when it says nothing of itself."""
        said = [part for part in (tenant or user, session or cache_salt) if part]
        return "/".join(self._label(part) for part in said)

    def _label(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "surrogatepass"), sha256).hexdigest()[:8]

    @staticmethod
    def _nobody() -> str:
        return "\0" + secrets.token_hex(16)  # no client can send it: ids with control characters are refused


def extra_keys(
    identity: CacheIdentity, first_token: int, num_tokens: int, *, root: bool, private: bool, weights_version: int,
    left_out: Sequence[str] = (),
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """The tagged parts of one block's key, apart from parent and tokens.

    root: the block is the first of its chain; private: it is the first that is not public. `left_out` names parts a
    fault leaves out (`--prefix-cache-fault`). Later blocks inherit everything through the chain; an image enters every
    block it touches, with its place in it.
    """
    keys: list[tuple[str, str]] = []
    if root:
        if weights_version and "weights_key" not in left_out:
            keys.append(("weights", str(weights_version)))
        if identity.adapter is not None and "adapter_key" not in left_out:
            keys.append(("adapter", f"{identity.adapter.version}:{identity.adapter.name}"))
    if private:
        keys += identity.namespace
    if identity.images and "image_key" not in left_out:
        last = first_token + num_tokens
        keys += [
            ("image", f"{span.offset - first_token}:{span.digest}")
            for span in identity.images
            if span.offset < last and first_token < span.offset + span.num_tokens
        ]
    return tuple(keys)
