"""Images and outputs reach every destination, from training and from evaluations."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from destinations import InMemory
from events import EvalOutputLogging, ImageVisualizer, Trainer


class Segmenter(torch.nn.Module):
    """Three classes for each pixel."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 3, 1)

    def forward(self, images):
        return self.layer(images)


def loss(outputs, targets):
    """Ignores negative targets, as segmentation does."""
    return torch.nn.functional.cross_entropy(outputs, targets, ignore_index=-1)


def train(callback, memory, epochs=1):
    """Trains a segmentation model for epochs of six batches of two."""
    images = torch.rand(12, 3, 4, 4)
    targets = torch.randint(0, 3, (12, 4, 4))
    targets[:, 0, 0] = -1
    data = DataLoader(TensorDataset(images, targets), batch_size=2)
    model = Segmenter()
    trainer = Trainer(
        model,
        data,
        data,
        max_duration=f"{epochs}ep",
        loss_fn=loss,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        callbacks=callback,
        loggers=memory,
        device="cpu",
    )
    trainer.fit()
    trainer.close()
    return images, targets


def of_kind(memory, kind):
    """Returns the names, steps and values of one kind of record."""
    return [(one.name, one.step, one.value) for one in memory.records if one.kind == kind]


def test_images_of_training_at_the_interval_and_of_each_evaluation():
    """The first microbatch is logged, cut to the number of images."""
    memory = InMemory()
    images, _ = train(ImageVisualizer("4ba", num_images=1), memory)

    found = of_kind(memory, "images")
    assert [(name, step) for name, step, _ in found] == [
        ("Images/Train", 0),
        ("Images/Train", 4),
        ("Images/Eval", 6),
    ]
    assert torch.equal(torch.as_tensor(found[1][2]["images"]), images[8:9])
    assert found[0][2]["masks"] is None


def test_segmentation_has_masks_of_prediction_and_truth():
    """Pixels to ignore are one class above the highest."""
    memory = InMemory()
    _, targets = train(ImageVisualizer("100ba", mode="segmentation"), memory)

    (_, _, value), (name, _, _) = of_kind(memory, "images")
    truth = torch.as_tensor(value["masks"]["ground_truth"])
    assert name == "Images/Eval"
    assert torch.equal(truth, torch.where(targets[:2] < 0, 3, targets[:2]))
    assert torch.as_tensor(value["masks"]["prediction"]).shape == (2, 4, 4)


def test_batches_without_images_are_ignored(make_trainer):
    """A batch of vectors has nothing to show."""
    memory = InMemory()
    make_trainer(callbacks=ImageVisualizer(), loggers=memory, max_duration="1ba").fit()

    assert of_kind(memory, "images") == []
    with pytest.raises(ValueError, match="mode must be one of input, segmentation"):
        ImageVisualizer(mode="boxes")
    with pytest.raises(ValueError, match="interval must be in batches or epochs"):
        ImageVisualizer("10sp")


def test_outputs_of_an_evaluation_are_a_table(make_trainer, make_dataloader):
    """It has the first samples, over batches, and the user's own columns."""
    memory = InMemory()
    callback = EvalOutputLogging(
        [lambda batch: batch[1] + 10], 5, show_output=lambda logits: int(logits.argmax())
    )
    trainer = make_trainer(
        callbacks=callback, loggers=memory, max_duration="1ep", eval_dataloader=make_dataloader()
    )
    trainer.fit()

    ((name, step, table),) = of_kind(memory, "table")
    assert (name, step, table.columns[:4]) == (
        "eval_outputs/eval",
        5,
        ["sample", "input", "output", "target"],
    )
    assert [row[0] for row in table.rows] == [0, 1, 2, 3, 4]
    assert {row[2] for row in table.rows} <= {0, 1}
    points = torch.stack([one for one, _ in make_dataloader().dataset])
    assert torch.equal(torch.stack([torch.as_tensor(row[1]) for row in table.rows]), points[:5])
    assert all(int(row[4]) == int(row[3]) + 10 for row in table.rows)
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        EvalOutputLogging(num_samples=0)


def test_an_interval_of_epochs_shows_the_first_batch_of_each():
    """Only images of the first microbatch of an epoch are logged."""
    memory = InMemory()
    images, _ = train(ImageVisualizer("1ep", num_images=1), memory, epochs=2)

    found = [one for one in of_kind(memory, "images") if one[0] == "Images/Train"]
    assert [step for _, step, _ in found] == [0, 6]
    assert torch.equal(torch.as_tensor(found[1][2]["images"]), images[:1])
