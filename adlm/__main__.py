"""`python -m adlm`, as torchrun starts it."""

from adlm.cli.main import app

if __name__ == "__main__":
    app()
