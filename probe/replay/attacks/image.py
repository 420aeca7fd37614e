"""The key leaves the image out: placeholder tokens are the same for every picture, so all pictures look alike.

As where a picture's identity is squeezed into 16 bits or skipped (LMCache/LMCache#4086, CVE-2025-46722).
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from typing import Any

from engine.testbed.font import draw
from engine.testbed.tasks import VALUES
from probe.replay.attacks.attack import Ask, Case, CaseAttack, session
from probe.replay.attacks.facts import draw_facts, other_value, question, told

FACTS = 11  # <bos> and 33 placeholder tokens: two whole blocks of pictures


class MissingImageKey(CaseAttack):
    """Variant `image`."""

    kind = "image"

    def flags(self) -> list[str]:
        """Blocks that do not say which picture they hold."""
        return ["--prefix-cache-fault", "image_key"]

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """Two pictures of the same size, the same question about both."""
        made = []
        for number in range(count):
            key, secret = "ax", rng.choice(VALUES)
            right = other_value(rng, secret)
            hers, his = told(draw_facts(rng, FACTS, (key, secret))), told(draw_facts(rng, FACTS, (key, right)))
            reader = session(f"a{number}")
            asked = _messages(hers, question(key))
            again = [*asked, {"role": "assistant", "content": secret}, {"role": "user", "content": question(key)}]
            made.append(
                Case(
                    victim=Ask(_shown(hers, key), asked, reader),
                    attacker=Ask(_shown(his, key), _messages(his, question(key)), session(f"b{number}")),
                    right=right,
                    secret=secret,
                    follow_up=Ask(f"{_shown(hers, key)} {question(key)}", again, reader),
                )
            )
        return made

    def tell(self, case: Case, answers: Sequence[str]) -> str:
        """What the second picture's owner was told."""
        return f"Session B sent a picture that says {case.right} and was told {answers[1]}: " + (
            "what Session A's picture says." if answers[1] == case.secret else "read from Session A's picture."
        )


def _messages(text: str, asked: str) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(draw(text)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": asked}]
    return [{"role": "user", "content": parts}]


def _shown(text: str, key: str) -> str:
    return f"[picture of a note: {text}] {question(key)}"
