"""`python -m kvport.api`: the command line, whatever is on PATH."""

from kvport.api.cli import main

main(prog_name="kvport")
