"""The errors of a run directory.

```
RunDirectoryError
├── RunInUseError      (RecordError)         another process writes to this folder
├── RunExistsError     (FileExistsError)     there is a run in this folder, and it must not be continued
├── RunPathError       (NotADirectoryError)  the path cannot be a folder to write to
└── RunNotOpenError    (RuntimeError)        something was logged before `init` or after `post_close`
```

All four are `events.RecordError` too: they are for whoever made the destination, and are raised rather than counted.
"""

from events import RecordError

__all__ = ["RunDirectoryError", "RunExistsError", "RunInUseError", "RunNotOpenError", "RunPathError"]


class RunDirectoryError(RecordError):
    """The root of this package's errors."""


class RunInUseError(RunDirectoryError):
    """Another process writes to this folder."""


class RunExistsError(RunDirectoryError, FileExistsError):
    """There is a run in this folder, and `resume="never"` was asked for."""


class RunPathError(RunDirectoryError, NotADirectoryError):
    """The path is a file, or a folder that cannot be written to."""


class RunNotOpenError(RunDirectoryError, RuntimeError):
    """Something was logged before `init` or after `post_close`."""
