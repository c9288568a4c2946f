"""`python -m optrun` is `optrun`."""

from optrun.cli import main

if __name__ == "__main__":
    main()
