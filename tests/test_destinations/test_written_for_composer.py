"""A destination written for Composer, with only its import changed."""

import pathlib

import numpy as np
import torch

from destinations import LoggerDestination
from events import Logger, State, Time, Trainer


class CsvLikeLogger(LoggerDestination):
    """In the style of Composer's own: overrides by name, stores the state, reads the timestamp."""

    def __init__(self, staging):
        # Composer's base class has an empty constructor; many subclasses don't call it.
        self.staging = pathlib.Path(staging)
        self.calls = []
        self.state = None

    def init(self, state: State, logger: Logger) -> None:
        self.state = state
        self.calls.append(("init", state.run_name))

    def log_hyperparameters(self, hyperparameters):
        self.calls.append(("hyperparameters", sorted(hyperparameters)))

    def log_metrics(self, metrics, step=None):
        batch = int(self.state.timestamp.batch)
        assert step is not None
        self.calls.append(("metrics", step, batch, self.state.timestamp.batch.value, sorted(metrics)))

    def log_table(self, columns, rows, name="Table", step=None):
        self.calls.append(("table", name, columns, rows, step))

    def log_traces(self, traces):
        self.calls.append(("traces", sorted(traces)))

    # A subclass may rename parameters: Composer passes these by position.
    def log_images(
        self, pictures, title="Images", last=False, at=None, overlays=None, labels=None, in_table=False
    ):
        self.calls.append(
            ("images", tuple(pictures.shape), title, last, at, sorted(overlays), labels, in_table)
        )

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        kept = self.staging / remote_file_name.replace("/", "_")
        kept.write_bytes(file_path.read_bytes())
        self.calls.append(("file", remote_file_name, overwrite, kept.read_bytes()))

    def can_upload_files(self):
        return True

    def batch_end(self, state, logger):
        elapsed = state.get_elapsed_duration()
        if state.timestamp.batch == Time.from_timestring("2ba"):
            logger.log_table(["a"], [[1]], name="T")
            masks = {"m": np.zeros((2, 4, 4))}
            logger.log_images(np.zeros((2, 3, 4, 4)), name="I", masks=masks, mask_class_labels={0: "sky"})
            logger.log_traces({"algorithm_traces/x": 1})
            self.calls.append(("elapsed", float(elapsed)))

    def fit_end(self, state, logger):
        self.calls.append(("fit_end", str(state.timestamp.epoch)))

    def close(self, state, logger):
        self.calls.append(("close",))

    def post_close(self):
        self.calls.append(("post_close",))


def test_it_receives_the_expected_events_and_records(tmp_path):
    """Hooks, records, positions, steps and files are the same as in Composer."""
    destination = CsvLikeLogger(tmp_path)
    model = torch.nn.Linear(3, 2)
    trainer = Trainer(
        model,
        [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 2,
        max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=[destination],
        run_name="ported",
        device="cpu",
    )
    (tmp_path / "weights.bin").write_bytes(b"weights")

    trainer.fit()
    trainer.logger.upload_file("{run_name}/weights.bin", tmp_path / "weights.bin", overwrite=True)
    trainer.close()

    batch = ["loss/train/total", "lr/SGD/group0", "time/epoch", "time/sample"]
    assert destination.calls == [
        ("init", "ported"),
        ("hyperparameters", ["trainer"]),
        ("metrics", 0, 0, 0, batch),
        ("metrics", 1, 1, 1, batch),
        ("table", "T", ["a"], [[1]], 2),
        ("images", (2, 3, 4, 4), "I", False, 2, ["m"], {0: "sky"}, True),
        ("traces", ["algorithm_traces/x"]),
        ("elapsed", 0.0),
        ("fit_end", "1ep"),
        ("file", "ported/weights.bin", True, b"weights"),
        ("close",),
        ("post_close",),
    ]
