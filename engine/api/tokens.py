"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.chat import chat_prompt
from engine.api.errors import bad_field
from engine.api.fields import Fields, read_json_object
from engine.api.protocol import Images, checked_text, parse_messages
from engine.api.serving import serving_of


async def tokenize(request: Request) -> Response:
    """POST /tokenize: `prompt` or `messages` -> count, tokens, max_model_len."""
    serving = serving_of(request)
    fields = Fields(await read_json_object(request))
    serving.find_model(fields.string("model"))
    prompt, messages = fields.string("prompt"), fields.raw("messages")
    wants_texts = fields.boolean("return_token_strs")
    tokenizer = serving.llm.tokenizer
    if (prompt is None) == (messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if prompt is not None:
        special = fields.boolean("add_special_tokens", True)
        tokens = tokenizer.encode(checked_text("prompt", prompt), add_special_tokens=special)
    else:
        fields.only("add_generation_prompt", True)
        fields.only("add_special_tokens", False)
        images = Images()
        tokens = chat_prompt(serving, parse_messages(messages, images), images).token_ids
    fields.reject_rest()
    texts = [tokenizer.token_text(token) for token in tokens] if wants_texts else None
    return JSONResponse(
        {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens, "token_strs": texts}
    )


async def detokenize(request: Request) -> Response:
    """POST /detokenize: `tokens` -> `prompt`."""
    serving = serving_of(request)
    fields = Fields(await read_json_object(request))
    serving.find_model(fields.string("model"))
    tokens = fields.token_ids("tokens", serving.limits.vocab_size)
    fields.reject_rest()
    return JSONResponse({"prompt": serving.llm.tokenizer.decode(tokens, skip_special_tokens=False)})
