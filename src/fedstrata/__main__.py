"""`python -m fedstrata` is the command line."""

from fedstrata.cli import main

main()
