"""The program behind `annulus report --tensorboard` and `--wandb`, and run.tensorboard: it does what needs the libraries of
TensorBoard and Weights & Biases. `./annulus follower ...` starts it after making sure that they are installed.
launcher/subcommands/report.cc checks and documents the options; launcher/python_programs/follower.cc starts it beside a run."""

import argparse
import os
import sys

from errors import INPUT, RESOURCE, UNAVAILABLE, Refused
from tail import step_and_values, whole_lines


def parse(words):
    parser = argparse.ArgumentParser(prog="annulus follower", allow_abbrev=False)
    parser.add_argument("--run", required=True)
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--version", default="")
    return parser.parse_args(words)


def configuration(run):
    """The run's configuration as a tree, for viewers that compare runs by it."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        return {}
    try:
        with open(os.path.join(run, "config.toml"), "rb") as f:
            return tomllib.load(f)
    except (OSError, tomllib.TOMLDecodeError):
        return {}


def require_lines(path):
    """Refuses a run without metrics before anything is written."""
    try:
        with open(path, "rb") as f:
            there = any(step_and_values(line) for line in whole_lines(f))
    except FileNotFoundError:
        there = False
    if not there:
        raise Refused(INPUT, f"{path} holds no line of metrics: the run has not logged a step; with --follow this waits for it")


def run(options):
    """Runs the program and returns the exit code."""
    try:
        if not os.path.isfile(os.path.join(options.run, "config.toml")):
            raise Refused(INPUT, f"{options.run}: this is not a run folder, because it has no config.toml")
        if not options.follow:
            require_lines(os.path.join(options.run, "metrics.jsonl"))
        from follower import follow, hold
        locks, sinks, where = [], [], []
        if options.tensorboard:
            from event_files import EventFiles
            locks.append(hold(options.run, "tensorboard"))
            where.append(os.path.join(options.run, "tensorboard"))
            sinks.append(EventFiles(where[-1]))
        if options.wandb:
            from wandb_records import WandbRecords
            locks.append(hold(options.run, "wandb"))
            where.append(os.path.join(options.run, "wandb"))
            sinks.append(WandbRecords(options.run, configuration(options.run)))
        count = follow(options.run, sinks, options.follow, options.parent, options.version)
        print(f"{' and '.join(where)}  ({count} lines of metrics)")
        if options.tensorboard:
            print(f"  {sys.executable} -m tensorboard.main --logdir {os.path.dirname(os.path.abspath(options.run))}")
        if options.wandb:
            print(f"  {sys.executable} -m wandb sync {os.path.join(options.run, 'wandb')}/offline-run-*")
        return 0
    except Refused as refused:
        print(f"annulus: [report] {refused}", file=sys.stderr)
        return refused.code
    except ImportError as error:
        print(f"annulus: [report] {error}: `./annulus report --tensorboard` of a clone installs what is missing; an installation's "
              "README names the packages", file=sys.stderr)
        return UNAVAILABLE
    except OSError as error:
        print(f"annulus: [report] {error.filename or options.run}: {error.strerror or error}", file=sys.stderr)
        return RESOURCE


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
