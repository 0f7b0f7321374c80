"""One thread for every test: tiny tensors gain nothing from more, and a busy machine loses much.

The key that signs runs is the tests' own, not the user's.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AGENTTRAIN_KEY", str(Path(tempfile.mkdtemp(prefix="agenttrain-")) / "key"))

pytest_plugins = ["stub_hub"]  # for the fixture `hub`; loaded after the variables are set
