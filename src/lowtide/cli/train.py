"""``lowtide train``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.output import say_failure, say_wrong
from lowtide.config import ACTIVATION_POLICIES
from lowtide.errors import ArgumentError
from lowtide.job.failure import describe
from lowtide.job.launch import launched_by
from lowtide.job.options import Options, check_same_run, parse_batch_word, parse_stage_word, remarks
from lowtide.job.presets import PRESETS
from lowtide.job.restarts import start_with_restarts
from lowtide.job.run_folder import refuse_unusable_run
from lowtide.job.ways import ways_out_of
from lowtide.job.worker import run_member
from lowtide.reporting.report import leave_post_mortem

_DEFAULTS = Options()

_Update = Annotated[
    str | None,
    typer.Option(
        help="When the optimizer runs: step (after backward) or backward (unit by unit, so that no gradient outlives its "
        "unit). Default: backward if nothing is clipped (--synthetic) and --memory or --disk is given, else step."
    ),
]
_Adapt = Annotated[
    str,
    typer.Option(
        metavar="placement|throughput",
        help="What may change by itself while it runs: where bytes live (no bit changes), or also how gradients cross a slow "
        "network (results change).",
    ),
]
_Run = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Where config, plan, metrics, events and checkpoints go. Default: runs/<time>-<model>."
    ),
]
_SaveEvery = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="Steps from one checkpoint to the next. Default: none on the way, one at the end and one when Ctrl-C, SIGTERM or "
        "SIGUSR1 ends the job. 0: never. Checkpoints need a run folder.",
    ),
]
_Keep = Annotated[int, typer.Option(help="How many checkpoints stay; older ones are removed.")]
_Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="Go on from the newest checkpoint of the run folder that verifies (auto), or from this one. A run that has "
        "checkpoints of its own goes on from those.",
    ),
]
_BackgroundSaves = Annotated[
    bool,
    typer.Option(
        "--background-saves",
        help="Train on while a checkpoint is written; takes memory for a copy of what is in memory.",
    ),
]
_Restarts = Annotated[
    int, typer.Option(help="How often to start the ranks again from the newest checkpoint when one has failed.")
]
_Nonfinite = Annotated[
    str,
    typer.Option(
        metavar="skip|raise", help="What becomes of a step whose gradients are not finite. Ten skips in a row end the job."
    ),
]
_Log = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND:PATH", help="Log every step there, too: jsonl:FILE or tensorboard:FOLDER. May be given repeatedly."
    ),
]


def train(
    *,
    preset: Annotated[str | None, typer.Option(help=f"Model: {', '.join(PRESETS)}. Default: {_DEFAULTS.model_name}.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="Your own model: an nn.Module with forward(tokens, targets) -> loss, or a Hugging Face one.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="A text file or a folder. Default: Python's own standard library.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULTS.steps,
    batch: Annotated[
        str, typer.Option(metavar="N|auto", help="Sequences per step and rank; auto: as many as train fastest and fit.")
    ] = str(_DEFAULTS.batch),
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = _DEFAULTS.lr,
    stage: Annotated[
        str, typer.Option(help="What is sharded: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters, auto.")
    ] = str(_DEFAULTS.stage),
    ranks: Annotated[int, typer.Option(help="Processes to start on this host.")] = _DEFAULTS.ranks,
    threads: Annotated[int | None, typer.Option(help="Threads per rank. Default: the cores, divided by the ranks.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the job may use of this host's memory, all ranks together: 4GiB, 500MB."),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR[:SIZE]", help="A folder for what does not fit, and how much of it. May be given repeatedly."),
    ] = None,
    activations: Annotated[
        str, typer.Option(help=f"What backward needs from forward: {', '.join(ACTIVATION_POLICIES)}.")
    ] = _DEFAULTS.activations,
    update: _Update = None,
    adapt: _Adapt = _DEFAULTS.adapt,
    seed: Annotated[int, typer.Option(help="Start of all random numbers.")] = _DEFAULTS.seed,
    run: _Run = None,
    save_every: _SaveEvery = None,
    keep: _Keep = _DEFAULTS.keep,
    resume: _Resume = _DEFAULTS.resume,
    background_saves: _BackgroundSaves = _DEFAULTS.background_saves,
    restarts: _Restarts = _DEFAULTS.restarts,
    nonfinite: _Nonfinite = _DEFAULTS.nonfinite,
    log: _Log = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random tokens instead of text (and no default run folder).")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON at the end.")] = False,
) -> int:
    """Train a GPT, or your own model, on text.

    Starts --ranks processes on this host (no port is opened), or joins those that torchrun, mpirun, srun or horovodrun started
    (torchrun --nproc-per-node 2 -m -- lowtide train ...). The same command with the same --run goes on where it stopped.
    """
    chosen: dict[str, Any] = {"preset": preset, "model": model, "data": data, "synthetic": synthetic}
    chosen |= {"steps": steps, "batch": parse_batch_word(batch), "lr": lr, "ranks": ranks, "threads": threads, "seed": seed}
    chosen |= {"memory": memory, "disk": tuple(disk or ()), "activations": activations, "update": update}
    chosen |= {"adapt": adapt}
    chosen |= {"save_every": save_every, "keep": keep, "resume": resume, "background_saves": background_saves}
    chosen |= {"log": tuple(log or ())}
    chosen |= {"restarts": restarts, "nonfinite": nonfinite, "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    folder = run if run is not None else None if synthetic else new_run_folder(model or preset or _DEFAULTS.model_name)
    options = Options(**chosen, stage=parse_stage_word(stage), run=folder)
    placement = launched_by()
    if placement is None or placement.rank == 0:  # the other ranks may find rank 0's files there
        if options.run is not None:
            check_same_run(options)
            refuse_unusable_run(options.run)
        for remark in remarks(options):
            say_wrong(remark)
    return run_job(options, output="json" if json else "text")


def run_job(options: Options, *, output: str) -> int:
    """Run the job in this process, or in ranks that this process starts; returns the exit code."""
    placement = launched_by()
    if placement is not None and options.ranks > 1:
        raise ArgumentError(f"--ranks is {options.ranks}, but another launcher has started this rank; leave --ranks out.")
    if placement is not None and options.restarts:
        raise ArgumentError(f"--restarts is {options.restarts}, but another launcher has started this rank; use its own.")
    if options.ranks > 1 or options.restarts:
        failure = start_with_restarts(options, output=output, say=say_wrong)
        return 0 if failure is None else say_failure(failure, ranks=options.ranks)
    try:
        return run_member(options, output=output)
    except (Exception, KeyboardInterrupt) as error:
        failure = describe(error, placement.rank if placement is not None else 0)
        code = say_failure(failure, ranks=placement.size if placement is not None else 1)
        if options.run is not None and isinstance(error, MemoryError | RuntimeError):
            told = leave_post_mortem(Path(options.run), ways=ways_out_of)
            if told is not None:
                say_wrong(told)
        if placement is not None:
            from lowtide.job.ranks import end_launched_rank  # imports torch: not before the options are known to be right

            end_launched_rank(error, failure)
        return code


def new_run_folder(name: str) -> str:
    """A folder below ``runs/`` that does not exist yet."""
    base = Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace(':', '-').replace('/', '-')}")
    path, number = base, 2
    while path.exists():
        path, number = Path(f"{base}-{number}"), number + 1
    return str(path)
