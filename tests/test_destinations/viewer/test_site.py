"""The exported site: static files with the answers of the API."""

import json
import re
import shutil
import subprocess

import pytest

from destinations import cli
from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from destinations.viewer.site import export_site, without_origin
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import served, write_demo


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Gives a folder with two runs."""
    root = tmp_path_factory.mktemp("site") / "runs"
    write_demo(root, rows=2500)
    with Written(root / "other") as run:
        run.logger.log_hyperparameters({"optim": {"lr": 0.2}})
        for step in range(50):
            run.log({"loss": 2.0}, step)
    (root / "digits" / "train.log").write_text("begun\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    """Gives the folder of their site."""
    target = tmp_path_factory.mktemp("exported") / "site"
    with open_runs(root, cache=target.parent / "cache") as runs:
        export_site(Catalog(runs), target)
    return target


def answers_of(site):
    """Returns the answers of a site by key, as its scripts hand them over."""
    manifest = (site / "data" / "manifest.js").read_text(encoding="utf-8")
    keys = json.loads(re.fullmatch(r"globalThis\.destinationsSite = JSON\.parse\((.*)\);\n", manifest)[1])
    keys = json.loads(keys)["keys"]
    found = {}
    for key, name in keys.items():
        text = (site / "data" / name).read_text(encoding="utf-8")
        call = re.fullmatch(r"destinationsSite\.add\((.*), JSON\.parse\((.*)\)\);\n", text)
        found[key] = json.loads(json.loads(call[2]))
        assert json.loads(call[1]) == key
    return found


def test_a_site_has_the_answers_of_the_server(root, site):
    """A site has the server's runs, details, media, tables, sounds and comparisons, under documented keys."""
    found = answers_of(site)
    with served(root) as page:
        digits, other = page.run_id("digits"), page.run_id("other")
        image = page.get(f"/api/runs/{digits}/media", {"kind": "images", "name": "Inputs"})
        tone = page.get(f"/api/runs/{digits}/media", {"kind": "audio", "name": "tone"})
        table = page.get(f"/api/runs/{digits}/table", {"name": "Words", "step": 7})
        detail = page.get(f"/api/runs/{digits}")
        compared = page.get("/api/compare", {"run": [other, digits]})
        (series,) = page.get("/api/series", {"run": digits, "metric": "loss"})["series"]
        selected = page.get("/api/selected", {"run": [other, digits]})["runs"]

    assert [row["id"] for row in found["runs"]["rows"]] == [other, digits]
    told = [[row[name] for name in ("metrics", "constant")] for row in found["runs"]["rows"]]
    assert told == [[row[name] for name in ("metrics", "constant")] for row in selected]
    values = found["runs"]["rows"][0]["values"]
    assert {name: value for name, value in values.items() if "." in name} == {
        "hparams.optim.lr": 0.2,
        "summary.loss": 2.0,
        "min.loss": 2.0,
        "max.loss": 2.0,
    }
    assert (values["kind"], values["run_id"]) == ("run-directory", found["runs"]["rows"][0]["run_id"])
    assert found[f"run/{digits}"] == without_origin(detail)
    assert found[f"media/{digits}/images/Inputs"] == image
    assert found[f"media/{digits}/audio/tone"] == tone
    assert found[f"table/{digits}/Words/7"] == table
    assert found[f"log/{digits}/train.log"]["text"] == "begun\n"
    both = found[f"compare/{other}/{digits}"]
    assert (both["runs"], both["parts"]) == (compared["runs"], compared["parts"])
    curve = found[f"series/{digits}/loss"]
    assert {name: curve[name] for name in ("y", "low", "high", "merged", "rows")} == {
        name: series[name] for name in ("y", "low", "high", "merged", "rows")
    }
    assert curve["step"] == series["x"]
    assert [len(curve[axis]) for axis in ("epoch", "time", "relative")] == [len(series["x"])] * 3
    assert (found["info"]["site"], found["info"]["writable"]) == (True, False)


def test_media_are_files_beside_the_page(root, site):
    """Media files are equal byte for byte."""
    detail = next(
        answer for key, answer in answers_of(site).items() if key.startswith("run/") and answer["media"]
    )
    (path,) = (site / "files" / detail["id"] / "media").glob("tone/*.wav")

    assert (
        path.read_bytes() == (root / "digits" / path.relative_to(site / "files" / detail["id"])).read_bytes()
    )


