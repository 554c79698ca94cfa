"""Uploads of these tests have a home and credentials of their own."""

from tests.test_uploads.conftest import _credentials, _home

__all__ = ["_credentials", "_home"]
