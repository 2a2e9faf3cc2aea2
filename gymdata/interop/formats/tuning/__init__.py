"""Files of services that tune models, in the messages of their own interfaces."""

from gymdata.interop.formats.tuning import bedrock, gemini

__all__ = ["bedrock", "gemini"]
