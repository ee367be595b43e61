"""What a training job was asked to do: frozen, checked, and able to travel to a rank as JSON. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lowtide.config import ACTIVATION_POLICIES, ADAPTATIONS, UPDATES, parse_bytes, parse_disk
from lowtide.errors import ArgumentError
from lowtide.files import read_plain
from lowtide.job.presets import PRESETS
from lowtide.reporting.loggers import check_logger

_FACTORY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
NONFINITE = ("skip", "raise")
_SAME_RUN = ("preset", "model", "data", "synthetic")
"""What must be as it was when a command goes on with a run."""
_REPLACED = ("plan.txt", "plan.json", "metrics.jsonl")
_OWN = ("checkpoints", "events.jsonl", "timeline")
"""What a folder may have that was a run's of ``lowtide.shard``, or of a job that ended before it had begun."""
_HIGH_RATE = 0.1
_MOST_BYTES = 16 << 20
"""Of a run's own description."""
MAX_RANKS = 256
"""More ranks on one host than this are a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One training job. ``preset`` and ``model`` exclude each other; ``threads=None`` divides the cores between the ranks.

    ``batch`` is a number, or ``auto``. ``memory`` and ``disk`` are as a person writes them: ``4GiB``, and ``DIR`` or
    ``DIR:SIZE`` for each folder. ``save_every=None`` saves at the end and when a signal ends the job, 0 never. ``resume`` is
    ``auto``, ``never`` or a path. ``attempt`` counts how often a launcher has started this job again.
    """

    preset: str | None = None
    model: str | None = None
    data: str | None = None
    synthetic: bool = False
    steps: int = 200
    batch: int | str = 2
    lr: float = 1e-3
    stage: int | str = "auto"
    ranks: int = 1
    threads: int | None = None
    seed: int = 0
    run: str | None = None
    memory: str | None = None
    disk: tuple[str, ...] = ()
    activations: str = "auto"
    update: str | None = None
    adapt: str = "placement"
    save_every: int | None = None
    keep: int = 3
    resume: str = "auto"
    background_saves: bool = False
    restarts: int = 0
    attempt: int = 0
    nonfinite: str = "skip"
    log: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.preset is not None and self.model is not None:
            raise ArgumentError("--preset and --model are both given; a job trains one model, choose one of them.")
        if self.preset is not None and self.preset not in PRESETS:
            raise ArgumentError(f"--preset is {self.preset!r}; {_allowed(self.preset, PRESETS)}")
        if self.model is not None and not _FACTORY.match(self.model):
            raise ArgumentError(f"--model is {self.model!r}; write package.module:function, the function returns the model.")
        if self.synthetic and self.data is not None:
            raise ArgumentError("--synthetic and --data are both given; random tokens need no text, choose one of them.")
        if self.data is not None:
            self._check_data(self.data)
        self._check_numbers()
        self._check_tiers()
        self._check_saves()

    def _check_data(self, data: str) -> None:
        fix = "give a text file or a folder of text files."
        if not os.path.exists(data):
            raise ArgumentError(f"--data is {data!r}, which does not exist; {fix}")
        if not os.path.isdir(data) and not os.path.isfile(data):
            raise ArgumentError(f"--data is {data!r}, which is no plain file; {fix}")
        if os.path.isdir(data) and not any(files for _, _, files in os.walk(data)):
            raise ArgumentError(f"--data is {data!r}, which holds no text; {fix}")

    def _check_numbers(self) -> None:
        _at_least("--steps", self.steps, 1)
        if isinstance(self.batch, str) and self.batch != "auto":
            raise ArgumentError(f"--batch is {self.batch!r}; give a whole number >= 1, or auto.")
        if not isinstance(self.batch, str):
            _at_least("--batch", self.batch, 1)
        _at_least("--ranks", self.ranks, 1)
        _at_least("--threads", self.threads, 1)
        _at_least("--seed", self.seed, 0)
        if self.ranks > MAX_RANKS:
            raise ArgumentError(f"--ranks is {self.ranks}; at most {MAX_RANKS} ranks are started on one host.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ArgumentError(f"--lr is {self.lr}; give a learning rate > 0, such as 1e-3.")
        if self.stage not in ("auto", 0, 1, 2, 3):
            raise ArgumentError(
                f"--stage is {self.stage!r}; "
                f"allowed: 0 (nothing sharded), 1 (optimizer), 2 (+ gradients), 3 (+ parameters) or auto."
            )

    def _check_tiers(self) -> None:
        _one_of("--activations", self.activations, ACTIVATION_POLICIES)
        _one_of("--adapt", self.adapt, ADAPTATIONS)
        parse_bytes("--memory", self.memory)
        for folder in self.disk:
            parse_disk(folder, what="--disk")
        if self.activations == "disk" and not self.disk:
            raise ArgumentError("--activations is 'disk', which needs a folder: give --disk DIR.")
        if self.update is None:
            return
        _one_of("--update", self.update, UPDATES)
        if self.update == "backward" and not self.synthetic:
            raise ArgumentError(
                "--update is 'backward', but a job on text clips all gradients after backward; "
                "leave --update out, or use --synthetic."
            )

    def _check_saves(self) -> None:
        _one_of("--nonfinite", self.nonfinite, NONFINITE)
        for word in self.log:
            check_logger(word, what="--log")
        _at_least("--save-every", self.save_every, 0)
        _at_least("--keep", self.keep, 1)
        _at_least("--restarts", self.restarts, 0)
        if self.resume not in ("auto", "never") and not os.path.isdir(self.resume):
            raise ArgumentError(
                f"--resume is {self.resume!r}, which is no folder; allowed: auto, never, a folder of a checkpoint or of a run."
            )
        if self.resume not in ("auto", "never") and not _holds_a_checkpoint(Path(self.resume)):
            raise ArgumentError(
                f"--resume is {self.resume!r}, which holds no checkpoint; name a checkpoint, a folder of them, or of a run."
            )
        if self.run is None:
            for flag, given in (("--save-every", self.save_every), ("--restarts", self.restarts)):
                if given:
                    raise ArgumentError(f"{flag} needs a folder for checkpoints: give --run FOLDER.")

    @property
    def saves(self) -> bool:
        """Whether this job writes checkpoints at all."""
        return self.run is not None and self.save_every != 0

    @property
    def update_when(self) -> str:
        """When the optimizer runs: in backward where nothing stands against it and memory is meant to be saved."""
        saves_memory = self.memory is not None or bool(self.disk)
        return self.update or ("backward" if self.synthetic and saves_memory else "step")

    @property
    def disk_folders(self) -> list[str]:
        """The folders of ``disk``, without their sizes."""
        return [folder.path for entry in self.disk for folder in parse_disk(entry, what="--disk")]

    @property
    def batch_size(self) -> int:
        """Sequences per step and rank; ``auto`` must have been replaced by what it came to."""
        if isinstance(self.batch, str):
            raise ArgumentError(f"--batch is {self.batch!r}, which has not been chosen yet.")
        return self.batch

    @property
    def memory_bytes(self) -> int | None:
        return parse_bytes("--memory", self.memory)

    @property
    def model_name(self) -> str:
        """What the job trains, in one word."""
        return self.model or self.preset or next(iter(PRESETS))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Options:
        fields: dict[str, Any] = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("disk", "log")}  # JSON has lists only
        return cls(**fields)


