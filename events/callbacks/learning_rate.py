"""`LRMonitor`: logs the learning rates."""

from events.callback import Callback
from events.logger.logger import Logger
from events.state import State

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Logs the learning rate of each parameter group with each batch, as `lr-<optimizer>/group<i>`.

    ```python
    Trainer(..., callbacks=[LRMonitor()], schedulers=CosineAnnealingScheduler())
    ```

    For trainers of your own and Composer's names: `Trainer` logs `lr/<optimizer>/group<i>` itself. A rate
    that is a tensor on a device is copied without waiting.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs the rates, after the schedulers have stepped."""
        logger.log_metrics(
            {
                f"lr-{type(optimizer).__name__}/group{index}": group["lr"]
                for optimizer in state.optimizers
                for index, group in enumerate(optimizer.param_groups)
            }
        )
