"""The command line. Importing it does not import torch, so that ``--help`` and a mistyped flag answer at once."""
