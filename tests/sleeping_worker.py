"""A process that says its id and then waits: `python -m tests.sleeping_worker FOLDER`."""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)
