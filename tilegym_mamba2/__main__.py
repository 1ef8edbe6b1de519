"""`python -m tilegym_mamba2` and the command `tilegym-mamba2`."""

import sys


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from tilegym_mamba2 import cli

        status = cli.main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write("tilegym-mamba2: the command line needs typer and rich: pip install 'tilegym_mamba2[cli]'\n")
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
