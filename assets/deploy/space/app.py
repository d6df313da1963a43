"""The page on a Hugging Face Space: `python app.py` on every interface, with the model locked and the options of
MEDUSA_VIZ_OPTIONS."""

import os
import shlex
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

if os.environ.get("SPACES_ZERO_GPU"):
    sys.exit("ZeroGPU takes a card's memory back after every call, and Medusa decoding needs its key-value cache from "
             "step to step: choose the free CPU or a card of the Space's own.")

from app import main  # noqa: E402

if __name__ == "__main__":
    main(["--host", "0.0.0.0", "--lock-model", *shlex.split(os.environ.get("MEDUSA_VIZ_OPTIONS", ""))])
