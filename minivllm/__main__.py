"""`python -m minivllm COMMAND`: the same program as `minivllm COMMAND`."""

import sys

from minivllm.cli.program import console

if __name__ == "__main__":
    sys.exit(console())
