"""Pictures in chat messages of the testbed model: read exactly, counted as placeholders, refused when they are bad."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from engine.images import MAX_BYTES, ImageError, read_picture
from engine.testbed.font import CHARACTERS, draw

pytestmark = pytest.mark.xdist_group("engine_server_images")

URL = "data:image/png;base64,"


@pytest.fixture(scope="module")
def testbed(serve: Callable[..., TestClient]) -> TestClient:
    return serve(model="", prefix_cache_scope="session", num_gpu_blocks_override=300)


def as_url(png: bytes) -> str:
    return URL + base64.b64encode(png).decode()


def png(shape: tuple[int, ...], mode: str | None = None) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(np.full(shape, 255, np.uint8))
    (image.convert(mode) if mode else image).save(file, "PNG")
    return file.getvalue()


def ask(client: TestClient, *parts: Any, **body: Any) -> Any:
    content = [{"type": "text", "text": p} if isinstance(p, str) else picture(as_url(p)) for p in parts]
    messages = [{"role": "user", "content": content}]
    settings = {"max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json={"messages": messages} | settings | body)


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("columns", [None, 5, 9])
def test_a_drawn_text_is_read_exactly(columns: int | None) -> None:
    text = "x" + CHARACTERS.strip()
    assert read_picture(draw(text, columns)).text == text


def test_a_speck_does_not_change_a_letter_but_the_digest() -> None:
    pixels = np.array(Image.open(io.BytesIO(draw("ax=37;"))))
    pixels[7, 3] = 0
    file = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(file, "PNG")
    speckled, clean = read_picture(file.getvalue()), read_picture(draw("ax=37;"))
    assert speckled.text == clean.text == "ax=37;"
    assert speckled.digest != clean.digest


def test_equal_pixels_of_another_shape_have_another_digest() -> None:
    """What CVE-2025-46722 missed: pixels alone do not tell a wide picture from a high one."""
    ink = np.zeros((24, 24), np.uint8)
    digests = set()
    for shape in ((24, 24), (48, 12), (16, 36)):
        file = io.BytesIO()
        Image.fromarray(ink.reshape(shape)).save(file, "PNG")
        digests.add(read_picture(file.getvalue()).digest)
    assert len(digests) == 3


def test_the_model_answers_from_a_picture(testbed: TestClient) -> None:
    for value in ("37", "84"):
        answer = ask(testbed, draw(f"ax={value};by=12;"), "cd=55;?ax>").json()
        assert answer["choices"][0]["message"]["content"] == value
        assert answer["usage"]["prompt_tokens"] == 1 + 6 + 3 + 3


def test_a_picture_may_stand_anywhere_and_answers_equal_those_of_the_text(testbed: TestClient) -> None:
    spoken = ask(testbed, "ax=37;by=12;cd=55;?by>", logprobs=True).json()
    drawn = ask(testbed, "ax=37;", draw("by=12;", 3), "cd=55;", draw("?by"), ">", logprobs=True).json()
    assert drawn["choices"] == spoken["choices"]
    assert drawn["usage"] == spoken["usage"]


def test_the_prompt_shows_placeholders(testbed: TestClient) -> None:
    answer = ask(testbed, draw("ax=37;"), "?ax>", return_token_ids=True).json()
    assert answer["prompt_token_ids"][1:4] == [3, 3, 3]
    body = {"messages": [{"role": "user", "content": [picture(as_url(draw("ax=37;"))), {"type": "text", "text": "?"}]}]}
    assert testbed.post("/tokenize", json=body).json()["tokens"][:4] == [0, 3, 3, 3]


def test_equal_prompts_with_other_pictures_share_nothing(testbed: TestClient) -> None:
    """Placeholders are equal token by token; the pictures are not."""
    facts = "ab=11;cd=22;ef=33;gh=44;ij=55;kl=66;mn=77;"

    def cached(name: str) -> tuple[str, int]:
        answer = ask(testbed, draw(f"{name}=90;{facts}"), "?ab>", user="one").json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("zz") == ("11", 0)
    assert cached("yy") == ("11", 0)
    assert cached("zz") == ("11", 16)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1/a.png", "nothing is fetched"),
        ("data:image/jpeg;base64,AA==", "nothing is fetched"),
        (URL + "A", "is not base64"),
        (URL + "ä" * 8, "is not base64"),
        (URL + "AAAA" * (MAX_BYTES // 3 + 10), "larger than 1048576 bytes"),
        (as_url(b"not a picture"), "is not a PNG file"),
        (as_url(draw("ax=37;")[:-30]), "is not a PNG file"),
        (as_url(png((8, 7))), "is 7 x 8 pixels"),
        (as_url(png((8 * 64, 6 * 65))), "more than 4096 cells"),
        (as_url(png((8, 6, 4))), "not of mode RGBA"),
        (as_url(png((8, 6), "P")), "not of mode P"),
        (as_url(png((16, 12))), "shows no text"),
    ],
)
def test_bad_pictures_are_refused_by_name(testbed: TestClient, url: str, says: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, picture(url)]}]}
    response = testbed.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert says in error["message"]
    assert "\n" not in error["message"]


def test_other_models_read_no_pictures(serve: Callable[..., TestClient]) -> None:
    response = ask(serve(), draw("ax=37;"), "?ax>")
    assert response.status_code == 400
    assert "reads no images" in response.json()["error"]["message"]


def test_without_pillow_the_answer_says_what_to_install(testbed: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw("ax=37;")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImageError, match="kvoncall\\[images\\]"):
        read_picture(drawn)
