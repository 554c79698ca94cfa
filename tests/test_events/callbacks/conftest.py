"""The fixtures of the monitor's tests: what callbacks log is heard the same way."""

from tests.test_events.monitor.conftest import heard, in_child, metric_list
from tests.test_events.trainer.conftest import make_dataloader, make_trainer

__all__ = ["heard", "in_child", "make_dataloader", "make_trainer", "metric_list"]
