"""Runs the benchmarks: `python -m tests.benchmarks` all of them, `python -m tests.benchmarks dispatch` those named.

A benchmark is a module of this folder that has `main()`. Where `main` returns False, a budget was not kept:
the others run all the same, and the exit status is 1.
"""

import importlib
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent


def _benchmarks():
    """Returns `main` of each module of this folder that has one, by module name."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        if hasattr(module, "main"):
            found[path.stem] = module.main
    return found


def main(names):
    """Runs the named benchmarks, or all; returns the exit status."""
    benchmarks = _benchmarks()
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        print(f"benchmark must be one of {', '.join(benchmarks)}, got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    kept = [benchmarks[name]() is not False for name in names or benchmarks]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