def test_a_site_hides_where_and_by_whom_runs_were_made(tmp_path, capsys):
    """A site has no host, user, command line or folder by default; logged content stays."""
    home = tmp_path / "home" / "ada"
    run = write_run(home / "runs" / "one", hparams={"data": "/srv/ada/images", "lr": 0.1})
    origin = {"host": "box.ada.example", "user": "ada", "pid": 77, "argv": ["/home/ada/train.py"]}
    environment = {
        **origin,
        "working_directory": str(home),
        "executable": "/usr/bin/python",
        "imported": {"source": "wandb", "host": "box.ada.example", "email": "ada@example.com"},
        "python": "3.12",
    }
    (run / "environment.json").write_text(json.dumps(environment))
    sidecar = json.loads((run / "sidecar.json").read_text())
    session = {
        "session": "1",
        "host": origin["host"],
        "pid": 77,
        "exception": f"OSError: {home}/x.pt is gone",
    }
    sidecar |= {"sessions": [session], "checkpoint_path": "s3://adas-bucket/one/last.pt"}
    (run / "sidecar.json").write_text(json.dumps(sidecar))
    (run / "train.log").write_text(f'File "{home}/train.py", line 3; see https://example.com/a/b and a/b/c')

    def exported(name, *options):
        assert cli.main(["view", str(home / "runs"), "--export", str(tmp_path / name), *options]) == 0
        # Without digests, which may contain any three letters.
        return "".join(path.read_text() for path in sorted((tmp_path / name / "data").glob("*.js")))

    with_nothing, with_all = exported("site"), exported("other", "--with-origin")

    hidden = ["box.ada", "ada", "/srv", str(tmp_path), "/usr/bin", "adas-bucket"]
    assert [text for text in hidden if text in with_nothing] == []
    assert [text for text in hidden if text not in with_all] == []
    found = answers_of(tmp_path / "site")
    (detail,) = [answer for key, answer in found.items() if key.startswith("run/")]
    assert (detail["environment"], detail["checkpoint_path"]) == ({"python": "3.12"}, "…/last.pt")
    assert detail["hyperparameters"] == {"data": "…/images", "lr": 0.1}
    (log,) = [answer["text"] for key, answer in found.items() if key.startswith("log/")]
    assert log == 'File "…/train.py", line 3; see https://example.com/a/b and a/b/c'


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_names_that_are_special_in_javascript_work(tmp_path):
    """A metric may be called `__proto__`: a browser finds it among the values of the site."""
    with Written(tmp_path / "runs" / "one") as run:
        run.log({"__proto__": 0.5, "constructor": 0.25}, 0)
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        export_site(Catalog(runs), tmp_path / "site")
    data = tmp_path / "site" / "data"
    page = "".join(path.read_text() for path in [data / "manifest.js", *sorted(data.glob("0*.js"))])
    script = tmp_path / "read.js"
    script.write_text(
        page.replace(
            "\n", "\nglobalThis.found ??= {}; destinationsSite.add = (k, v) => { found[k] = v; };", 1
        )
        + "console.log(JSON.stringify(Object.keys(found.runs.rows[0].values).sort()));"
        + "console.log(Object.keys(found.orders.columns).includes('summary.__proto__'));"
        + "console.log(Object.values(found).some((one) => Object.hasOwn(one.summary ?? {}, '__proto__')));"
    )

    said = subprocess.run(
        ["node", str(script)], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    names, *there = said.splitlines()
    assert {"summary.__proto__", "summary.constructor"} <= set(json.loads(names))
    assert there == ["true", "true"]


def test_the_page_of_a_site_loads_classic_scripts_only(site):
    """It loads the data first, no modules, and nothing from other servers."""
    page = (site / "index.html").read_text(encoding="utf-8")

    scripts = re.findall(r"<script[^>]*>", page)
    assert 'type="module"' not in page
    assert scripts[0] == '<script src="data/manifest.js">'
    assert '<script src="static/app.js" defer>' in scripts
    assert all((site / name).is_file() for name in re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert "//" not in "".join(re.findall(r'(?:src|href)="([^"]+)"', page))


def test_the_command_exports_matching_runs(root, tmp_path, capsys):
    """The command reports what it wrote and left out; a second export needs `--overwrite`."""
    target = tmp_path / "site"
    command = ["view", str(root), "--export", str(target)]

    first = cli.main([*command, "--where", 'name == "digits"', "--media-mib", "0"])
    out = capsys.readouterr()
    again = cli.main(command)
    refused = capsys.readouterr().err
    replaced = cli.main([*command, "--overwrite", "--limit", "1"])
    last = capsys.readouterr()

    assert (first, again, replaced) == (0, 1, 0)
    assert out.out == f"1 run, 0 files of media, 0 B\n{target / 'index.html'}\n"
    assert "left out: media of" in out.err
    assert refused == f"{target} has a site in it. Give --overwrite to replace it.\n"
    assert "left out: 1 of 2 runs" in last.err
    assert [row["name"] for row in answers_of(target)["runs"]["rows"]] == ["other"]


def _put(path, text="x"):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def _put_link_in_place(site):
    (site / "index.html").rename(site.parent / "page.html")
    (site / "index.html").symlink_to(site.parent / "page.html")


def _list_what_is_no_file(site):
    (site / "data/files.json").write_text('{"mine": [], "index.html": null}')
    (site / "mine").symlink_to(site / "index.html")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda site: _put(site / ".git/HEAD"), ".git/"),
        (lambda site: _put(site / "data/raw.csv"), "data/raw.csv"),
        (lambda site: (site / "mine").symlink_to(site.parent, target_is_directory=True), "mine/"),
        (lambda site: _put(site / "index.html", "mine"), "index.html"),
        (_put_link_in_place, "index.html"),
        (_list_what_is_no_file, ""),
        (lambda site: (site / "data/files.json").unlink(), "there is no data/files.json"),
    ],
)
def test_a_site_with_anything_else_is_never_replaced(root, site, tmp_path, capsys, change, named):
    """The error names the file that the site doesn't list, and everything stays."""
    target = tmp_path / "site"
    shutil.copytree(site, target)
    change(target)
    before = sorted(tmp_path.rglob("*"))

    code = cli.main(["view", str(root), "--export", str(target), "--overwrite"])

    assert code == 1
    assert f"has other files in it than a site: {named}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_files_added_during_an_export_stay(root, site, tmp_path):
    """The old site is compared again when the new one is complete."""
    target = tmp_path / "site"
    shutil.copytree(site, target)

    class AddingCatalog(Catalog):
        def info(self):
            (target / "thesis.tex").write_text("x")
            return super().info()

    with (
        open_runs(root, cache=tmp_path / "cache") as runs,
        pytest.raises(FileExistsError, match=r"thesis\.tex"),
    ):
        export_site(AddingCatalog(runs), target, overwrite=True)

    assert (target / "thesis.tex").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "site"]


