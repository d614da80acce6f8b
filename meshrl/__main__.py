"""The command line, as `python -m meshrl`. No other module may import it."""

from meshrl.cli import main

if __name__ == "__main__":
    main()
