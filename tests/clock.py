"""A clock for tests."""

__all__ = ["Clock"]


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now
