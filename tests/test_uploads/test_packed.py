"""Tables of numbers that must say what a dictionary and a sorted list would say, in a fraction of the memory."""

from hypothesis import given
from hypothesis import strategies as st

from uploads.drain.schedule import NumberTable, PackedFolders
from uploads.spool.entry import folder_of

FEW = st.one_of(st.integers(0, 40), st.integers(2**64 - 40, 2**64 - 1))


@given(st.lists(st.tuples(FEW, st.integers(0, 3)), max_size=300))
def test_a_table_says_what_a_dictionary_would(steps):
    """Numbers that want the same place, also around the end of the table, are told apart; 0 takes one out."""
    table, expected = NumberTable(), {}

    for number, value in steps:
        table[number] = value
        expected[number] = value
        assert table[number] == value

    present = {number for number, value in expected.items() if value}
    assert {number for number in expected if number in table} == present
    assert len(table) == len(present)
    assert all(table[number] == value for number, value in expected.items())


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 2), st.booleans()), max_size=200))
def test_packed_folders_say_what_a_sorted_list_would(steps):
    """In whatever order they come and go, also with the same number twice, as a forked child gives them."""
    packed, expected = PackedFolders(), set()

    for sequence, identity, is_added in steps:
        folder = folder_of(sequence, f"{sequence:016x}", f"{identity:016x}")
        changes = (folder not in expected) is is_added
        assert (packed.add if is_added else packed.remove)(folder) is changes
        (expected.add if is_added else expected.discard)(folder)
        assert (folder in packed) is is_added

    assert len(packed) == len(expected)
    assert {folder[:12] for folder in packed} == {folder[:12] for folder in expected}
    assert set(packed) == set(packed.copy()) == expected
    assert [folder[:12] for folder in packed] == sorted(folder[:12] for folder in packed)


def test_twenty_thousand_take_a_few_bytes_each_and_nothing_afterwards():
    """A number with its value takes at most 33 bytes, a folder's name 24; when they are gone so is the memory."""
    count = 20_000
    table, packed = NumberTable(), PackedFolders()
    folders = [folder_of(number, f"{number * 7919:016x}", f"{number:016x}") for number in range(1, count + 1)]

    for number, folder in enumerate(folders):
        table[number * 7919] = 1
        packed.add(folder)
    most = (table.nbytes / count, packed.nbytes / count)
    for number, folder in enumerate(folders):
        table[number * 7919] = 0
        packed.remove(folder)

    assert most[0] <= 33
    assert most[1] == 24
    assert (len(table), len(packed)) == (0, 0)
    assert max(table.nbytes, packed.nbytes) <= 256
