"""A device whose copies land on request, and tensors on it that tests can read only through copies."""

import torch


class OnDevice:
    """A scalar or an array on the fake device.

    Reading its value without a copy is an error.
    """

    is_cpu = False

    def __init__(self, value, dtype=torch.float32, device="fake:0"):
        self.value = value
        self.dtype = dtype
        self.device = device
        self.shape = tuple(getattr(value, "shape", ()))

    def detach(self):
        return self

    def cpu(self):
        raise AssertionError("the device was waited for")

    item = tolist = cpu


class _Flight:
    def __init__(self, device):
        self._device = device
        self._landed = None
        self._staged = None
        self.on_read = lambda: None

    def begin(self, values):
        self._staged = values
        self._landed = None
        self._device.flights.append(self)

    def land(self):
        self._landed = self._staged

    def is_done(self):
        self._device.queries += 1
        if self._device.failure is not None:
            raise self._device.failure
        return self._landed is not None

    def read(self):
        # Nothing that has not landed may be read, and nothing twice.
        landed, self._landed = self._landed, None
        self.on_read()
        return landed


class _Layout:
    """How scalars lie in a row: the cells of a row are its number."""

    def __init__(self, scalars, rows, copy):
        self.dtypes = [scalar.dtype for scalar in scalars]
        self.cells = [None] * rows
        self.copy = copy


class _Rows:
    """Memory for rows of scalars; counts what it queues."""

    def __init__(self, device, count, capacity):
        self._device = device
        self._capacity = capacity
        self._rows = [None] * count

    def layout(self, scalars):
        return _Layout(scalars, len(self._rows), self._copy)

    def make_cells(self, layout, row):
        layout.cells[row] = row

    def stream_number(self):
        return self._device.current_stream

    stream = stream_number

    def _copy(self, row, scalars):
        if self._device.refuses is not None:
            raise self._device.refuses
        assert len(scalars) <= self._capacity
        assert self._rows[row] is None, "a row must not be used before its copy was read"
        self._rows[row] = [scalar.value for scalar in scalars]
        self._device.queued.append(f"snapshot on {self._device.current_stream}")

    def send(self, first, layouts, stream):
        rows = slice(first, first + len(layouts))
        flight = _Flight(self._device)
        flight.begin(self._rows[rows])
        flight.on_read = lambda: self._rows.__setitem__(rows, [None] * len(layouts))
        self._device.queued += [f"copy of {len(layouts)} on {stream}", "event"]
        return flight


class FakeDevice:
    """Copies land one by one, in order, as `land` is called."""

    def __init__(self):
        self.flights = []
        self.queued = []
        self.rows_made = 0
        self.queries = 0
        self.failure = None
        self.refuses = None
        self.captures = False
        self.current_stream = 0

    def is_capturing(self):
        return self.captures

    def make_rows(self, count, capacity):
        self.rows_made += count
        return _Rows(self, count, capacity)

    def copy_array(self, tensor):
        flight = _Flight(self)
        flight.begin(tensor.value.clone())
        return flight

    def land(self, count=None):
        count = len(self.flights) if count is None else count
        for flight in self.flights[:count]:
            flight.land()
        del self.flights[:count]


class Clock:
    """A clock that is set, and moved by sleeping."""

    def __init__(self, on_sleep=None):
        self.now = 1000.0
        self.slept = 0
        self.on_sleep = on_sleep

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept += 1
        self.now += seconds
        if self.on_sleep is not None:
            self.on_sleep()
