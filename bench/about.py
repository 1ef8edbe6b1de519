"""Prints on what machine, when and at which revision a command is run: python -m bench.about COMMAND..."""

import sys

import torch

from tilegym_mamba2.bench.report import machine_and_versions
from tilegym_mamba2.cli.bench import about

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
found = about(device, sys.argv[1:])
print(f"{machine_and_versions(found)}; revision {found['revision']}; command: {found['command']}")
