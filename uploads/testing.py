"""The contract of a store, as tests, for your stores and ours. It doesn't import pytest.

```python
class TestMine(StoreContract):
    @pytest.fixture
    def store(self):
        return MyStore("host")
```
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import RemoteExistsError, RemoteNotFoundError, TransientStoreError
from .stores.registry import open_object, open_store
from .stores.store import Body, Ranging, RemoteObject, Store

__all__ = ["StoreContract"]

_LIMIT_SECONDS = 120.0
_WRITERS = 4
_NAMES = ("ünï cödé", "a b/c d", "50%25+&=#?~", "x" * 150 + "/" + "y" * 150)


class StoreContract:
    """The tests that every store must pass. Subclass it in a test module, with an empty fixture `store`.

    ```python
    class TestLocalStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return LocalStore(tmp_path / "store")
    ```

    Override the two methods if your store can't do what they say. `tmp_path` is pytest's own fixture.
    """

    def supports_create_only(self, store: Any) -> bool:
        """Returns whether `overwrite=False` is atomic. If not, document it."""
        return True

    def is_opened_by_uri(self, store: Any) -> bool:
        """Returns whether `open_store(store.uri())` leads to the same objects."""
        return True

    def test_returns_what_was_put(self, store: Store, tmp_path: Path) -> None:
        """Empty, tiny and large objects come back, whole and from an offset, and their size is known."""
        for number, content in enumerate((b"", b"x", bytes(range(256)) * 80_000)):
            name = f"folder/{number}"
            found = put(store, tmp_path, name, content)

            assert (found.name, found.size) == (name, len(content))
            assert b"".join(store.get(name)) == content
            assert _head(store, name).size == len(content)
            if content:
                assert b"".join(store.get(name, offset=len(content) - 1)) == content[-1:]

    def test_keeps_names(self, store: Store, tmp_path: Path) -> None:
        """Names keep unicode, spaces, their length, and characters with a meaning in a URL."""
        for name in _NAMES:
            put(store, tmp_path, name, b"x")

        assert [found.name for found in store.list()] == sorted(_NAMES)
        assert [_head(store, name).name for name in _NAMES] == list(_NAMES)

    def test_create_only_refuses_a_taken_name(self, store: Store, tmp_path: Path) -> None:
        """Putting a taken name raises RemoteExistsError and leaves the object as it is."""
        put(store, tmp_path, "a", b"first", overwrite=False)
        if not self.supports_create_only(store):
            return

        with _must_raise(RemoteExistsError, "put(overwrite=False) of a name that is taken"):
            put(store, tmp_path, "a", b"second", overwrite=False, identifier="other")

        assert b"".join(store.get("a")) == b"first"

    def test_of_create_only_writers_one_wins(self, store: Store, tmp_path: Path) -> None:
        """If several put at the same instant, exactly one succeeds, and its bytes are there."""
        if not self.supports_create_only(store):
            return
        outcomes: dict[int, BaseException | None] = {}
        barrier = threading.Barrier(_WRITERS)

        def write(number: int) -> None:
            barrier.wait(_LIMIT_SECONDS)
            try:
                put(
                    store,
                    tmp_path,
                    "raced",
                    b"bytes of %d" % number,
                    overwrite=False,
                    identifier=f"entry-{number}",
                )
                outcomes[number] = None
            except BaseException as error:  # noqa: BLE001  # compared below
                outcomes[number] = error

        writers = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(_WRITERS)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(_LIMIT_SECONDS)

        winners = [number for number, error in outcomes.items() if error is None]
        others = [error for error in outcomes.values() if error is not None]
        assert len(winners) == 1, f"one put must win, got {outcomes}"
        assert all(isinstance(error, RemoteExistsError | TransientStoreError) for error in others), outcomes
        assert b"".join(store.get("raced")) == b"bytes of %d" % winners[0]

    def test_overwrites(self, store: Store, tmp_path: Path) -> None:
        """The object has the newer bytes, whole."""
        put(store, tmp_path, "a", b"first, and longer")
        put(store, tmp_path, "a", b"second")

        assert b"".join(store.get("a")) == b"second"

    def test_knows_what_is_missing(self, store: Store) -> None:
        """For no object, `head` returns None, `get` raises RemoteNotFoundError, and `delete` does nothing."""
        assert store.head("nothing/here") is None
        with _must_raise(RemoteNotFoundError, "get without an object"):
            list(store.get("nothing/here"))
        store.delete("nothing/here")

    def test_lists_by_prefix(self, store: Store, tmp_path: Path) -> None:
        """`list` sorts by name, with and without a prefix, which need not end with a `/`."""
        assert list(store.list()) == []
        for name in ("b", "a/x", "a/y/z", "ab"):
            put(store, tmp_path, name, b"1")

        assert [found.name for found in store.list()] == ["a/x", "a/y/z", "ab", "b"]
        assert [found.name for found in store.list("a/")] == ["a/x", "a/y/z"]
        assert [found.name for found in store.list("a")] == ["a/x", "a/y/z", "ab"]

    def test_deletes(self, store: Store, tmp_path: Path) -> None:
        """`delete` removes one object, and not the others."""
        put(store, tmp_path, "a", b"1")
        put(store, tmp_path, "b", b"2")

        store.delete("a")

        assert [found.name for found in store.list()] == ["b"]

    def test_does_not_mix_versions(self, store: Store, tmp_path: Path) -> None:
        """If `head` gives a version, a read of it raises TransientStoreError after a change."""
        put(store, tmp_path, "a", b"first")
        version = _head(store, "a").version
        put(store, tmp_path, "a", b"second one")
        if version is None:
            return

        with _must_raise(TransientStoreError, "get of a version that is gone"):
            list(store.get("a", offset=2, version=version))

    def test_gives_parts_of_an_object(self, store: Store, tmp_path: Path) -> None:
        """A store with `get_range` returns exactly the requested bytes, or says that it can't."""
        put(store, tmp_path, "a", b"0123456789")
        version = _head(store, "a").version
        if version is None or not isinstance(store, Ranging):
            return

        for offset, size in ((0, 4), (4, 6), (0, 10)):
            with contextlib.suppress(NotImplementedError):
                found = b"".join(store.get_range("a", offset, size, version))
                assert found == b"0123456789"[offset : offset + size]

    def test_is_opened_by_its_uris(self, store: Store, tmp_path: Path) -> None:
        """The URI of an object opens the object, and the URI of the store opens the store."""
        if not self.is_opened_by_uri(store):
            return
        put(store, tmp_path, "folder/ü %41.pt", b"found")

        again, name = open_object(store.uri("folder/ü %41.pt"))

        assert b"".join(again.get(name)) == b"found"
        assert [found.name for found in open_store(store.uri()).list()] == ["folder/ü %41.pt"]

    def test_keeps_folders_of_its_uri_apart(self, store: Store, tmp_path: Path) -> None:
        """A store that is opened below another one puts its objects there."""
        if not self.is_opened_by_uri(store):
            return
        one, other = (open_store(store.uri(folder)) for folder in ("one", "other"))
        put(one, tmp_path, "a.pt", b"one")
        put(other, tmp_path, "a.pt", b"other")

        assert b"".join(one.get("a.pt")) == b"one"
        assert [found.name for found in store.list()] == ["one/a.pt", "other/a.pt"]


def put(
    store: Store,
    folder: Path,
    name: str,
    content: bytes,
    *,
    overwrite: bool = True,
    identifier: str = "id",
) -> RemoteObject:
    """Puts bytes by way of a file in `folder`, as an upload queue does."""
    path = folder / f"staged-{identifier}"
    path.write_bytes(content)
    with Body(path, identifier) as body:
        return store.put(name, body, overwrite=overwrite)


@contextlib.contextmanager
def _must_raise(error: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{what} must raise {error.__name__}")


def _head(store: Store, name: str) -> RemoteObject:
    found = store.head(name)
    assert found is not None, f"head must find {name!r}"
    return found
