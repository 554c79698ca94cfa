"""Hostile stores for tests of the code above them."""

import threading
from collections import Counter

from uploads.errors import RejectedByStoreError
from uploads.stores import RemoteObject


class MemoryStore:
    """Keeps objects in a dictionary; the base of the others. The lock guards everything."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.order: list[str] = []
        self.puts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def put(self, name, body, *, overwrite, notes=None):
        from uploads.errors import RemoteExistsError

        data = body.read(0, body.digest.size)
        with self.lock:
            self.puts[name] += 1
            if not overwrite and name in self.objects:
                raise RemoteExistsError(name)
            self.objects[name] = data
            self.order.append(name)
        return RemoteObject(name, len(data), body.identifier, body.digest.sha256)

    def head(self, name):
        with self.lock:
            return RemoteObject(name, len(self.objects[name])) if name in self.objects else None

    def get(self, name, offset=0, version=None):
        yield self.objects[name][offset:]

    def list(self, prefix=""):
        return iter(
            [
                RemoteObject(name, len(data))
                for name, data in sorted(self.objects.items())
                if name.startswith(prefix)
            ]
        )

    def delete(self, name):
        self.objects.pop(name, None)

    def uri(self, name=""):
        return f"memory://store/{name}"


class StoreThatWaits(MemoryStore):
    """Puts nothing before its gate opens; counts the waiting puts."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate
        self.started = threading.Semaphore(0)

    def put(self, name, body, *, overwrite, notes=None):
        self.started.release()
        self.gate.wait(600)  # Longer than any test takes: on a slow machine too nothing is put before.
        return super().put(name, body, overwrite=overwrite, notes=notes)


class StoreThatFails(MemoryStore):
    """Raises these errors at its first puts, then works."""

    def __init__(self, *errors):
        super().__init__()
        self.errors = list(errors)

    def put(self, name, body, *, overwrite, notes=None):
        with self.lock:
            error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return super().put(name, body, overwrite=overwrite, notes=notes)


class StoreThatRejects(MemoryStore):
    """Rejects the names that it does not like."""

    def __init__(self, disliked, error=None):
        super().__init__()
        self.disliked = disliked
        self.error = error or RejectedByStoreError("no")

    def put(self, name, body, *, overwrite, notes=None):
        if name in self.disliked:
            raise self.error
        return super().put(name, body, overwrite=overwrite, notes=notes)
