"""`/v1/models` and what changes it: LoRA adapters come and go, and other weights take the place of the model's.

Adapters have the names of vLLM's endpoints, weights that of SGLang's.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.adapters import ServedAdapter
from engine.api.errors import APIError, bad_field
from engine.api.fields import Fields, read_json_object
from engine.api.identity import checked_id
from engine.api.serving import Serving, serving_of
from engine.errors import ConfigError


async def list_models(request: Request) -> Response:
    """GET /v1/models: the model, then its adapters."""
    serving = serving_of(request)
    cards = [_model_card(serving), *(_adapter_card(serving, served) for served in serving.llm.adapters.served())]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    serving = serving_of(request)
    adapter = serving.find_model(request.path_params["model"])
    served = [served for served in serving.llm.adapters.served() if served.adapter == adapter]
    return JSONResponse(_adapter_card(serving, served[0]) if served else _model_card(serving))


async def load_lora_adapter(request: Request) -> Response:
    """POST /v1/load_lora_adapter: `lora_name`, `lora_path`; a name in use only with `load_inplace`."""
    serving = serving_of(request)
    fields = Fields(await read_json_object(request))
    name = checked_id("lora_name", fields.require("lora_name"))
    path = fields.string("lora_path")
    if not path:
        raise bad_field("lora_path", "this field is required")
    replace = fields.boolean("load_inplace")
    fields.reject_rest()
    try:
        served = await serving.engine.call(lambda engine: engine.load_adapter(name, path, replace=replace))
    except ConfigError as error:
        raise APIError(400, str(error)) from None
    return JSONResponse({"lora_name": name, "version": served.adapter.version, "rank": served.weights.rank})


async def unload_lora_adapter(request: Request) -> Response:
    """POST /v1/unload_lora_adapter: `lora_name`. Requests that have the adapter go on with it."""
    serving = serving_of(request)
    fields = Fields(await read_json_object(request))
    name = checked_id("lora_name", fields.require("lora_name"))
    fields.raw("lora_int_id")  # vLLM's handle, which nobody needs here
    fields.reject_rest()
    try:
        await serving.engine.call(lambda engine: engine.adapters.unload(name))
    except KeyError:
        raise APIError(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found") from None
    return JSONResponse({"lora_name": name, "unloaded": True})


async def update_weights(request: Request) -> Response:
    """POST /update_weights_from_disk: `model_path` -> the version of the weights now; 400 for another model.

    Requests in flight are computed again with the new weights and go on from the tokens they have.
    """
    serving = serving_of(request)
    fields = Fields(await read_json_object(request))
    path = fields.string("model_path")
    if not path:
        raise bad_field("model_path", "this field is required")
    fields.only("load_format", "auto", "safetensors")
    fields.reject_rest()
    try:
        version = await serving.engine.call(lambda engine: engine.update_weights(path))
    except ConfigError as error:
        raise APIError(400, str(error), param="model_path") from None
    return JSONResponse({"success": True, "message": f"weights of {path} are in use", "weights_version": version})


def _model_card(serving: Serving) -> dict[str, object]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": int(serving.started_at),
        "owned_by": "kvoncall",
        "root": str(serving.llm.model_path),
        "parent": None,
        "max_model_len": serving.max_model_len,
    }


def _adapter_card(serving: Serving, served: ServedAdapter) -> dict[str, object]:
    return _model_card(serving) | {
        "id": served.adapter.name,
        "root": served.path,
        "parent": serving.model_name,
        "version": served.adapter.version,
    }
