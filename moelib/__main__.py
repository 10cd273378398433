"""`python -m moelib` is the `moelib` command."""

from moelib.cli.main import main

if __name__ == "__main__":
    main()
