"""`Target`: connects a tracker to `destinations runs send --to NAME:PLACE`; see `Tracker.target`."""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

__all__ = ["SentRun", "Target"]

_log = logging.getLogger("destinations")


@attrs.frozen
class SentRun:
    """The run that is sent.

    ```python
    from destinations.trackers.target import SentRun

    run = SentRun("4f1e0c9ab27d", "digits", Path("runs/digits"), tags=("best",))
    print(run.name, run.tags)  # digits ('best',)
    ```

    Attributes:
        run_id: its id.
        name: its display name, or the name of its folder.
        path: its folder.
        tags: its tags.
        notes: its notes, or "".
    """

    run_id: str
    name: str
    path: Path
    tags: tuple[str, ...] = ()
    notes: str = ""


class Target:
    """Creates the tracker that a run is sent to, and removes an earlier copy.

    ```python
    from destinations.trackers.target import Target

    class OfATeam(Target):
        places = ("TEAM/PROJECT",)
    ```

    By default, the place is the first argument of the tracker's constructor: with
    `register_destination("Mine", Mine)`, a run sent to `mine:there` is logged to `Mine("there", ...)`. If
    places have another form, set `Tracker.target` to a subclass of this class.

    All methods are called in one thread, and may block.

    Args:
        place: the part after "NAME:".
        run: the run.
        options: the user's `--option NAME=VALUE`, passed to the constructor of the tracker.

    Attributes:
        places: forms of the place, for the help: "PROJECT", "ENTITY/PROJECT"; default: the first argument of
            the constructor.
        own_files: names of the files that the tracker writes. If set, the place is a folder, and the tracker
            gets a subfolder for each run; `send` finds, checks and empties it.
        starts_over: whether everything is sent, or only new records.
        copy_id: 32 letters and digits; a new id whenever everything is sent.
        earlier_id: the id of the copy that `restart` removes; "" if there is none.
    """

    places: ClassVar[Sequence[str]] = ()
    own_files: ClassVar[re.Pattern[str] | None] = None

    def __init__(self, place: str, run: SentRun, options: Mapping[str, Any]) -> None:
        self.place = place
        self.run = run
        self.options = dict(options)
        self.starts_over = True
        self.copy_id = ""
        self.earlier_id = ""

    @classmethod
    def places_of(cls, tracker: type) -> Sequence[str]:
        """Returns the forms of the place for a tracker; "" if its constructor takes none."""
        if cls.places:
            return cls.places
        first = next(iter(inspect.signature(tracker).parameters.values()), None)
        is_place = first is not None and first.kind is first.POSITIONAL_OR_KEYWORD
        return (first.name.upper() if first is not None and is_place else "",)

    @property
    def name(self) -> str:
        """The name of the run, without braces, which would be placeholders."""
        return re.sub(r"[{}]", "_", self.run.name)

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        """Returns the tracker.

        Args:
            tracker: its class.
            shared: arguments for every tracker: the clock of the run, and bounds for a command that may wait.
        """
        places = (self.place,) if self.place else ()
        return tracker(*places, **{**shared, **self.options})

    def is_gone(self) -> bool:
        """Returns whether the copy has been deleted from the tracker."""
        return False

    def restart(self) -> None:
        """Removes the earlier copy. The base class can't, and says so."""
        if self.earlier_id:
            _log.warning(
                "run %s is sent to %s again: what was sent before stays there, too.",
                self.run.run_id,
                self.place or "the tracker",
            )
