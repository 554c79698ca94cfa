"""Secrets in texts that go to logs, handles and the spool."""

import pytest

from uploads._redact import is_secret_option, redact


@pytest.mark.parametrize(
    "text",
    [
        "key AKIAABCDEFGHIJKLMNOP is unknown",
        "cannot reach https://user:hush@host/path",
        "https://bucket/key?X-Amz-Signature=hush&X-Amz-Credential=AKIAABCDEFGHIJKLMNOP/2024",
        "aws_secret_access_key = hush",
        "{'aws_session_token': 'hush'}",
    ],
)
def test_secrets_are_taken_out(text):
    """Fault 49: key ids, passwords in URLs, signatures and secret settings."""
    clean = redact(text)

    assert "hush" not in clean
    assert "AKIAABCDEFGHIJKLMNOP" not in clean
    assert "[redacted]" in clean


def test_ordinary_texts_are_left_alone():
    """Fault 49: names that only look like secrets stay."""
    for text in ("num_tokens: 4096", "tokenizer.json must exist", "https://host:9000/bucket/key"):
        assert redact(text) == text


def test_secret_options_are_known_by_name():
    """What must not be written to spool.json."""
    assert all(
        map(
            is_secret_option,
            [
                "aws_access_key_id",
                "aws_secret_access_key",
                "aws_session_token",
                "password",
                "azure_storage_account_key",
            ],
        )
    )
    assert not any(map(is_secret_option, ["endpoint_url", "region", "part_bytes", "key_filename"]))
