"""Where tokens come from over HTTP: vLLM servers by token ids, others by chat messages, and checks of their answers."""
