"""`python -m qconvert` is the same program as the `qconvert` command."""

from qconvert.cli import main

if __name__ == "__main__":
    main()
