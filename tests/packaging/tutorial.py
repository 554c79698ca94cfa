"""Walks the tutorial in an environment that has the wheel: `tutorial.py FOLDER MOTO_SERVER`."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from page_blocks import run_page  # noqa: E402  # a module of the checkout, which is not installed

folder, moto_server = Path(sys.argv[1]), sys.argv[2]
(folder / "home").mkdir(parents=True)
with subprocess.Popen(
    [moto_server, "-H", "127.0.0.1", "-p", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
) as server:
    lines = iter(server.stderr.readline, "")
    address = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:[1-9]\d*", line)))
    # It writes a line for each request, which must be read.
    threading.Thread(target=lambda: all(lines), daemon=True).start()
    environment = {
        "HOME": str(folder / "home"),
        "PATH": os.environ["PATH"],
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secretsecret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    make_bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
    subprocess.run([sys.executable, "-c", make_bucket], env=environment, check=True, timeout=60)
    try:
        code, printed = run_page(ROOT / "docs/getting-started.md", folder, environment)
    finally:
        server.terminate()
if code:
    sys.exit("".join(printed)[-4000:])
print("the tutorial, from the wheel: done")
