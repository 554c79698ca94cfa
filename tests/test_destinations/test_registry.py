"""Destinations by name: ours, registered ones, and those from installed packages."""

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import destinations
from destinations import Console, InMemory, create_destination, register_destination, registry


class Elsewhere(InMemory):
    """A third party's destination."""


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """Restores the table of names after the test."""
    monkeypatch.setattr(registry, "_factories", {})


def test_our_destinations_have_names():
    """They take the arguments of their constructors."""
    assert isinstance(create_destination("Console"), Console)
    assert create_destination("InMemory", max_records=3)._max_records == 3


def test_a_registered_destination_is_created_by_name():
    """The same factory may be registered again; another factory, or one of our names, raises."""
    register_destination("elsewhere", Elsewhere)
    register_destination("elsewhere", Elsewhere)

    assert isinstance(create_destination("elsewhere"), Elsewhere)
    with pytest.raises(ValueError, match="has a destination already"):
        register_destination("elsewhere", InMemory)
    with pytest.raises(ValueError, match="choose another name"):
        register_destination("Console", Elsewhere)


def test_a_destination_may_have_an_argument_called_name():
    """The name in the table comes first; without it, `name` selects the entry, as in a configuration file."""
    made = []
    register_destination("elsewhere", lambda **options: made.append(options) or InMemory())

    create_destination("elsewhere", name="loss/eval")

    assert made == [{"name": "loss/eval"}]
    assert isinstance(create_destination(name="elsewhere"), InMemory)


def test_an_installed_package_adds_a_destination(monkeypatch):
    """It declares an entry point."""
    mine = EntryPoint("elsewhere", f"{__name__}:Elsewhere", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: Elsewhere)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: EntryPoints([mine]))

    assert isinstance(create_destination("elsewhere"), Elsewhere)


@pytest.mark.parametrize("name", ["Consle", "LoggerDestination"])
def test_unknown_names_raise(name):
    """The error lists the known names and the nearest match."""
    with pytest.raises(ValueError, match="unknown destination") as raised:
        create_destination(name)

    assert "TextFile" in str(raised.value)
    assert ("did you mean 'Console'" in str(raised.value)) == (name == "Consle")


def test_the_table_has_every_public_destination():
    """A class in `destinations.__all__` that can be created is in the table."""
    assert set(registry.MODULES) == set(destinations.__all__) - {"create_destination", "register_destination"}
