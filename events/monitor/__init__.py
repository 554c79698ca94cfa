"""What a program tells about itself while it runs: measurements summed up per window, and events, to whoever listens.

The interface is that of `torch.monitor`, without its faults, and with a way to the destinations of a run:

```python
from events import monitor

data_seconds = monitor.Stat("data_seconds", [monitor.Aggregation.P95], window_size=timedelta(seconds=60))
trainer = Trainer(..., callbacks=[monitor.ForwardMonitor()])
```

Everything here may be called from any thread. Nothing happens before the first `Stat` is made, or the first handler
registered.
"""

from .forward import ForwardMonitor, forward_to
from .monitor_event import (
    Event,
    EventHandlerHandle,
    log_event,
    register_event_handler,
    unregister_event_handler,
)
from .stat import Aggregation, Stat, flush
from .torch_monitor import FromTorchMonitor, ToTorchMonitor, from_torch, to_torch

__all__ = [
    "Aggregation",
    "Event",
    "EventHandlerHandle",
    "ForwardMonitor",
    "FromTorchMonitor",
    "Stat",
    "ToTorchMonitor",
    "flush",
    "forward_to",
    "from_torch",
    "log_event",
    "register_event_handler",
    "to_torch",
    "unregister_event_handler",
]
