"""S3 and servers that speak its protocol, through boto3."""

from .store import S3Store

__all__ = ["S3Store"]
