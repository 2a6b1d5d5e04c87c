"""`python -m deqkit` is the same as `deqkit`."""

import sys

from deqkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
