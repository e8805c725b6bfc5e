"""``python -m bicl``."""

from bicl.cli import main

main()
