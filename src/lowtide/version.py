"""The version of lowtide, for people, programs and other ranks."""

__version__ = "0.1.0.dev0"
