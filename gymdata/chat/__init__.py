"""From messages to token ids and back: chat templates within limits, tool-call parsers, the tokens between turns."""
