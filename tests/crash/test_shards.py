"""Checkpoints in shards: real ranks save them, die while saving, and load them on another number of ranks."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from events import read_checkpoint
from tests.effort import times
from tests.servers import s3_servers
from uploads import open_store

PROGRAM = Path(__file__).with_name("shard_child.py")
LIMIT_SECONDS = 240
NUMBERS = times((1, 2), (1, 2, 4))
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "rank-0.pt", "rank-1.pt"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What ranks need to reach each other, and the store."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        # Gloo would look up the name of the machine.
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "UPLOADS_HOME": str(tmp_path_factory.mktemp("machine")),
        **s3_servers.ENVIRONMENT,
    }


@pytest.fixture(scope="module")
def run_ranks(environment, torch_python, tmp_path_factory):
    """Runs the program on a number of ranks; returns their wait statuses."""
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with log.open("w") as output:
        server = subprocess.Popen(
            [torch_python, PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )

    def run(ranks, folder, *plans, fails=False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        before = log.stat().st_size
        print(ranks, port, folder, *plans, file=server.stdin, flush=True)
        statuses = [int(status) for status in server.stdout.readline().split()]
        text = log.read_text()[before:]
        assert len(statuses) == ranks, text
        assert any(statuses) == fails, text
        return text

    yield run
    server.stdin.close()
    server.wait(60)
    server.stdout.close()


@pytest.fixture
def machine(environment, monkeypatch):
    """The folder in which the ranks' machine keeps spools; without it, it is another machine."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = Path(environment["UPLOADS_HOME"])
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def saved(environment, torch_server, tmp_path_factory):
    """A folder in which two ranks under torchrun have saved one run with FSDP and one with DDP."""
    folder = tmp_path_factory.mktemp("saved")
    plans = [f"{shard}:shard={shard},save={folder}/{shard}" for shard in ("fsdp", "ddp")]
    outcome = torch_server.torchrun(2, PROGRAM, folder, *plans, env=environment, timeout_s=LIMIT_SECONDS)
    assert outcome.returncode == 0, outcome.stdout
    return folder


def seen(folder, name, ranks):
    """Returns the report of each rank."""
    return [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(ranks)]


def names(folder):
    """Returns the names of all files in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def files_of(*checkpoints):
    """Returns the file names of two ranks' checkpoints, and the pointer's name."""
    return sorted([f"{one}/{file}" for one in checkpoints for file in FILES] + ["latest.symlink"])


def flip_a_bit(path):
    """Damages a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


EVERYTHING = files_of("ep0-ba4", "ep1-ba8", "ep2-ba10")


@pytest.mark.parametrize("shard", ["fsdp", "ddp"])
def test_every_rank_writes_its_part(saved, shard):
    """Each part of each tensor is written once, and each rank's own state is in its own file."""
    assert names(saved / shard) == EVERYTHING
    zero, one = seen(saved, shard, 2)
    assert zero["digest"] == one["digest"]
    assert [rank["last"] for rank in (zero, one)] == [str(saved / shard / "ep2-ba10")] * 2
    folder = saved / shard / "ep2-ba10"
    parts = FileSystemReader(folder).read_metadata().storage_data.values()
    lengths = {
        name: sum(part.length for part in parts if part.relative_path == name)
        for name in ("__0_0.distcp", "__1_0.distcp")
    }
    assert lengths == {name: (folder / name).stat().st_size for name in lengths}


def test_any_number_of_ranks_loads_it_and_ends_as_if_never_stopped(saved, run_ranks, tmp_path):
    """It is equal to the last bit with FSDP and DDP; a callback has its rank's own state, or rank 0's."""
    plans = {
        (
            ranks,
            shard,
        ): f"{shard}{ranks}:shard={shard},load={saved}/{other}/ep0-ba4,save={tmp_path}/{shard}{ranks}"
        for ranks in NUMBERS
        for shard, other in (("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp"))[: 2 if ranks > 1 else 3]
    }
    expected = seen(saved, "fsdp", 2)

    for ranks in NUMBERS:
        run_ranks(ranks, tmp_path, *(plan for (number, _), plan in plans.items() if number == ranks))

    for ranks, shard in plans:
        found = seen(tmp_path, f"{shard}{ranks}", ranks)
        assert {one["digest"] for one in found} == {expected[0]["digest"]}
        assert {one["start"] for one in found} == {4}
        assert found[0]["random"] == expected[0]["random"]
        base = [1000 * rank if ranks == 2 else 0 for rank in range(ranks)]
        assert [one["seen"] for one in found] == [[first + batch for batch in range(1, 5)] for first in base]
    assert seen(tmp_path, "fsdp2", 2)[1]["random"] == expected[1]["random"]


