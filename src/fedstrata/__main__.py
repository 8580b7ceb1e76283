"""The command line as a program: `fedstrata`, and `python -m fedstrata`."""

import sys


def main() -> None:
    """Ctrl-C also ends it while it begins."""
    try:
        from fedstrata.cli import program
    except KeyboardInterrupt:
        sys.exit(130)
    program()


if __name__ == "__main__":
    main()
