"""Text to tokens and back, piece by piece, and chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.config import ConfigError
from engine.tokenizer import ByteStream, ChatTemplateError, DecodeStream, Tokenizer, WindowStream

TEXT = "naïve café, 日本語 и 👩‍👩‍👧 abcabc\n"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    return pieces_from(tokenizer.stream(prompt or []), token_ids)


def pieces_from(stream: DecodeStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in token_ids), stream.flush()]


def test_round_trip(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == 2 + 256 + 56


@pytest.fixture(params=[ByteStream, WindowStream])
def make_stream(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Callable[[], DecodeStream]:
    """Both decoders must do for a byte-level tokenizer; it takes the faster one itself."""
    assert isinstance(tokenizer.stream(), ByteStream)
    return tokenizer.stream if request.param is ByteStream else lambda: WindowStream(tokenizer, [])


def test_pieces_hold_whole_characters(tokenizer: Tokenizer, make_stream: Callable[[], DecodeStream]) -> None:
    pieces = pieces_from(make_stream(), tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[-1] == ""
    assert pieces.count("") > 10  # bytes in the middle of a character let nothing out


def test_a_character_that_never_ends_comes_out_at_the_end(
    tokenizer: Tokenizer, make_stream: Callable[[], DecodeStream]
) -> None:
    ids = tokenizer.encode("a日")
    assert pieces_from(make_stream(), ids[:-1]) == ["a", "", "", "\ufffd"]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 330), max_size=30))
def test_pieces_together_are_the_text_of_any_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    text = tokenizer.decode(token_ids)
    assert "".join(pieces_from(tokenizer.stream(), token_ids)) == text
    assert "".join(pieces_from(WindowStream(tokenizer, []), token_ids)) == text


def test_added_tokens_that_are_text(copy: Path) -> None:
    raw = json.loads((copy / "tokenizer.json").read_text())
    added = dict(raw["added_tokens"][0], id=314, content="¡añadido ☃!", special=False)
    raw["added_tokens"].append(added)
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(copy)
    ids = [314, *tokenizer.encode("ab"), 314]
    assert tokenizer.decode(ids) == "¡añadido ☃!ab¡añadido ☃!"
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, [*tokenizer.encode("ab"), 1]) == ["ab", "", ""]
    assert tokenizer.token_text(1) == "</s>"


def metaspace_directory(directory: Path) -> Path:
    """Sentencepiece style: a leading space belongs to the token, and bytes that spell a character are a run."""
    words = ["<unk>", "▁", "▁hello", "▁world", "wide"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    return directory


def test_spaces_between_words_survive_a_decoder_that_strips_the_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer(metaspace_directory(tmp_path))
    hello, world, wide = 2, 3, 4
    assert pieces_of(tokenizer, [hello, world, wide, world]) == ["hello", " world", "wide", " world", ""]
    assert pieces_of(tokenizer, [world], prompt=[hello]) == [" world", ""]
    assert tokenizer.eos_token_id is None


def test_byte_fallback_runs(tmp_path: Path) -> None:
    tokenizer = Tokenizer(metaspace_directory(tmp_path))
    ids = [5 + byte for byte in "日本".encode()]
    assert pieces_of(tokenizer, ids) == ["", "", "日", "", "", "本", ""]


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert tokenizer.apply_chat_template(messages) == "<s>u:hi\na:ho\na:"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s>u:hi\na:ho\n"


def test_chat_template_that_refuses(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no system messages here"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    with pytest.raises(ChatTemplateError):
        tokenizer.apply_chat_template([{"role": "user"}, 3])  # type: ignore[list-item]


def set_template(directory: Path, template: object) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def test_template_in_the_config_named_or_plain(copy: Path) -> None:
    set_template(copy, "{{ messages[0].content }}")
    assert Tokenizer(copy).apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    set_template(copy, [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}])
    assert Tokenizer(copy).apply_chat_template([]) == "yes"


def test_no_template(copy: Path) -> None:
    set_template(copy, None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(copy).apply_chat_template([])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(99999999) %}x{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(copy: Path, attack: str) -> None:
    set_template(copy, attack)
    with pytest.raises(ChatTemplateError):
        Tokenizer(copy).apply_chat_template([])


def test_broken_template(copy: Path) -> None:
    set_template(copy, "{% for %}")
    with pytest.raises(ConfigError, match="not valid jinja"):
        Tokenizer(copy)


def test_end_tokens(copy: Path) -> None:
    assert Tokenizer(copy).eos_token_ids == [1]
    generation = copy / "generation_config.json"
    generation.write_text('{"eos_token_id": [1, 7]}')
    assert Tokenizer(copy).eos_token_ids == [1, 7]
    generation.unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert Tokenizer(copy).eos_token_ids == [9]
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert Tokenizer(copy).eos_token_ids == [1]  # by the name in tokenizer_config.json


@pytest.mark.parametrize(("content", "words"), [(None, "holds no tokenizer.json"), ("{}", "not a readable tokenizer")])
def test_missing_or_corrupt_tokenizer(copy: Path, content: str | None, words: str) -> None:
    (copy / "tokenizer.json").unlink()
    if content is not None:
        (copy / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        Tokenizer(copy)


@pytest.mark.parametrize("eos", ["</s>", [1, "</s>"], {"id": 1}, 1.5])
def test_end_tokens_that_are_no_ids(copy: Path, eos: object) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match="eos_token_id must be a token id or a list of them"):
        Tokenizer(copy)


def test_a_template_that_is_not_text(copy: Path) -> None:
    (copy / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja' cannot be read as text"):
        Tokenizer(copy)


def test_the_tokenizer_of_another_model_is_refused(copy: Path, lab: Any) -> None:
    tokenizer = Tokenizer(copy)
    tokenizer.refuse_other_vocabulary(tokenizer.vocab_size)
    with pytest.raises(ConfigError, match="do not belong together"):
        tokenizer.refuse_other_vocabulary(tokenizer.vocab_size - 1)
    other = lab.make_llama(copy.parent / "other", vocab_size=200)
    sentence = (
        r"token ids up to 313, but the model has embeddings for 200; tokenizer and weights do not belong together"
    )
    with pytest.raises(ConfigError, match=sentence):
        lab.make_engine(other)


def test_tokens_added_beyond_the_vocabulary_are_nobodys_mistake(copy: Path) -> None:
    content = json.loads((copy / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": size, "content": "<image>", **flags})
    (copy / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(copy)
    assert tokenizer.vocab_size == size + 1
    tokenizer.refuse_other_vocabulary(size)
