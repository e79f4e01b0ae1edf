"""Register an operator's changes by name: sleep, wake, new weights of the model, another drafter."""

from collections.abc import Callable

from redrafter.engine.changes import ChangeDrafter, Sleep, UpdateWeights, Wake
from redrafter.engine.engine import Engine
from redrafter.scheduler.engine_change import EngineChange

# Each factory takes the engine, and a path or None.
CHANGES: dict[str, Callable[[Engine, str | None], EngineChange]] = {
    "sleep": lambda engine, _: Sleep(engine),
    "wake": lambda engine, _: Wake(engine),
    "update_weights": lambda engine, path: UpdateWeights(engine, path or ""),
    "update_weights_not_finite": lambda engine, path: UpdateWeights(engine, path or "", allow_not_finite=True),
    "change_drafter": ChangeDrafter,
}
