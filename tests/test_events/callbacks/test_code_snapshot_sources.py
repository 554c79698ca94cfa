"""Secrets, links and pipes among the code."""

import os
import stat
import subprocess
import zipfile

import pytest

from destinations import Functions
from events import CodeSnapshot, Run

PREFIX = "hf" + "_"
SECRET = PREFIX + "aBcDeFgHiJ" * 4


@pytest.fixture
def keep():
    """Returns a function that takes a snapshot, and returns mode and content of each file in it."""
    kept = {}

    def upload(state, name, path, *, overwrite):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                kept[entry.filename] = entry.external_attr >> 16, archive.read(entry)

    def take(snapshot):
        with Run(Functions(upload_file=upload), snapshot, "mine"):
            pass
        return kept

    return take


def git(folder, *arguments):
    """Runs git there."""
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(params=["git", "no git"])
def project(request, tmp_path):
    """A folder, and a function that adds all that is in it to git, where there is git."""
    root = tmp_path / "project"
    root.mkdir()

    def add():
        if request.param == "git":
            git(root, "init", "-q")
            git(root, "add", "-A", "-f")

    return root, add


def write(root, files):
    """Writes files by name."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_files_named_like_secrets_are_left_out(keep, project, caplog):
    """Credentials aren't code; a module named after secrets is."""
    root, add = project
    code = [
        "tokenizer.json",
        "tokens.py",
        "secrets.py",
        "special_tokens_map.json",
        "config.yaml",
        "key_points.txt",
    ]
    secret = [
        *(
            "credentials.json",
            "token.txt",
            "api_keys.yaml",
            "client_secret_1.json",
            "my-service-account.json",
        ),
        *("deploy/secrets.yaml", "prod.env.txt", ".env.json", "passwords.txt", ".aws/config.ini"),
        *("kaggle.json", ".kaggle/kaggle.json", ".docker/config.json", ".config/gcloud/legacy.json"),
        *(".huggingface/stored.txt", "conf/.terraform.d/login.json"),
    ]
    write(root, dict.fromkeys([*code, *secret], "x"))
    add()

    kept = keep(CodeSnapshot(root))

    assert sorted(kept) == sorted(code)
    assert "left out files that are named like secrets" in caplog.text


def test_secrets_inside_of_files_are_taken_out(keep, project, caplog):
    """Code loses only literal secrets; settings lose the values of secret names."""
    root, add = project
    code = f'token = next(tokens)\npassword: str = args.password\napi_key = "{SECRET}"\ndb_password = "hunter2"\n'
    write(root, {"train.py": code, "config.yaml": "password: hunter2\nlr: 1\n", "good.py": "token = x\n"})
    write(
        root,
        {"other.json": '{"username":"jo","key":"0123456789abcdef"}', "api.yaml": "api:\n  key: hunter2\n"},
    )
    add()

    kept = {name: content.decode() for name, (_, content) in keep(CodeSnapshot(root)).items()}

    assert kept == {
        "train.py": 'token = next(tokens)\npassword: str = args.password\napi_key = "[redacted]"\n'
        'db_password = "[redacted]"\n',
        "config.yaml": "password: [redacted]\nlr: 1\n",
        "good.py": "token = x\n",
        "other.json": '{"username":"jo","key":"[redacted]"}',
        "api.yaml": "api:\n  key: [redacted]\n",
    }
    assert "took secrets out of files (4): api.yaml, config.yaml, other.json, train.py" in caplog.text


def test_links_are_kept_as_links_and_not_followed(keep, project, tmp_path):
    """A link may lead to a file or folder outside, to nothing, or to itself."""
    root, add = project
    outside = tmp_path / "outside"
    write(outside, {"private.py": "private"})
    write(root, {"train.py": "x"})
    for name, target in {
        "file.py": outside / "private.py",
        "folder.py": outside,
        "nothing.py": "missing",
        "loop.py": "loop.py",
    }.items():
        (root / name).symlink_to(target)
    add()

    kept = keep(CodeSnapshot(root))

    assert sorted(kept) == ["file.py", "folder.py", "loop.py", "nothing.py", "train.py"]
    assert all(stat.S_ISLNK(kept[name][0]) for name in kept if name != "train.py")
    assert kept["file.py"][1] == os.fsencode(outside / "private.py")


def test_a_folder_that_became_a_link_is_not_followed(keep, tmp_path):
    """Git still lists the files that were in it."""
    root, outside = tmp_path / "project", tmp_path / "outside"
    write(root, {"package/net.py": "mine", "train.py": "x"})
    write(outside, {"net.py": "private"})
    git(root, "init", "-q")
    git(root, "add", "-A")
    (root / "package/net.py").unlink()
    (root / "package").rmdir()
    (root / "package").symlink_to(outside)

    assert sorted(keep(CodeSnapshot(root))) == ["train.py"]


def test_a_pipe_does_not_stop_training(keep, project, caplog):
    """It has no writer; it is left out."""
    root, add = project
    write(root, {"train.py": "x", "pipe.py": ""})
    add()
    (root / "pipe.py").unlink()
    os.mkfifo(root / "pipe.py")

    assert sorted(keep(CodeSnapshot(root))) == ["train.py"]
    assert "left out files that cannot be read (1): pipe.py" in caplog.text


def test_without_git_environments_runs_and_hidden_folders_are_left_out(keep, tmp_path):
    """They are not code, and there may be any number of files in them."""
    write(
        tmp_path,
        {
            **dict.fromkeys(["train.py", "data/loader.py", "runs/reader.py"], "x"),
            **dict.fromkeys(["node_modules/a.py", ".git2/b.py", "wandb/c.py", "x.egg-info/d.txt"], "x"),
            **dict.fromkeys(
                ["mine/pyvenv.cfg", "mine/lib/e.py", "out/sidecar.json", "out/hparams.yaml"], "x"
            ),
        },
    )

    assert sorted(keep(CodeSnapshot(tmp_path))) == ["data/loader.py", "runs/reader.py", "train.py"]


def test_a_repository_that_git_cannot_read_gives_no_archive(keep, tmp_path, caplog):
    """It can't tell which files to ignore. A folder without a repository is a different case."""
    write(tmp_path, {"train.py": "x"})
    git(tmp_path, "init", "-q")
    (tmp_path / ".git/index").write_bytes(b"damaged")

    assert keep(CodeSnapshot(tmp_path)) == {}
    assert "could not archive the code" in caplog.text
