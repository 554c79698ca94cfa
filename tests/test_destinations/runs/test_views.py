"""Views of runs: saved beside the runs, and used by the shell."""

import json

import pytest

from destinations.cli import main
from destinations.runs import EditError, open_runs
from destinations.runs.views import RunView, read_views, save_view
from tests.test_destinations.runs.written import Written


@pytest.fixture
def root(tmp_path):
    """Three runs of two models."""
    for name, model, loss in (("one", "vit", 0.5), ("two", "vit", 0.2), ("three", "resnet", 0.1)):
        with Written(tmp_path / "runs" / name) as run:
            run.logger.log_hyperparameters({"model": model, "optim": {"lr": 0.1}})
            run.log({"eval/loss": loss}, 0)
    return tmp_path / "runs"


def names_of(capsys, root, *arguments):
    """Returns the runs that `ls` lists, in its order."""
    assert main(["runs", "ls", "--root", str(root), "--json", "--columns", "name", *arguments]) == 0
    return [run["name"] for run in json.loads(capsys.readouterr().out)]


def test_filter_search_and_statuses_are_one_filter(root):
    """Each may be missing; texts with quotes stay texts."""
    view = RunView(where="model == 'vit'", q='b"', without=("failed",))

    found = view.filter("hparams.optim.lr > 0")

    assert found == (
        "(model == 'vit') and (hparams.optim.lr > 0) and "
        "("
        + " or ".join(f'{name} ~ "(?i)b\\""' for name in ("name", "run_id", "tags", "notes"))
        + ') and status not in ("failed")'
    )
    assert RunView().filter() is None
    with open_runs(root) as runs:
        assert [run.name for run in runs.query(where=RunView(q="tw").filter())] == ["two"]


def test_the_shell_lists_the_runs_of_a_view_in_its_order(root, capsys):
    """An additional filter narrows the list further, and an additional order replaces the view's."""
    save_view(
        root, "vit", {"where": "model == 'vit'", "sort": "summary.eval/loss", "column": ["hparams.model"]}
    )

    assert names_of(capsys, root, "--view", "vit") == ["two", "one"]
    assert names_of(capsys, root, "--view", "vit", "--sort", "eval/loss", "--descending") == ["one", "two"]
    assert names_of(capsys, root, "--view", "vit", "--where", "eval/loss > 0.3") == ["one"]
    assert main(["runs", "ls", "--root", str(root), "--view", "vit"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["run", "model"]


def test_unknown_view_raises_and_lists_the_others(root, capsys):
    """The exit code is 2, as for other wrong arguments."""
    save_view(root, "lr sweep", {})

    assert main(["runs", "ls", "--root", str(root), "--view", "lr swep"]) == 2
    assert "Did you mean 'lr sweep'?" in capsys.readouterr().err


def test_replacing_or_removing_a_view_keeps_the_others(root):
    """The views are JSON in a file beside the runs."""
    save_view(root, "one", {"q": "a"})
    save_view(root, "two", {"group": ["status"]})
    save_view(root, "one", {"q": "b"})

    assert read_views(root) == {"one": {"q": "b"}, "two": {"group": ["status"]}}
    assert save_view(root, "one", None) == {"two": {"group": ["status"]}}
    with open_runs(root) as runs:
        assert len(runs) == 3


@pytest.mark.parametrize(("name", "fields"), [("", {}), ("a\nb", {}), ("x" * 101, {}), ("a", {"q": 1})])
def test_invalid_views_are_refused(root, name, fields):
    """Nothing is written."""
    with pytest.raises(ValueError, match="view"):
        save_view(root, name, fields)

    assert read_views(root) == {}


def test_a_damaged_file_of_views_is_not_replaced(root):
    """The user may still recover views from it."""
    (root / "views.json").write_text("{")

    with pytest.raises(EditError):
        save_view(root, "a", {})

    assert (root / "views.json").read_text() == "{"


def test_a_saved_field_of_a_wrong_type_counts_as_missing():
    """The user may have edited the file."""
    assert RunView.parse({"where": 3, "group": "lr", "without": ["failed", 1]}) == RunView(
        without=("failed",)
    )


def test_names_mean_the_same_in_filters_orders_and_columns(root, capsys):
    """A metric needs no prefix, and a part of a name suggests the whole one."""
    for option in (["--where", "eval/loss < 2"], ["--sort", "eval/loss"], ["--columns", "eval/loss"]):
        assert main(["runs", "ls", "--root", str(root), *option]) == 0
    capsys.readouterr()
    for option in (["--where", "lr > 0.1"], ["--sort", "lr"], ["--columns", "lr"]):
        assert main(["runs", "ls", "--root", str(root), *option]) != 0
        assert "hparams.optim.lr" in capsys.readouterr().err
