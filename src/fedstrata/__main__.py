"""`python -m fedstrata` is the command line."""

from fedstrata.cli import program

program()
