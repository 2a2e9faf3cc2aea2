"""``gymdata serve``: a vLLM server that answers with what collecting needs."""
