"""What a new user does first, in an environment that has the wheel and nothing else."""

import pathlib

import destinations
import events
import uploads

for package in (destinations, events, uploads):
    folder = pathlib.Path(package.__file__).parent
    assert "site-packages" in str(folder), f"{folder} is not the installed package"
    assert (folder / "py.typed").is_file(), f"{folder} has no py.typed"

with events.Run(loggers=[destinations.RunDirectory("runs/first"), destinations.Artifacts("store")]) as run:
    run.log_hyperparameters({"lr": 0.1})
    for step in range(5):
        run.batch_start()
        run.log_metrics({"loss": 1 / (step + 1)})
        run.batch_end()
    pathlib.Path("model.pt").write_bytes(b"weights")
    run.upload_file("model.pt", "model.pt")

rows = pathlib.Path("runs/first/metrics.csv").read_text(encoding="utf-8").splitlines()
assert len(rows) == 6, rows
assert list(pathlib.Path("store").rglob("model.pt")), "the file did not arrive in the store"

from destinations.runs import open_runs  # noqa: E402  # after the run, as a user would

assert open_runs("runs")["first"].series("loss").value.tolist()[0] == 1.0
print("a run, an upload and a reading, without extras: done")
