"""The error for a framework that is not installed."""

__all__ = ["missing"]


def missing(package: str, extra: str | None, error: ImportError) -> ImportError:
    """Returns an error that says what to install.

    Args:
        package: what could not be imported.
        extra: the extra of this project that brings it; None where it needs an environment of its own.
        error: what the import raised.
    """
    hint = (
        f"pip install 'training-destinations[{extra}]'"
        if extra
        else f"pip install {package}, in an environment of its own"
    )
    return ImportError(f"package {package!r} must be installed, got: {error}. {hint}", name=package)
