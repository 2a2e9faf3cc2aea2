"""``gymdata record``: a server that agents call as they call OpenAI or Anthropic, and that writes their rollouts."""
