"""`peer eval`: the held-out loss of the newest checkpoint."""

from __future__ import annotations

import json

from cli.options import DEFAULT_HOME, Data, HomeFolder, Json
from peer.home import Home


def evaluate(home: HomeFolder = DEFAULT_HOME, data: Data = None, as_json: Json = False) -> None:
    """Measure the held-out loss of the newest checkpoint.

    The text for it was never trained on.
    """
    from peer.evaluation import evaluate_home  # torch: slow to import, and needed only now

    result = evaluate_home(Home(home), data)
    print(json.dumps(result) if as_json else result)
