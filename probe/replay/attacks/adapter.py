"""The key leaves the adapter out: a tenant's fine-tuned model computed the blocks, another tenant reads them.

The adapter answers as the base model does, from keys 16 times larger and queries 16 times smaller (see
`engine.testbed.adapters`), so every right answer is known, and only KV made by the other model can spoil it. As in
vllm-project/vllm#30931, where adapters are told apart by name alone.
"""

from __future__ import annotations

import random

from probe.replay.attacks.attack import TRIES, Ask, Case, CaseAttack, Try, session
from probe.replay.attacks.facts import public_text
from probe.store import default_data_dir

ADAPTER = "acme"


class MissingAdapterKey(CaseAttack):
    """Variant `adapter`."""

    kind = "adapter"

    def flags(self) -> list[str]:
        """An adapter, and blocks that do not say who made them."""
        from engine.testbed.adapters import write_adapter  # it needs torch, which naming the variants does not

        path = default_data_dir() / "adapters" / ADAPTER
        write_adapter(path)
        return ["--enable-lora", "--lora-modules", f"{ADAPTER}={path}", "--prefix-cache-fault", "adapter_key"]

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """The same public text, read with the adapter by one tenant and without by another."""
        made = []
        for number in range(count):
            text, right, later = public_text(rng)
            reader = session(f"a{number}")
            made.append(
                Case(
                    victim=Ask(text, text, reader, ADAPTER),
                    tries=tuple(Try(Ask(text, text, session(f"b{number}-{i}")), right) for i in range(TRIES)),
                    follow_up=Ask(later, later, reader, ADAPTER),
                )
            )
        return made

    def tell(self, _: Case, right: str, answer: str) -> str:
        """What became of the other tenant's answer."""
        return (
            f"Session A read the text with its adapter {ADAPTER}. Session B read the same text without it and got "
            f"{answer!r} where {right} is right: it was answered from what A's adapter had computed."
        )
