"""The command line of every example: the arguments of its function `run` as flags."""

import argparse
import inspect


def run_as_command(run, description):
    """Calls `run` with the flags of the command line, and prints what it returns."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    for name, argument in inspect.signature(run).parameters.items():
        required, default = argument.default is argument.empty, argument.default
        kind = type(default) if isinstance(default, int) else str
        text = "Required." if required else f"By default {default}."
        parser.add_argument(f"--{name}", required=required, default=default, type=kind, help=text)
    print(run(**vars(parser.parse_args())))
