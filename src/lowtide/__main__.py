"""``python -m lowtide`` (and ``torchrun -m lowtide``) is the ``lowtide`` command."""

from __future__ import annotations

from lowtide.cli.main import main

if __name__ == "__main__":
    main()
