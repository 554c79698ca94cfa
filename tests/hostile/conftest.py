"""The upload tests in this folder have their own home and credentials."""

from tests.test_uploads.conftest import _credentials, _home

__all__ = ["_credentials", "_home"]
