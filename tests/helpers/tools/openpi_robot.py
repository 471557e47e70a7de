"""Run by the Python of openpi's client: asks a server what a robot would, and prints as JSON what
came of it."""

import json
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

url, key, front, wrist, dims = sys.argv[1:]
picture = np.zeros((48, 48, 3), np.uint8)
observation = {
    f"observation/{front}": picture,
    f"observation/{wrist}": picture,
    "observation/state": np.full(int(dims), 0.5),
    "prompt": "lift the red block",
}


def attempt(policy, observation):
    try:
        return np.asarray(policy.infer(observation)["actions"]).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


policy = WebsocketClientPolicy(url, api_key=key or None)
broker = ActionChunkBroker(policy, action_horizon=2)
results = {
    "metadata": policy.get_server_metadata(),
    "good": attempt(policy, observation),
    "wrong dtype": attempt(policy, {**observation, f"observation/{front}": picture.astype(int)}),
    "missing camera": attempt(policy, {k: observation[k] for k in observation if wrist not in k}),
    "nested": attempt(
        policy,
        {
            "images": {front: picture, wrist: picture.transpose(2, 0, 1)},
            "state": np.full(int(dims), 0.5, np.float32),
            "prompt": "lift the red block",
        },
    ),
    "steps of a broker": [attempt(broker, observation) for _ in range(3)],
    "oversized": attempt(policy, {**observation, "prompt": "a" * 2**21}),
}
print(json.dumps(results))
