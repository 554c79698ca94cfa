"""Composer's uploader with its own arguments: each one has an effect, and training ends after the uploads."""

import pytest

from destinations.adapters.remote_uploader_downloader import RemoteUploaderDownloader
from events import Run

pytestmark = pytest.mark.usefixtures("s3_credentials")


def test_every_argument_reaches_the_store(moto, tmp_path, monkeypatch):
    """Names, prefix, endpoint, region and staging folder apply; at `FIT_END` the files are there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    uploader = RemoteUploaderDownloader(
        "s3://bucket",
        backend_kwargs={
            "bucket": "bucket",
            "prefix": "theirs",
            "region_name": "us-east-1",
            "endpoint_url": moto.endpoint_url,
            "addressing_style": "path",
            "transfer_config": {"multipart_chunksize": 8 << 20, "max_concurrency": 2},
            "client_config": {"connect_timeout": 5},
        },
        file_path_format_string="/{run_name}/rank_{rank}/{remote_file_name}",
        num_concurrent_uploads=2,
        upload_staging_folder=str(tmp_path / "staging"),
        use_procs=False,
        progress_bar=False,
    )
    (tmp_path / "file").write_bytes(b"content")

    with Run(uploader, run_name="mine") as run:
        run.fit_start()
        run.logger.upload_file("ep1.pt", tmp_path / "file")
        queue = uploader.queue
        run.run_event("fit_end")
        uploaded = moto.objects("theirs")
        assert queue.spool.path == tmp_path / "staging"

    assert uploaded == {"mine/rank_0/ep1.pt": b"content"}


def test_a_folder_and_the_defaults_work(tmp_path):
    """Any URI of `uploads` is accepted."""
    uploader = RemoteUploaderDownloader(f"file://{tmp_path}/store", use_procs=False, progress_bar=False)
    (tmp_path / "file").write_bytes(b"content")

    with Run(uploader, run_name="mine") as run:
        run.fit_start()
        run.logger.upload_file("ep1.pt", tmp_path / "file")

    assert (tmp_path / "store/ep1.pt").read_bytes() == b"content"


def test_files_are_found_and_downloaded_after_the_run(moto, tmp_path):
    """Composer's does so too, with a closed trainer; before a run there's nothing to download."""
    uploader = RemoteUploaderDownloader(
        "s3://bucket/after",
        backend_kwargs={"endpoint_url": moto.endpoint_url, "addressing_style": "path"},
        file_path_format_string="{run_name}/{remote_file_name}",
        upload_staging_folder=str(tmp_path / "staging"),
        use_procs=False,
        progress_bar=False,
    )
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(RuntimeError, match="before init"):
        uploader.download_file("a/ep1.pt", str(tmp_path / "copy"))

    with Run(uploader, run_name="mine") as run:
        run.fit_start()
        run.logger.upload_file("a/ep1.pt", tmp_path / "file")
        during = uploader.get_uri_for_file("a/ep1.pt")
    uploader.download_file("a/ep1.pt", str(tmp_path / "copy"), progress_bar=False)

    assert uploader.get_uri_for_file("a/ep1.pt") == during
    assert during.startswith("s3://bucket/after/mine/a/ep1.pt?endpoint_url=")
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        uploader.download_file("a/ep1.pt", str(tmp_path / "copy"), progress_bar=False)


def test_the_number_of_attempts_limits_unknown_failures(tmp_path, caplog):
    """A message says that transient ones are still retried."""
    uploader = RemoteUploaderDownloader(str(tmp_path), num_attempts=7)

    assert uploader._queue_options["policy"].unknown_tries == 7
    assert "num_attempts=7 counts failures of an unknown kind" in caplog.text
    with pytest.raises(ValueError, match="num_attempts must be at least 1"):
        RemoteUploaderDownloader(str(tmp_path), num_attempts=0)


@pytest.mark.parametrize(
    ("uri", "backend", "message"),
    [
        ("s3://bucket", {"regoin": "x"}, "unknown options regoin: an S3 store takes"),
        ("s3://bucket", {"bucket": "other"}, r"backend_kwargs\['bucket'\] must be that of the URI, 'bucket'"),
        ("s3://bucket", {"transfer_config": {"max_io_queue": 1}}, r"\['transfer_config'\] must be among"),
        ("s3://bucket", {"client_config": object()}, r"\['client_config'\] must be a dict, got object"),
        ("gs://bucket", {"key": "x"}, "'key' is not valid for store 'GCS'"),
        ("sftp://host", {"key": "x"}, "unexpected keyword argument 'key'"),
        ("libcloud://bucket", {}, "must be one of s3://, gs://, sftp://, got 'libcloud://bucket'"),
        ("s3://bucket", {}, "must contain {remote_file_name}"),
    ],
)
def test_arguments_without_an_equivalent_raise(uri, backend, message):
    """The constructor's error names the argument."""
    options = {"file_path_format_string": "x"} if not backend and uri.startswith("s3") else {}

    with pytest.raises(ValueError, match=message):
        RemoteUploaderDownloader(uri, backend_kwargs=backend, **options)
