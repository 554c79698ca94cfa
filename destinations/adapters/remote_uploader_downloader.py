"""`RemoteUploaderDownloader`: `Artifacts` with the arguments of Composer's class of that name.

It needs nothing of Composer. The page "Coming from Composer" says what each argument becomes.
"""

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from destinations.artifacts import Artifacts
from uploads import RetryPolicy, download_file, open_store

__all__ = ["RemoteUploaderDownloader"]

_log = logging.getLogger("destinations")

_DEFAULT_ATTEMPTS = 3
_WAIT_SECONDS = 86_400.0
# Stands for the name of a file; no run has it in its name.
_ANY = "\x00"
# Options with a different name in Composer's stores; others have the same name, and our store checks them.
_RENAMED = {"region_name": "region", "known_hosts_filename": "known_hosts"}
# Parts of boto3's `TransferConfig` and botocore's `Config`, as dictionaries.
_S3_CONFIGS = {
    "transfer_config": {"multipart_chunksize": "part_bytes", "max_concurrency": "part_threads"},
    "client_config": {
        "connect_timeout": "connect_timeout_seconds",
        "read_timeout": "read_timeout_seconds",
        "region_name": "region",
    },
}
# Options that name the bucket or host; they are part of our URI.
_PLACE = {"s3": ("bucket", "prefix"), "gs": ("bucket", "prefix"), "sftp": ("host", "cwd")}


class RemoteUploaderDownloader(Artifacts):
    """Uploads the files of a run, with the constructor of Composer's class of this name.

    ```python
    from destinations.adapters.remote_uploader_downloader import RemoteUploaderDownloader

    loggers = [RemoteUploaderDownloader("s3://my-bucket", num_concurrent_uploads=4)]
    ```

    The end of `fit` waits until every file is in the store, as in Composer, for at most a day. Files can
    also be downloaded after the run was closed. Everything else is `Artifacts`: files survive the process,
    transient failures are retried without limit, and a file that fails for good does not end training.

    Args:
        bucket_uri: the bucket or host: "s3://…", "gs://…", "sftp://…", or any other URI that
            `uploads.open_store` knows.
        backend_kwargs: the arguments of Composer's store, or of `uploads`' store.
        file_path_format_string: the name of a file in the store, with "{remote_file_name}".
        num_concurrent_uploads: how many files are uploaded at a time.
        upload_staging_folder: the spool: a folder for this run alone, which must outlive the process.
        use_procs: whether uploads run in a separate process.
        num_attempts: how many failures of an unknown kind reject a file. Others are retried without limit.
        options: further arguments of `Artifacts`.

    Raises:
        ValueError: the URI is invalid, or an argument of the backend has no equivalent.
    """

    # Composer's class adds no folder of the run.
    _is_below_run = False

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        num_concurrent_uploads: int = 4,
        upload_staging_folder: str | None = None,
        use_procs: bool = True,
        num_attempts: int = _DEFAULT_ATTEMPTS,
        **options: Any,
    ) -> None:
        uri, store_options = _store(bucket_uri, dict(backend_kwargs or {}))
        if num_attempts < 1:
            raise ValueError(f"num_attempts must be at least 1, got {num_attempts}.")
        if num_attempts != _DEFAULT_ATTEMPTS:
            _log.warning(
                "RemoteUploaderDownloader: num_attempts=%d counts failures of an unknown kind; transient "
                "ones are retried without limit.",
                num_attempts,
            )
            options.setdefault("policy", RetryPolicy(unknown_tries=num_attempts))
        super().__init__(
            uri,
            remote_file_name=file_path_format_string.lstrip("/"),
            **{
                "wait": "uploaded",
                "wait_seconds": _WAIT_SECONDS,
                "workers": num_concurrent_uploads,
                "spool": upload_staging_folder,
                "isolation": "process" if use_procs else "threads",
                "store_options": store_options,
                **options,
            },
        )
        self._store_options = {**store_options, **options.get("store_options", {})}
        # The URI of the store of the last run, and the name of a file that is called `_ANY` there.
        self._closed: tuple[str, str] | None = None

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Returns the URI of a file in the store, uploaded or not, from the beginning of the run on.

        Raises:
            RuntimeError: no run has begun.
        """
        if self._state is None and self._closed is not None:
            uri, name = self._closed
            return open_store(uri, **self._store_options).uri(name.replace(_ANY, remote_file_name))
        return str(self.file_uri(remote_file_name))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        if self._state is not None or self._closed is None:
            super().download_file(remote_file_name, destination, overwrite, progress_bar)
            return
        uri, name = self._closed
        download_file(
            name.replace(_ANY, remote_file_name),
            destination,
            store=open_store(uri, **self._store_options),
            overwrite=overwrite,
            progress_bar=progress_bar,
        )

    def post_close(self) -> None:
        if self.queue is not None:
            self._closed = self.queue.uri(""), self._name(_ANY)
        super().post_close()


def _store(bucket_uri: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the URI and the options of our store for the arguments of Composer's.

    Raises:
        ValueError: one has no equivalent.
    """
    scheme = urlsplit(bucket_uri).scheme
    if scheme not in _PLACE:
        if scheme in {"libcloud", "oci", "mlflow", "dbfs", "hf"}:
            raise ValueError(
                f"bucket_uri must be one of s3://, gs://, sftp://, got {bucket_uri!r}. "
                "Many other stores speak S3: give s3://bucket and backend_kwargs={'endpoint_url': …}."
            )
        return bucket_uri, given
    place, folder = _PLACE[scheme]
    own = urlsplit(bucket_uri).netloc
    named = str(given.pop(place, own)).removeprefix("sftp://")
    if named != own:
        raise ValueError(f"backend_kwargs[{place!r}] must be that of the URI, {own!r}, got {named!r}.")
    uri = bucket_uri.rstrip("/")
    if below := str(given.pop(folder, "")).strip("/"):
        uri = f"{uri}/{below}"
    options: dict[str, Any] = {}
    for config, names in _S3_CONFIGS.items() if scheme == "s3" else ():
        parts = given.pop(config, None) or {}
        if not isinstance(parts, Mapping):
            kind = type(parts).__name__
            raise ValueError(f"backend_kwargs[{config!r}] must be a dict, got {kind}.")  # noqa: TRY004
        options |= _renamed(parts, names, f"backend_kwargs[{config!r}]")
    given = {_RENAMED.get(name, name): value for name, value in given.items() if value is not None}
    return uri, options | given


def _renamed(given: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise ValueError(
            f"{where} must be among {', '.join(names)}, got {', '.join(unknown)}. "
            'The page "Coming from Composer" says what each argument becomes.'
        )
    return {names[name]: value for name, value in given.items() if value is not None}
