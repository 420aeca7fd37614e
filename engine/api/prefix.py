"""The prefix cache over HTTP: emptying it, the prefixes everybody may share, and its tree for the app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.chat import chat_prompt
from engine.api.errors import APIError, bad_field
from engine.api.fields import Fields, read_json_object
from engine.api.protocol import Images, parse_messages, parse_prompts
from engine.api.serving import Serving, serving_of

if TYPE_CHECKING:
    from engine.engine import LLMEngine


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache: 200 when done, 409 while requests hold blocks."""
    done = await serving_of(request).engine.call(lambda engine: engine.reset_prefix_cache())
    if done is False:
        raise APIError(409, "the prefix cache was not reset: requests hold blocks; try again when they are done")
    return JSONResponse({"reset": True})


async def add_public_prefix(request: Request) -> Response:
    """POST /prefix_cache/public: `prompt` (text or token ids) or `messages` -> tokens, whole blocks, prefixes now."""
    serving = serving_of(request)
    token_ids = _read_prefix(serving, Fields(await read_json_object(request)))

    def add(engine: LLMEngine) -> int:
        engine.public_prefixes.add(token_ids)
        return len(engine.public_prefixes)

    try:
        prefixes = await serving.engine.call(add)
    except ValueError as error:
        raise APIError(400, str(error)) from None
    num_blocks = len(token_ids) // serving.llm.plan.block_size
    return JSONResponse({"num_tokens": len(token_ids), "num_blocks": num_blocks, "prefixes": prefixes})


async def list_public_prefixes(request: Request) -> Response:
    """GET /prefix_cache/public: lengths only; the text stays with whoever registered it."""
    serving = serving_of(request)
    lengths = await serving.engine.call(lambda engine: engine.public_prefixes.lengths())
    block_size = serving.llm.plan.block_size
    shown = [{"num_tokens": length, "num_blocks": length // block_size} for length in lengths]
    return JSONResponse({"prefixes": len(shown), "lengths": shown})


async def clear_public_prefixes(request: Request) -> Response:
    """DELETE /prefix_cache/public."""
    await serving_of(request).engine.call(lambda engine: engine.public_prefixes.clear())
    return JSONResponse({"prefixes": 0})


async def debug_prefix(request: Request) -> Response:
    """GET /debug/prefix: the prefix cache as a tree, with owners, hits, ages and bytes; no text and no tokens."""
    serving = serving_of(request)
    config, plan = serving.llm.config, serving.llm.plan

    def view(engine: LLMEngine) -> dict[str, Any]:
        manager = engine.scheduler.kv_cache_manager
        tree = manager.prefix_tree(bytes_per_block=plan.kv_bytes_per_block)
        return tree | {"public_prefixes": len(engine.public_prefixes)}

    settings = {
        "enabled": config.enable_prefix_caching,
        "scope": config.prefix_cache_scope,
        "hash_algo": config.prefix_caching_hash_algo,
        "ttl": config.prefix_cache_ttl,
        "verify": config.prefix_cache_verify,
    }
    return JSONResponse(settings | await serving.engine.call(view))


def _read_prefix(serving: Serving, fields: Fields) -> list[int]:
    """The tokens a registered prefix begins with; 400 when it is none."""
    prompt, messages = fields.raw("prompt"), fields.raw("messages")
    fields.reject_rest()
    if (prompt is None) == (messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if messages is not None:
        images = Images()
        parsed = parse_messages(messages, images)
        if images.urls:
            raise bad_field(images.paths[0], "a public prefix is text only")
        token_ids = chat_prompt(serving, parsed, images, add_generation_prompt=False).token_ids
    else:
        prompts = parse_prompts(prompt, serving.limits.vocab_size)
        if len(prompts) > 1:
            raise bad_field("prompt", "must be one text or one list of token ids")
        token_ids = serving.llm.tokenizer.encode(prompts[0]) if isinstance(prompts[0], str) else prompts[0]
    name = "prompt" if messages is None else "messages"
    if not token_ids:
        raise bad_field(name, "has no tokens")
    if len(token_ids) > serving.max_model_len:
        raise bad_field(name, f"has {len(token_ids)} tokens, more than the context limit of {serving.max_model_len}")
    return token_ids
