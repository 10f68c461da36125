"""`python -m zero_jax`: the command line `zero-jax`."""

import sys

from zero_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
