"""The key leaves the image out: placeholder tokens are the same for every picture, so all pictures look alike.

As where a picture's identity is squeezed into 16 bits or skipped (LMCache/LMCache#4086, CVE-2025-46722).
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from typing import Any

from engine.testbed.font import draw
from engine.testbed.tasks import KEYS, VALUES
from probe.isolation.result import CheckName
from probe.replay.attacks.attack import Ask, Case, CaseAttack, session
from probe.replay.attacks.facts import Fact, draw_facts, other_value, question, told

FACTS = 5  # of three tokens each: <bos> and the form are a block, the picture and the "?" after it are another


class MissingImageKey(CaseAttack):
    """Variant `image`."""

    kind = "image"
    check: CheckName = "leak-canary"

    def flags(self) -> list[str]:
        """Blocks that do not say which picture they hold."""
        return ["--prefix-cache-fault", "image_key"]

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """Two pictures of the same size beside the same form, and the same question about both."""
        made = []
        for number in range(count):
            form = draw_facts(rng, FACTS)
            key = rng.choice([key for key in KEYS if key not in dict(form)])
            secret = rng.choice(VALUES)
            right = other_value(rng, secret)
            hers, his = (told(draw_facts(rng, FACTS, (key, value))) for value in (secret, right))
            reader = session(f"a{number}")
            asked = _messages(told(form), hers, question(key))
            again = [*asked, {"role": "assistant", "content": secret}, {"role": "user", "content": question(key)}]
            made.append(
                Case(
                    victim=Ask(_shown(form, hers, key), asked, reader),
                    attacker=Ask(
                        _shown(form, his, key), _messages(told(form), his, question(key)), session(f"b{number}")
                    ),
                    right=right,
                    secret=secret,
                    follow_up=Ask("", again, reader),
                )
            )
        return made

    def tell(self, case: Case, answers: Sequence[str]) -> str:
        """What the second picture's owner was told."""
        return f"Session B sent a picture that says {case.right} and was told {answers[1]}: " + (
            "what Session A's picture says." if answers[1] == case.secret else "read from Session A's picture."
        )


def _messages(form: str, text: str, asked: str) -> list[dict[str, Any]]:
    """A chat with a form, a picture of `text` and a question. The form tells conversations apart, not sessions."""
    url = "data:image/png;base64," + base64.b64encode(draw(text)).decode()
    parts = [
        {"type": "text", "text": form},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": asked},
    ]
    return [{"role": "user", "content": parts}]


def _shown(form: Sequence[Fact], text: str, key: str) -> str:
    return f"{told(form)} [picture of a note: {text}] {question(key)}"
