"""`peer eval`: the held-out loss of the newest checkpoint."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

from gossamer.cli.options import DEFAULT_HOME, Data, HomeFolder, Json
from gossamer.peer.machine.home import Home


def evaluate(home: HomeFolder = DEFAULT_HOME, data: Data = None, as_json: Json = False) -> None:
    """Measure the held-out loss of the newest checkpoint.

    The text was not used for training.
    """
    from gossamer.cli.screen import meter, show_reading  # rich
    from gossamer.peer.model.evaluation import evaluate_home  # torch: slow to import, and needed only now

    with meter(sys.stderr, "held-out loss", num_lines=1, unit="batches") if not as_json else nullcontext(lambda *progress: None) as show:
        found = evaluate_home(
            Home(home), data,
            follow=lambda *progress: show("measuring the model", *progress),
            reading=partial(show_reading, show),
        )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print(f"step {found.step}: held-out loss {found.loss:.4f} nats per token")
        print(f"perplexity {found.perplexity:.3f} per token, {found.byte_perplexity:.3f} per byte, over {found.num_tokens} tokens")
