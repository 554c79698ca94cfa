"""Our destinations inside other people's trainers: Lightning, Hugging Face, Accelerate, torchrl, Composer, Keras, logging.

Nothing here is imported by the rest of the project, and this package imports none of its modules: each needs the framework
that it is for. Import the module that you want, `from destinations.adapters.lightning_logger import LightningLogger`.
"""

__all__: list[str] = []
