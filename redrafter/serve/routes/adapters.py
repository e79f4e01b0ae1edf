"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes."""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from redrafter.serve.protocol.fields import Strict
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.protocol.response_models import error_responses
from redrafter.serve.service import Service

__all__ = ["add_adapter_routes"]

_CLOSED = "adapters are not changed while this server runs: start it with --allow-runtime-lora-updating"


class LoadAdapterRequest(Strict):
    """An adapter to load: its name, and the directory on the server's machine that PEFT wrote."""

    lora_name: str | None = None
    lora_path: str | None = None


class UnloadAdapterRequest(Strict):
    """The adapter to unload."""

    lora_name: str | None = None


def add_adapter_routes(app: FastAPI, service: Service, allowed: bool) -> None:
    """Add the routes. allowed: whether they do anything but refuse."""
    options: dict[str, Any] = {"response_class": PlainTextResponse}
    options["responses"] = error_responses(400, 401, 404, 408, 413, 422, 503)

    @app.post("/v1/load_lora_adapter", **options)
    async def load(body: LoadAdapterRequest) -> PlainTextResponse:
        _check_allowed(allowed)
        if not body.lora_name or not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_user_input")
        await service.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", **options)
    async def unload(body: UnloadAdapterRequest) -> PlainTextResponse:
        _check_allowed(allowed)
        if not body.lora_name:
            raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", code="invalid_user_input")
        await service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(allowed: bool) -> None:
    if not allowed:
        raise ApiError(404, _CLOSED, code="unsupported_endpoint")
