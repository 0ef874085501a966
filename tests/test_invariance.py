"""The same request gives the same bits in every condition of bench/conditions.py, for several families; and engines by other kernels, or
by none, say so and agree on tokens.
"""

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bench import conditions
from bench.conditions import Case, Engine, Outcome, alone, difference, make_cases
from model import native
from model.families import read_spec
from model.runner import ModelRunner, RunnerOptions
from model.spec import OptionError
from model.step import Sampling
from tests.checkpoints import SHAPES, make_checkpoint
from tests.families import make_family_checkpoint

COUNT = 20
CONTEXT = 192
NATIVE = {"gpt_bigcode": 0, "gemma": 3, "gemma3_text": 3, "falcon": 1, "deepseek_v2": 3}