def test_a_site_behind_a_link_is_replaced_in_place(root, site, tmp_path):
    """The link stays."""
    shutil.copytree(site, tmp_path / "real")
    (tmp_path / "site").symlink_to("real")

    with open_runs(root, cache=tmp_path / "cache") as runs:
        export_site(Catalog(runs), tmp_path / "site", limit=1, overwrite=True)

    assert (tmp_path / "site").is_symlink()
    assert [row["name"] for row in answers_of(tmp_path / "real")["runs"]["rows"]] == ["other"]


def test_an_export_that_fails_leaves_nothing(root, tmp_path, capsys):
    """A filter that doesn't parse leaves no folder behind."""
    code = cli.main(["view", str(root), "--export", str(tmp_path / "site"), "--where", "status ="])

    assert code == 2
    assert list(tmp_path.iterdir()) == []
    assert "Write ==." in capsys.readouterr().err


def test_a_hostile_run_writes_no_page_and_nothing_outside(tmp_path):
    """A site leaves out paths that lead out, pages, and links among media; only the data has run names."""
    root = tmp_path / "runs"
    run = write_run(root / "one", hparams={"</script><script>alert(1)</script>": "\u2028"})
    (tmp_path / "secret.txt").write_text("secret")
    (run / "media").mkdir()
    (run / "media" / "page.html").write_text("<script>alert(1)</script>")
    (run / "media" / "link.png").symlink_to(tmp_path / "secret.txt")
    lines = [
        {"step": 1, "tag": "out", "type": "image", "path": "../../secret.txt"},
        {"step": 1, "tag": "../../../x", "type": "image", "path": "media/link.png"},
        {"step": 1, "tag": "page", "type": "video", "path": "media/page.html"},
    ]
    (run / "media.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    target = tmp_path / "site"

    with open_runs(root, cache=tmp_path / "cache") as runs:
        export_site(Catalog(runs), target)

    written = {path.relative_to(target).parts[0] for path in target.rglob("*")}
    assert written == {"index.html", "static", "data"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "runs", "secret.txt", "site"]
    assert all(
        re.fullmatch(r"\d{6}\.js|manifest\.js|files\.json", path.name) for path in (target / "data").iterdir()
    )


def test_fields_of_the_origin_are_hidden_in_a_comparison():
    """Nested fields are left out too; a field whose name only begins alike stays."""
    names = ["environment.host", "environment.imported.email", "environment.hosted", "hparams.host"]

    found = without_origin({"fields": [{"name": name, "values": {}} for name in names]})

    assert [field["name"] for field in found["fields"]] == ["environment.hosted", "hparams.host"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/runs/a.pt", "…/a.pt"),
        ("/home/alice smith/runs/my file.pt", "…/my file.pt"),
        ("s3://bucket/alice/a.pt and /tmp/b/c.pt", "…/a.pt and …/c.pt"),
        (r"C:\Users\alice\runs\a.pt", r"…\a.pt"),
        (r"in 'C:\\Users\\alice smith\\a.pt', line 3", r"in '…\\a.pt', line 3"),
        ("C:/Users/alice/a.pt", "…/a.pt"),
        (r"\\server\alice\a.pt", r"…\a.pt"),
        (r"at D:\a.pt: 3:4 and a\b\c", r"at D:\a.pt: 3:4 and a\b\c"),
        ("loss/train at 1/2, https://example.com/a/b", "loss/train at 1/2, https://example.com/a/b"),
    ],
)
def test_only_the_last_name_of_a_path_is_exported(text, shown):
    """This covers POSIX and Windows paths in any text; other text stays."""
    assert without_origin({"error": [text]}) == {"error": [shown]}
