"""How many samples a batch of any shape has, and how it is moved and split."""

import collections
import dataclasses
import typing

import attrs
import numpy as np
import pytest
import torch

from events.trainer.batches import move, samples_in, split


class Pair(typing.NamedTuple):
    """A batch with names."""

    inputs: object
    targets: object


@dataclasses.dataclass
class Fields:
    """A batch of a user."""

    points: object
    names: object


@attrs.frozen
class Frozen:
    """A batch that cannot be changed."""

    points: object
    names: object


class Graph:
    """Moves itself, as batches of PyG do."""

    num_graphs = 7
    device = None

    def to(self, device):
        self.device = device


def image(height=4):
    """Returns an image."""
    return torch.zeros(3, height, 5)


def boxes(count):
    """Returns the targets of an image."""
    return {"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)}


PACKED = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(6, 2), 6),
        (np.zeros((4, 2)), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ((torch.zeros(()), torch.zeros(4)), 4),
        ({"inner": {"points": torch.zeros(9)}}, 9),
        ({"points": torch.zeros(6), "names": ["a"] * 6}, 6),
        ({"names": ["a"] * 6, "split": "train"}, 6),
        ({"ids": [[1, 2], [3]]}, 2),
        (((torch.zeros(5, 2), torch.zeros(5, 3)), (torch.zeros(5), torch.zeros(5))), 5),
        (([image()] * 5, [0] * 5), 5),
        ((tuple(image(size) for size in (4, 5)), tuple(boxes(count) for count in (1, 3))), 2),
        (([image()] * 5, [torch.zeros(4, 4)] * 5), 5),
        ([[image()] * 5], 5),
        ([{"image": image(), "height": 4, **boxes(count)} for count in range(4)], 4),
        ([{"image": torch.zeros(6, 2)}, {"image": torch.zeros(6, 2)}], 6),
        (({"ids": torch.zeros(6, 2)}, {"labels": torch.zeros(6)}), 6),
        (Pair([image()] * 5, ["a"] * 5), 5),
        (Fields(torch.zeros(8, 1), ["a"] * 8), 8),
        (Frozen(None, ["a"] * 8), 8),
        ((Graph(), torch.zeros(7)), 7),
        (Graph(), 7),
        (PACKED, 2),
        (None, 1),
        (3, 1),
        (([], []), 1),
    ],
)
def test_samples_are_counted_in_any_batch(batch, samples):
    """Lists of images, dicts and texts have a sample in each entry; tensors in their first dimension."""
    assert samples_in(batch) == samples


def test_containers_keep_their_type_and_objects_with_to_stay_whole():
    """Dataclasses, named tuples, ordered dicts and objects with `to` come back as they are."""
    graph = Graph()
    batch = (
        graph,
        Fields(torch.zeros(2), ["a", "b"]),
        Frozen(torch.zeros(2), None),
        Pair(torch.zeros(2), 1),
        collections.OrderedDict(points=torch.zeros(1)),
        "text",
    )

    moved = move(batch, torch.device("meta"))

    assert [type(one) for one in moved] == [type(one) for one in batch]
    assert moved[0] is graph
    assert graph.device == torch.device("meta")
    assert {moved[1].points.device.type, moved[2].points.device.type, moved[3].inputs.device.type} == {"meta"}
    assert batch[1].points.device.type == "cpu"


def test_lists_are_split_with_the_tensors_beside_them():
    """Each microbatch has its own texts and images; what all samples share stays whole."""
    parts = split({"points": torch.arange(5), "names": list("abcde"), "split": "train"}, 2)
    images = split(([image()] * 5, [0, 1, 2, 3, 4]), 2)
    nested = split(((torch.zeros(2, 2), torch.zeros(2, 3)), torch.zeros(2)), 1)
    dicts = split([{"image": image(), "height": 4}] * 3, 2)

    assert [(part["points"].tolist(), part["names"], part["split"]) for part in parts] == [
        ([0, 1], ["a", "b"], "train"),
        ([2, 3], ["c", "d"], "train"),
        ([4], ["e"], "train"),
    ]
    assert [(len(part[0]), part[1]) for part in images] == [(2, [0, 1]), (2, [2, 3]), (1, [4])]
    assert [[len(one) for one in (*part[0], part[1])] for part in nested] == [[1, 1, 1]] * 2
    assert [len(part) for part in dicts] == [2, 1]


def test_an_object_that_moves_itself_is_not_split():
    """It would go whole into each microbatch."""
    with pytest.raises(ValueError, match=r"got \[7, 'Graph'\]"):
        split((Graph(), torch.zeros(7)), 2)
