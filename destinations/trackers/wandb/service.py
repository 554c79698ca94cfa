"""W&B's settings, and its service: one process beside ours, which belongs to all runs of W&B in it."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from events import redact_arguments

__all__ = ["end_service", "has_service", "kill_service", "require_login", "service_lock", "settings_for"]

# One run at a time begins or ends: W&B's service is one for the process.
service_lock = threading.Lock()


def settings_for(wandb: Any, given: Mapping[str, Any], finish_seconds: float) -> Any:
    """Returns settings that leave the process alone and tell no secrets; the user's come last."""
    known = set(getattr(wandb.Settings, "model_fields", None) or ())
    own: dict[str, Any] = {"console": "off", "silent": True, "save_code": False}
    if redact_arguments(sys.argv[1:]) != sys.argv[1:]:
        # The command line is part of what W&B notes about a run.
        own["x_disable_meta"] = True
    if finish_seconds > 0:
        own["finish_timeout"] = finish_seconds
    own = {name: value for name, value in own.items() if not known or name in known}
    return wandb.Settings(**{**own, **given})


def require_login(wandb: Any, arguments: Mapping[str, Any]) -> None:
    """Refuses to go online without credentials: W&B would ask for them on the terminal, in a thread.

    Raises:
        RuntimeError: there are none.
    """
    mode = arguments.get("mode")
    settings = arguments["settings"]
    if mode != "online" or settings.api_key:
        return
    try:
        from wandb.sdk.lib.wbauth import authenticate_session

        host = wandb.setup().settings.base_url
        found = authenticate_session(host=host, source="WandB", prompt=False)
    except (ImportError, TypeError, AttributeError):
        # Another version, which asks in its own way.
        return
    if found is None:
        raise RuntimeError(
            "WandB must have an API key for mode='online', got none. Set WANDB_API_KEY, run `wandb login`, or pass "
            "mode='offline'."
        )


def _library() -> Any:
    """Returns what W&B keeps for the process, or None where it has begun nothing; private, so looked for with care."""
    module = sys.modules.get("wandb.sdk.wandb_setup")
    return getattr(module, "_singleton", None)


def has_service() -> bool:
    """Returns whether W&B's service process is connected."""
    library = _library()
    return library is not None and getattr(library, "_connection", True) is not None


def end_service(hooks: tuple[Any, Any] | None) -> None:
    """Ends the service, where no run is in it any more."""
    library = _library()
    if library is None or getattr(library, "_active_runs", None):
        return
    import wandb

    wandb.teardown()
    _unhook(hooks)


def kill_service(hooks: tuple[Any, Any] | None) -> bool:
    """Ends the process of a service that does not answer, and what W&B would wait for at the end of the interpreter.

    Returns:
        Whether it did: there is a service, and no other run in it.
    """
    library = _library()
    connection = getattr(library, "_connection", None)
    process: Any = getattr(getattr(connection, "_proc", None), "_process", None)
    if process is None or len(getattr(library, "_active_runs", ())) > 1:
        return False
    forget: Callable[[], None] | None = getattr(connection, "_cleanup", None)
    if forget is not None:
        forget()
    process.kill()
    process.wait()
    # The next run, and `wandb.init` of anybody else, start a new one.
    setattr(sys.modules["wandb.sdk.wandb_setup"], "_singleton", None)  # noqa: B010  # private to W&B
    os.environ.pop("WANDB_SERVICE", None)
    _unhook(hooks)
    return True


def _unhook(hooks: tuple[Any, Any] | None) -> None:
    """Puts back the two functions of `sys` that W&B replaced to know how the process ends, where they are still its own."""
    for name, before in zip(("exit", "excepthook"), hooks or (), strict=False):
        owner = getattr(getattr(sys, name), "__self__", None)
        if type(owner).__module__.startswith("wandb."):
            setattr(sys, name, before)
