"""Finds the code blocks of a page, and runs them in order.

A page is a script: its blocks of Python share one namespace, its blocks of shell run between them, in one folder.

- `<!-- not run: REASON -->` above a block leaves it out.
- `<!-- invisible-code-block: python` … `-->` is run but not shown: it sets up things the reader already has, such as a
  model. (The syntax is Sybil's.)
- A block of text after a line `prints` shows the output of the block before it; `...` matches anything.
- `pip install` in a shell block is skipped.
"""

import json
import re
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

LANGUAGES = {"python": "python", "py": "python", "sh": "sh", "bash": "sh"}
LIMIT_SECONDS = 240
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>python|py|sh|bash)\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n+(?:It |which )?prints\n+```text\n(?P<printed>.*?)^```$)?"
    r"|^<!-- invisible-code-block: python\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_MARK = "\0block "


@attrs.frozen
class Block:
    """A block of code.

    Attributes:
        line: where its code begins, counted from 1.
        reason: why it is not run; None if it runs.
        printed: the output that the page shows; None if it shows none.
        hidden: whether the reader doesn't see it.
    """

    language: str
    code: str
    line: int
    reason: str | None = None
    printed: str | None = None
    hidden: bool = False


def blocks_of(text: str) -> list[Block]:
    """Returns the blocks of a page in order."""
    found = []
    for match in _FENCE.finditer(text):
        hidden = match["hidden"]
        language = "python" if hidden is not None else LANGUAGES[match["language"]]
        start = match.start("code" if hidden is None else "hidden")
        found.append(
            Block(
                language,
                match["code"] if hidden is None else hidden,
                text.count("\n", 0, start) + 1,
                match["reason"],
                match["printed"],
                hidden is not None,
            )
        )
    return found


def run_page(
    page: Path, folder: Path, environment: dict[str, str], start: Callable[..., Any] | None = None
) -> tuple[int, list[str]]:
    """Runs the blocks of a page in a process of their own.

    Args:
        page: the file.
        folder: where they run.
        environment: their environment variables.
        start: runs a program as `ForkServer.run` does; a new interpreter by default.

    Returns:
        The exit code, and the output of each block in the order of `blocks_of`, "" for those that don't run; then the
        output at the end of the process. A failure's traceback is at the end of its block.
    """
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    finished = (start or _start)(
        Path(__file__).read_text(encoding="utf-8"),
        page.name,
        stdin=json.dumps([attrs.asdict(block) for block in blocks]),
        cwd=folder,
        env=environment,
        is_merged=True,
        timeout_s=LIMIT_SECONDS,
    )
    printed = [""] * (len(blocks) + 1)
    parts = finished.stdout.split(_MARK)
    for part in parts[1:]:
        number, _, text = part.partition("\n")
        printed[int(number)] = text
    if len(parts) == 1:
        printed[0] = finished.stdout
    return finished.returncode, printed


def _start(
    program: str, name: str, *, stdin: str, cwd: Path, env: dict[str, str], is_merged: bool, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program, name],
        input=stdin,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_merged else subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _main() -> None:
    name = sys.argv[1]
    # The page is the main module, so that its definitions can be imported and pickled.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    namespace = module.__dict__
    for number, block in enumerate(json.loads(sys.stdin.read())):
        if block["reason"] is not None:
            continue
        print(f"{_MARK}{number}", flush=True)
        if block["language"] == "sh":
            lines = [line for line in block["code"].splitlines() if not line.startswith("pip install ")]
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
            outcome = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
            if outcome.returncode:
                sys.exit(f"{name}:{block['line']}: exit code {outcome.returncode}")
            continue
        try:
            source = "\n" * (block["line"] - 1) + block["code"]
            exec(compile(source, name, "exec"), namespace)  # noqa: S102  # the pages are ours
        except BaseException:  # noqa: BLE001  # whatever a page raises is shown
            traceback.print_exc()
            sys.exit(1)
        sys.stdout.flush()
    print(f"{_MARK}-1", flush=True)


if __name__ == "__main__":
    _main()
