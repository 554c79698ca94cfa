"""Multipart uploads to S3: parallel, resumed after a restart, completed only if all bytes are right."""

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import attrs

from uploads.disk import crc32_of_both, read_regular, replace_json
from uploads.errors import BytesCorruptError, RejectedByStoreError, RemoteExistsError, StoreError
from uploads.stores.store import Body, Digest, has_md5

from .errors import code_of, translated
from .requests import Checksum, Part, PartBody, Requests

__all__ = ["PartsUpload", "abandon_parts", "part_bytes_for"]

_MAXIMUM_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MEBIBYTE = 1 << 20


def part_bytes_for(size: int, part_bytes: int) -> int:
    """Returns the given part size, or the smallest one in MiB that keeps to S3's limit of parts."""
    smallest = -(-size // _MAXIMUM_PARTS)
    return max(part_bytes, -(-smallest // _MEBIBYTE) * _MEBIBYTE)


@attrs.define(eq=False, slots=False, repr=False)
class PartsUpload:
    """The multipart upload of one file. One thread uses it, and a thread per part checksums and sends it.

    Args:
        requests: Makes the requests.
        key: Key of the object.
        body: The bytes.
        part_bytes: Size of all parts but the last.
        slots: Limits the parts in flight, over all uploads of the store.
        notes: Keeps the upload's id for another attempt; None if there won't be one.
        otherwise: The kind of checksum for a server that doesn't confirm that it compares the CRC-32 of the
            whole; None for the kind of `requests`.

    Attributes:
        is_whole_checked: Whether the server compares the CRC-32 of the whole object and keeps it; None until
            it has answered.
    """

    _requests: Requests
    _key: str
    _body: Body
    _part_bytes: int = attrs.field(kw_only=True)
    _slots: threading.Semaphore = attrs.field(kw_only=True)
    _notes: Path | None = attrs.field(kw_only=True)
    _otherwise: Checksum | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._upload_id = ""
        self.is_whole_checked: bool | None = None
        self._lock = threading.Lock()  # Guards the three below.
        self._sent: dict[int, Part] = {}
        self._sums: dict[int, tuple[int, bytes | None]] = {}  # CRC-32, and MD5 if it is needed.
        self._error: BaseException | None = None

    @property
    def checksum(self) -> Checksum:
        """The kind of checksum that is sent."""
        return self._requests.checksum

    def run(self, condition: dict[str, str], *, overwrite: bool) -> None:
        """Sends the missing parts and completes the object.

        Args:
            condition: Condition of the last request, see `Requests.put`.
            overwrite: Whether to keep the parts for another try if the condition fails.

        Raises:
            RemoteExistsError: The condition doesn't hold.
            BytesCorruptError: The bytes changed since they were checked; the parts were aborted.
            RejectedByStoreError: The parts were aborted.
            StoreError: Any other; with notes, the parts stay for the next attempt.
        """
        ends = (BytesCorruptError, RejectedByStoreError, *(() if overwrite else (RemoteExistsError,)))
        try:
            parts = self._continue()
            self._sent = self._begin() if parts is None else parts
            self._send_missing()
            self._body.check()
            self._complete(condition)
        except BaseException as error:
            if code_of(error) == "NoSuchUpload":
                self._forget()
            elif self._notes is None or isinstance(error, ends):
                self.abort()
            raise
        self._forget()

    def abort(self) -> None:
        """Aborts the upload if it was created; if that fails, the notes stay and lead to it."""
        with contextlib.suppress(StoreError), translated(f"abort {self._key}"):
            if self._upload_id:
                self._requests.abort(self._key, self._upload_id)
            self._forget()

    def _continue(self) -> dict[int, Part] | None:
        """Returns the parts of an earlier attempt, or None if there is no upload to resume."""
        noted = _read(self._notes)
        if noted is None or noted.get("key", self._key) != self._key:
            return None
        if "upload_id" not in noted:
            # The process was killed before it noted the upload's id, or the notes are damaged. This also
            # aborts another rank's upload of the same name, which then starts over.
            with translated(f"abort uploads of {self._key}"):
                self._requests.abort_all(self._key)
            return None
        if noted.get("part_bytes") != self._part_bytes:
            with translated(f"abort {self._key}"):
                self._requests.abort(self._key, noted["upload_id"])
            return None
        self._upload_id = noted["upload_id"]
        if noted.get("checksum") in get_args(Checksum):  # As it was begun.
            self._requests = attrs.evolve(self._requests, checksum=noted["checksum"])
        self.is_whole_checked = True if noted.get("is_whole_checked") is True else None
        try:
            with translated(f"parts of {self._key}"):
                parts = list(self._requests.list_parts(self._key, self._upload_id))
        except StoreError as error:
            if code_of(error) != "NoSuchUpload":
                raise
            return None
        return {part.number: part for part in parts if part.size == self._length(part.number)}

    def _begin(self) -> dict[int, Part]:
        self._note({})
        if self._requests.checksum != "aws":
            self._sum_first()
        with translated(f"create upload of {self._key}"):
            self._upload_id, self.is_whole_checked = self._requests.create_upload(self._key, self._body)
            if not self.is_whole_checked and (self._otherwise or not self._body.is_summed):
                # Then the metadata, which are sent first, need a checksum.
                self._requests.abort(self._key, self._upload_id)
                self._requests = attrs.evolve(
                    self._requests, checksum=self._otherwise or self._requests.checksum
                )
                self._sum_first()
                self._upload_id, _ = self._requests.create_upload(self._key, self._body)
        self._note({"upload_id": self._upload_id, "is_whole_checked": self.is_whole_checked})
        return {}

    def _sum_first(self) -> None:
        """Sums a file whose CRC-32 is unknown and must be in the metadata, which are sent first.

        The sums are kept for sending the parts, so that each byte is summed once.
        """
        if not self._body.is_summed:
            self._each_part(self._sum)
            self._body.expect(self._whole())

    def _sum(self, number: int) -> None:
        sums = self._sums_of(number, with_md5=self._requests.checksum != "aws")
        with self._lock:
            self._sums[number] = sums

    def _sums_of(self, number: int, *, with_md5: bool) -> tuple[int, bytes | None]:
        return self._body.sums((number - 1) * self._part_bytes, self._length(number), with_md5=with_md5)

    def _send_missing(self) -> None:
        self._each_part(self._send)
        self._body.accept(Digest(self._body.size, None, self._whole()))

    def _whole(self) -> int:
        """Returns the CRC-32 of all parts together."""
        crc32 = 0
        for number in range(1, self._count() + 1):
            crc32 = crc32_of_both(crc32, self._sums[number][0], self._length(number))
        return crc32

    def _each_part(self, act: Callable[[int], None]) -> None:
        """Calls `act` with each part's number in a thread, as many at once as there are slots."""
        senders: list[threading.Thread] = []
        try:
            for number in range(1, self._count() + 1):
                self._slots.acquire()  # noqa: SIM115, RUF100  # given back by `_with_slot`
                if self._error is not None:
                    self._slots.release()
                    break
                sender = threading.Thread(
                    target=self._with_slot, args=(act, number), name=f"uploads-part-{number}", daemon=True
                )
                try:
                    sender.start()
                except RuntimeError:  # Out of threads, or at interpreter exit.
                    self._with_slot(act, number)
                else:
                    senders.append(sender)
        finally:
            for sender in senders:
                sender.join()
        if self._error is not None:
            raise self._error

    def _with_slot(self, act: Callable[[int], None], number: int) -> None:
        try:
            act(number)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            with self._lock:
                self._error = error if self._error is None else self._error
        finally:
            self._slots.release()

    def _send(self, number: int) -> None:
        """Sums a part and sends it, or compares it with the part of an earlier attempt.

        The part is read twice, in pieces. The server confirms that both readings were the same, with the
        CRC-32 of the part or the whole, or with the MD5; if it doesn't, the part is read again afterwards.
        """
        if number not in self._sums:
            self._sum(number)
        crc32, md5 = self._sums[number]
        part, is_new = self._sent.get(number), number not in self._sent
        if part is None:
            data = PartBody(self._body, (number - 1) * self._part_bytes, self._length(number))
            with translated(f"part {number} of {self._key}"):
                part = self._requests.put_part(self._key, self._upload_id, number, data, crc32, md5=md5)
        if not (self.is_whole_checked or part.is_proven):
            if is_new or md5 is None:
                crc32, again = self._sums_of(number, with_md5=md5 is None)
                md5 = again if md5 is None else md5
            part = attrs.evolve(part, is_proven=md5 is not None and has_md5(part.etag, md5))
        with self._lock:
            self._sent[number] = part
            self._sums[number] = crc32, md5

    def _complete(self, condition: dict[str, str]) -> None:
        parts = [self._sent[number] for number in range(1, self._count() + 1)]
        with translated(f"complete {self._key}"):
            self._requests.complete(self._key, self._upload_id, parts, self._body, condition)

    def _note(self, more: dict[str, Any]) -> None:
        if self._notes is not None:
            known = {"key": self._key, "part_bytes": self._part_bytes, "checksum": self._requests.checksum}
            replace_json(self._notes, {**known, **more})

    def _forget(self) -> None:
        if self._notes is not None:
            self._notes.unlink(missing_ok=True)

    def _count(self) -> int:
        return max(1, -(-self._body.size // self._part_bytes))

    def _length(self, number: int) -> int:
        return min(self._part_bytes, self._body.size - (number - 1) * self._part_bytes)


def abandon_parts(requests: Requests, notes: Path, prefix: str) -> None:
    """Aborts the upload in the notes, if its key starts with the store's prefix, and removes the notes."""
    noted = _read(notes) or {}
    if not noted.get("key", "").startswith(prefix):
        noted = {}
    with translated(f"abort {noted.get('key')}"):
        if "upload_id" in noted:
            requests.abort(noted["key"], noted["upload_id"])
        elif "key" in noted:
            requests.abort_all(noted["key"])
    notes.unlink(missing_ok=True)


def _read(notes: Path | None) -> dict[str, Any] | None:
    """Returns the notes: None if there are none, and an empty dictionary if they can't be read."""
    if notes is None:
        return None
    try:
        noted = json.loads(read_regular(notes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    match noted:
        case {"key": str(), "upload_id": str()}:
            return dict(noted)
        case {"key": str()} if "upload_id" not in noted:
            return dict(noted)
    return {}
