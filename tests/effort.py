"""How long tests take: which files are the longest, and how often a proof is repeated in `make test` and `make test-all`."""

import os
from typing import TypeVar

T = TypeVar("T")

IS_EXHAUSTIVE = os.environ.get("TESTS") == "all"

LONGEST = (
    "tests/test_docs.py",
    "tests/test_destinations/viewer/test_browser_charts.py",
    "tests/test_destinations/adapters/test_lightning.py",
    "tests/crash/test_ranks.py",
    "tests/crash/test_uploads_kill.py",
    "tests/test_destinations/runs/test_dataset.py",
    "tests/crash/test_checkpoint_kill.py",
    "tests/hostile/test_failing_disk.py",
    "tests/test_destinations/trackers/test_mlflow.py",
    "tests/test_uploads/stores/test_s3.py",
    "tests/test_uploads/drain/test_worker.py",
    "tests/crash/test_run_directory_kill.py",
    "tests/test_destinations/adapters/test_hugging_face.py",
    "tests/test_destinations/adapters/test_torchrl.py",
    "tests/hostile/test_store_answers.py",
    "tests/hostile/test_damaged_runs.py",
    "tests/test_events/trainer/test_distributed.py",
    "tests/test_events/trainer/test_asynchronous.py",
)
"""Files of more than ten seconds, longest first; of a group one file, which takes the others along."""


def times(usual: T, exhaustive: T) -> T:
    """Returns the first, or the second where all is to be tested: a count, or parameters."""
    return exhaustive if IS_EXHAUSTIVE else usual
