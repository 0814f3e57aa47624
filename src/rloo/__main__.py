"""`python -m rloo`. torchrun and accelerate can launch it: `torchrun -m rloo train ...`."""

import sys

from rloo.cli import main

if __name__ == "__main__":
    sys.exit(main())