def test_two_ranks_load_what_four_ranks_saved(saved, run_ranks, tmp_path):
    """Some of the four ranks hold no part of a small tensor."""
    run_ranks(4, tmp_path, f"four:save={tmp_path}/c")

    text = run_ranks(2, tmp_path, f"two:load={tmp_path}/c/ep0-ba4,save={tmp_path}/d")

    assert [one["digest"] for one in seen(tmp_path, "two", 2)] == [seen(saved, "fsdp", 1)[0]["digest"]] * 2
    assert text.count("was saved by 4 ranks and is loaded on 2") == 1


def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(saved, run_ranks, tmp_path):
    """Half a checkpoint never counts; the next start removes it and continues normally."""
    text = run_ranks(2, tmp_path, f"killed:save={tmp_path}/c,kill=8", fails=True)
    left = names(tmp_path / "c")
    newest = (tmp_path / "c" / "latest.symlink").read_text()

    run_ranks(2, tmp_path, f"again:save={tmp_path}/c,resume=1")

    assert "rank-1.pt" in " ".join(name for name in left if name.startswith("ep1-ba8/")), text
    assert "ep1-ba8/manifest.json" not in left
    assert newest == "r/checkpoints/ep0-ba4/manifest.json"
    found = seen(tmp_path, "again", 2)
    assert [one["start"] for one in found] == [4, 4]
    assert [one["began"] for one in found] == [str(tmp_path / "c/ep0-ba4")] * 2
    assert [one["digest"] for one in found] == [seen(saved, "fsdp", 1)[0]["digest"]] * 2
    assert names(tmp_path / "c") == EVERYTHING


def test_a_damaged_shard_invalidates_its_checkpoint_on_every_rank(saved, run_ranks, tmp_path):
    """Ranks that don't read it refuse it too; the previous one is loaded, and the log names the file."""
    shutil.copytree(saved / "fsdp", tmp_path / "c")
    flip_a_bit(tmp_path / "c/ep2-ba10/__1_0.distcp")
    (tmp_path / "c/ep1-ba8/rank-0.pt").unlink()

    text = run_ranks(2, tmp_path, f"again:save={tmp_path}/c,resume=1")

    assert [one["start"] for one in seen(tmp_path, "again", 2)] == [4, 4]
    assert [one["digest"] for one in seen(tmp_path, "again", 2)] == [seen(saved, "fsdp", 1)[0]["digest"]] * 2
    assert "ep2-ba10/__1_0.distcp' must be as its manifest says" in text
    assert "ep1-ba8/rank-0.pt' must be as its manifest says" in text


@pytest.fixture(params=times(["s3"], ["file", "s3"]))
def uri(request, tmp_path):
    """A folder in a store."""
    if request.param == "file":
        return f"file://{tmp_path}/store/{{run_name}}"
    server = request.getfixturevalue("moto")
    return server.uri(f"shards-{os.getpid()}/{{run_name}}")


def test_a_store_has_it_once_all_ranks_have_uploaded_and_an_empty_machine_resumes(
    saved, run_ranks, tmp_path, uri, machine
):
    """Each rank uploads its own; the pointer names the newest; damaged checkpoints there are skipped."""
    run_ranks(2, tmp_path, f"first:save={uri},batches=8,run=x")
    place = open_store(uri.replace("{run_name}", "x"))
    listed = sorted(one.name for one in place.list(""))
    last = seen(tmp_path, "first", 2)[1]["last"]
    weights = read_checkpoint(place.uri("latest"))["model"]
    shutil.rmtree(machine)
    place.delete("ep1-ba8/__1_0.distcp")

    run_ranks(1, tmp_path, f"again:save={uri},resume=1,run=x")

    assert listed == files_of("ep0-ba4", "ep1-ba8")
    assert last == place.uri("ep1-ba8")
    assert torch.equal(weights["0.weight"], read_checkpoint(saved / "fsdp" / "ep1-ba8")["model"]["0.weight"])
    found = seen(tmp_path, "again", 1)[0]
    assert found["began"] == place.uri("ep0-ba4")
    assert (found["start"], found["digest"]) == (4, seen(saved, "fsdp", 1)[0]["digest"])
    assert b"".join(place.get("latest.symlink")) == b"ep2-ba10/manifest.json"


