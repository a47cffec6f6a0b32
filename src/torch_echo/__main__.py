"""``python -m torch_echo``: the command ``torch-echo``."""

from torch_echo.cli import main

if __name__ == "__main__":
    main()
