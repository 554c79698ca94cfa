"""How long tests take: which are left out of `make quick`, which files are the longest, how often a proof is repeated."""

import os
import re
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

IS_QUICK = os.environ.get("TESTS") == "quick"
IS_EXHAUSTIVE = os.environ.get("TESTS") == "all"

LONGEST = (
    "tests/test_destinations/viewer/browser/test_charts.py",
    "tests/test_docs.py",
    "tests/crash/test_shards.py",
    "tests/crash/test_bucket_kill.py",
    "tests/test_events/trainer/test_asynchronous.py",
    "tests/test_destinations/runs/test_dataset.py",
    "tests/test_events/trainer/test_retention.py",
    "tests/test_destinations/viewer/test_bucket.py",
    "tests/crash/test_time_ledger.py",
    "tests/crash/test_run_directory_model.py",
    "tests/crash/test_ranks.py",
    "tests/test_destinations/run_directory/test_parts_model.py",
    "tests/model/test_histories.py",
    "tests/model/test_faults.py",
    "tests/test_destinations/adapters/test_lightning.py",
    "tests/test_destinations/trackers/test_mlflow.py",
    "tests/test_destinations/runs/test_damaged_runs.py",
    "tests/test_uploads/stores/test_s3.py",
    "tests/test_destinations/adapters/test_hugging_face.py",
    "tests/test_events/trainer/test_sharded.py",
    "tests/test_events/trainer/test_ends.py",
    "tests/test_destinations/trackers/test_wandb.py",
    "tests/crash/test_checkpoint_kill.py",
    "tests/crash/test_compaction_kill.py",
    "tests/test_destinations/run_directory/test_faults.py",
    "tests/test_destinations/compat/test_wandb.py",
    "tests/test_uploads/stores/test_store_answers.py",
    "tests/crash/test_run_directory_kill.py",
    "tests/test_destinations/runs/content/test_large_runs.py",
    "tests/crash/test_exact_resume.py",
    "tests/hostile/test_fuzz_readers.py",
    "tests/test_events/trainer/test_distributed.py",
    "tests/crash/test_uploads_kill.py",
    "tests/test_uploads/drain/test_worker.py",
    "tests/test_uploads/spool/test_failing_disk.py",
)
"""Files of more than eight seconds of a processor, longest first; of a group one file, which takes the others along."""


def times(usual: T, exhaustive: T) -> T:
    """Returns the first, or the second if everything is tested: a count, or parameters."""
    return exhaustive if IS_EXHAUSTIVE else usual


# What a file of tests says that starts a process, a server or a browser, trains, or imports a framework.
_STARTS_MORE = re.compile(
    r"\b(subprocess|multiprocessing|os\.fork|torch_server|torch_python|tests\.servers|browser|page|server|TestClient|moto"
    r"|UploadQueue|Trainer|lightning|transformers|accelerate|keras|torchrl|mlflow|wandb|tensorboard|trackio"
    r"|comet_ml|deltalake|duckdb|hypothesis|fuzzing)\b"
)
_TESTS = Path(__file__).parent
# Proofs that kill, that fill memory, or that try everything.
_LONG_FOLDERS = {"crash", "hostile", "gpu", "model"}


def is_quick(path: Path) -> bool:
    """Returns whether a file of tests is short, and needs neither process, server, browser nor framework."""
    if _LONG_FOLDERS & set(path.relative_to(_TESTS).parts) or path in {
        _TESTS.parent / name for name in LONGEST
    }:
        return False
    # `test_architecture.py` names what it forbids.
    return path.name == "test_architecture.py" or not _STARTS_MORE.search(path.read_text(encoding="utf-8"))
