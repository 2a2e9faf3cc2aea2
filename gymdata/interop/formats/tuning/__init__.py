"""Files of services that tune models, in the messages of their own interfaces."""
