"""The monitor's fixtures: these tests listen to what callbacks log in the same way."""

from tests.test_events.monitor.conftest import heard, in_child, metric_list
from tests.test_events.trainer.conftest import make_dataloader, make_trainer

__all__ = ["heard", "in_child", "make_dataloader", "make_trainer", "metric_list"]
