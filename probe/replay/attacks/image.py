"""The key leaves the image out: placeholder tokens are the same for every picture, so all pictures look alike.

As where a picture's identity is squeezed into 16 bits or skipped (LMCache/LMCache#4086, CVE-2025-46722).
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence

from engine.testbed.font import draw
from engine.testbed.tasks import KEYS, VALUES
from probe.isolation.client import Caller
from probe.replay.attacks.attack import TRIES, Ask, Case, CaseAttack, Try, session
from probe.replay.attacks.facts import Fact, draw_facts, other_value, question, told

FACTS = 5  # of three tokens each: <bos> and the form are a block, the picture and the "?" after it are another


class MissingImageKey(CaseAttack):
    """Variant `image`."""

    kind = "image"

    def flags(self) -> list[str]:
        """Blocks that do not say which picture they hold."""
        return ["--prefix-cache-fault", "image_key"]

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """Pictures of the same size beside the same form, and the same question about each."""
        made = []
        for number in range(count):
            form = draw_facts(rng, FACTS)
            key = rng.choice([key for key in KEYS if key not in dict(form)])
            secret, reader = rng.choice(VALUES), session(f"a{number}")
            victim = _ask(form, draw_facts(rng, FACTS, (key, secret)), key, reader)
            tries = []
            for i in range(TRIES):
                right = other_value(rng, secret)
                attacker = session(f"b{number}-{i}")
                tries.append(Try(_ask(form, draw_facts(rng, FACTS, (key, right)), key, attacker), right))
            again = [
                *victim.prompt, {"role": "assistant", "content": secret}, {"role": "user", "content": question(key)},
            ]  # fmt: skip
            made.append(Case(victim, tuple(tries), Ask("", again, reader), secret))
        return made

    def tell(self, case: Case, right: str, answer: str) -> str:
        """What the second picture's owner was told."""
        whose = "what Session A's picture says." if answer == case.secret else "read from another picture."
        return f"Session B sent a picture that says {right} and was told {answer}: {whose}"


def _ask(form: Sequence[Fact], picture: Sequence[Fact], key: str, caller: Caller) -> Ask:
    """A chat with a form, a picture and a question. The form tells conversations apart, not sessions."""
    url = "data:image/png;base64," + base64.b64encode(draw(told(picture))).decode()
    parts = [
        {"type": "text", "text": told(form)},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question(key)},
    ]
    text = f"{told(form)} [picture of a note: {told(picture)}] {question(key)}"
    return Ask(text, [{"role": "user", "content": parts}], caller)
