"""One thread for every test: tiny tensors gain nothing from more, and a busy machine loses much."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
