"""How likely a key of so many bits names two different things by chance.

Chance is the lower bound: against a hash without collision resistance somebody looks for collisions, whatever the
number of bits.
"""

from __future__ import annotations

import math


def collision_probability(bits: int, live_blocks: int, lookups: int = 0) -> float:
    """Probability that at least one pair of different contents shares a key of `bits` bits, uniformly distributed.

    live_blocks: different contents cached at a time; each was looked up among the others when it came. lookups:
    further contents looked up among all of them. `ValueError` for a number below its least: 1 bit, 0 blocks, 0 lookups.
    """
    if bits < 1 or live_blocks < 0 or lookups < 0:
        raise ValueError(f"needs bits >= 1 and no negative counts, got {bits}, {live_blocks} and {lookups}")
    pairs = live_blocks * (live_blocks - 1) / 2 + live_blocks * lookups
    return -math.expm1(pairs * math.log1p(-(2.0**-bits)))
