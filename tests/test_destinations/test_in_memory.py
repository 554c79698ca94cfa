"""What InMemory keeps, and how to read it."""

import numpy as np
import pytest
import torch
from PIL import Image

from destinations import InMemory
from destinations.testing import DryRun
from events import Run, Timestamp


def test_metrics_are_kept_with_step_and_timestamp():
    """Each call of log_metrics is a record with its step (by default the batch) and the run's timestamp."""
    memory = InMemory()
    run = DryRun(memory, max_duration="2ba")
    run.init()

    run.fit()
    run.logger.log_metrics({"loss/train": 9.0}, step=77)
    run.close()

    assert [
        (record.kind, record.step, int(record.timestamp.batch), record.value) for record in memory.records
    ] == [
        ("metrics", 0, 0, {"loss/train": 1.0}),
        ("metrics", 1, 1, {"loss/train": 0.5}),
        ("metrics", 77, 2, {"loss/train": 9.0}),
    ]
    assert [(int(timestamp.batch), value) for timestamp, value in memory.data["loss/train"]] == [
        (0, 1.0),
        (1, 0.5),
        (2, 9.0),
    ]


def test_latest_values_and_their_timestamps():
    """The latest value is the last one logged, whatever its step."""
    memory = InMemory()
    run = DryRun(memory, max_duration="3ba")
    run.init()
    run.fit()

    run.logger.log_metrics({"accuracy": 0.25, "loss/train": 4.0}, step=1)
    run.logger.log_metrics({"accuracy": 0.75}, step=0)

    assert memory.most_recent_values == {"loss/train": 4.0, "accuracy": 0.75}
    assert {name: int(when.batch) for name, when in memory.most_recent_timestamps.items()} == {
        "loss/train": 3,
        "accuracy": 3,
    }


def test_timeseries_has_metric_step_and_timestamp_fields():
    """A series has arrays of one length; wall-clock fields are seconds."""
    memory = InMemory()
    run = DryRun(memory, max_duration="2ep", batches_per_epoch=2, samples_per_batch=4, seconds_per_batch=1.5)
    run.init()
    run.fit()

    series = memory.get_timeseries("loss/train")

    assert set(series) == {"loss/train", "step", *(field for field in Timestamp().state_dict())}
    assert all(isinstance(array, np.ndarray) and len(array) == 4 for array in series.values())
    assert series["loss/train"].tolist() == [1.0, 0.5, 1 / 3, 0.25]
    assert series["step"].tolist() == [0, 1, 2, 3]
    assert series["epoch"].tolist() == [0, 0, 1, 1]
    assert series["batch"].tolist() == [0, 1, 2, 3]
    assert series["batch_in_epoch"].tolist() == [0, 1, 0, 1]
    assert series["sample"].tolist() == [0, 4, 8, 12]
    assert series["total_wct"].tolist() == [0.0, 1.5, 3.0, 4.5]
    assert series["epoch_wct"].tolist() == [0.0, 1.5, 0.0, 1.5]
    assert series["batch_wct"].dtype == np.float64
    assert series["batch"].dtype.kind == "i"


def test_timeseries_of_an_unknown_metric_raises():
    """The error lists the known metrics."""
    memory = InMemory()
    memory.log_metrics({"loss": 1.0, "accuracy": 0.5}, 0)

    with pytest.raises(
        ValueError, match=r"unknown metric 'los'; did you mean 'loss'[?] Kept: 'accuracy', 'loss'\."
    ):
        memory.get_timeseries("los")


def test_a_metric_may_have_the_name_of_a_field():
    """A metric named "epoch" replaces the timestamp's epoch in the series."""
    memory = InMemory()
    memory.log_metrics({"epoch": 2.5}, 1)

    assert memory.get_timeseries("epoch")["epoch"].tolist() == [2.5]


def test_records_before_init_are_kept():
    """They have the given step and a timestamp of zero."""
    memory = InMemory()

    memory.log_metrics({"loss": 1.0}, 4)
    memory.log_metrics({"loss": 2.0})

    assert memory.get_timeseries("loss")["step"].tolist() == [4, 0]
    assert memory.most_recent_timestamps == {"loss": Timestamp()}


def test_every_table_of_a_name_is_kept():
    """A later table doesn't replace an earlier one."""
    memory = InMemory()
    memory.log_table(["a", "b"], [[1, "x"]], "wrong", 1)
    memory.log_table(["a", "b"], [[2, "y"], [3, "z"]], "wrong", 2)

    assert [(table.step, table.columns, table.rows) for table in memory.tables["wrong"]] == [
        (1, ["a", "b"], [[1, "x"]]),
        (2, ["a", "b"], [[2, "y"], [3, "z"]]),
    ]


