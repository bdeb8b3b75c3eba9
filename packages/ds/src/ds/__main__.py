"""``python -m ds`` is the ``ds`` command."""

from ds.cli import main

main()
