import os
import signal
import sys
from pathlib import Path

# Tiny models: a second OpenMP thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(f) for f in TESTS.iterdir() if f.is_dir() and f.name[0] != "_")]
# A background job starts with Ctrl-C ignored, and so would everything that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
