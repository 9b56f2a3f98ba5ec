"""`python -m syncbn_torch verify`: the command of `syncbn_verify`."""

import sys

from syncbn_verify.command import run

if __name__ == "__main__":
    sys.exit(run())
