"""`Items`: the configuration and the summary of a run, with the interface of W&B."""

from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from events import plain_config

__all__ = ["Items", "as_dict"]


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration of any kind, or a path of YAML, as a dict."""
    if isinstance(config, str | PurePath):
        read = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
        values = {key: value for key, value in read.items() if key != "wandb_version"}
        return {
            key: one["value"] if isinstance(one, dict) and "value" in one else one
            for key, one in values.items()
        }
    return dict(config) if isinstance(config, dict | list | tuple) else plain_config(config)


class Items(MutableMapping[str, Any]):
    """Values by name, also as attributes; changes are passed on."""

    def __init__(self, changed: Callable[[dict[str, Any]], None]) -> None:
        self.__dict__.update(_values={}, _changed=changed)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value.item() if hasattr(value, "item") else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} among {list(self)}.") from None

    __setattr__ = __setitem__

    def update(  # type: ignore[override]  # as theirs
        self, values: Any = (), allow_val_change: bool | None = None, **more: Any
    ) -> None:
        given = as_dict(values) | more
        self._values.update(given)
        self._changed(given)

    def setdefaults(self, values: Any) -> None:
        self.update({name: value for name, value in as_dict(values).items() if name not in self})

    def as_dict(self) -> dict[str, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))
