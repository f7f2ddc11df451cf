"""Runs the `qconvert` command: `python -m qconvert`."""

from qconvert.cli import main

if __name__ == "__main__":
    main()
