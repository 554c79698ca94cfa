"""The options of a bucket, as the URI of the store and `store_options=` give them."""

from typing import Any, Literal, get_args

import attrs

from uploads.stores.create_only import CreateOnlyPolicy
from uploads.stores.uri import configured_endpoint

from .requests import Checksum

__all__ = ["S3Options"]

# Without these, the URI of an object would lead elsewhere, or objects would be written differently.
_IN_URIS = ("endpoint_url", "region", "profile", "addressing_style", "checksum", "create_only")


def _or_configured(url: str | None) -> str | None:
    return url or configured_endpoint()


def _check_checksum(_options: object, _field: object, value: str) -> None:
    if value not in {"auto", *get_args(Checksum)}:
        raise ValueError(f"checksum must be 'auto', 'aws' or 'md5', got {value!r}")


@attrs.frozen(kw_only=True)
class S3Options:
    """Options for reaching a bucket and putting objects there. Numbers may be text, as in a URI.

    Attributes:
        endpoint_url: URL of another server than AWS; default `$S3_ENDPOINT_URL`, `$AWS_ENDPOINT_URL_S3` or
            `$AWS_ENDPOINT_URL`, then what boto3 finds.
        region: As boto3's `region_name`.
        profile: A profile of the credentials file.
        aws_access_key_id: Credentials that boto3 doesn't find by itself. Never written to disk.
        aws_secret_access_key: As above.
        aws_session_token: As above.
        addressing_style: "path" or "virtual"; boto3 chooses by default.
        checksum: "auto": "aws", or "md5" if the server refuses that, found out with the first file that it
            refuses and logged once. With one of the two, see `Requests`, the server must accept it.
        create_only: What `overwrite=False` requires. "auto": if the server doesn't honour `If-None-Match: *`,
            which is tried once, look and then put, so that two ranks at the same instant may both succeed.
            "require": the server must honour it, and nothing is ever overwritten.
        part_bytes: Files up to this size go in one request, larger ones in parts of this size (more for files
            above 10,000 parts).
        part_threads: Parts in flight at the same time, over all uploads. They are read in pieces while they
            are sent; each worker holds at most one file up to `part_bytes` in memory.
        connect_timeout_seconds: For a connection, and for each piece sent over it.
        read_timeout_seconds: For each piece of an answer.
    """

    # Resolved here, so that the store's URI works in another shell.
    endpoint_url: str | None = attrs.field(default=None, converter=_or_configured)
    region: str | None = None
    profile: str | None = None
    aws_access_key_id: str | None = attrs.field(default=None, repr=False)
    aws_secret_access_key: str | None = attrs.field(default=None, repr=False)
    aws_session_token: str | None = attrs.field(default=None, repr=False)
    addressing_style: str | None = None
    checksum: Literal["auto"] | Checksum = attrs.field(default="auto", validator=_check_checksum)
    create_only: CreateOnlyPolicy = "auto"
    part_bytes: int = attrs.field(default=16 << 20, converter=int)
    part_threads: int = attrs.field(default=4, converter=int)
    connect_timeout_seconds: float = attrs.field(default=10.0, converter=float)
    read_timeout_seconds: float = attrs.field(default=60.0, converter=float)

    def in_uris(self) -> dict[str, Any]:
        """Returns the options in the URIs of objects."""
        return {name: value for name in _IN_URIS if (value := getattr(self, name)) not in {None, "auto"}}

    def of_session(self) -> dict[str, Any]:
        """Returns the arguments of `boto3.Session`."""
        options = {
            "profile_name": self.profile,
            "region_name": self.region,
            "aws_access_key_id": self.aws_access_key_id,
            "aws_secret_access_key": self.aws_secret_access_key,
            "aws_session_token": self.aws_session_token,
        }
        return {name: value for name, value in options.items() if value}

    def of_client(self) -> dict[str, Any]:
        """Returns the arguments of botocore's `Config`."""
        style = {"addressing_style": self.addressing_style} if self.addressing_style else {}
        return {
            "connect_timeout": self.connect_timeout_seconds,
            "read_timeout": self.read_timeout_seconds,
            # The signed header of a checksum says enough. For http, botocore would sum every byte once more.
            "s3": {"payload_signing_enabled": False, **style},
        }
