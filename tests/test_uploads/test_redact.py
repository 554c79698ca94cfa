"""Secrets in texts that go to logs, handles and the spool."""

import pytest

from uploads.redaction import redact
from uploads.stores.uri import kept_options


@pytest.mark.parametrize(
    "text",
    [
        "key AKIAABCDEFGHIJKLMNOP is unknown",
        "cannot reach https://user:hush@host/path",
        "https://bucket/key?X-Amz-Signature=hush&X-Amz-Credential=AKIAABCDEFGHIJKLMNOP/2024",
        "aws_secret_access_key = hush",
        "{'aws_session_token': 'hush'}",
        "SSECustomerKey=hush and x-amz-server-side-encryption-customer-key: hush",
        "az://container/run?sas_token=hush&account_key=hush",
    ],
)
def test_secrets_are_taken_out(text):
    """They are key ids, passwords in URLs, signatures and secret settings."""
    clean = redact(text)

    assert "hush" not in clean
    assert "AKIAABCDEFGHIJKLMNOP" not in clean
    assert "[redacted]" in clean


def test_ordinary_texts_are_unchanged():
    """Names that only look like secrets stay."""
    for text in (
        "num_tokens: 4096",
        "tokenizer.json must exist",
        "https://host:9000/bucket/key",
        "sftp://me@host/x",
    ):
        assert redact(text) == text


def test_only_options_that_are_known_to_be_harmless_are_kept():
    """Only these are written to spool.json and into URIs; an unknown key isn't."""
    kept = {"endpoint_url": "http://host:9000", "region": "eu", "part_bytes": 5, "key_filename": "~/.ssh/id"}
    secret = {
        "aws_access_key_id": "hush",
        "aws_secret_access_key": "hush",
        "aws_session_token": "hush",
        "password": "hush",
        "azure_storage_account_key": "hush",
        "azure_storage_sas_token": "hush",
        "SSECustomerKey": "hush",
        "of_the_next_release": "hush",
        "StorageClass": ["hush"],
    }

    assert kept_options({**kept, **secret, "checksum": None}) == kept


def test_a_url_among_the_options_is_kept_without_its_credentials():
    """The user, the password, and the parameters that sign the URL are removed."""
    url = "https://user:hush@host:9000/path?sig=hush#hush"

    assert kept_options({"endpoint_url": url}) == {"endpoint_url": "https://host:9000/path"}
