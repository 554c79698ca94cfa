"""A Keras run on the torch backend, in its own process: `python keras_child.py FOLDER`.

It prints the events.
"""

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from destinations import InMemory, RunDirectory
from destinations.adapters.keras_callback import KerasCallback
from events import Callback, Event

FOLDER = Path(sys.argv[1])


class Listener(Callback):
    """Records each event."""

    def __init__(self):
        self.heard = []
        self.fails = False

    def run_event(self, event, state, logger):
        self.heard.append((event.value, int(state.timestamp.batch), int(state.timestamp.epoch)))
        if self.fails and event is Event.BATCH_END:
            raise ValueError("diverged")


def main():
    """Fits two epochs of two batches, evaluates, predicts and then fails."""
    memory, listener = InMemory(), Listener()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.01))
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    heard = {}
    with KerasCallback(RunDirectory(FOLDER / "run"), memory, callbacks=listener, raise_errors=True) as ours:
        model.fit(x, y, epochs=2, batch_size=4, validation_data=(x, y), callbacks=[ours], verbose=0)
        heard["fit"], listener.heard = listener.heard, []
        model.evaluate(x, y, batch_size=4, callbacks=[ours], verbose=0)
        model.predict(x, batch_size=4, callbacks=[ours], verbose=0)
        heard["after"], listener.heard = listener.heard, []
    listener.fails = True
    try:
        with KerasCallback(RunDirectory(FOLDER / "failed"), callbacks=listener) as ours:
            model.fit(x, y, batch_size=4, callbacks=[ours], verbose=0)
    except ValueError as error:
        heard["error"] = str(error)
    rows = [(record.step, sorted(record.value)) for record in memory.records if record.kind == "metrics"]
    print(json.dumps({**heard, "rows": rows, "hyperparameters": memory.hyperparameters}))


main()
