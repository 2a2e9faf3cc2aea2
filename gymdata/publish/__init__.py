"""``gymdata push`` and ``gymdata pull``: an output as a data set on the Hub or in a folder, with a card, and back."""
