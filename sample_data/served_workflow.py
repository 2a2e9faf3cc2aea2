"""A served workflow as an agent: each task is posted to it with the recorder's address, where its model is to be called.

``WORKFLOW_URL=http://HOST:PORT/PATH gymdata collect TASKS -m MODEL --agent sample_data/served_workflow.py:run``

The workflow calls the OpenAI API at ``base_url`` with ``api_key``, which are this rollout's own, and answers with a JSON
object: ``reward``, and what else the row shall keep. Any other answer is a failed attempt, and never a score.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any


def run(task: dict[str, Any], base_url: str, api_key: str, model: str, rollout_index: int) -> Any:
    """What the workflow answers to one task."""
    body = {**task, "base_url": base_url, "api_key": api_key, "model": model, "rollout_index": rollout_index}
    url, timeout_s = os.environ["WORKFLOW_URL"], float(os.environ.get("WORKFLOW_TIMEOUT", "300"))
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the workflow: HTTP {error.code}: {error.read(300).decode(errors='replace')}") from error
