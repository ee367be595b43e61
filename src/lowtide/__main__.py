"""``python -m lowtide``, and ``torchrun ... -m -- lowtide``, is the ``lowtide`` command.

(Without ``--``, torchrun takes ``--run`` for an abbreviation of an option of its own.)
"""

from __future__ import annotations

from lowtide.cli.main import main

if __name__ == "__main__":
    main()
