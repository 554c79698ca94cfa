"""The errors of a run directory.

```
RunDirectoryError
├── RunInUseError      (RecordError)         another process writes to this folder
├── RunExistsError     (FileExistsError)     the folder holds a run, which if_exists refuses
├── RunPathError       (NotADirectoryError)  the path cannot be a folder to write to
└── RunNotOpenError    (RuntimeError)        something was logged before `init` or after `post_close`
```

All are also `events.RecordError`: they report a mistake in the program, and are raised instead of counted.
"""

from events import RecordError

__all__ = ["RunDirectoryError", "RunExistsError", "RunInUseError", "RunNotOpenError", "RunPathError"]


class RunDirectoryError(RecordError):
    """The base class of the errors of this package."""


class RunInUseError(RunDirectoryError):
    """Another process writes to this folder, or another run of this process.

    Attributes:
        is_same_process: whether it is another run of this process.
    """

    is_same_process = False


class RunExistsError(RunDirectoryError, FileExistsError):
    """The folder holds a run, which `if_exists` refuses."""


class RunPathError(RunDirectoryError, NotADirectoryError):
    """The path is a file, is not writable, or the run name leads out of its folder."""


class RunNotOpenError(RunDirectoryError, RuntimeError):
    """Something was logged before `init` or after `post_close`."""
