"""Options of a store that may be written to disk and into URIs."""

from uploads.stores.uri import kept_options


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
