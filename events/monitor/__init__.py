"""Measurements aggregated per window, and events, passed to registered handlers and to a run's destinations.

It has the interface of `torch.monitor`, without its faults:

```python
from events import monitor

data_seconds = monitor.Stat("data_seconds", [monitor.Aggregation.P95], window_size=timedelta(seconds=60))
trainer = Trainer(..., callbacks=[monitor.ForwardMonitor()])
```

Everything here may be called from any thread. No thread is started before the first `Stat` is made.
"""

from .bridges import (
    ForwardMonitor,
    FromTorchMonitor,
    TensorboardEventHandler,
    ToTorchMonitor,
    forward_to,
    from_torch,
    to_torch,
)
from .monitor_event import (
    Event,
    EventHandlerHandle,
    data_value_t,
    log_event,
    register_event_handler,
    unregister_event_handler,
)
from .stat import Aggregation, Stat, flush

__all__ = [
    "Aggregation",
    "Event",
    "EventHandlerHandle",
    "ForwardMonitor",
    "FromTorchMonitor",
    "Stat",
    "TensorboardEventHandler",
    "ToTorchMonitor",
    "data_value_t",
    "flush",
    "forward_to",
    "from_torch",
    "log_event",
    "register_event_handler",
    "to_torch",
    "unregister_event_handler",
]
