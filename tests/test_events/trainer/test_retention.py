"""Which checkpoints stay: the newest, the best, every n-th."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import Callback, CheckpointSaver
from events.trainer.checkpoint.retention import Retention, SavedCheckpoint


def saved(*metrics):
    """Returns checkpoints with these values of the metric."""
    return [
        SavedCheckpoint(f"{number}", number=number, batch=number, metric=metric)
        for number, metric in enumerate(metrics, 1)
    ]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"newest": None}, "123456"),
        ({"newest": 2}, "56"),
        ({"newest": 1, "every": 2}, "246"),
        ({"newest": 1, "metric": "metrics/eval/a"}, "46"),
        ({"newest": 1, "metric": "metrics/eval/a", "mode": "min"}, "16"),
        ({"newest": 1, "metric": "metrics/eval/a", "best": 2}, "346"),
        ({"newest": 2, "metric": "metrics/eval/a", "every": 5}, "456"),
    ],
)
def test_what_any_part_of_the_rule_wants_stays(rule, kept):
    """Of six; the second has no value, the fifth is NaN, of the equal third and fourth the newer is better."""
    six = saved(0.1, None, 0.9, 0.9, float("nan"), 0.5)

    gone = Retention(**rule).surplus(six)

    assert "".join(one.path for one in six if one not in gone) == kept


@given(
    metrics=st.lists(st.none() | st.floats(), min_size=1),
    newest=st.integers(1, 5),
    best=st.integers(1, 3),
    every=st.none() | st.integers(1, 4),
)
def test_the_newest_always_stays_and_what_is_gone_stays_gone(metrics, newest, best, every):
    """Applied after each checkpoint or once at the end, the same are left but for those that were best for a while."""
    rule = Retention(newest, best, "metrics/eval/a", "max", every)

    left = []
    for one in saved(*metrics):
        left = [*left, one]
        gone = rule.surplus(left)
        assert one not in gone
        left = [each for each in left if each not in gone]

    assert left[-newest:] == saved(*metrics)[-newest:] or [one.number for one in left[-newest:]] == [
        one.number for one in saved(*metrics)[-newest:]
    ]
    assert rule.surplus(left) == []


def test_the_best_and_every_third_stay_on_the_disk(make_trainer, make_dataloader, tmp_path):
    """By the metric as it is logged; across two sessions."""

    class Accuracy(Callback):
        """Sets what the evaluation says: the best is the second."""

        def eval_start(self, state, logger):
            values = {5: 0.1, 10: 0.9, 15: 0.2, 20: 0.3, 25: 0.4, 30: 0.5}
            metric = state.eval_metrics["eval"]["accuracy"]
            metric.compute = lambda: values[int(state.timestamp.batch)]

    def run(duration):
        saver = CheckpointSaver(
            tmp_path / "saved", keep=1, keep_best="metrics/eval/accuracy", keep_every=3, filename="{batch}.pt"
        )
        make_trainer(
            callbacks=[Accuracy(), saver],
            eval_dataloader=make_dataloader(),
            max_duration=duration,
            autoresume=True,
        ).fit()

    run("3ep")
    run("5ep")

    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "10.pt",
        "15.pt",
        "25.pt",
        "latest.symlink",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep must be at least 1, got 0. Write None to keep all"),
        ({"keep_every": 0}, "keep_every must be at least 1"),
        ({"keep_best_count": 0}, "keep_best_count must be at least 1"),
        (
            {"keep_best": "accuracy"},
            "keep_best must be a metric of an evaluation, got 'accuracy'. Write \"metrics",
        ),
        ({"keep_best_mode": "most"}, "keep_best_mode must be 'max' or 'min', got 'most'"),
        ({"when_busy": "stop"}, "when_busy must be 'wait' or 'skip', got 'stop'"),
    ],
)
def test_a_rule_that_is_none_is_refused(arguments, message):
    """In the constructor, with what to write."""
    with pytest.raises(ValueError, match=message):
        CheckpointSaver(**arguments)
