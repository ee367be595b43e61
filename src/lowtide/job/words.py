"""What the command line says, in its own words and safe to print. No torch here.

An error is raised where the shortage or the mistake is, by code that programs call as well: it says ``disk='/a/folder'``. To a
person who typed ``--disk`` the command line says ``--disk /a/folder``, of all messages alike, where it speaks.
"""

from __future__ import annotations

import logging
import re
import sys

from lowtide.planning.text import clean

FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("memory", "device_memory", "disk", "stage", "activations", "update", "adapt", "run", "keep"),
        *("world_size", "hardware", "precision", "optimizer", "accumulate", "objective", "batch", "sequence"),
    )
}
"""Arguments of the library that are flags of the command line."""
_ONLY_IN_PYTHON = ("units", "partition", "weights", "comm")

_CODE = re.compile(r"(`[^`]*`)")
"""What is quoted as code stays as it is."""
_DEFERRED = re.compile(r"\bdeferred\((disk=(?:'[^']*'|\"[^\"]*\"|\.\.\.))\)")
_CHOICE = re.compile(rf"\b({'|'.join(FLAGS)})=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d[\w.]*|\.\.\.)?(?![\w=])")
_SUBJECT = re.compile(rf"^(the size of |)({'|'.join(FLAGS)}) is (?=['\"\d-])")
_RAISE = re.compile(r"\braise memory to\b")
_OWN = re.compile(r"^(the size of )?--[a-z]")
"""How a message begins that the command line has made itself, of its flags and of what was typed."""
_NO_FLAG = re.compile(rf"\b({'|'.join(_ONLY_IN_PYTHON)})=(?![\w=])")


def in_flags(message: str) -> str:
    """``message`` with the flags of the command line in place of the arguments of a call."""
    if _OWN.match(message):
        return message
    parts = _CODE.split(message)
    return "".join(part if part.startswith("`") else _translated(part, first=not at) for at, part in enumerate(parts))


def _translated(text: str, *, first: bool) -> str:
    text = _DEFERRED.sub(r"\1", text)
    text = _SUBJECT.sub(lambda match: f"{match[1]}{FLAGS[match[2]]} is ", text) if first else text
    text = _NO_FLAG.sub(r"\1= of lowtide.shard", text)
    text = _RAISE.sub("raise --memory to", text)
    return _CHOICE.sub(lambda match: FLAGS[match[1]] + _value(match[2] or ""), text)


def _value(written: str) -> str:
    if not written or written == "...":
        return ""
    return " DIR:SIZE" if written.startswith("[") else f" {written.strip(chr(34) + chr(39))}"


def spoken(message: str) -> str:
    """``message`` as a terminal may have it: in flags, and without what a terminal would act upon (names may hold anything)."""
    return "\n".join(clean(line) for line in in_flags(message).split("\n"))


class _Spoken(logging.Handler):
    """Warnings of the library as lines on standard error, in the words of the command line."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(spoken(self.format(record)) + "\n")
        sys.stderr.flush()


def speak_warnings() -> None:
    """From now on, warnings of the library come in the words of the command line."""
    log = logging.getLogger("lowtide")
    if not any(isinstance(handler, _Spoken) for handler in log.handlers):
        log.addHandler(_Spoken(logging.WARNING))
