"""`python -m reproductions`."""

from fedstrata.cli import main
from reproductions.cli import app

main(app)
