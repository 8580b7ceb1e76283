"""`python -m reproductions`."""

from fedstrata.cli import program
from reproductions.cli import app

program(app)