def test_a_table_is_a_data_frame():
    """`get_table` returns the last table of a name, or the one at a step, as a data frame."""
    memory = InMemory()
    memory.log_table(["a", "b"], [[1, "x"]], "wrong", 1)
    memory.log_table(["a", "b"], [[2, "y"], [3, "z"]], "wrong", 2)

    assert memory.get_table("wrong").to_dict("list") == {"a": [2, 3], "b": ["y", "z"]}
    assert memory.get_table("wrong", step=1).to_dict("list") == {"a": [1], "b": ["x"]}


def test_an_unknown_table_raises():
    """The error lists the known tables with their steps."""
    memory = InMemory()
    memory.log_table(["a"], [[1]], "wrong", 1)

    with pytest.raises(ValueError, match=r"unknown table 'wrong' at step 3. Kept: 'wrong' at \[1\]\."):
        memory.get_table("wrong", step=3)


def test_arrays_are_copied():
    """Changing an array after the call doesn't change the copy.

    Tensors are detached.
    """
    memory = InMemory()
    pixels, tensor = np.zeros((2, 2), "uint8"), torch.zeros(2, 2, requires_grad=True)
    picture = Image.new("L", (2, 2))
    masks, row = {"truth": np.zeros((2, 2), "int64")}, [np.zeros(2)]
    memory.log_images(pixels, "a", step=1, masks=masks, mask_class_labels={0: "cat"})
    memory.log_images([picture], "b", step=1)
    memory.log_histogram(tensor, step=1)
    memory.log_table(["x"], [row], step=1)

    pixels[:] = 9
    masks["truth"][:] = 9
    row[0][:] = 9
    picture.putpixel((0, 0), 9)
    with torch.no_grad():
        tensor[:] = 9

    first, second, histogram, table = (record.value for record in memory.records)
    assert (first["images"].max(), first["masks"]["truth"].max()) == (0, 0)
    assert second["images"][0].getpixel((0, 0)) == 0
    assert (histogram["values"].max().item(), histogram["values"].requires_grad) == (0, False)
    assert table.rows[0][0].tolist() == [0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_kept_in_host_memory():
    """They occupy no memory of the device."""
    memory = InMemory()

    memory.log_histogram(torch.zeros(4, device="cuda"))

    assert memory.records[0].value["values"].device.type == "cpu"


def test_objects_that_cannot_be_copied_are_kept_as_text():
    """A lock among traces raises nothing."""
    import threading

    memory = InMemory()

    memory.log_traces({"lock": threading.Lock(), "n": 1})

    assert memory.records[0].value["n"] == 1
    assert memory.records[0].value["lock"].startswith("<unlocked _thread.lock")


def test_a_tensor_without_values_is_kept_as_text():
    """A meta tensor has no values to copy; its siblings are kept."""
    memory = InMemory()

    memory.log_traces({"meta": torch.zeros(2, device="meta"), "good": 1})

    (record,) = memory.records
    assert record.value == {"meta": "tensor(..., device='meta', size=(2,))", "good": 1}


def test_hyperparameters_are_merged():
    """A later call adds to the earlier ones."""
    memory = InMemory()

    memory.log_hyperparameters({"lr": 0.1, "name": "a"})
    memory.log_hyperparameters({"lr": 0.2, "depth": {"n": 3}})

    assert memory.hyperparameters == {"lr": 0.2, "name": "a", "depth": {"n": 3}}


def test_a_bound_drops_the_oldest_and_counts_them():
    """With max_records=2, the last two of five records stay; latest values and hyperparameters stay too."""
    memory = InMemory(max_records=2)
    memory.log_hyperparameters({"lr": 0.1})
    memory.log_metrics({"early": 1.0}, 0)

    for step in range(1, 4):
        memory.log_metrics({"loss": float(step)}, step)

    assert [record.step for record in memory.records] == [2, 3]
    assert memory.dropped_records == 3
    assert memory.most_recent_values == {"early": 1.0, "loss": 3.0}
    assert memory.hyperparameters == {"lr": 0.1}
    with pytest.raises(ValueError, match="unknown metric 'early'"):
        memory.get_timeseries("early")


def test_clear_removes_everything():
    """After clear there are no records, and the counts are zero."""
    memory = InMemory(max_records=1)
    memory.log_metrics({"loss": 1.0}, 0)
    memory.log_metrics({"loss": 1.0}, 1)

    memory.clear()

    assert (memory.records, memory.dropped_records, memory.most_recent_values) == ([], 0, {})


def test_a_bound_below_one_raises():
    """The constructor raises."""
    with pytest.raises(ValueError, match="max_records must be at least 1"):
        InMemory(max_records=0)


def test_a_closed_run_is_released():
    """The state of a closed run, and with it the model, isn't kept alive."""
    memory = InMemory()
    run = DryRun(memory)
    run.init()

    run.close()

    assert memory._state is None


def test_the_state_is_available_while_the_run_is_open():
    """Code that sets Composer's timestamp works; the state doesn't keep the model alive."""
    memory = InMemory()
    assert memory.state is None

    with Run(memory, run_name="r") as run:
        assert memory.state is run.state
    assert memory.state is None
