"""Values of --kv-cache-dtype by how finely they keep keys and values, and what is wrong with a coarser one.

Names are those of the embedded engine and of vLLM up to 0.33; keys come first because they carry the damage.
"""

from __future__ import annotations

from typing import Any

# (bits of a key's element, of a value's), without scales; "auto" counts as a model of 16 bits.
_BITS: dict[str, tuple[int, int]] = {
    "float32": (32, 32),
    **dict.fromkeys(("auto", "float16", "bfloat16", "bf16"), (16, 16)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "mxfp8"), (8, 8)),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), (8, 8)),
    **dict.fromkeys(("int8k_int4v", "turboquant_k8v4"), (8, 4)),
    **dict.fromkeys(("int4_symmetric", "int4_per_token_head", "int4_kivi", "turboquant_4bit_nc"), (4, 4)),
    **dict.fromkeys(("nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "ultraquant_4bit", "fp4_e2m1", "fp4_mx_block16"), (4, 4)),
    **dict.fromkeys(("turboquant_k3v4_nc", "octave_k3v4"), (3, 4)),
    **dict.fromkeys(("turboquant_3bit_nc", "octave_k3v3", "octave_k3v3_compact"), (3, 3)),
}
FULL_PRECISION = ("auto", "float32", "float16", "bfloat16")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")


def why_worse(now: Any, to: Any) -> str | None:
    """Why a format loses more than the one in force, by what is known of formats alone; None: nothing says so."""
    if to == "int4_symmetric":
        return (
            "wrong direction: one scale for all channels of a token, so a few outlier key channels leave the others "
            "no codes; it breaks first of all 4-bit formats"
        )
    before, after = _BITS.get(str(now)), _BITS.get(str(to))
    if before is None or after is None or after >= before:
        return None
    part, bits, had = ("keys", after[0], before[0]) if after[0] < before[0] else ("values", after[1], before[1])
    return f"wrong direction: {part} get {bits} bits in place of {had}, and quality fell for want of precision"


def bits_of(value: Any) -> tuple[int, int] | None:
    """Bits of a key's element and of a value's; None for a format that is not known here."""
    return _BITS.get(str(value))


def takes_more_bits(now: Any, to: Any) -> bool:
    """Whether a format is known to take more bytes a token than another."""
    before, after = bits_of(now), bits_of(to)
    return before is not None and after is not None and sum(after) > sum(before)
