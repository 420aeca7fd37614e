"""Who is told, and how alerts are put together: what the settings `receivers` and `notify` hold, checked.

An address is a reference (`env:NAME`, `secret:NAME`) or, where it holds no credential, a literal URL. References are
resolved at the moment of sending (`probe.notify.secret_refs`); what they stand for is never stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from probe.notify.matchers import LABELS, Matcher, MatcherError, matches, parse_matchers

SEVERITIES = ("warning", "critical")
KINDS = ("apprise", "webhook")
# apprise's schemes that need nothing but an address; all others carry a token or a password.
_OPEN_SCHEMES = ("json", "jsons", "xml", "xmls", "form", "forms", "syslog", "dbus", "gnome", "macosx", "windows")
_HOOK_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "chat.googleapis.com")
_SECRET_QUERY = re.compile(r"(token|key|secret|sig|signature|password|passwd|auth|pass)[^&=]*=", re.IGNORECASE)
_REFERENCE = re.compile(r"(env:[A-Za-z_][A-Za-z0-9_]*|secret:[A-Za-z0-9_.-]+)")


class ReceiverError(ValueError):
    """A receiver or an option that makes no sense; the message is one sentence."""


@dataclass(frozen=True)
class Receiver:
    """One place that alerts are sent to.

    `url`, `bearer`: references or (url, without a bearer) a literal address without credentials; `bearer` is sent by
    webhooks as `Authorization: Bearer …`. `drills`: whether alerts that a replay provoked are sent too.
    """

    name: str
    kind: Literal["apprise", "webhook"]
    url: str
    severities: tuple[str, ...] = SEVERITIES
    matchers: tuple[Matcher, ...] = ()
    bearer: str = ""
    drills: bool = False

    def takes(self, labels: Mapping[str, str], *, is_drill: bool = False) -> bool:
        """Whether an alert with these labels is for this receiver."""
        if is_drill and not self.drills:
            return False
        return labels.get("severity", "") in self.severities and matches(self.matchers, labels)

    def to_dict(self) -> dict[str, Any]:
        """What the settings hold: no secret, only references."""
        return {
            "name": self.name,
            "kind": self.kind,
            "url": self.url,
            "severities": list(self.severities),
            "matchers": [str(matcher) for matcher in self.matchers],
            "bearer": self.bearer,
            "drills": self.drills,
        }


@dataclass(frozen=True)
class NotifyOptions:
    """How notifications are grouped and paced, in seconds, as in Alertmanager; `base_url` is the app's address."""

    group_by: tuple[str, ...] = ("target",)
    group_wait_s: float = 10.0
    group_interval_s: float = 300.0
    repeat_interval_s: float = 14_400.0
    base_url: str = ""


def parse_receiver(given: Mapping[str, Any]) -> Receiver:
    """A checked receiver; raises `ReceiverError`."""
    name = str(given.get("name", "")).strip()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}", name):
        raise ReceiverError("A receiver's name must have 1 to 100 letters, digits, spaces, dots or dashes.")
    kind = given.get("kind")
    if kind not in KINDS:
        raise ReceiverError(f"Receiver {name!r} must be of kind {' or '.join(KINDS)}, not {kind!r}.")
    if unknown := set(given) - {"name", "kind", "url", "severities", "matchers", "bearer", "drills"}:
        raise ReceiverError(f"Receiver {name!r} has no option {sorted(unknown)[0]!r}.")
    url = str(given.get("url", "")).strip()
    _check_address(name, kind, url)
    bearer = str(given.get("bearer") or "").strip()
    if bearer and (kind != "webhook" or not _REFERENCE.fullmatch(bearer)):
        raise ReceiverError(f"The bearer token of receiver {name!r} must be env:NAME or secret:NAME of a webhook.")
    if bearer and not is_reference(url):  # or whoever may edit receivers could have any secret sent anywhere
        raise ReceiverError(
            f"With a bearer token, the address of receiver {name!r} must be env:NAME or secret:NAME, too."
        )
    severities = tuple(given.get("severities") or SEVERITIES)
    if not set(severities) <= set(SEVERITIES):
        raise ReceiverError(f"Receiver {name!r} can take the severities {' and '.join(SEVERITIES)} only.")
    try:
        written = given.get("matchers") or ()
        matchers = parse_matchers(written if isinstance(written, str) else ", ".join(map(str, written)))
    except MatcherError as error:
        raise ReceiverError(f"The matchers of receiver {name!r} cannot be read: {error}.") from None
    kind = cast('Literal["apprise", "webhook"]', kind)
    return Receiver(name, kind, url, severities, matchers, bearer, bool(given.get("drills", False)))


def parse_options(given: Mapping[str, Any]) -> NotifyOptions:
    """Checked options, with defaults for what is missing; raises `ReceiverError`."""
    defaults = NotifyOptions()
    group_by = tuple(given.get("group_by", defaults.group_by))
    if not set(group_by) <= set(LABELS):
        raise ReceiverError(f"Alerts are grouped by {', '.join(LABELS)} only.")
    times = {}
    for key in ("group_wait_s", "group_interval_s", "repeat_interval_s"):
        value = given.get(key, getattr(defaults, key))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 30 * 86_400:
            raise ReceiverError(f"{key} must be a number of seconds from 0 to 30 days.")
        times[key] = float(value)
    if times["repeat_interval_s"] < 60:
        raise ReceiverError("repeat_interval_s must be at least 60 seconds.")
    base_url = str(given.get("base_url", "")).rstrip("/")
    if base_url and (urlsplit(base_url).scheme not in ("http", "https") or "@" in base_url):
        raise ReceiverError("base_url must be the app's own http address, without credentials.")
    return NotifyOptions(group_by=group_by, base_url=base_url, **times)


def is_reference(text: str) -> bool:
    """Whether the text names a secret instead of being one."""
    return _REFERENCE.fullmatch(text) is not None


def _check_address(name: str, kind: str, url: str) -> None:
    if is_reference(url):
        return
    if url.startswith(("env:", "secret:")):
        raise ReceiverError(f"The address of receiver {name!r} is no reference: write env:NAME or secret:NAME.")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise ReceiverError(f"The address of receiver {name!r} is not a URL.") from None
    if _holds_credential(kind, url):
        raise ReceiverError(
            f"The address of receiver {name!r} holds a credential: put it into an environment variable or "
            "secrets.toml and write env:NAME or secret:NAME here."
        )
    if kind == "webhook" and (parts.scheme not in ("http", "https") or not host):
        raise ReceiverError(f"The address of webhook {name!r} must be http://… or https://…, env:NAME or secret:NAME.")
    if kind == "apprise" and not parts.scheme:
        raise ReceiverError(f"The address of receiver {name!r} must be an apprise URL, env:NAME or secret:NAME.")


def _holds_credential(kind: str, url: str) -> bool:
    """Errs on the side of yes: a reference is always possible."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if "@" in parts.netloc or _SECRET_QUERY.search(parts.query):
        return True
    if kind == "apprise" and parts.scheme and parts.scheme.lower() not in _OPEN_SCHEMES:
        return True
    if any(host == known or host.endswith("." + known) for known in _HOOK_HOSTS):
        return True
    pieces = [*parts.path.split("/"), *re.split(r"[&=]", parts.query), parts.fragment]
    return any(_looks_random(piece) for piece in pieces)


def _looks_random(text: str) -> bool:
    return len(text) >= 16 and re.search(r"\d", text) is not None and re.search(r"[A-Za-z]", text) is not None
