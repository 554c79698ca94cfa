"""Runs the benchmarks: `python -m tests.benchmarks` runs all, `python -m tests.benchmarks dispatch` those named.

A benchmark is a module of this folder with a function `main()`. If `main` returns False, a budget was missed; the
other benchmarks still run, and the exit code is 1.

`python -m tests.benchmarks --keep [--rounds 3] [NAME ...]`, which is `make bench`, runs each several times and
stores its figures in `results.json`. It also exits with 1 if a ratio to a peer is worse than the last time, beyond
noise; see `report`. On a busy machine, nothing is stored or compared.
"""

import argparse
import importlib
import pathlib
import sys

MOST_OF_OTHERS = 0.25
FOLDER = pathlib.Path(__file__).parent


def _benchmarks():
    """Returns `main` of each module of this folder that has one, by module name."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        if hasattr(module, "main"):
            found[path.stem] = module.main
    return found


def main(arguments):
    """Runs the named benchmarks, or all; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--keep", action="store_true", help="store the figures, and compare them with the last"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each runs with --keep (3)")
    options = parser.parse_args(arguments)
    benchmarks = _benchmarks()
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        print(f"benchmark must be one of {', '.join(benchmarks)}, got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    chosen = {name: benchmarks[name] for name in options.names or benchmarks}
    if options.keep:
        kept = [_keep(name, run, options.rounds) for name, run in chosen.items()]
    else:
        kept = [run() is not False for run in chosen.values()]
    return 0 if all(kept) else 1


def _keep(name, run, rounds):
    """Runs one benchmark several times and keeps its figures; returns whether all is as good as promised."""
    from .report import collect, keep, share_of_others
    from .timing import PRINTED

    others = share_of_others()
    tables, is_kept = [], True
    for _ in range(rounds):
        PRINTED.clear()
        is_kept &= run() is not False
        tables.append(list(PRINTED))
    if not any(tables):
        return is_kept
    if others > MOST_OF_OTHERS:
        print(f"{name}: not stored or compared, others took {others:.0%} of the processors when it began.")
        return is_kept
    found = keep(name, collect(tables))
    for text in found:
        print(f"WORSE THAN THE LAST TIME: {text}")
    return is_kept and not found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
