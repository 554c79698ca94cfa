"""Translates URIs of stores for `object_store`, the library of Delta Lake, Polars, Daft and others."""

import os
from pathlib import Path
from typing import Any

from .local import folder_of
from .uri import LOCAL_SCHEME, SCHEMES, configured_endpoint, options_of

__all__ = ["object_store_location"]


def object_store_location(uri: str | Path, **options: Any) -> tuple[str, dict[str, str]]:
    """Returns a path or URI without options, and the options by the names of `object_store`.

    ```python
    print(object_store_location("s3://bucket/digits?region=eu-west-1"))
    ```

    The other library finds credentials that you don't pass: in the environment, and where its cloud keeps
    them. boto3 looks up the credentials of a `profile`.

    Args:
        uri: as `open_store` takes it: a path, `file://`, `s3://`, `gs://` or `az://`.
        options: as `open_store` takes them; they override the URI's options.

    Raises:
        ValueError: the scheme is another.
        StoreError: the profile or its credentials cannot be read.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return os.path.abspath(text), {}  # noqa: PTH100  # a Path would lose a trailing line feed
    if scheme == LOCAL_SCHEME:
        return folder_of("/" + rest.partition("/")[2]), {}
    names = SCHEMES[scheme].object_store_names if scheme in SCHEMES else None
    if names is None:
        known = [f"{one}://" for one, about in SCHEMES.items() if about.object_store_names is not None]
        raise ValueError(f"expected a path, {', '.join(known[:-1])} or {known[-1]}, got {scheme}://")
    options = {**options_of(text), **options}
    base = text.partition("?")[0].rstrip("/")
    if scheme == "s3":
        options.setdefault("endpoint_url", configured_endpoint())
        options = {**_keys_of(options.get("profile")), **options}
    found = {
        names.get(name, name): str(value)
        for name, value in options.items()
        if value is not None and name not in SCHEMES[scheme].own_options
    }
    if str(options.get("endpoint_url") or "").startswith("http://"):
        found["aws_allow_http" if scheme == "s3" else "allow_http"] = "true"
    if options.get("addressing_style") == "virtual":
        found["aws_virtual_hosted_style_request"] = "true"
    return base, found


def _keys_of(profile: str | None) -> dict[str, str | None]:
    """Returns the region and the credentials of a profile in the configuration of boto3."""
    if not profile:
        return {}
    import boto3

    from .s3.errors import translated

    with translated(f"look up profile {profile!r}"):
        session = boto3.Session(profile_name=profile)
        found: dict[str, str | None] = {"region": session.region_name}
        if (credentials := session.get_credentials()) is not None:
            keys = credentials.get_frozen_credentials()
            found |= {
                "aws_access_key_id": keys.access_key,
                "aws_secret_access_key": keys.secret_key,
                "aws_session_token": keys.token,
            }
    return found
