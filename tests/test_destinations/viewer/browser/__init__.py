"""Tests in a browser: a package, so that shared fixtures end with the last of them."""
