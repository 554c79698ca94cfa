"""Settings of W&B, and its service: one child process shared by all W&B runs of this process."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from events import redact_arguments

__all__ = ["end_service", "has_service", "kill_service", "require_login", "service_lock", "settings_for"]

# Serializes the start and end of runs, because they share W&B's service.
service_lock = threading.Lock()


def settings_for(wandb: Any, given: Mapping[str, Any], finish_seconds: float) -> Any:
    """Returns settings without side effects on the process and without secrets; `given` takes precedence."""
    known = set(getattr(wandb.Settings, "model_fields", None) or ())
    own: dict[str, Any] = {"console": "off", "silent": True, "save_code": False}
    if redact_arguments(sys.argv[1:]) != sys.argv[1:]:
        # W&B records the command line as metadata.
        own["x_disable_meta"] = True
    if finish_seconds > 0:
        own["finish_timeout"] = finish_seconds
    own = {name: value for name, value in own.items() if not known or name in known}
    return wandb.Settings(**{**own, **given})


def require_login(wandb: Any, arguments: Mapping[str, Any]) -> None:
    """Checks for credentials in online mode: W&B would prompt for them on the terminal, in a thread.

    Raises:
        RuntimeError: no credentials.
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
        # Another version of W&B, with other internals.
        return
    if found is None:
        raise RuntimeError(
            "WandB needs an API key for mode='online'. Set WANDB_API_KEY, run `wandb login`, "
            "or pass mode='offline'."
        )


def _library() -> Any:
    """Returns W&B's private singleton of this process, or None."""
    module = sys.modules.get("wandb.sdk.wandb_setup")
    return getattr(module, "_singleton", None)


def has_service() -> bool:
    """Returns whether W&B's service process is connected."""
    library = _library()
    return library is not None and getattr(library, "_connection", True) is not None


def end_service(hooks: tuple[Any, Any] | None) -> None:
    """Ends the service if it has no runs left."""
    library = _library()
    if library is None or getattr(library, "_active_runs", None):
        return
    import wandb

    wandb.teardown()
    _unhook(hooks)


def kill_service(hooks: tuple[Any, Any] | None) -> bool:
    """Kills the process of an unresponsive service, and removes W&B's hooks of the interpreter exit.

    Returns:
        Whether it was killed: there is a service, and it has no other run.
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
    # The next run, or call of `wandb.init`, starts a new service.
    setattr(sys.modules["wandb.sdk.wandb_setup"], "_singleton", None)  # noqa: B010  # private to W&B
    os.environ.pop("WANDB_SERVICE", None)
    _unhook(hooks)
    return True


def _unhook(hooks: tuple[Any, Any] | None) -> None:
    """Restores `sys.exit` and `sys.excepthook` if they are still those of W&B."""
    for name, before in zip(("exit", "excepthook"), hooks or (), strict=False):
        owner = getattr(getattr(sys, name), "__self__", None)
        if type(owner).__module__.startswith("wandb."):
            setattr(sys, name, before)