def test_a_rank_on_an_empty_machine_fetches_only_its_own_shard(run_ranks, tmp_path, uri, machine):
    """It also fetches the metadata; the shards of other ranks stay in the store."""
    run_ranks(2, tmp_path, f"first:save={uri},batches=8,run=z")
    shutil.rmtree(machine)

    run_ranks(2, tmp_path, f"again:save={uri},resume=1,run=z")

    for rank, one in enumerate(seen(tmp_path, "again", 2)):
        assert one["start"] == 8
        assert [name for name in one["fetched"] if name.startswith(("rank-", "__"))] == [
            f"__{rank}_0.distcp",
            f"rank-{rank}.pt",
        ]


def test_destinations_get_the_shards_and_give_them_back(saved, run_ranks, tmp_path):
    """Each rank passes its own shards to `Artifacts`; an empty folder is filled from there."""
    plan = f"save={tmp_path}/c,store={tmp_path}/store"
    run_ranks(2, tmp_path, f"first:{plan},batches=8")
    uploaded = names(tmp_path / "store/r/checkpoints")
    shutil.rmtree(tmp_path / "c")

    run_ranks(2, tmp_path, f"again:{plan},resume=1")

    assert uploaded == files_of("ep0-ba4", "ep1-ba8")
    assert [one["start"] for one in seen(tmp_path, "again", 2)] == [8, 8]
    assert [one["digest"] for one in seen(tmp_path, "again", 2)] == [seen(saved, "fsdp", 1)[0]["digest"]] * 2
    assert (
        tmp_path / "store/r/checkpoints/latest.symlink"
    ).read_text() == "r/checkpoints/ep2-ba10/manifest.json"


def test_old_shards_of_all_ranks_are_deleted_from_a_store(run_ranks, tmp_path, uri, machine):
    """Shards that every rank has uploaded are deleted once the newer ones are there."""
    run_ranks(2, tmp_path, f"first:save={uri},keep_in_store=1,run=y")

    place = open_store(uri.replace("{run_name}", "y"))
    assert sorted(one.name for one in place.list("")) == files_of("ep2-ba10")


def test_after_a_rank_has_died_the_others_delete_what_it_has_uploaded(run_ranks, tmp_path):
    """The run continues with another number of ranks; while the rank was dead, nothing was deleted."""
    plan = f"save={tmp_path}/c,store={tmp_path}/store,keep_in_store=1"
    run_ranks(2, tmp_path, f"first:{plan},batches=8")
    run_ranks(2, tmp_path, f"killed:{plan},batches=16,resume=1,kill=12", fails=True)
    uploaded = names(tmp_path / "store/r/checkpoints")

    run_ranks(1, tmp_path, f"again:{plan},batches=16,resume=1")

    assert uploaded == files_of("ep1-ba8")
    left = names(tmp_path / "store/r/checkpoints")
    assert left == sorted([*(f"ep3-ba16/{name}" for name in FILES if "1" not in name), "latest.symlink"])


def test_a_full_disk_on_one_rank_drops_that_checkpoint_on_all_ranks(saved, run_ranks, tmp_path):
    """All ranks report it, free its space and continue; the next checkpoint is whole."""
    text = run_ranks(2, tmp_path, f"full:save={tmp_path}/c,full=3-6")

    found = seen(tmp_path, "full", 2)
    assert [(one["failed"], one["saved"]) for one in found] == [(1, 2)] * 2
    assert [one["digest"] for one in found] == [seen(saved, "fsdp", 1)[0]["digest"]] * 2
    # The report of rank 1 would be too much for its disk.
    assert "could not be saved (rank 1: OSError: [Errno 27] File too large); training continues." in text
    assert names(tmp_path / "c") == files_of("ep1-ba8", "ep2-ba10")


def test_a_process_writes_and_old_ones_are_removed(saved, run_ranks, tmp_path):
    """Each rank has its own; `keep` removes whole folders."""
    run_ranks(2, tmp_path, f"kept:save={tmp_path}/c,process_bytes=0,keep=2")

    assert seen(tmp_path, "kept", 2)[1]["digest"] == seen(saved, "fsdp", 1)[0]["digest"]
    assert names(tmp_path / "c") == files_of("ep1-ba8", "ep2-ba10")


def test_weights_alone_go_into_a_sharded_model(saved, run_ranks, tmp_path):
    """A new run begins with them."""
    run_ranks(2, tmp_path, f"new:save={tmp_path}/c,load={saved}/fsdp,weights=1,batches=0")

    assert [one["start"] for one in seen(tmp_path, "new", 2)] == [0, 0]
    loaded = seen(tmp_path, "new", 2)[0]["weights"]
    expected = read_checkpoint(saved / "fsdp")["model"]
    assert loaded == [value.flatten().tolist() for value in expected.values()]
