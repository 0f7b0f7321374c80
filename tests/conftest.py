"""One thread for every test: tiny tensors gain nothing from more, and a busy machine loses much.

The key that signs runs and the cache are the tests' own, not the user's. In a shell's background,
where SIGINT is ignored, the runs that tests start hear it.
"""

import gc
import os
import tempfile
from pathlib import Path

import composed_once
from hypothesis import HealthCheck, settings

from agenttrain.utils.signals import hear_interrupts

os.environ.setdefault("OMP_NUM_THREADS", "1")
_own = Path(tempfile.mkdtemp(prefix="agenttrain-"))
os.environ.setdefault("AGENTTRAIN_KEY", str(_own / "key"))
os.environ.setdefault("XDG_CACHE_HOME", str(_own / "cache"))

hear_interrupts()
# On a busy machine an example takes any time.
settings.register_profile(
    "without_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without_clock")
composed_once.install()
# A full collection visits half a million objects of torch, transformers and the tests.
gc.set_threshold(5000, 20, 20)

# For the fixtures `hub` and `trained_run`; loaded after the variables are set.
pytest_plugins = ["stub_hub", "shared_run"]
