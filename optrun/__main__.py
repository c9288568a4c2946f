"""`python -m optrun` is `optrun`."""

from optrun.cli.main import main

if __name__ == "__main__":
    main()
