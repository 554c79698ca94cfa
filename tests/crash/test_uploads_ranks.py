"""Two training processes that want the same name."""

import re
import subprocess

RANK = """
import pathlib, sys
from uploads import UploadQueue
uri, folder, content = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
queue = UploadQueue(uri, spool=folder / f"spool-{content}", isolation="threads", free_bytes=0)
source = folder / content
source.write_text(content)
queue.submit(source, f"warm-{content}").result(120)  # The client is there, and the server was tried.
print("ready", flush=True)
sys.stdin.readline()
handles = [queue.submit(source, f"same{number}") for number in range(20)]
errors = [handle.exception(120) for handle in handles]
after = queue.submit(source, f"after-{content}").result(120)
print(*("won" if error is None else type(error).__name__ for error in errors), flush=True)
print(*(handle.identifier for handle in handles), flush=True)
print(after.state, flush=True)
print(*(str(error).replace(chr(10), " ") for error in errors if error), sep=chr(10), flush=True)
"""


def test_exactly_one_of_two_ranks_that_put_the_same_name_wins(start, counting_s3, prefix, tmp_path):
    """Two processes submit twenty names at the same moment with overwrite=False.

    Each name has one winner, the loser's error names both entries, and both continue.
    """
    # Not moto: it checks whether a name is free and takes it in two steps, so that two puts may both succeed.
    ranks = [
        start(RANK, counting_s3.uri(prefix), tmp_path, name, stdin=subprocess.PIPE)
        for name in ("first", "second")
    ]
    for rank in ranks:
        assert rank.stdout.readline().strip() == "ready", rank.stderr.read()

    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    said = [rank.communicate(timeout=240) for rank in ranks]

    (first, second) = ([line.split() for line in output.splitlines()[:2]] for output, _ in said)
    assert [{one, other} for one, other in zip(first[0], second[0], strict=True)] == [
        {"won", "RemoteConflictError"}
    ] * 20, said
    objects = counting_s3.under(prefix)
    winners = ["first" if word == "won" else "second" for word in first[0]]
    assert [objects[f"same{number}"].decode() for number in range(20)] == winners
    reasons = " ".join(output for output, _ in said)
    pairs = {frozenset(pair) for pair in zip(first[1], second[1], strict=True)}
    assert {frozenset(pair) for pair in re.findall(r"entry (\w{16}), not (\w{16})", reasons)} == pairs
    assert [output.splitlines()[2] for output, _ in said] == ["done", "done"]
