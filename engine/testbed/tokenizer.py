"""Builds the testbed's tokenizer: byte-level BPE that merges fact keys (`ax`) and told values (`=37`).

So a fact is three tokens, which a small model learns to look up far sooner than six; digits and brackets elsewhere
are one token each, and any text at all (all 256 bytes are in
the vocabulary) survives encode and decode exactly. Special tokens take the first ids: see SPECIAL.
"""

from __future__ import annotations

from string import ascii_lowercase, digits

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.testbed.tasks import BOS, EOS, PAD

SPECIAL = (BOS, EOS, PAD, "<unk>")  # ids 0, 1, 2, 3; <unk> is never produced

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'user' and not message['content'].endswith('>') %}{{ '>' }}"
    "{% endif %}{% endfor %}"
)
"""User text as it is (">" added where it is missing), assistant text closed by EOS, system text as it is."""


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with its special tokens and chat template; encoding puts BOS in front by default."""
    merges = [(a, b) for a in ascii_lowercase for b in ascii_lowercase]
    merges += [("=", a) for a in digits] + [("=" + a, b) for a in digits for b in digits]
    symbols = list(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    bpe = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("=[0-9]{2}|[a-z]{2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIAL))
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
