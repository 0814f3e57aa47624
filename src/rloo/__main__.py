"""`python -m rloo`, which torchrun and accelerate launch as well: `torchrun -m rloo train ...`."""

import sys

from rloo.cli import main

if __name__ == "__main__":
    sys.exit(main())
