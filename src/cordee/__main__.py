"""`python -m cordee` is the command `cordee`."""

from cordee.cli.main import main

if __name__ == "__main__":
    main()
