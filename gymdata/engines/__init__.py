"""Where tokens come from: vLLM in process, servers, chat templates."""
