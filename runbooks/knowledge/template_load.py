"""What a template's requests hold of a pool: their own tokens, those they share, and how many fit at once."""

from __future__ import annotations

from engine.memory.capacity import CapacityPlan
from runbooks.knowledge.template_parts import Template


def shared_tokens(template: Template, found: CapacityPlan) -> int:
    """Tokens that all requests share: whole blocks of the common beginning."""
    block = max(1, found.block_size)
    return template.shared_prefix // block * block


def own_tokens(template: Template, found: CapacityPlan) -> int:
    """Tokens of a request, at its end, that no other shares, in whole blocks."""
    block = max(1, found.block_size)
    length = min(template.tokens_per_request, found.max_model_len) - shared_tokens(template, found)
    return max(block, -(-length // block) * block)


def requests_at_once(template: Template, found: CapacityPlan) -> int:
    """Requests of the template's length that the pool holds at once."""
    if not found.kv_bytes_per_token:
        return found.max_num_seqs
    return max(0, found.kv_tokens - shared_tokens(template, found)) // own_tokens(template, found)
