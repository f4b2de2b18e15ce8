"""`python -m kvstrata` is the `kvstrata` command."""

from kvstrata.cli import app

app(prog_name="kvstrata")