def parse_batch_word(word: str) -> int | str:
    """``"4"`` → ``4``; any other word is left for :class:`Options` to check."""
    return int(word) if word.lstrip("-").isdecimal() else word


def parse_stage_word(word: str) -> int | str:
    """``"3"`` → ``3``; any other word is left for :class:`Options` to check."""
    return int(word) if word.isdecimal() else word


def check_run_folder(run: str) -> None:
    """Refuse a folder that already holds a run."""
    if Path(run, "config.json").exists():
        raise ArgumentError(f"--run is {run!r}, which already holds a run; choose a new folder or remove this one.")
    if os.path.exists(run) and not os.path.isdir(run):
        raise ArgumentError(f"--run is {run!r}, which is not a folder; choose another name.")


def check_same_run(options: Options) -> None:
    """A run folder belongs to one run: the same job may go on with it, another may not touch it."""
    if options.run is None or options.attempt:
        return
    was = _config_of(options.run) if options.resume != "never" else None
    if was is None:
        check_run_folder(options.run)
        return
    for name in _SAME_RUN:
        if was.get(name, ()) != getattr(options, name):
            raise ArgumentError(
                f"--run is {options.run!r}, which already holds a run of another job (--{name} was {was.get(name)!r}); "
                f"choose a new folder or remove this one."
            )


def _strange_files(run: str) -> list[str]:
    """What is in a folder that is to become a run's, and is no run's. Raises if the run would replace a file of it."""
    folder = Path(run)
    if not folder.is_dir() or any((folder / name).exists() for name in ("config.json", "lock")):
        return []
    names = sorted(os.listdir(folder))
    lost = [name for name in names if name in _REPLACED]
    if lost:
        raise ArgumentError(f"--run is {run!r}, which holds a {lost[0]} that no run has written; choose an empty folder.")
    return [name for name in names if name not in _OWN]


def _config_of(run: str) -> dict[str, Any] | None:
    """What a run was asked for, if the folder holds one."""
    try:
        config: Any = json.loads(read_plain(Path(run, "config.json"), _MOST_BYTES))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", config) if isinstance(config, dict) else None


def _holds_a_checkpoint(folder: Path) -> bool:
    """Whether there is one to be seen; whether it can be read is another question."""
    return any(any(folder.glob(f"{where}manifest.json")) for where in ("", "*/", "checkpoints/*/"))


def remarks(options: Options) -> list[str]:
    """What is allowed, and probably a mistake."""
    found: list[str] = []
    asked = options.ranks * (options.threads or 1)
    if asked > cores():
        what = f"--ranks {options.ranks}" if options.threads is None else f"--threads {options.threads}"
        there = f"{cores()} core{'s' if cores() > 1 else ''}"
        found.append(f"{what} asks for {asked} threads at once, but there are {there}: that is slower, not faster.")
    if options.lr > _HIGH_RATE:
        found.append(f"--lr is {options.lr:g}, at which AdamW hardly ever learns; 1e-3 and less are usual.")
    if options.run is not None and (strange := _strange_files(options.run)):
        few = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        found.append(f"--run is {options.run!r}, which holds other files ({few}); the run's are put next to them.")
    return found


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ArgumentError(f"{name} is {value}; give a whole number >= {least}.")


def _one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ArgumentError(f"{name} is {value!r}; {_allowed(value, words)}")


def _allowed(value: str, words: Iterable[str]) -> str:
    words = list(words)
    near = difflib.get_close_matches(value, words, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"allowed: {', '.join(words)}.{hint}"
