"""The fixtures of the monitor's tests: what callbacks log is heard the same way."""

from tests.test_events.monitor.conftest import caplog, heard, in_child, metric_list

__all__ = ["caplog", "heard", "in_child", "metric_list"]
