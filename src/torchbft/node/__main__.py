"""A node as a program: ``python -m torchbft.node RUN FOLDER [DESCRIPTOR|-] [HOST:PORT]``."""

import sys

from torchbft.node.launch import main
from torchbft.node.supervisor import EXIT_REFUSED
from torchbft.primitives.errors import TorchbftError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TorchbftError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(EXIT_REFUSED)
