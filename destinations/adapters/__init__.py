"""Adapters for other frameworks: Lightning, Hugging Face, Accelerate, torchrl, Composer, Keras, logging.

Each module requires its framework, so nothing here is imported by this package or the rest of the project.
Import the module you need: `from destinations.adapters.lightning_logger import LightningLogger`.
"""

__all__: list[str] = []
